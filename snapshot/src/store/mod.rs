//! The snapshots of a state directory: immutable, complete, verifiable.
//!
//! `snapshots/<id>` holds one. A directory of another name (`.tmp-…`, `.gone-…`) is half made or half removed, and means
//! nothing. What a snapshot holds is listed in its manifest, which comes last: files that it does not name do not exist,
//! and it is whole because it was renamed into place when all of it was on the medium. Its hashes follow when it is
//! *sealed*. `docs/formats/snapshot.md` has the bytes.
//!
//! A snapshot's disk is the image, then the layers of the snapshots that it stands on, then its own. Whoever stands on a
//! snapshot is found by looking: other snapshots' manifests, and the chains of runs. `snapshots/.lock` is held while
//! something is made to stand on another, and while one is removed.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod archive;
mod chain;
mod error;
mod flatten;
mod hash;
mod manifest;
mod pending;
mod saved;
mod transfer;

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};

pub use archive::ArchiveError;
pub use chain::{Chain, ChainLayer};
pub use error::StoreError;
pub use manifest::{FileRecord, Kind, Manifest};
pub use pending::{Meta, Pending};
pub use saved::{Depth, Snapshot, Status};
pub use transfer::Imported;

use error::at;
use pending::fresh_id;

/// Where they are in a state directory.
const SNAPSHOTS: &str = "snapshots";
/// Where the runs are.
const RUNS: &str = "runs";
/// Begins the names of what is half made.
const TEMPORARY: &str = ".tmp-";
/// Begins the names of what is half removed.
const GONE: &str = ".gone-";
/// The lock of the directory, and, in a directory that is being made, its maker's.
const LOCK: &str = ".lock";
/// Most bytes of a run's state.
const MAX_STATE: u64 = 4 << 20;
/// Digits of an id.
const ID_DIGITS: usize = 16;

/// The snapshots of a state directory.
#[derive(Debug, Clone)]
pub struct Snapshots {
    home: PathBuf,
    directory: PathBuf,
}

/// While it lives, nothing is made to stand on a snapshot, and none is removed.
#[derive(Debug)]
pub struct Held(#[allow(dead_code, reason = "the lock goes with it")] File);

/// What stands on a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dependent {
    /// Another snapshot.
    Snapshot(String),
    /// A run.
    Run(String),
}

impl Dependent {
    /// What removes it, as words after `bulkhead`.
    #[must_use]
    pub fn removal(&self) -> String {
        match self {
            Self::Snapshot(id) => format!("snapshot rm {id}"),
            Self::Run(id) => format!("rm {id}"),
        }
    }
}

impl std::fmt::Display for Dependent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Snapshot(id) => write!(f, "snapshot {id}"),
            Self::Run(id) => write!(f, "run {id}"),
        }
    }
}

impl Snapshots {
    /// Those of a state directory.
    ///
    /// # Errors
    /// Their directory cannot be made.
    pub fn open(home: &Path) -> Result<Self, StoreError> {
        let directory = home.join(SNAPSHOTS);
        match std::fs::DirBuilder::new().mode_0700().create(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(at(&directory)(error)),
            _ => {}
        }
        // Links on the way to it are the user's. In it none is followed.
        let directory = directory.canonicalize().map_err(at(&directory))?;
        Ok(Self { home: home.to_owned(), directory })
    }

    /// All of them, by their time.
    ///
    /// # Errors
    /// The directory cannot be read. One that is damaged is not among them; [`Snapshots::find`] says what is wrong with it.
    pub fn list(&self) -> Result<Vec<Snapshot>, StoreError> {
        let mut all: Vec<Snapshot> = self.ids()?.iter().filter_map(|id| self.load(id).ok()).collect();
        all.sort_by(|a, b| (&a.manifest().created, a.id()).cmp(&(&b.manifest().created, b.id())));
        Ok(all)
    }

