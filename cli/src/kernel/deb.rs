//! Debian packages of kernels: an `ar` archive in which a tar archive lies (deb(5)).
//!
//! The package is hostile input. Of its files only the kernel and the modules are taken, by names that are checked part by
//! part, and only plain files: no link is ever made, so none can be followed.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use guest::message::printable;

use super::compression::Compression;

/// Begins every `ar` archive.
const MAGIC: &[u8; 8] = b"!<arch>\n";
/// Most members before the data: there are two.
const MAX_MEMBERS: usize = 16;
/// Most entries of the tar archive, and most bytes of it, unpacked. A general-purpose kernel has 5,000 and 700 MB.
const MAX_ENTRIES: usize = 100_000;
const MAX_BYTES: u64 = 4 << 30;
/// Longest name, as in the kernel.
const MAX_NAME: u64 = 4096;
/// Most parts of a path that is wanted. Modules have twelve at most, and whatever removes a tree holds each of its levels open.
const MAX_PARTS: usize = 16;

/// What can be wrong with a package.
#[derive(Debug, thiserror::Error)]
pub(super) enum DebError {
    /// Not one at all, or a damaged one.
    #[error("not a whole Debian package: {0}")]
    Damaged(String),
    /// Unlike any package that Debian's tools make.
    #[error("{0}, which no kernel package does")]
    Strange(String),
    /// What is taken from it could not be written.
    #[error("{path}: {error}", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}

/// Whether a file that begins so is a package.
pub(super) fn is_package(head: &[u8]) -> bool {
    head.starts_with(MAGIC)
}

/// Unpacks the kernels in `boot` and the modules in `lib/modules` (or `usr/lib/modules`) of a package to `boot` and
/// `lib/modules` in a directory that nobody else writes to.
pub(super) fn unpack(package: &mut impl Read, into: &Path) -> Result<(), DebError> {
    let (name, length) = find_data(package)?;
    let mut data = package.take(length);
    let mut head = [0; 6];
    let read = read_full(&mut data, &mut head).map_err(damaged)?;
    let head = head.get(..read).unwrap_or_default();
    let compression = Compression::of(head).map_err(|error| DebError::Damaged(format!("{name}: {error}")))?;
    let tar = compression.reader(head.chain(&mut data)).map_err(damaged)?;
    // One byte more than there may be, so that the end of the bound is not taken for the end of the archive.
    let mut archive = tar::Archive::new(tar.take(MAX_BYTES.saturating_add(1)));
    extract(&mut archive, into)?;
    // What follows the end is padding, and the checksum of what is packed.
    let mut rest = archive.into_inner();
    io::copy(&mut rest, &mut io::sink()).map_err(damaged)?;
    if rest.limit() == 0 {
        return Err(DebError::Strange(format!("it unpacks to over {MAX_BYTES} bytes")));
    }
    drop(rest);
    if data.limit() > 0 {
        return Err(DebError::Damaged(format!("{name}: there is more after its end, or less than it says")));
    }
    Ok(())
}

/// Reads up to the content of the member that holds the files: its name and length.
fn find_data(package: &mut impl Read) -> Result<(String, u64), DebError> {
    let mut magic = [0; 8];
    package.read_exact(&mut magic).map_err(damaged)?;
    if magic != *MAGIC {
        return Err(DebError::Damaged("its first bytes are not those of one".to_owned()));
    }
    for _ in 0..MAX_MEMBERS {
        let mut header = [0; 60];
        if let Err(error) = package.read_exact(&mut header) {
            let missing = error.kind() == io::ErrorKind::UnexpectedEof;
            return Err(if missing { DebError::Damaged("it has no data.tar".to_owned()) } else { damaged(error) });
        }
        let field = |from: usize, to: usize| {
            header.get(from..to).and_then(|field| std::str::from_utf8(field).ok()).map(str::trim_end)
        };
        let name = field(0, 16).map(|name| name.trim_end_matches('/'));
        let length = field(48, 58).and_then(|length| length.parse::<u64>().ok());
        let (Some(name), Some(length), Some("`")) = (name, length, field(58, 60)) else {
            return Err(DebError::Damaged("a member's header is none".to_owned()));
        };
        if name.starts_with("data.tar") {
            return Ok((name.to_owned(), length));
        }
        let padded = length.saturating_add(length % 2);
        let skipped = io::copy(&mut package.take(padded), &mut io::sink()).map_err(damaged)?;
        if skipped != padded {
            return Err(DebError::Damaged(format!("it ends within {name:?}")));
        }
    }
    Err(DebError::Strange(format!("it has over {MAX_MEMBERS} members before its data")))
}

fn extract(archive: &mut tar::Archive<impl Read>, into: &Path) -> Result<(), DebError> {
    let mut long_name = None;
    // Raw, because the library would read names of any length into memory.
    for (index, entry) in archive.entries().map_err(damaged)?.raw(true).enumerate() {
        let mut entry = entry.map_err(damaged)?;
        if index >= MAX_ENTRIES {
            return Err(DebError::Strange(format!("it has over {MAX_ENTRIES} entries")));
        }
        let kind = entry.header().entry_type();
        if kind.is_gnu_longname() {
            if entry.size() > MAX_NAME {
                return Err(DebError::Strange(format!("it has a name of {} bytes", entry.size())));
            }
            let mut name = Vec::new();
            entry.read_to_end(&mut name).map_err(damaged)?;
            name.retain(|byte| *byte != 0);
            long_name = Some(name);
            continue;
        }
        if kind.is_pax_local_extensions() || kind.is_pax_global_extensions() {
            return Err(DebError::Strange("its archive has PAX headers".to_owned()));
        }
        let name = long_name.take().unwrap_or_else(|| entry.path_bytes().into_owned());
        if !kind.is_file() {
            continue;
        }
        let Some(path) = wanted(&name) else { continue };
        if path.components().count() > MAX_PARTS {
            let path = printable(&path.to_string_lossy());
            return Err(DebError::Strange(format!(
                "{path} is deeper than {MAX_PARTS} directories, which no module is"
            )));
        }
        let path = into.join(path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(|error| DebError::Write { path: parent.to_owned(), error })?;
        }
        let mut file = File::create_new(&path).map_err(|error| DebError::Write { path: path.clone(), error })?;
        let size = entry.size();
        copy(&mut entry, &mut file, size, &path)?;
    }
    Ok(())
}

/// Copies exactly `size` bytes. An error of the source is the package's, one of the file is the disk's.
fn copy(from: &mut impl Read, to: &mut File, size: u64, path: &Path) -> Result<(), DebError> {
    use io::Write;
    let mut buffer = vec![0; 256 << 10];
    let mut left = size;
    while left > 0 {
        let read = from.read(&mut buffer).map_err(damaged)?;
        let piece = buffer.get(..read).filter(|piece| !piece.is_empty());
        let piece = piece.ok_or_else(|| DebError::Damaged(format!("it ends within {}", path.display())))?;
        to.write_all(piece).map_err(|error| DebError::Write { path: path.to_owned(), error })?;
        left = left.saturating_sub(u64::try_from(read).unwrap_or(u64::MAX));
    }
    Ok(())
}

/// Where a file of the package goes, if it is wanted: a kernel, or one of the files of `lib/modules`.
fn wanted(name: &[u8]) -> Option<PathBuf> {
    let path = Path::new(std::str::from_utf8(name).ok()?);
    let parts: Option<Vec<&str>> = path
        .components()
        .filter(|part| *part != Component::CurDir)
        .map(|part| match part {
            Component::Normal(name) => name.to_str(),
            _ => None,
        })
        .collect();
    let parts = parts?;
    let parts = parts.strip_prefix(&["usr"]).unwrap_or(&parts);
    match parts {
        ["boot", file] if file.starts_with("vmlinuz-") || file.starts_with("vmlinux-") => {}
        ["lib", "modules", _release, _, ..] => {}
        _ => return None,
    }
    Some(parts.iter().collect())
}

fn read_full(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut read = 0;
    while let Some(rest) = buffer.get_mut(read..).filter(|rest| !rest.is_empty()) {
        match from.read(rest)? {
            0 => break,
            n => read = read.saturating_add(n),
        }
    }
    Ok(read)
}

#[allow(clippy::needless_pass_by_value)] // for map_err
fn damaged(error: io::Error) -> DebError {
    DebError::Damaged(error.to_string())
}

/// Packages made up, for the tests of this and of the import.
#[cfg(test)]
#[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
pub(super) mod make {
    use super::super::compression::pack::pack;
    use super::*;

