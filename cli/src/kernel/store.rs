//! The store of kernels; docs/formats/kernel-store.md has the format.
//!
//! A kernel is a directory named by its id, which appears whole by one rename, with its record written last, and is
//! never changed afterwards. Names are symbolic links beside. What begins with a dot is half made and means nothing;
//! its maker holds a lock on it, so the next import can tell leftovers from work under way.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::home::{
    Home, HomeError, at, entries, is_missing, make_directory, read_json, unknown, unusable, version_key,
};
use crate::store::{fresh_id, sync_directory};

/// Version of the record. 2: with the driver of the network interface, which every machine has.
pub(super) const VERSION: u32 = 2;
/// The parts of a kernel.
pub(super) const VMLINUX: &str = "vmlinux";
pub(super) const MODULES: &str = "modules.cpio";
pub(super) const TREE: &str = "modules.img";
/// The record of a kernel.
const RECORD: &str = "kernel.json";
/// Names, below the store.
const NAMES: &str = "names";

/// What can be wrong with the store.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// A file or directory, or no such kernel.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// No kernel at all.
    #[error(
        "no kernel in {directory}; import one: bulkhead kernel import VMLINUZ --modules DIR, or bulkhead kernel import \
         PACKAGE.deb{hint}",
        directory = directory.display()
    )]
    None {
        /// The store.
        directory: PathBuf,
        /// What this host offers.
        hint: String,
    },
    /// Several ids that begin so.
    #[error("kernel {given:?}: {} ids begin so: {}; give more of it", ids.len(), ids.join(", "))]
    Ambiguous {
        /// What was given.
        given: String,
        /// The candidates.
        ids: Vec<String>,
    },
    /// A record of another version.
    #[error(
        "{path}: it has version {version}, this bulkhead knows {VERSION}; {}",
        if *version < VERSION { "import the kernel again" } else { "use a newer one" },
        path = path.display()
    )]
    Version {
        /// The record.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// A part that is not as it was written.
    #[error(
        "kernel {id}: {part} is damaged: {what}; remove the kernel (bulkhead kernel rm {id}) and import it again",
        id = short(id)
    )]
    Damaged {
        /// The kernel.
        id: String,
        /// The file.
        part: String,
        /// How it differs.
        what: String,
    },
    /// A kernel without the tree of all modules.
    #[error(
        "kernel {name:?}: it was imported without its whole module tree, which --modules needs; import it again with \
         --full-modules"
    )]
    NoTree {
        /// As it was asked for.
        name: String,
    },
}

/// What is known of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    /// The format's version.
    pub(super) version: u32,
    /// 64 hexadecimal digits.
    pub(super) id: String,
    /// As `uname -r` prints it.
    pub(super) release: String,
    /// The files' names that it came from.
    pub(super) source: Vec<String>,
    /// When.
    pub(super) imported: String,
    /// Each file's length and hash.
    pub(super) files: BTreeMap<String, Part>,
    /// The modules of the archive, in the order of loading.
    pub(super) modules: Vec<String>,
}

/// One file of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Part {
    /// In bytes.
    pub(super) size: u64,
    /// 64 hexadecimal digits.
    pub(super) sha256: String,
}

/// A kernel to boot.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// As it was asked for, or its own name.
    pub(crate) name: String,
    /// The uncompressed ELF kernel.
    pub(crate) vmlinux: PathBuf,
    /// The initramfs archive of the modules that our devices need.
    pub(crate) modules: PathBuf,
    /// The file system of all modules.
    tree: PathBuf,
}

impl Kernel {
    /// A kernel in this directory.
    pub(crate) fn at(name: String, directory: &Path) -> Self {
        let file = |name| directory.join(name);
        Self { name, vmlinux: file(VMLINUX), modules: file(MODULES), tree: file(TREE) }
    }

    /// The file system of all modules, if the kernel was imported with it.
    pub(crate) fn tree(&self) -> Result<PathBuf, StoreError> {
        if self.tree.is_file() { Ok(self.tree.clone()) } else { Err(StoreError::NoTree { name: self.name.clone() }) }
    }
}

