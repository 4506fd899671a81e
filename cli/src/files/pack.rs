//! Makes a tar archive of the user's files.
//!
//! Below the path that the user named no link is followed, and files are opened beneath it alone: who can write in the
//! directory cannot have other files of the user's packed.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, fstat, open, openat2, readlinkat, statat};
use tar::{Builder, EntryType, Header};

use super::archive::shown;
use super::extract::SAFELY;

/// Why files could not be packed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PackError {
    /// A file here.
    #[error("{path}: {error}", path = shown(path))]
    Here {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A file that became shorter while it was read.
    #[error("{}: it changed while it was read", shown(.0))]
    Changed(PathBuf),
    /// Where the archive goes.
    #[error("{0}")]
    There(io::Error),
}

/// Who owns the files in the guest.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Owner {
    /// This user and group.
    Numbers(u32, u32),
    /// Those who own them here, by number.
    Same,
}

/// What was packed.
#[derive(Debug, Default)]
pub(crate) struct Packed {
    /// What was left out, and why.
    pub(crate) left_out: Vec<String>,
}

/// How an archive is made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Form<'a> {
    /// Whose the files are in the guest.
    pub(crate) owner: Owner,
    /// A directory that does not exist yet, which everything goes into.
    pub(crate) within: Option<&'a OsStr>,
}

/// Packs one file or link under a name.
pub(crate) fn single(
    source: &Path,
    follow: bool,
    name: &OsStr,
    form: Form<'_>,
    to: &mut dyn Write,
) -> Result<Packed, PackError> {
    // The directory is the user's own word: it is looked up as ever.
    let above = source.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let last = source.file_name().ok_or_else(|| here(source)(io::ErrorKind::InvalidInput.into()))?;
    let mut packer = Packer::new(to, form.owner);
    let name = packer.begin(form)?.join(name);
    if follow {
        let file = open(source, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty());
        let file = file.map_err(|error| here(source)(error.into()))?;
        packer.file(file, source, &name)?;
    } else {
        let directory = open(above, flags, Mode::empty()).map_err(|error| here(above)(error.into()))?;
        packer.entry(directory.as_fd(), Path::new(last), source, &name)?;
    }
    packer.finish()
}

/// Packs a directory with all below it: under a name, or without one of its own.
pub(crate) fn tree(
    source: &Path,
    name: Option<&OsStr>,
    form: Form<'_>,
    to: &mut dyn Write,
) -> Result<Packed, PackError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = open(source, flags, Mode::empty()).map_err(|error| here(source)(error.into()))?;
    let mut packer = Packer::new(to, form.owner);
    let mut base = packer.begin(form)?;
    base.extend(name);
    if name.is_some() {
        let stat = fstat(&root).map_err(|error| here(source)(error.into()))?;
        packer.directory(&stat, &base)?;
    }
    let mut waiting = vec![PathBuf::from(".")];
    while let Some(path) = waiting.pop() {
        let shown = source.join(&path);
        let failed = |error: rustix::io::Errno| here(&shown)(error.into());
        let directory = openat2(&root, &path, flags, Mode::empty(), SAFELY).map_err(failed)?;
        let mut names = Vec::new();
        for entry in Dir::read_from(&directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push(OsStr::from_bytes(name).to_owned());
            }
        }
        // In an order of its own each time, two archives of one directory would differ.
        names.sort();
        for entry in &names {
            let below = path.strip_prefix(".").unwrap_or(&path).join(entry);
            if packer.entry(directory.as_fd(), Path::new(entry), &source.join(&below), &base.join(&below))? {
                waiting.push(below);
            }
        }
    }
    packer.finish()
}

struct Packer<'a> {
    builder: Builder<&'a mut dyn Write>,
    owner: Owner,
    packed: Packed,
}

impl<'a> Packer<'a> {
    fn new(to: &'a mut dyn Write, owner: Owner) -> Self {
        Self { builder: Builder::new(to), owner, packed: Packed::default() }
    }

    /// Makes the directory that everything goes into; returns where names begin.
    fn begin(&mut self, form: Form<'_>) -> Result<PathBuf, PackError> {
        let Some(within) = form.within else { return Ok(PathBuf::from(".")) };
        let mut header = Header::new_gnu();
        let (uid, gid) = match self.owner {
            Owner::Numbers(uid, gid) => (uid, gid),
            Owner::Same => (0, 0),
        };
        header.set_entry_type(EntryType::Directory);
        header.set_mode(0o755);
        header.set_uid(u64::from(uid));
        header.set_gid(u64::from(gid));
        header.set_size(0);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        header.set_mtime(now.as_secs());
        self.builder.append_data(&mut header, within, io::empty()).map_err(PackError::There)?;
        Ok(PathBuf::from(within))
    }