    /// Those that are damaged so that nothing is known of them, and how.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn broken(&self) -> Result<Vec<(String, StoreError)>, StoreError> {
        // One that was removed meanwhile is not damaged.
        let broken = |id: String| match self.load(&id) {
            Err(StoreError::Unknown(_)) | Ok(_) => None,
            Err(error) => Some((id, error)),
        };
        Ok(self.ids()?.into_iter().filter_map(broken).collect())
    }

    /// The snapshot with this id, name or unique beginning of an id.
    ///
    /// # Errors
    /// There is none, there are several, or it is damaged.
    pub fn find(&self, given: &str) -> Result<Snapshot, StoreError> {
        self.load(&self.id_of(given)?)
    }

    /// The id of the snapshot with this id, name or unique beginning of an id, even if it is damaged.
    ///
    /// # Errors
    /// There is none, or there are several.
    pub fn id_of(&self, given: &str) -> Result<String, StoreError> {
        let ids = self.ids()?;
        if ids.iter().any(|id| id == given) {
            return Ok(given.to_owned());
        }
        if let Some(named) = self.list()?.into_iter().find(|one| one.manifest().name.as_deref() == Some(given)) {
            return Ok(named.id().to_owned());
        }
        let found: Vec<&String> = ids.iter().filter(|id| !given.is_empty() && id.starts_with(given)).collect();
        match found.as_slice() {
            [] => Err(StoreError::Unknown(given.to_owned())),
            [id] => Ok((*id).clone()),
            many => Err(StoreError::Ambiguous {
                given: given.to_owned(),
                ids: many.iter().map(|id| (*id).clone()).collect(),
            }),
        }
    }

    /// Keeps a snapshot from being removed while something is made to stand on it.
    ///
    /// # Errors
    /// It is gone already, or the lock cannot be taken.
    pub fn hold(&self, snapshot: &Snapshot) -> Result<Held, StoreError> {
        let held = self.lock()?;
        self.load(snapshot.id())?;
        Ok(held)
    }

    /// What stands on a snapshot: on its disk layer, or, a run that was saved, on all of it.
    ///
    /// # Errors
    /// Something that may stand on it cannot be read: then nobody knows.
    pub fn dependents(&self, id: &str) -> Result<Vec<Dependent>, StoreError> {
        let mut all = Vec::new();
        // What is damaged itself may go even if others are: else nothing of them could.
        let broken = matches!(self.load(id), Err(StoreError::Damaged { .. }));
        for other in self.ids()?.into_iter().filter(|other| other != id) {
            let loaded = match self.load(&other) {
                Err(StoreError::Damaged { .. }) if broken => continue,
                other => other?,
            };
            if loaded.manifest().layers.iter().any(|layer| layer == id) {
                all.push(Dependent::Snapshot(other));
            }
        }
        let runs = self.home.join(RUNS);
        for name in names(&runs)? {
            // Also of one that is being made: it takes its place in one step, with its chain.
            let chain = runs.join(&name).join(Chain::PLACE);
            let chain = match Chain::read(&chain) {
                // It goes, or was made by hand for something else.
                Err(error) if error.is_not_found() => continue,
                other => other?,
            };
            if chain.stands_on(id) || saved_as(&runs.join(&name)).as_deref() == Some(id) {
                all.push(Dependent::Run(name.trim_start_matches(TEMPORARY).to_owned()));
            }
        }
        Ok(all)
    }

    /// Removes a snapshot on which nothing stands. From the first step on it is none any more.
    ///
    /// # Errors
    /// Something stands on it, which is named; it is not there, or cannot be removed.
    pub fn remove(&self, id: &str) -> Result<(), StoreError> {
        let gone = {
            let _held = self.lock()?;
            if !is_id(id) || !self.directory.join(id).is_dir() {
                return Err(StoreError::Unknown(id.to_owned()));
            }
            let dependents = self.dependents(id)?;
            if !dependents.is_empty() {
                return Err(StoreError::InUse { id: id.to_owned(), dependents });
            }
            self.discard(id)?
        };
        clear(&gone)
    }

    /// Makes a snapshot none any more; gives where its files lie now. The lock is held.
    fn discard(&self, id: &str) -> Result<PathBuf, StoreError> {
        let path = self.directory.join(id);
        self.set_aside(&path)
    }

    fn set_aside(&self, path: &Path) -> Result<PathBuf, StoreError> {
        let gone = fresh_id().map_err(at(path))?;
        let gone = self.directory.join(format!("{GONE}{gone}"));
        std::fs::rename(path, &gone).map_err(at(path))?;
        Ok(gone)
    }

    /// Removes what died in the middle. Leaves everything else.
    ///
    /// # Errors
    /// The directory cannot be read. What cannot be removed is left to the next one.
    pub fn sweep(&self) -> Result<(), StoreError> {
        let held = self.lock()?;
        let mut gone = Vec::new();
        for name in names(&self.directory)? {
            let path = self.directory.join(&name);
            if name.starts_with(GONE) {
                gone.push(path);
            } else if name.starts_with(TEMPORARY) && !is_locked(&path.join(LOCK)) {
                gone.extend(self.set_aside(&path).ok());
            }
        }
        // Large files take their time; nobody waits for it.
        drop(held);
        gone.iter().for_each(|path| drop(clear(path)));
        Ok(())
    }

    fn lock(&self) -> Result<Held, StoreError> {
        let path = self.directory.join(LOCK);
        let file = open_lock(&path).map_err(at(&path))?;
        flock(&file, FlockOperation::LockExclusive).map_err(|error| at(&path)(error.into()))?;
        Ok(Held(file))
    }

    fn load(&self, id: &str) -> Result<Snapshot, StoreError> {
        Snapshot::load(self, id)
    }

    fn ids(&self) -> Result<Vec<String>, StoreError> {
        let mut ids = names(&self.directory)?;
        ids.retain(|name| is_id(name));
        ids.sort();
        Ok(ids)
    }
}