/// All kernels of a state directory.
#[derive(Debug)]
pub(crate) struct Store(PathBuf);

impl Store {
    /// The kernels of a state directory. Nothing is made.
    pub(crate) fn of(home: &Home) -> Self {
        Self(home.path().join("kernels"))
    }

    /// The same, for writing: the directory is there, and so is its lock, which is taken until it is dropped.
    pub(super) fn lock(&self) -> Result<File, StoreError> {
        make_directory(&self.0)?;
        let path = self.0.join(".lock");
        let file = File::options().write(true).create(true).truncate(false).open(&path).map_err(at(&path))?;
        flock(&file, FlockOperation::LockExclusive).map_err(|error| at(&path)(error.into()))?;
        Ok(file)
    }

    /// The records of all kernels, sorted by version. What has no valid record is no kernel.
    pub(super) fn records(&self) -> Result<Vec<Record>, StoreError> {
        let mut found = Vec::new();
        for id in entries(&self.0)? {
            match self.record(&id) {
                Ok(record) => found.push(record),
                // What we may not look at might be one.
                Err(StoreError::Home(HomeError::Io { path, error })) if !is_missing(&error) => {
                    return Err(unusable(&path)(error).into());
                }
                Err(_) => {}
            }
        }
        found.sort_by_cached_key(|record| (version_key(&record.release), record.imported.clone()));
        Ok(found)
    }

    /// The record of the kernel with this id.
    pub(super) fn record(&self, id: &str) -> Result<Record, StoreError> {
        let path = self.0.join(id).join(RECORD);
        let record: Record = read_json(&path)?;
        if record.version != VERSION {
            return Err(StoreError::Version { path, version: record.version });
        }
        if record.id != id || !is_id(id) {
            let what = "it is the record of another".to_owned();
            return Err(StoreError::Damaged { id: id.to_owned(), part: RECORD.to_owned(), what });
        }
        Ok(record)
    }

    /// Where they lie.
    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// The directory of a kernel.
    pub(super) fn directory(&self, id: &str) -> PathBuf {
        self.0.join(id)
    }

    /// All names, with the ids that they stand for.
    pub(super) fn names(&self) -> Result<BTreeMap<String, String>, StoreError> {
        let directory = self.0.join(NAMES);
        let target = |name: &String| {
            let target = directory.join(name).read_link().ok()?;
            let id = target.to_str()?.strip_prefix("../")?.to_owned();
            is_id(&id).then_some(id)
        };
        Ok(entries(&directory)?.into_iter().filter_map(|name| target(&name).map(|id| (name, id))).collect())
    }

    /// The id of a kernel by its name, its id, or a unique beginning of that.
    pub(super) fn find(&self, given: &str) -> Result<String, StoreError> {
        let (names, records) = (self.names()?, self.records()?);
        let exists = |id: &String| records.iter().any(|record| record.id == *id);
        if let Some(id) = names.get(given).filter(|id| exists(id)) {
            return Ok(id.clone());
        }
        let begin = |record: &&Record| !given.is_empty() && record.id.starts_with(given);
        let mut ids: Vec<String> = records.iter().filter(begin).map(|record| record.id.clone()).collect();
        match ids.len() {
            1 => Ok(ids.remove(0)),
            0 => {
                let known: Vec<String> = names.into_iter().filter(|(_, id)| exists(id)).map(|(name, _)| name).collect();
                Err(unknown("kernel", &self.0, given, &known).into())
            }
            _ => {
                ids.iter_mut().for_each(|id| *id = short(id).to_owned());
                Err(StoreError::Ambiguous { given: given.to_owned(), ids })
            }
        }
    }

    /// The kernel to boot: the one that was asked for, or that with the highest version. Its parts have the lengths
    /// that they were written with.
    pub(crate) fn kernel(&self, given: Option<&str>) -> Result<Kernel, StoreError> {
        let Some(given) = given else {
            let Some(record) = self.records()?.pop() else {
                return self.by_hand_newest();
            };
            return self.checked(record.release.clone(), &record);
        };
        match self.find(given) {
            Ok(id) => self.checked(given.to_owned(), &self.record(&id)?),
            Err(error @ StoreError::Home(HomeError::Unknown { .. })) => self.by_hand(given).ok_or(error),
            Err(error) => Err(error),
        }
    }

