//! Files in and out of the workload, as tar archives on stdin and stdout. It runs as the exec's user in its
//! namespaces, so it can do what that user can do and no more.

use crate::message::{FileKind, FileStat};
use std::{
    collections::HashSet,
    fs::{self, File, Metadata},
    io::{self, BufReader, BufWriter, Read, Write},
    os::{
        fd::AsFd,
        unix::fs::{FileTypeExt, MetadataExt, lchown},
    },
    path::{Component, Path, PathBuf},
};

use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, UTIME_OMIT, makedev, mknodat, utimensat};

/// Reads and writes of archives, in bytes.
const BUFFER: usize = 64 * 1024;

/// Unpacks stdin below a directory.
pub(super) fn extract(dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir).map_err(naming(dir))?;
    let input = File::from(rustix::stdio::stdin().try_clone_to_owned()?);
    unpack(&mut BufReader::with_capacity(BUFFER, input), dir)
}

fn unpack(input: &mut impl Read, dir: &Path) -> io::Result<()> {
    let mut archive = tar::Archive::new(&mut *input);
    archive.set_preserve_permissions(true);
    archive.set_preserve_mtime(true);
    archive.set_preserve_ownerships(rustix::process::geteuid().is_root());
    put_away(&mut archive, dir).map_err(|e| io::Error::new(e.kind(), explain(&e)))?;
    // What follows the end of the archive is padding; unread, it would look like a broken pipe to its sender.
    io::copy(input, &mut io::sink())?;
    Ok(())
}

fn put_away(archive: &mut tar::Archive<impl Read>, dir: &Path) -> io::Result<()> {
    let mut directories = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let kind = match entry.header().entry_type() {
            // Last, and the deepest first: their modes may forbid to write in them, and what is written sets their times.
            tar::EntryType::Directory => {
                directories.push(entry);
                continue;
            }
            tar::EntryType::Fifo => FileType::Fifo,
            tar::EntryType::Char => FileType::CharacterDevice,
            tar::EntryType::Block => FileType::BlockDevice,
            _ => {
                entry.unpack_in(dir)?;
                continue;
            }
        };
        // The archive reader makes an empty file of these, once it has seen that the place is below the directory.
        if entry.unpack_in(dir)? {
            let place = dir.join(below(&entry.path()?));
            make_special(&place, kind, entry.header()).map_err(naming(&place))?;
        }
    }
    directories.sort_by(|a, b| b.path_bytes().cmp(&a.path_bytes()));
    for mut directory in directories {
        let name = below(&directory.path()?);
        // The archive reader leaves a directory's time. Where all of it goes was there before.
        if directory.unpack_in(dir)? && !name.as_os_str().is_empty() {
            let place = dir.join(name);
            let seconds = directory.header().mtime()?;
            set_time(&place, i64::try_from(seconds).unwrap_or(i64::MAX), 0).map_err(naming(&place))?;
        }
    }
    Ok(())
}

/// A member's name as the archive reader takes it: without a root.
fn below(name: &Path) -> PathBuf {
    name.components().filter(|part| matches!(part, Component::Normal(_))).collect()
}

/// Makes a pipe or a device in the place of a file, with its owner, mode and time.
fn make_special(place: &Path, kind: FileType, header: &tar::Header) -> io::Result<()> {
    let found = fs::symlink_metadata(place)?;
    let number = |found: io::Result<Option<u32>>| found.map(Option::unwrap_or_default);
    // A pipe has no number, and its header need not say so.
    let device = match kind {
        FileType::Fifo => 0,
        _ => makedev(number(header.device_major())?, number(header.device_minor())?),
    };
    fs::remove_file(place)?;
    mknodat(CWD, place, kind, Mode::RUSR | Mode::WUSR, device)?;
    lchown(place, Some(found.uid()), Some(found.gid()))?;
    fs::set_permissions(place, found.permissions())?;
    set_time(place, found.mtime(), found.mtime_nsec())
}

