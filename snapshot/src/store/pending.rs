//! A snapshot that is being made.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::rand::{GetRandomFlags, getrandom};

use super::error::{StoreError, at};
use super::manifest::{DISK, FileRecord, IMPORTED, Kind, Manifest, VERSION};
use super::{LOCK, Mode0700, Snapshot, Snapshots, TEMPORARY, boot_id, open_lock, sync_directory, write_whole};

/// What is known of a snapshot when it is published.
#[derive(Debug, Clone)]
pub struct Meta {
    /// When it was made, in RFC 3339.
    pub created: String,
    /// What was saved.
    pub kind: Kind,
    /// The run that it was taken of.
    pub origin: String,
    /// The number of the machine's epoch.
    pub epoch: u64,
    /// The image's name.
    pub image: String,
    /// The snapshots whose disk layers lie between the image and its own, from the bottom.
    pub layers: Vec<String>,
    /// Size of the disk.
    pub disk_bytes: u64,
    /// Size of the guest's memory.
    pub memory_bytes: u64,
    /// Number of vCPUs.
    pub vcpus: u8,
}

/// Files that become a snapshot when all of them are there. Dropped before, it leaves nothing.
#[derive(Debug)]
pub struct Pending {
    snapshots: Snapshots,
    id: String,
    name: Option<String>,
    path: PathBuf,
    /// Held while it is made, so that nobody takes it for a leftover.
    _lock: File,
    /// What is to come of it, where that is known before.
    manifest: Option<Manifest>,
    done: bool,
}

impl Snapshots {
    /// Begins a snapshot.
    ///
    /// # Errors
    /// Another one has the name, or its directory cannot be made.
    pub fn begin(&self, name: Option<&str>) -> Result<Pending, StoreError> {
        self.sweep()?;
        self.check_name(name)?;
        let id = fresh_id().map_err(at(&self.directory))?;
        self.begin_in(&id.clone(), id, name)
    }

    /// Begins a snapshot that has its id, and all else that is to be known of it, already.
    pub(super) fn stage(&self, manifest: &Manifest) -> Result<Pending, StoreError> {
        self.sweep()?;
        let place = fresh_id().map_err(at(&self.directory))?;
        let mut pending = self.begin_in(&place, manifest.id.clone(), manifest.name.as_deref())?;
        pending.manifest = Some(manifest.clone());
        pending.write(IMPORTED, b"")?;
        Ok(pending)
    }

    fn begin_in(&self, place: &str, id: String, name: Option<&str>) -> Result<Pending, StoreError> {
        let path = self.directory.join(format!("{TEMPORARY}{place}"));
        // So that nobody sweeps it before its lock is held.
        let _held = self.lock()?;
        std::fs::DirBuilder::new().mode_0700().create(&path).map_err(at(&path))?;
        let lock = path.join(LOCK);
        let lock = open_lock(&lock)
            .and_then(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).map(|()| file).map_err(Into::into));
        let lock = lock.map_err(at(&path))?;
        Ok(Pending {
            snapshots: self.clone(),
            id,
            name: name.map(str::to_owned),
            path,
            _lock: lock,
            manifest: None,
            done: false,
        })
    }

    fn check_name(&self, name: Option<&str>) -> Result<(), StoreError> {
        let Some(name) = name else { return Ok(()) };
        match self.list()?.into_iter().find(|other| other.manifest().name.as_deref() == Some(name)) {
            Some(other) => Err(StoreError::NameTaken { name: name.to_owned(), id: other.id().to_owned() }),
            None => Ok(()),
        }
    }
}

