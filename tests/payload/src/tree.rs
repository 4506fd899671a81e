//! A list of everything below a directory, one line each, by which two trees can be compared: path, kind, mode, owner,
//! time, and then what the kind has. Names of one file show the first of them.

use std::collections::HashMap;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// Prints the list to standard output.
pub(crate) fn print(root: &Path) {
    let mut paths = vec![PathBuf::new()];
    let mut lines = Vec::new();
    let mut links = HashMap::new();
    while let Some(path) = paths.pop() {
        let at = root.join(&path);
        let found = at.symlink_metadata().unwrap_or_else(|error| panic!("{}: {error}", at.display()));
        if found.is_dir() {
            let entries = std::fs::read_dir(&at).unwrap_or_else(|error| panic!("{}: {error}", at.display()));
            paths.extend(entries.flatten().map(|entry| path.join(entry.file_name())));
        } else if found.nlink() > 1 {
            links.entry(found.ino()).or_insert_with(Vec::new).push(path.clone());
        }
        lines.push((path, found));
    }
    lines.sort_by(|(a, _), (b, _)| a.cmp(b));
    for names in links.values_mut() {
        names.sort();
    }
    let mut text = String::new();
    for (path, found) in lines {
        let first = links.get(&found.ino()).and_then(|names| names.first()).filter(|first| **first != path);
        let _ =
            writeln!(text, "/{} {}", escaped(path.as_os_str().as_bytes()), describe(&root.join(&path), &found, first));
    }
    print!("{text}");
}

fn describe(at: &Path, found: &std::fs::Metadata, first: Option<&PathBuf>) -> String {
    let kind = found.file_type();
    let what = if kind.is_dir() {
        "directory".to_owned()
    } else if kind.is_symlink() {
        let target = std::fs::read_link(at).unwrap_or_default();
        format!("symlink {}", escaped(target.as_os_str().as_bytes()))
    } else if kind.is_file() {
        let content = std::fs::read(at).unwrap_or_else(|error| panic!("{}: {error}", at.display()));
        format!("file {} {}", content.len(), hex(&Sha256::digest(content)))
    } else if kind.is_fifo() {
        "fifo".to_owned()
    } else if kind.is_socket() {
        "socket".to_owned()
    } else {
        let kind = if kind.is_block_device() { "block" } else { "character" };
        format!("{kind} {}:{}", rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()))
    };
    let mut line = format!("{:o} {}:{} ", found.mode() & 0o7777, found.uid(), found.gid());
    let _ = write!(line, "{}.{:09} {what}", found.mtime(), found.mtime_nsec());
    if let Some(first) = first {
        let _ = write!(line, " is /{}", escaped(first.as_os_str().as_bytes()));
    }
    for (name, value) in attributes(at) {
        let _ = write!(line, " {name}={}", hex(&value));
    }
    line
}

fn attributes(at: &Path) -> Vec<(String, Vec<u8>)> {
    let mut names = vec![0; 64 << 10];
    let length = rustix::fs::llistxattr(at, &mut names).unwrap_or(0);
    let names = names.get(..length).unwrap_or_default().split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let mut all: Vec<_> = names
        .map(|name| {
            let mut value = vec![0; 64 << 10];
            let length = rustix::fs::lgetxattr(at, name, &mut value).unwrap_or(0);
            value.truncate(length);
            (String::from_utf8_lossy(name).into_owned(), value)
        })
        .collect();
    all.sort();
    all
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Without spaces and line ends, so that a line has its parts.
fn escaped(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string().replace(' ', "\\x20")
}