    fn finish(mut self) -> Result<Packed, PackError> {
        self.builder.finish().map_err(PackError::There)?;
        Ok(self.packed)
    }

    /// Packs what has this name in a directory, without what is below it. Says whether it is a directory.
    fn entry(&mut self, at: BorrowedFd<'_>, name: &Path, path: &Path, as_name: &Path) -> Result<bool, PackError> {
        let failed = |error: rustix::io::Errno| here(path)(error.into());
        let stat = statat(at, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                // What has become something else meanwhile is found out on the open file.
                let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
                self.file(openat2(at, name, flags, Mode::empty(), SAFELY).map_err(failed)?, path, as_name)?;
            }
            FileType::Directory => {
                self.directory(&stat, as_name)?;
                return Ok(true);
            }
            FileType::Symlink => {
                let target = readlinkat(at, name, Vec::new()).map_err(failed)?;
                let mut header = self.header(&stat, EntryType::Symlink);
                let target = Path::new(OsStr::from_bytes(target.to_bytes()));
                self.builder.append_link(&mut header, as_name, target).map_err(PackError::There)?;
            }
            // Its name alone: whoever opened it would wait.
            FileType::Fifo => {
                let mut header = self.header(&stat, EntryType::Fifo);
                self.builder.append_data(&mut header, as_name, io::empty()).map_err(PackError::There)?;
            }
            // A device's number means another one in the guest.
            _ => self.packed.left_out.push(format!("{}: left out: it is a device or socket", shown(path))),
        }
        Ok(false)
    }

    fn file(&mut self, file: OwnedFd, path: &Path, as_name: &Path) -> Result<(), PackError> {
        let stat = fstat(&file).map_err(|error| here(path)(error.into()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(PackError::Changed(path.to_owned()));
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let mut header = self.header(&stat, EntryType::Regular);
        header.set_size(size);
        // The header has said how long it is: no more is read, and less is an error.
        let mut content = Exactly { file: File::from(file), left: size, error: None, short: false };
        let appended = self.builder.append_data(&mut header, as_name, &mut content);
        match (content.short, content.error) {
            (true, _) => Err(PackError::Changed(path.to_owned())),
            (_, Some(error)) => Err(here(path)(error)),
            _ => appended.map_err(PackError::There),
        }
    }

    fn directory(&mut self, stat: &Stat, as_name: &Path) -> Result<(), PackError> {
        let mut header = self.header(stat, EntryType::Directory);
        self.builder.append_data(&mut header, as_name, io::empty()).map_err(PackError::There)
    }

    fn header(&self, stat: &Stat, kind: EntryType) -> Header {
        let mut header = Header::new_gnu();
        let (uid, gid) = match self.owner {
            Owner::Numbers(uid, gid) => (uid, gid),
            Owner::Same => (stat.st_uid, stat.st_gid),
        };
        header.set_entry_type(kind);
        header.set_mode(stat.st_mode & 0o7777);
        header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
        header.set_uid(u64::from(uid));
        header.set_gid(u64::from(gid));
        header.set_size(0);
        header
    }
}

/// So many bytes of a file, and an error if it has fewer.
struct Exactly {
    file: File,
    left: u64,
    error: Option<io::Error>,
    short: bool,
}

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        match self.file.read(buffer.get_mut(..most).unwrap_or_default()) {
            Ok(0) => {
                self.short = true;
                Err(io::ErrorKind::UnexpectedEof.into())
            }
            Ok(n) => {
                self.left = self.left.saturating_sub(u64::try_from(n).unwrap_or(u64::MAX));
                Ok(n)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(error),
            Err(error) => {
                let kind = error.kind();
                self.error = Some(error);
                Err(kind.into())
            }
        }
    }
}