impl Pending {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Makes one of its files, empty.
    ///
    /// # Errors
    /// The medium's.
    pub fn create(&self, name: &str) -> Result<File, StoreError> {
        let path = self.path.join(name);
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path).map_err(at(&path))
    }

    /// Writes one of its files.
    ///
    /// # Errors
    /// The medium's.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        self.create(name)?.write_all(bytes).map_err(at(&self.path.join(name)))
    }

    /// One of its files.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Hashes the files of one that was staged: whether they are what its manifest says.
    pub(super) fn check(&self, progress: &mut dyn FnMut(u64)) -> Result<(), StoreError> {
        let Some(manifest) = self.manifest.clone() else { return Ok(()) };
        Snapshot::staged(&self.snapshots, self.path.clone(), manifest).settle(progress)
    }

    /// Gives one that was staged and checked its place, and says what it is called there; the lock is held. A name that is
    /// taken it goes without.
    pub(super) fn place(mut self) -> Result<Option<String>, StoreError> {
        let Some(mut manifest) = self.manifest.take() else { return Ok(None) };
        let path = self.path.join(Snapshot::MANIFEST);
        if self.snapshots.check_name(manifest.name.as_deref()).is_err() {
            manifest.name = None;
        }
        let name = manifest.name.clone();
        let text = manifest.summed().and_then(|manifest| serde_json::to_vec_pretty(&manifest));
        write_whole(&path, &text.map_err(|error| at(&path)(error.into()))?)?;
        let place = self.snapshots.directory.join(&self.id);
        std::fs::rename(&self.path, &place).map_err(at(&place))?;
        self.done = true;
        let _ = std::fs::remove_file(place.join(LOCK));
        Ok(name)
    }

    /// Takes a frozen layer in: the same files, under another name.
    ///
    /// # Errors
    /// The medium's.
    pub fn link_disk(&self, data: &Path, map: &Path) -> Result<(), StoreError> {
        [data, map].into_iter().zip(DISK).try_for_each(|(from, name)| self.link(from, name))
    }

    /// Takes a file in that nobody writes to any more.
    pub(super) fn link(&self, from: &Path, name: &str) -> Result<(), StoreError> {
        std::fs::hard_link(from, self.path.join(name)).map_err(at(from))
    }

    /// Makes a snapshot of it: from then on it is there, whatever happens.
    ///
    /// # Errors
    /// A file is missing, a snapshot that it stands on is gone, another one has its name, or the medium's.
    pub fn publish(mut self, meta: Meta) -> Result<Snapshot, StoreError> {
        let mut files = Vec::new();
        for name in meta.kind.files() {
            let path = self.path.join(name);
            let file = File::open(&path).map_err(at(&path))?;
            file.sync_all().map_err(at(&path))?;
            let length = file.metadata().map_err(at(&path))?.len();
            files.push(FileRecord { name: (*name).to_owned(), length, hash: None });
        }
        let manifest = Manifest {
            version: VERSION,
            id: self.id.clone(),
            name: self.name.clone(),
            created: meta.created,
            kind: meta.kind,
            origin: meta.origin,
            epoch: meta.epoch,
            image: meta.image,
            layers: meta.layers,
            disk_bytes: meta.disk_bytes,
            memory_bytes: meta.memory_bytes,
            vcpus: meta.vcpus,
            boot: boot_id()?,
            files,
            sum: String::new(),
        };
        let path = self.path.join(Snapshot::MANIFEST);
        let manifest = manifest.summed().map_err(|error| at(&path)(error.into()))?;
        let text = serde_json::to_vec_pretty(&manifest).map_err(|error| at(&path)(error.into()))?;
        Manifest::parse(&text, &self.id).map_err(|why| StoreError::Damaged {
            id: self.id.clone(),
            file: Snapshot::MANIFEST.into(),
            why,
        })?;
        write_whole(&path, &text)?;
        let place = self.snapshots.directory.join(&self.id);
        {
            let _held = self.snapshots.lock()?;
            self.snapshots.check_name(self.name.as_deref())?;
            for below in &manifest.layers {
                self.snapshots.load(below)?;
            }
            std::fs::rename(&self.path, &place).map_err(at(&place))?;
            self.done = true;
        }
        // Not needed by anyone who sees it: its name says that it is whole.
        let _ = std::fs::remove_file(place.join(LOCK));
        sync_directory(&self.snapshots.directory)?;
        self.snapshots.load(&self.id)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.done {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

pub(super) fn fresh_id() -> std::io::Result<String> {
    let mut bytes = [0; 8];
    let n = getrandom(&mut bytes, GetRandomFlags::empty())?;
    if n != bytes.len() {
        return Err(std::io::Error::other("getrandom gave too few bytes"));
    }
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
