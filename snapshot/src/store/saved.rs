//! A snapshot that is there: its files, its seal, and whether they still are what was saved.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::error::{StoreError, at};
use super::hash::{CHUNK, ChunkHash, chunks, whole};
use super::manifest::{CHUNKS, DISK, FileRecord, IMPORTED, Kind, MAX_BYTES, MEMORY, Manifest, NETWORK, STATE};
use super::{Snapshots, boot_id, read_small, write_whole};

/// When its files were hashed last.
const STAMP: &str = "verified.json";
/// Most bytes of that.
const MAX_STAMP: u64 = 16 << 10;
/// Most bytes that are read of the chunks' hashes: those of 3 TiB that are no zeros.
const MAX_CHUNKS: u64 = 32 << 20;
/// Bytes of a chunk's record: which file, which chunk, its hash.
const CHUNK_RECORD: usize = 1 + 8 + 32;

/// How much is hashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// What was not hashed in this life of the host, or is not the very file that was.
    IfNeeded,
    /// Everything.
    Always,
}

/// How a snapshot stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// All its hashes are known.
    Sealed,
    /// They are not known yet. On this host, in this life of it, it can be used.
    Sealing,
    /// They never will be.
    NeverSealed,
}

/// A snapshot.
#[derive(Debug, Clone)]
pub struct Snapshot {
    snapshots: Snapshots,
    path: PathBuf,
    manifest: Manifest,
    this_boot: bool,
}

/// A file at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileStamp {
    name: String,
    device: u64,
    inode: u64,
    size: u64,
    mtime: (i64, i64),
    ctime: (i64, i64),
}

/// All files, in one life of the host.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stamp {
    boot: String,
    /// So that a stamp of one manifest is not taken for another's.
    manifest: String,
    files: Vec<FileStamp>,
}

impl FileStamp {
    fn of(name: &str, found: &Metadata) -> Self {
        Self {
            name: name.to_owned(),
            device: found.dev(),
            inode: found.ino(),
            size: found.len(),
            mtime: (found.mtime(), found.mtime_nsec()),
            ctime: (found.ctime(), found.ctime_nsec()),
        }
    }
}

impl Snapshot {
    /// The manifest's name in its directory.
    pub(super) const MANIFEST: &str = "manifest.json";

    pub(super) fn load(snapshots: &Snapshots, id: &str) -> Result<Self, StoreError> {
        let path = snapshots.directory.join(id);
        let manifest = path.join(Self::MANIFEST);
        let damaged = |why: String| StoreError::Damaged { id: id.to_owned(), file: Self::MANIFEST.to_owned(), why };
        if !path.is_dir() {
            return Err(StoreError::Unknown(id.to_owned()));
        }
        let text = read_small(&manifest, MAX_BYTES).map_err(|error| damaged(error.to_string()))?;
        let manifest = Manifest::parse(&text, id).map_err(damaged)?;
        let this_boot = manifest.boot == boot_id()?;
        Ok(Self { snapshots: snapshots.clone(), path, manifest, this_boot })
    }

    /// One whose files lie elsewhere still.
    pub(super) fn staged(snapshots: &Snapshots, path: PathBuf, manifest: Manifest) -> Self {
        Self { snapshots: snapshots.clone(), path, manifest, this_boot: false }
    }

    /// Checks the files of one that comes from elsewhere, and writes down what of them is not in the manifest.
    pub(super) fn settle(&self, progress: &mut dyn FnMut(u64)) -> Result<(), StoreError> {
        self.stamps()?;
        let records = self.check(progress)?;
        write_whole(&self.path(CHUNKS), &records)
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.manifest.id
    }

    /// Its manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Whether it came from an archive, or was made of one that did.
    #[must_use]
    pub fn is_imported(&self) -> bool {
        std::fs::symlink_metadata(self.path(IMPORTED)).is_ok()
    }

    /// How it stands.
    #[must_use]
    pub fn status(&self) -> Status {
        match (self.manifest.is_sealed(), self.this_boot) {
            (true, _) => Status::Sealed,
            (false, true) => Status::Sealing,
            (false, false) => Status::NeverSealed,
        }
    }