    fn checked(&self, name: String, record: &Record) -> Result<Kernel, StoreError> {
        let directory = self.directory(&record.id);
        for (part, recorded) in &record.files {
            let path = directory.join(part);
            let size = fs::metadata(&path).map_err(at(&path))?.len();
            if size != recorded.size {
                let what = format!("it has {size} bytes, and had {}", recorded.size);
                return Err(StoreError::Damaged { id: record.id.clone(), part: part.clone(), what });
            }
        }
        Ok(Kernel::at(name, &directory))
    }

    /// A directory that someone put here by hand, with a vmlinux and a modules.cpio and without a record.
    fn by_hand(&self, name: &str) -> Option<Kernel> {
        let plain = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0']);
        let directory = self.0.join(name);
        let ours = name == NAMES || directory.join(RECORD).exists();
        (plain && !ours && directory.is_dir()).then(|| Kernel::at(name.to_owned(), &directory))
    }

    fn by_hand_newest(&self) -> Result<Kernel, StoreError> {
        let all = entries(&self.0)?.into_iter().filter_map(|name| self.by_hand(&name));
        all.max_by_key(|kernel| version_key(&kernel.name)).ok_or_else(|| {
            let own = super::host::HostKernel::find().import_command();
            let hint = own.map(|command| format!("; for this host's own: {command}")).unwrap_or_default();
            StoreError::None { directory: self.0.clone(), hint }
        })
    }

    /// Compares every part of a kernel with its record.
    pub(super) fn verify(&self, record: &Record) -> Result<(), StoreError> {
        for (part, recorded) in &record.files {
            let path = self.directory(&record.id).join(part);
            let found = File::open(&path).and_then(hash).map_err(at(&path))?;
            if found != *recorded {
                let what = format!("its SHA-256 is {}, and was {}", found.sha256, recorded.sha256);
                return Err(StoreError::Damaged { id: record.id.clone(), part: part.clone(), what });
            }
        }
        Ok(())
    }

