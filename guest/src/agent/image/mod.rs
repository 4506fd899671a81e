//! Building an image: what a builder machine runs in place of a command.
//!
//! Its disk is an empty file system and nothing else is mounted. The layers come on stdin, as the host got them; here
//! they are decompressed and unpacked, as root of a machine that holds nothing but them. The archives are hostile, and
//! what they can do is make a bad image or none. At the end the file system is read-only, and so complete on the disk.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

mod compression;
mod layers;
mod members;
mod tree;
mod unpack;

use std::{
    fs::File,
    io::{self, Write},
};

use crate::build::{BuildReport, status as build_status};
use layers::Layers;
use rustix::mount::{MountFlags, mount_remount};
use tree::Tree;
use unpack::Unpacker;

/// Bytes that an image may unpack to, as a multiple of its file system's size: layers may replace what is below them,
/// but a bomb that overwrites one file for ever has an end.
const MAX_EXPANSION: u64 = 8;

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
enum BuildError {
    /// {0}
    #[error("{0}")]
    Archive(String),
    /// {0}
    #[error("{0}")]
    Full(String),
    /// {what}: {error}
    #[error("{what}: {error}")]
    Io { what: String, error: io::Error },
}

impl BuildError {
    fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> BuildError {
        move |error| BuildError::Io { what: what.into(), error }
    }
}

impl From<rustix::io::Errno> for BuildError {
    fn from(error: rustix::io::Errno) -> Self {
        BuildError::Io { what: "file system".into(), error: error.into() }
    }
}

/// Unpacks stdin, as layers over each other or as one archive, into `/`; gives the exit status.
pub(super) fn build(layered: bool) -> u8 {
    let (status, mut text) = match attempt(layered) {
        Ok(report) => (build_status::DONE, serde_json::to_string(&report).unwrap_or_default()),
        Err(error) => (
            match error {
                BuildError::Archive(_) => build_status::ARCHIVE,
                BuildError::Full(_) => build_status::FULL,
                BuildError::Io { .. } => build_status::IO,
            },
            error.to_string(),
        ),
    };
    text.push('\n');
    let output = if status == build_status::DONE { rustix::stdio::stdout() } else { rustix::stdio::stderr() };
    match output.try_clone_to_owned().map(File::from).and_then(|mut file| file.write_all(text.as_bytes())) {
        Ok(()) => status,
        // Nobody hears of it.
        Err(_) => build_status::IO,
    }
}

fn attempt(layered: bool) -> Result<BuildReport, BuildError> {
    let stdin = rustix::stdio::stdin().try_clone_to_owned().map(File::from).map_err(BuildError::io("stdin"))?;
    let root = rustix::fs::statvfs("/")?;
    let limit = root.f_blocks.saturating_mul(root.f_frsize).saturating_mul(MAX_EXPANSION);
    // mke2fs makes it for fsck, which makes it itself if need be; no archive names it.
    match std::fs::remove_dir("/lost+found") {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(BuildError::io("/lost+found")(error)),
        _ => {}
    }
    let mut layers = Layers::new(stdin);
    let mut unpacker = Unpacker::new(Tree::new("/"), layered, limit);
    while let Some(mut layer) = layers.next_layer()? {
        unpacker.layer(&mut layer)?;
    }
    let report = unpacker.finish()?;
    rustix::fs::sync();
    mount_remount("/", MountFlags::RDONLY, "")
        .map_err(|e| BuildError::io("cannot finish the file system")(e.into()))?;
    Ok(report)
}