fn here(path: &Path) -> impl Fn(io::Error) -> PackError + '_ {
    move |error| PackError::Here { path: path.to_owned(), error }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn form(uid: u32, gid: u32) -> Form<'static> {
        Form { owner: Owner::Numbers(uid, gid), within: None }
    }

    fn listed(archive: &[u8]) -> Vec<String> {
        let mut archive = tar::Archive::new(archive);
        let entries = archive.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            let link = entry.link_name().unwrap().map(|to| format!(" -> {}", to.display())).unwrap_or_default();
            let header = entry.header();
            format!(
                "{}{link} {:o} {}:{} {text}",
                entry.path().unwrap().display(),
                header.mode().unwrap(),
                header.uid().unwrap(),
                header.gid().unwrap()
            )
        });
        entries.collect()
    }

    #[test]
    fn a_tree_is_packed_as_it_is() {
        let place = tempfile::tempdir().unwrap();
        let tree_at = place.path().join("tree");
        std::fs::create_dir_all(tree_at.join("b/deep")).unwrap();
        for file in ["a", "b/deep/c"] {
            std::fs::write(tree_at.join(file), file).unwrap();
            std::fs::set_permissions(tree_at.join(file), PermissionsExt::from_mode(0o640)).unwrap();
        }
        for directory in ["", "b", "b/deep"] {
            std::fs::set_permissions(tree_at.join(directory), PermissionsExt::from_mode(0o755)).unwrap();
        }
        std::fs::write(place.path().join("secret"), "secret").unwrap();
        symlink("../secret", tree_at.join("link")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(tree_at.join("socket")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, tree_at.join("pipe"), FileType::Fifo, Mode::from(0o600), 0).unwrap();
        let mut archive = Vec::new();
        let packed = tree(&tree_at, Some(OsStr::new("t")), form(7, 8), &mut archive).unwrap();
        assert_eq!(
            listed(&archive),
            [
                "t 755 7:8 ",
                "t/a 640 7:8 a",
                "t/b 755 7:8 ",
                "t/link -> ../secret 777 7:8 ",
                "t/pipe 600 7:8 ",
                "t/b/deep 755 7:8 ",
                "t/b/deep/c 640 7:8 b/deep/c"
            ]
        );
        assert_eq!(packed.left_out.len(), 1);
        assert!(packed.left_out[0].ends_with("socket: left out: it is a device or socket"), "{packed:?}");
        let mut archive = Vec::new();
        tree(&tree_at, None, form(0, 0), &mut archive).unwrap();
        assert!(listed(&archive)[0].starts_with("a 640 0:0") || listed(&archive)[0].starts_with("./a 640 0:0"));
    }

    #[test]
    fn a_directory_that_is_not_there_yet_comes_along() {
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("a"), "1").unwrap();
        let within = Form { within: Some(OsStr::new("w")), ..form(7, 8) };
        let mut archive = Vec::new();
        tree(place.path(), None, within, &mut archive).unwrap();
        assert_eq!((listed(&archive)[0].as_str(), listed(&archive)[1].starts_with("w/a ")), ("w 755 7:8 ", true));
        let mut archive = Vec::new();
        single(&place.path().join("a"), false, OsStr::new("n"), within, &mut archive).unwrap();
        assert_eq!((listed(&archive)[0].as_str(), listed(&archive)[1].starts_with("w/n ")), ("w 755 7:8 ", true));
    }

    #[test]
    fn a_link_stands_for_itself_or_for_what_it_leads_to() {
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("file"), "content").unwrap();
        let link = place.path().join("link");
        symlink("file", &link).unwrap();
        let packed = |follow| {
            let mut archive = Vec::new();
            single(&link, follow, OsStr::new("n"), form(0, 0), &mut archive).unwrap();
            listed(&archive)
        };
        assert!(packed(false)[0].starts_with("n -> file 777"));
        assert!(packed(true)[0].ends_with(" content"));
    }

    #[test]
    fn a_file_that_shrinks_is_an_error_and_one_that_grows_is_cut() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("file");
        std::fs::write(&path, "content").unwrap();
        let mut short = Exactly { file: File::open(&path).unwrap(), left: 8, error: None, short: false };
        assert!(short.read_to_end(&mut Vec::new()).is_err() && short.short);
        let mut long = Exactly { file: File::open(&path).unwrap(), left: 3, error: None, short: false };
        let mut text = Vec::new();
        long.read_to_end(&mut text).unwrap();
        assert_eq!(text, b"con");
    }

    #[test]
    fn what_is_not_there_is_named() {
        let error = tree(Path::new("/no/such"), None, form(0, 0), &mut Vec::new()).unwrap_err();
        assert_eq!(error.to_string(), "/no/such: No such file or directory (os error 2)");
    }
}