    /// A package with these files.
    pub(in crate::kernel) fn package(files: &[(&str, &[u8])], with: Compression) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, content) in files {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o644);
            header.set_size(content.len() as u64);
            builder.append_data(&mut header, name, *content).unwrap();
        }
        around(&pack(&builder.into_inner().unwrap(), with))
    }

    pub(super) fn around(data: &[u8]) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        for (name, content) in [("debian-binary", &b"2.0\n"[..]), ("control.tar.xz", b"odd"), ("data.tar.any", data)] {
            let length = content.len();
            out.extend(format!("{name:<16}{0:<12}{0:<6}{0:<6}{1:<8}{length:<10}`\n", 0, 100_644).as_bytes());
            out.extend(content);
            out.resize(out.len().next_multiple_of(2), b'\n');
        }
        out
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
mod tests {
    use proptest::prelude::*;

    use super::super::compression::pack::{ALL, pack};
    use super::super::modules::walk;
    use super::make::{around, package};
    use super::*;

    const DEEP: &str = "./lib/modules/6.1/kernel/a-directory/with-a-name-that-does-not-fit/into-the-hundred-bytes/that-the-header-of-tar-has-for-it/m.ko";
    const FILES: &[(&str, &[u8])] = &[
        ("./boot/vmlinuz-6.1", b"kernel"),
        ("./boot/config-6.1", b"no"),
        (DEEP, b"deep"),
        ("./usr/lib/modules/6.1/modules.builtin", b""),
        ("./lib/modules/stray", b"no"),
        ("./usr/share/doc/boot/vmlinuz-6.1", b"no"),
    ];