fn set_time(place: &Path, tv_sec: i64, tv_nsec: i64) -> io::Result<()> {
    let last_access = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    let times = Timestamps { last_access, last_modification: Timespec { tv_sec, tv_nsec } };
    Ok(utimensat(CWD, place, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// An error with all of its causes: the archive reader's own names the file, its source the reason.
fn explain(error: &io::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.get_ref().and_then(|inner| inner.source());
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

/// Writes a file or a tree to stdout.
pub(super) fn create(path: &str) -> io::Result<()> {
    let mut output = output()?;
    pack(path, &mut output)?;
    output.flush()
}

/// Writes what matches a pattern to stdout.
pub(super) fn create_matching(pattern: &str) -> io::Result<()> {
    let mut output = output()?;
    pack_matching(pattern, &mut output)?;
    output.flush()
}

/// Writes what stands at a path to stdout.
pub(super) fn stat(path: &Path, follow: bool) -> io::Result<()> {
    let found = if follow { fs::metadata(path) } else { fs::symlink_metadata(path) };
    let kind = match &found {
        Ok(found) if found.is_dir() => FileKind::Directory,
        Ok(found) if found.is_file() => FileKind::File,
        Ok(found) if found.is_symlink() => FileKind::Link,
        Ok(_) => FileKind::Other,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            FileKind::Absent
        }
        Err(error) => return Err(naming(path)(io::Error::new(error.kind(), error.to_string()))),
    };
    let resolved = if follow { fs::canonicalize(path).ok() } else { None };
    let stat = FileStat {
        kind,
        path: resolved.and_then(|path| path.into_os_string().into_string().ok()),
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
    };
    let mut output = output()?;
    serde_json::to_writer(&mut output, &stat)?;
    output.flush()
}

fn output() -> io::Result<BufWriter<File>> {
    let output = File::from(rustix::stdio::stdout().as_fd().try_clone_to_owned()?);
    Ok(BufWriter::with_capacity(BUFFER, output))
}

fn pack(path: &str, output: &mut impl Write) -> io::Result<()> {
    let source = Path::new(path);
    // The first path must be there.
    fs::symlink_metadata(source).map_err(naming(source))?;
    // `/a/b` is packed as `b`; `/a/b/.` and `/` as what is below.
    let name = match source.file_name() {
        Some(name) if !path.ends_with("/.") => PathBuf::from(name),
        _ => PathBuf::from("."),
    };
    let mut builder = tar::Builder::new(output);
    pack_tree(&mut builder, source.to_owned(), name)?;
    builder.finish()
}

fn pack_matching(pattern: &str, output: &mut impl Write) -> io::Result<()> {
    // Names begin after the fixed part, in which nothing matches but itself.
    let fixed: PathBuf = Path::new(pattern)
        .components()
        .take_while(|part| !part.as_os_str().to_string_lossy().contains(['*', '?', '[']))
        .collect();
    let base = if fixed == Path::new(pattern) { fixed.parent().unwrap_or(&fixed) } else { &fixed };
    let options = glob::MatchOptions { require_literal_leading_dot: true, ..glob::MatchOptions::new() };
    let matches = glob::glob_with(pattern, options).map_err(io::Error::other)?;
    let mut builder = tar::Builder::new(output);
    let mut packed = HashSet::new();
    for found in matches {
        let found =
            found.map_err(|error| naming(error.path())(io::Error::new(error.error().kind(), error.to_string())))?;
        // What lies below one that is packed is packed with it.
        if found.ancestors().any(|above| packed.contains(above)) {
            continue;
        }
        let name = found.strip_prefix(base).unwrap_or(&found).to_owned();
        let name = if name.as_os_str().is_empty() { PathBuf::from(".") } else { name };
        pack_tree(&mut builder, found.clone(), name)?;
        packed.insert(found);
    }
    builder.finish()
}

fn pack_tree(builder: &mut tar::Builder<impl Write>, source: PathBuf, name: PathBuf) -> io::Result<()> {
    builder.follow_symlinks(false);
    builder.sparse(false);
    let mut waiting = vec![(source, name)];
    while let Some((source, name)) = waiting.pop() {
        // What vanishes while the tree is walked was never there.
        let metadata = match fs::symlink_metadata(&source) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other.map_err(naming(&source))?,
        };
        if metadata.file_type().is_socket() {
            continue;
        }
        if metadata.is_dir() {
            for entry in fs::read_dir(&source).map_err(naming(&source))? {
                let entry = entry.map_err(naming(&source))?;
                waiting.push((entry.path(), name.join(entry.file_name())));
            }
        }
        append(builder, &source, &name, &metadata).map_err(naming(&source))?;
    }
    Ok(())
}

fn append(builder: &mut tar::Builder<impl Write>, source: &Path, name: &Path, metadata: &Metadata) -> io::Result<()> {
    let kind = metadata.file_type();
    let special = match () {
        () if kind.is_fifo() => Some(tar::EntryType::Fifo),
        () if kind.is_char_device() => Some(tar::EntryType::Char),
        () if kind.is_block_device() => Some(tar::EntryType::Block),
        () => None,
    };
    if let Some(special) = special {
        // The builder would give these their path here as their name.
        let mut header = tar::Header::new_gnu();
        header.set_metadata(metadata);
        header.set_entry_type(special);
        header.set_size(0);
        header.set_device_major(rustix::fs::major(metadata.rdev()))?;
        header.set_device_minor(rustix::fs::minor(metadata.rdev()))?;
        return builder.append_data(&mut header, name, io::empty());
    }
    if !metadata.is_file() {
        return builder.append_path_with_name(source, name);
    }
    // The length in the header counts, whatever a writer does to the file meanwhile: cut, or filled with zeros.
    let mut header = tar::Header::new_gnu();
    header.set_metadata(metadata);
    let file = File::open(source)?;
    let length = metadata.len();
    builder.append_data(&mut header, name, file.chain(io::repeat(0)).take(length))
}

fn naming(path: &Path) -> impl Fn(io::Error) -> io::Error + '_ {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_tree_goes_round() {
        let from = tempfile::tempdir().unwrap();
        let tree = from.path().join("tree");
        let deep = tree.join("d".repeat(120)).join("e".repeat(120));
        fs::create_dir_all(&deep).unwrap();
        fs::write(deep.join("file"), "deep").unwrap();
        fs::write(tree.join("script"), "#!/bin/sh\n").unwrap();
        fs::set_permissions(tree.join("script"), fs::Permissions::from_mode(0o750)).unwrap();
        symlink("script", tree.join("link")).unwrap();
        symlink("/nowhere", tree.join("dangling")).unwrap();
        // Only root may make the device.
        let (null, pipe) = (rustix::fs::makedev(1, 3), rustix::fs::FileType::Fifo);
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mknodat(rustix::fs::CWD, tree.join("pipe"), pipe, mode, 0).unwrap();
        let device =
            rustix::fs::mknodat(rustix::fs::CWD, tree.join("null"), rustix::fs::FileType::CharacterDevice, mode, null);
        fs::create_dir(tree.join("empty")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(tree.join("socket")).unwrap();

        let mut archive = Vec::new();
        pack(tree.to_str().unwrap(), &mut archive).unwrap();
        let to = tempfile::tempdir().unwrap();
        unpack(&mut &archive[..], to.path()).unwrap();
        let tree = to.path().join("tree");
        assert_eq!(fs::read(tree.join("d".repeat(120)).join("e".repeat(120)).join("file")).unwrap(), b"deep");
        assert_eq!(fs::metadata(tree.join("script")).unwrap().permissions().mode() & 0o7777, 0o750);
        assert_eq!(fs::read_link(tree.join("link")).unwrap(), Path::new("script"));
        assert_eq!(fs::read_link(tree.join("dangling")).unwrap(), Path::new("/nowhere"));
        assert!(tree.join("empty").is_dir());
        let special: Vec<_> = tar::Archive::new(&archive[..])
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().header().clone())
            .filter(|header| !matches!(header.entry_type().as_byte(), b'0' | b'2' | b'5'))
            .map(|header| (header.entry_type().as_byte(), header.device_minor().unwrap()))
            .collect();
        let expected = if device.is_ok() { &[(b'3', Some(3)), (b'6', Some(0))][..] } else { &[(b'6', Some(0))] };
        assert!(special.len() == expected.len() && expected.iter().all(|one| special.contains(one)), "{special:?}");
        let pipe = fs::symlink_metadata(tree.join("pipe")).unwrap();
        assert!(pipe.file_type().is_fifo() && pipe.mode() & 0o7777 == 0o700, "{pipe:?}");
        if device.is_ok() {
            let null = fs::symlink_metadata(tree.join("null")).unwrap();
            assert!(null.file_type().is_char_device() && null.rdev() == rustix::fs::makedev(1, 3), "{null:?}");
        }
        assert!(!tree.join("socket").exists());

        let mut archive = Vec::new();
        pack(&format!("{}/.", tree.display()), &mut archive).unwrap();
        let to = tempfile::tempdir().unwrap();
        unpack(&mut &archive[..], to.path()).unwrap();
        assert!(to.path().join("script").is_file());
    }

    #[test]
    fn directories_get_their_modes_and_times_last_and_pipes_stay_below() {
        let place = tempfile::tempdir().unwrap();
        let to = place.path().join("to");
        fs::create_dir(&to).unwrap();
        let mut archive = tar::Builder::new(Vec::new());
        let mut add = |name: &str, kind: tar::EntryType, mode: u32| {
            let mut header = tar::Header::new_gnu();
            header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
            header.set_entry_type(kind);
            header.set_mode(mode);
            header.set_uid(u64::from(rustix::process::geteuid().as_raw()));
            header.set_gid(u64::from(rustix::process::getegid().as_raw()));
            header.set_mtime(1_000_000);
            header.set_size(0);
            header.set_cksum();
            archive.append(&header, io::empty()).unwrap();
        };
        add("d", tar::EntryType::Directory, 0o500);
        add("d/e", tar::EntryType::Directory, 0o500);
        add("d/e/file", tar::EntryType::Regular, 0o640);
        add("/d/pipe", tar::EntryType::Fifo, 0o622);
        add("../outside", tar::EntryType::Fifo, 0o600);
        unpack(&mut archive.into_inner().unwrap().as_slice(), &to).unwrap();
        let found = |name: &str| {
            let found = fs::symlink_metadata(to.join(name)).unwrap();
            (found.mode() & 0o7777, found.mtime(), found.file_type().is_fifo())
        };
        assert_eq!(found("d"), (0o500, 1_000_000, false));
        assert_eq!(found("d/e"), (0o500, 1_000_000, false));
        assert_eq!(found("d/e/file"), (0o640, 1_000_000, false));
        assert_eq!(found("d/pipe"), (0o622, 1_000_000, true));
        assert!(!place.path().join("outside").exists());
        fs::set_permissions(to.join("d"), fs::Permissions::from_mode(0o700)).unwrap();
        fs::set_permissions(to.join("d/e"), fs::Permissions::from_mode(0o700)).unwrap();
    }

    fn names(archive: &[u8]) -> Vec<String> {
        let mut archive = tar::Archive::new(archive);
        let names = archive.entries().unwrap().map(|entry| entry.unwrap().path().unwrap().display().to_string());
        names.collect()
    }

    #[test]
    fn a_pattern_packs_what_matches_once() {
        let from = tempfile::tempdir().unwrap();
        fs::create_dir_all(from.path().join("out/deep/er")).unwrap();
        for file in ["out/a.txt", "out/b.txt", "out/c.log", "out/.hidden.txt", "out/deep/d.txt", "out/deep/er/e.txt"] {
            fs::write(from.path().join(file), file).unwrap();
        }
        let packed = |pattern: &str| {
            let mut archive = Vec::new();
            pack_matching(&format!("{}/{pattern}", from.path().display()), &mut archive).unwrap();
            let mut names = names(&archive);
            names.sort();
            names
        };
        assert_eq!(packed("out/*.txt"), ["a.txt", "b.txt"]);
        assert_eq!(packed("out/[ac].*"), ["a.txt", "c.log"]);
        assert_eq!(packed("*/deep/d.txt"), ["out/deep/d.txt"]);
        assert_eq!(packed("out/c.log"), ["c.log"]);
        assert_eq!(packed("out/**/e.*"), ["deep/er/e.txt"]);
        let whole = ["out", "out/.hidden.txt", "out/a.txt", "out/b.txt", "out/c.log", "out/deep"];
        assert_eq!(packed("out")[..6], whole);
        assert_eq!(packed("out/**/*").len(), 7, "nothing twice");
        assert!(packed("none/*").is_empty());
    }

    #[test]
    fn failures_name_the_file() {
        let error = pack("/nonexistent/x", &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/x"), "{error}");
        let error = unpack(&mut &[1u8; 700][..], Path::new("/tmp")).unwrap_err();
        assert!(!error.to_string().is_empty());
    }
}