    /// A directory for a kernel that is being made. Removes what killed imports left.
    pub(super) fn begin(&self) -> Result<Unfinished, StoreError> {
        let _lock = self.lock()?;
        self.sweep()?;
        let path = self.0.join(format!(".tmp-{}", fresh_id().map_err(at(&self.0))?));
        make_directory(&path)?;
        let lock = File::open(&path).map_err(at(&path))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|error| at(&path)(error.into()))?;
        Ok(Unfinished { path, _lock: lock })
    }

    /// Removes what means nothing any more. The store's lock is held.
    fn sweep(&self) -> Result<(), StoreError> {
        for entry in fs::read_dir(&self.0).map_err(at(&self.0))? {
            let entry = entry.map_err(at(&self.0))?;
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            // No machine of ours starts with a kernel of an older version, and no command shows it.
            if matches!(self.record(&name), Err(StoreError::Version { version: ..VERSION, .. })) {
                remove_all(&self.set_aside(&path)?)?;
                continue;
            }
            if !name.starts_with(".tmp-") {
                continue;
            }
            // Its import may be giving it up just now, for which it needs no lock.
            let directory = match File::open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other.map_err(at(&path))?,
            };
            if flock(&directory, FlockOperation::NonBlockingLockExclusive).is_ok() {
                // What cannot be removed is in nobody's way, and the next import tries again.
                let _ = remove_all(&path);
            }
        }
        Ok(())
    }

    /// Takes a kernel out of the store, all at once: gives it a name that means nothing. It is a new one, since a removal that was
    /// killed leaves the one that it had chosen.
    fn set_aside(&self, path: &Path) -> Result<PathBuf, StoreError> {
        let gone = self.0.join(format!(".tmp-{}", fresh_id().map_err(at(&self.0))?));
        fs::rename(path, &gone).map_err(at(path))?;
        sync_directory(&self.0)?;
        Ok(gone)
    }

    /// Makes what was made a kernel of this store, unless it is there already: that is the one then. Tells whether it
    /// is new.
    pub(super) fn publish(&self, made: &Unfinished, record: &Record) -> Result<bool, StoreError> {
        let mut bytes = serde_json::to_vec_pretty(record)
            .map_err(|error| HomeError::Json { path: made.path.join(RECORD), error })?;
        bytes.push(b'\n');
        write_synced(&made.path.join(RECORD), &bytes)?;
        sync_directory(&made.path)?;
        let _lock = self.lock()?;
        let path = self.directory(&record.id);
        if self.record(&record.id).is_ok_and(|old| self.verify(&old).is_ok()) {
            return Ok(false);
        }
        // What is there without a valid record, or damaged, is no kernel; it gives way.
        if path.exists() {
            fs::remove_dir_all(&path).map_err(at(&path))?;
        }
        fs::rename(&made.path, &path).map_err(at(&path))?;
        sync_directory(&self.0)?;
        Ok(true)
    }

    /// Gives a kernel a name, which it takes from the one that had it. Returns that one's id.
    pub(super) fn name(&self, name: &str, id: &str) -> Result<Option<String>, StoreError> {
        let _lock = self.lock()?;
        let directory = self.0.join(NAMES);
        make_directory(&directory)?;
        let before = self.names()?.get(name).cloned();
        if before.as_deref() == Some(id) {
            return Ok(None);
        }
        let (path, temporary) = (directory.join(name), directory.join(format!(".tmp-{name}")));
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(&temporary)(error).into()),
            _ => {}
        }
        std::os::unix::fs::symlink(format!("../{id}"), &temporary).map_err(at(&temporary))?;
        fs::rename(&temporary, &path).map_err(at(&path))?;
        sync_directory(&directory)?;
        Ok(before)
    }

    /// Removes a kernel and its names. What dies in the middle leaves names without a kernel, which mean nothing.
    pub(super) fn remove(&self, id: &str) -> Result<(), StoreError> {
        let _lock = self.lock()?;
        let gone = self.set_aside(&self.directory(id))?;
        for (name, _) in self.names()?.into_iter().filter(|(_, of)| of == id) {
            let path = self.0.join(NAMES).join(name);
            fs::remove_file(&path).map_err(at(&path))?;
        }
        remove_all(&gone)
    }
}

/// Removes a directory that someone else may be removing too.
fn remove_all(path: &Path) -> Result<(), StoreError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(path)(error).into()),
        _ => Ok(()),
    }
}

/// A kernel that is being made. Dropping it removes what is left of it.
#[derive(Debug)]
pub(super) struct Unfinished {
    /// Its directory, which no one else writes to.
    pub(super) path: PathBuf,
    /// Tells the next import that this one lives.
    _lock: File,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // Published, it is not there any more; what cannot be removed the next import removes.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Writes a file that has to be on the disk before anything refers to it.
pub(super) fn write_synced(path: &Path, content: &[u8]) -> Result<Part, HomeError> {
    let mut file = File::create_new(path).map_err(at(path))?;
    file.write_all(content).and_then(|()| file.sync_all()).map_err(at(path))?;
    Ok(Part { size: u64::try_from(content.len()).unwrap_or(u64::MAX), sha256: hex(&Sha256::digest(content)) })
}

/// Length and hash of a file.
pub(super) fn hash(mut file: impl Read) -> io::Result<Part> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 256 << 10];
    let mut size = 0_u64;
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(Part { size, sha256: hex(&hash.finalize()) });
        }
        hash.update(buffer.get(..read).unwrap_or_default());
        size = size.saturating_add(u64::try_from(read).unwrap_or(u64::MAX));
    }
}

/// Bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// As much of an id as people are shown.
pub(super) fn short(id: &str) -> &str {
    id.get(..12).unwrap_or(id)
}

/// Whether this is an id.
fn is_id(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Makes sure that what was written to a file system by another program is on the disk.
pub(super) fn sync_file(path: &Path) -> Result<(), HomeError> {
    let file = File::open(path).map_err(at(path))?;
    rustix::fs::fsync(file.as_fd()).map_err(|error| at(path)(error.into()))
}