    fn unpacked(package: &[u8]) -> Result<Vec<String>, String> {
        let directory = tempfile::tempdir().unwrap();
        unpack(&mut &*package, directory.path()).map_err(|error| error.to_string())?;
        let below = |path: PathBuf| path.strip_prefix(directory.path()).unwrap().to_str().unwrap().to_owned();
        Ok(walk(directory.path()).unwrap().into_iter().map(below).collect())
    }

    #[test]
    fn the_kernel_and_its_modules_are_taken_and_nothing_else() {
        for compression in ALL {
            let files = unpacked(&package(FILES, compression)).unwrap();
            assert_eq!(files, ["boot/vmlinuz-6.1", &DEEP[2..], "lib/modules/6.1/modules.builtin"], "{compression:?}");
        }
    }

    #[test]
    fn names_that_lead_elsewhere_are_not_followed() {
        for name in [
            "../boot/vmlinuz-1",
            "/boot/../boot/vmlinuz-1",
            "/boot/vmlinuz-1",
            "boot/x/vmlinuz-1",
            "lib/modules/6.1/../../../x",
            "lib/modules/../y",
        ] {
            assert_eq!(wanted(name.as_bytes()), None, "{name}");
        }
        assert_eq!(wanted(b"usr/lib/modules/6.1/a"), Some("lib/modules/6.1/a".into()));
        // A link and what would be written through it; the same file twice.
        let mut builder = tar::Builder::new(Vec::new());
        let mut link = tar::Header::new_gnu();
        link.set_entry_type(tar::EntryType::Symlink);
        link.set_size(0);
        builder.append_link(&mut link, "boot", "/tmp").unwrap();
        let mut header = tar::Header::new_gnu();
        header.set_size(1);
        builder.append_data(&mut header, "boot/vmlinuz-1", &b"x"[..]).unwrap();
        assert_eq!(unpacked(&around(&builder.into_inner().unwrap())).unwrap(), ["boot/vmlinuz-1"]);
        let twice = package(&[("boot/vmlinuz-1", b"a"), ("usr/boot/vmlinuz-1", b"b")], Compression::None);
        assert!(unpacked(&twice).unwrap_err().contains("File exists"));
    }

    #[test]
    fn no_file_is_deep_and_the_store_stays_as_it_was() {
        let deep = |depth: usize| format!("lib/modules/6.1/{}x.ko", "d/".repeat(depth));
        let with = |name: &str| unpacked(&package(&[(name, b"x")], Compression::None));
        assert_eq!(with(&deep(12)).unwrap().len(), 1);
        for depth in [13, 1850] {
            assert!(with(&deep(depth)).unwrap_err().contains("is deeper than"));
        }
    }

    #[test]
    fn what_is_cut_short_or_strange_is_refused() {
        for compression in ALL {
            let whole = package(FILES, compression);
            for length in [7, 30, 100, whole.len() / 2 + 150, whole.len() - 10] {
                assert!(unpacked(&whole[..length.min(whole.len() - 1)]).is_err(), "{compression:?} {length}");
            }
        }
        assert!(unpacked(b"!<arch>\n").unwrap_err().contains("no data.tar"));
        assert!(unpacked(&around(&pack(b"no tar archive", Compression::Xz))).is_err());
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::GNULongName);
        header.set_size(1 << 40);
        header.set_cksum();
        assert!(unpacked(&around(header.as_bytes())).unwrap_err().contains("a name of 1099511627776 bytes"));
    }

    proptest! {
        #[test]
        fn any_damage_is_survived(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5)) {
            let mut package = package(FILES, Compression::None);
            for (at, to) in changes {
                let at = at.index(package.len());
                package[at] = to;
            }
            let _ = unpacked(&package);
        }
    }
}