    /// Bytes that its own files take on the medium.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let taken =
            |name: &str| std::fs::metadata(self.path(name)).map_or(0, |found| found.blocks().saturating_mul(512));
        self.manifest.files.iter().map(|file| taken(&file.name)).fold(0, u64::saturating_add)
    }

    /// One of its files.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The machine's state, and the images of its memory; nothing if it is of a disk alone.
    #[must_use]
    pub fn machine(&self) -> Option<(PathBuf, Vec<PathBuf>)> {
        (self.manifest.kind == Kind::Full).then(|| (self.path(STATE), vec![self.path(MEMORY)]))
    }

    /// What the network filter knew.
    #[must_use]
    pub fn network(&self) -> Option<PathBuf> {
        (self.manifest.kind == Kind::Full).then(|| self.path(NETWORK))
    }

    /// The data file of its disk layer, beside which lies the map.
    #[must_use]
    pub fn layer(&self) -> PathBuf {
        self.path(DISK[0])
    }

    /// The snapshots that it stands on, from the bottom.
    ///
    /// # Errors
    /// One of them is gone or damaged.
    pub fn below(&self) -> Result<Vec<Snapshot>, StoreError> {
        self.manifest.layers.iter().map(|id| self.snapshots.load(id)).collect()
    }

    /// Hashes all files, and writes the hashes down. One that is sealed already stays as it is.
    ///
    /// # Errors
    /// A file is not as it was published, or the medium's.
    pub fn seal(&self, progress: &mut dyn FnMut(u64)) -> Result<(), StoreError> {
        if self.status() == Status::Sealed {
            return Ok(());
        }
        let mut sealed = self.manifest.clone();
        let stamps = self.stamps()?;
        let mut records = Vec::new();
        for (number, file) in (0u8..).zip(&mut sealed.files) {
            let (hash, found) = self.hash(&file.name, file.length, progress)?;
            file.hash = Some(hash.to_hex().to_string());
            put_chunks(&mut records, number, &found);
        }
        write_whole(&self.path(CHUNKS), &records)?;
        let sealed = sealed.summed().map_err(|error| at(&self.path)(error.into()))?;
        let text = serde_json::to_vec_pretty(&sealed).map_err(|error| at(&self.path)(error.into()))?;
        write_whole(&self.path(Self::MANIFEST), &text)?;
        Self { manifest: sealed, ..self.clone() }.note(stamps);
        Ok(())
    }

    /// Whether all its files, and those that it stands on, are what was saved.
    ///
    /// # Errors
    /// The first one that is not, by name and place; or it was never sealed.
    pub fn verify(&self, depth: Depth, progress: &mut dyn FnMut(u64)) -> Result<(), StoreError> {
        for below in self.below()? {
            below.verify_files(&DISK, depth, progress)?;
        }
        self.verify_files(self.manifest.kind.files(), depth, progress)
    }

    /// Whether its disk, and what that stands on, is what was saved, whatever became of its machine.
    ///
    /// # Errors
    /// The first file that is not.
    pub fn verify_disk(&self, depth: Depth, progress: &mut dyn FnMut(u64)) -> Result<(), StoreError> {
        for snapshot in self.below()?.iter().chain([self]) {
            snapshot.verify_files(&DISK, depth, progress)?;
        }
        Ok(())
    }

    /// The snapshot whose run went on to become this one, if it is not the first.
    ///
    /// # Errors
    /// It is gone or damaged.
    pub fn parent(&self) -> Result<Option<Snapshot>, StoreError> {
        self.manifest.layers.last().map(|id| self.snapshots.load(id)).transpose()
    }

    fn verify_files(&self, names: &[&str], depth: Depth, progress: &mut dyn FnMut(u64)) -> Result<(), StoreError> {
        match self.status() {
            // Its files are noted as hashed only after they were: this manifest is from before.
            Status::NeverSealed | Status::Sealing if self.path(STAMP).exists() => {
                return Err(
                    self.damaged(Self::MANIFEST, "it is the one from before the snapshot was sealed".to_owned())
                );
            }
            Status::NeverSealed => return Err(StoreError::NeverSealed { id: self.id().to_owned() }),
            Status::Sealing if depth == Depth::IfNeeded => return self.stamps().map(drop),
            Status::Sealing => return self.seal(progress),
            Status::Sealed => {}
        }
        let before = self.noted();
        let mut good = before.clone();
        for (number, file) in (0u8..).zip(&self.manifest.files) {
            if !names.contains(&file.name.as_str()) {
                continue;
            }
            // Before it is read: what changes it meanwhile makes another stamp.
            let stamp = self.stamp(file)?;
            if good.contains(&stamp) && depth == Depth::IfNeeded {
                continue;
            }
            self.check_file(number, file, progress)?;
            good.retain(|other| other.name != stamp.name);
            good.push(stamp);
        }
        if good != before {
            self.note(good);
        }
        Ok(())
    }

    /// Compares all files with their hashes; gives those of their chunks.
    fn check(&self, progress: &mut dyn FnMut(u64)) -> Result<Vec<u8>, StoreError> {
        let mut records = Vec::new();
        for (number, file) in (0u8..).zip(&self.manifest.files) {
            put_chunks(&mut records, number, &self.check_file(number, file, progress)?);
        }
        Ok(records)
    }

    fn check_file(
        &self,
        number: u8,
        file: &FileRecord,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Vec<ChunkHash>, StoreError> {
        let (hash, found) = self.hash(&file.name, file.length, progress)?;
        if file.hash.as_deref() != Some(hash.to_hex().as_str()) {
            let why = self.first_difference(number, &found);
            return Err(self.damaged(&file.name, why));
        }
        Ok(found)
    }

    fn hash(
        &self,
        name: &str,
        length: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(blake3::Hash, Vec<ChunkHash>), StoreError> {
        let path = self.path(name);
        let file = File::open(&path).map_err(at(&path))?;
        let (found, chunks) = chunks(&file, progress).map_err(at(&path))?;
        if found != length {
            return Err(self.damaged(name, format!("it has {found} bytes, and had {length}")));
        }
        Ok((whole(length, &chunks), chunks))
    }

    /// Where a file differs from what was saved.
    fn first_difference(&self, file: u8, found: &[ChunkHash]) -> String {
        let saved = read_small(&self.path(CHUNKS), MAX_CHUNKS).unwrap_or_default();
        let saved = chunks_of(&saved, file);
        let differs = saved.iter().find(|chunk| !found.contains(chunk)).or(found.iter().find(|c| !saved.contains(c)));
        match differs {
            Some(chunk) => format!(
                "what lies in the {CHUNK} bytes from {} is not what was saved",
                chunk.number.saturating_mul(CHUNK)
            ),
            None => "its hash is not the one that was saved".to_owned(),
        }
    }

    fn damaged(&self, file: &str, why: String) -> StoreError {
        StoreError::Damaged { id: self.id().to_owned(), file: file.to_owned(), why }
    }

    /// The files as they are now.
    fn stamps(&self) -> Result<Vec<FileStamp>, StoreError> {
        self.manifest.files.iter().map(|file| self.stamp(file)).collect()
    }

    fn stamp(&self, file: &FileRecord) -> Result<FileStamp, StoreError> {
        let path = self.path(&file.name);
        let found = match std::fs::symlink_metadata(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(self.damaged(&file.name, "it is not there".to_owned()));
            }
            other => other.map_err(at(&path))?,
        };
        if !found.is_file() {
            return Err(self.damaged(&file.name, "it is no plain file".to_owned()));
        }
        if found.len() != file.length {
            let why = format!("it has {} bytes, and had {}", found.len(), file.length);
            return Err(self.damaged(&file.name, why));
        }
        Ok(FileStamp::of(&file.name, &found))
    }

    /// What a stamp of this manifest, in this life of the host, begins with.
    fn stamped(&self, files: Vec<FileStamp>) -> Result<Stamp, StoreError> {
        let text = serde_json::to_vec(&self.manifest).map_err(|error| at(&self.path)(error.into()))?;
        Ok(Stamp { boot: boot_id()?, manifest: blake3::hash(&text).to_hex().to_string(), files })
    }

    /// The files that were hashed, as they were then.
    fn noted(&self) -> Vec<FileStamp> {
        let read = || {
            let text = read_small(&self.path(STAMP), MAX_STAMP).ok()?;
            let stamp: Stamp = serde_json::from_slice(&text).ok()?;
            let of_this = self.stamped(Vec::new()).ok()?;
            (stamp.boot == of_this.boot && stamp.manifest == of_this.manifest).then_some(stamp.files)
        };
        read().unwrap_or_default()
    }

    /// Writes down that they were hashed. Where that cannot be, they are hashed again the next time.
    fn note(&self, files: Vec<FileStamp>) {
        let Ok(stamp) = self.stamped(files) else { return };
        let Ok(text) = serde_json::to_vec(&stamp) else { return };
        let _ = write_whole(&self.path(STAMP), &text);
    }
}

fn put_chunks(to: &mut Vec<u8>, file: u8, chunks: &[ChunkHash]) {
    for chunk in chunks {
        to.push(file);
        to.extend(chunk.number.to_le_bytes());
        to.extend(chunk.hash);
    }
}

fn chunks_of(records: &[u8], file: u8) -> Vec<ChunkHash> {
    let chunk = |record: &[u8]| {
        let (of, rest) = record.split_first()?;
        let (number, hash) = rest.split_first_chunk::<8>()?;
        (*of == file).then_some(ChunkHash { number: u64::from_le_bytes(*number), hash: hash.try_into().ok()? })
    };
    records.chunks_exact(CHUNK_RECORD).filter_map(chunk).collect()
}

/// Where a directory lies that is a snapshot's.
impl AsRef<Path> for Snapshot {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}