/// The snapshot that a run goes on from, as its state says.
fn saved_as(run: &Path) -> Option<String> {
    let text = read_small(&run.join("state.json"), MAX_STATE).ok()?;
    let state: serde_json::Value = serde_json::from_slice(&text).ok()?;
    Some(state.get("saved")?.as_str()?.to_owned())
}

/// Removes what was set aside. Somebody else may do so at the same time.
fn clear(gone: &Path) -> Result<(), StoreError> {
    match std::fs::remove_dir_all(gone) {
        Err(error) if gone.exists() => Err(at(gone)(error)),
        _ => Ok(()),
    }
}

fn names(directory: &Path) -> Result<Vec<String>, StoreError> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(at(directory))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(at(directory))?;
        if let Ok(name) = entry.file_name().into_string()
            && name != LOCK
        {
            names.push(name);
        }
    }
    Ok(names)
}

/// Whether this is an id: what is no id is no path either.
fn is_id(text: &str) -> bool {
    text.len() == ID_DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

fn is_locked(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    matches!(flock(&file, FlockOperation::NonBlockingLockShared), Err(rustix::io::Errno::WOULDBLOCK))
}

fn sync_directory(path: &Path) -> Result<(), StoreError> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(at(path))
}

/// Reads a file of at most `most` bytes. What is no plain file is not waited for, and no link is followed.
fn read_small(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match open(path, flags, Mode::empty()) {
        Err(rustix::io::Errno::LOOP) => return Err(io::Error::other("it is a symbolic link, which is not followed")),
        other => File::from(other?),
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no plain file"));
    }
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > most {
        return Err(io::Error::other(format!("it has more than {most} bytes")));
    }
    Ok(bytes)
}

/// What this life of the host is called.
fn boot_id() -> Result<String, StoreError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    Ok(std::fs::read_to_string(path).map_err(at(path))?.trim().to_owned())
}

/// Writes a file whole, on the medium, or not at all.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    use std::io::Write;
    let new = path.with_extension("new");
    let _ = std::fs::remove_file(&new);
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| std::fs::rename(&new, path));
    if let Err(error) = written {
        let _ = std::fs::remove_file(&new);
        return Err(at(path)(error));
    }
    path.parent().map_or(Ok(()), sync_directory)
}

trait Mode0700 {
    fn mode_0700(&mut self) -> &mut Self;
}

impl Mode0700 for std::fs::DirBuilder {
    fn mode_0700(&mut self) -> &mut Self {
        use std::os::unix::fs::DirBuilderExt;
        self.mode(0o700)
    }
}

#[cfg(test)]
mod tests;
