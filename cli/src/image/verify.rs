//! Whether an image's file still is what was imported.
//!
//! The whole file is hashed before its first use after a start of this host, and again whenever it is not the very file
//! that was hashed: what a run starts from is then what its record says, whatever the disk below or a copy did to it. In
//! between, the host's page cache is trusted.

use std::fs::{File, Metadata};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::disk::hash;
use super::progress::Progress;
use super::store::{Image, StoreError, short};
use crate::home::{HomeError, at, read_json};

/// In an image's directory: when its file was hashed last.
const STAMP: &str = "verified.json";

/// A file at one moment of one life of the host.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stamp {
    boot: String,
    device: u64,
    inode: u64,
    size: u64,
    mtime: (i64, i64),
    ctime: (i64, i64),
}

impl Stamp {
    fn of(found: &Metadata) -> Result<Self, HomeError> {
        let path = Path::new("/proc/sys/kernel/random/boot_id");
        Ok(Self {
            boot: std::fs::read_to_string(path).map_err(at(path))?.trim().to_owned(),
            device: found.dev(),
            inode: found.ino(),
            size: found.len(),
            mtime: (found.mtime(), found.mtime_nsec()),
            ctime: (found.ctime(), found.ctime_nsec()),
        })
    }
}

impl Image {
    /// Hashes the file, unless that was done already.
    pub(crate) fn verify(&self, quiet: bool) -> Result<(), StoreError> {
        let Some(directory) = self.root.parent().filter(|_| self.record.is_some()) else { return Ok(()) };
        let found = std::fs::metadata(&self.root).map_err(at(&self.root))?;
        if read_json::<Stamp>(&directory.join(STAMP)).ok() == Some(Stamp::of(&found)?) {
            return Ok(());
        }
        self.hash(quiet)
    }

    /// Hashes the file, and notes that it was.
    pub(super) fn hash(&self, quiet: bool) -> Result<(), StoreError> {
        let Some(record) = &self.record else { return Err(StoreError::ByHand(self.name.clone())) };
        let file = File::open(&self.root).map_err(at(&self.root))?;
        // Before it is read: what changes it meanwhile makes another stamp.
        let stamp = Stamp::of(&file.metadata().map_err(at(&self.root))?)?;
        let mut progress = Progress::new("verifying", Some(record.used), quiet);
        let found = hash(&file, |bytes| progress.add(bytes)).map_err(at(&self.root))?.hash.to_string();
        if found != record.root {
            let why = format!("the hash of {} is {found}, not {}", self.root.display(), record.root);
            return Err(StoreError::Damaged { id: short(&record.id).to_owned(), why });
        }
        self.note(&stamp);
        Ok(())
    }

    /// Where nothing can be noted, because the store is another user's, the file is hashed each time.
    fn note(&self, stamp: &Stamp) {
        let Some(directory) = self.root.parent() else { return };
        let written = tempfile(directory).and_then(|(mut file, path)| {
            file.write_all(&serde_json::to_vec(stamp)?)?;
            std::fs::rename(path, directory.join(STAMP))
        });
        let _ = written;
    }
}

/// A new file for a stamp. Two runs that verify at once each have their own, and either's stamp is right.
fn tempfile(directory: &Path) -> std::io::Result<(File, std::path::PathBuf)> {
    let path = directory.join(format!(".{STAMP}-{}", std::process::id()));
    Ok((File::create(&path)?, path))
}
