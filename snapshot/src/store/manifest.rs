//! The manifest: what a snapshot is and holds.

use serde::{Deserialize, Serialize};

use super::is_id;

/// The format's version.
pub(super) const VERSION: u32 = 1;
/// Most bytes of a manifest.
pub(super) const MAX_BYTES: u64 = 64 << 10;
/// Most layers below a snapshot's own.
const MAX_LAYERS: usize = 62;
/// Most snapshots that make a disk: those layers, and the snapshot itself.
pub(super) const MAX_SNAPSHOTS: usize = MAX_LAYERS + 1;
/// Most bytes of a machine's memory: more than any host has.
const MAX_MEMORY: u64 = 16 << 40;
/// Most bytes of a file that is neither memory nor disk.
const MAX_SMALL: u64 = 16 << 20;
/// Most characters of a text in it.
const MAX_TEXT: usize = 256;

/// The machine's state.
pub(super) const STATE: &str = "state";
/// The machine's memory.
pub(super) const MEMORY: &str = "memory";
/// The frozen layer's data, and its map.
pub(super) const DISK: [&str; 2] = ["disk.data", "disk.map"];
/// What the network filter knew.
pub(super) const NETWORK: &str = "net.json";
/// What runs in it, as the run that was saved had it.
const SPEC: &str = "spec.json";
/// What clients have of the execs' output.
const STREAMS: &str = "streams.json";
/// There if it came from an archive: what it says was then said by anybody.
pub(super) const IMPORTED: &str = "imported";
/// The hashes of the files' chunks.
pub(super) const CHUNKS: &str = "chunks";

/// Files that a snapshot of a machine has, in this order.
pub(super) const FULL: &[&str] = &[STATE, MEMORY, DISK[0], DISK[1], NETWORK, SPEC, STREAMS];
/// Files that a snapshot of a disk has.
pub(super) const DISK_ONLY: &[&str] = &[DISK[0], DISK[1], SPEC];

/// Most bytes of a file.
fn most(name: &str) -> u64 {
    match name {
        MEMORY => MAX_MEMORY,
        name if name == DISK[0] => crate::disk::MAX_SIZE,
        // A byte for each block, and a header.
        name if name == DISK[1] => (crate::disk::MAX_SIZE / crate::disk::BLOCK).saturating_add(crate::disk::BLOCK),
        _ => MAX_SMALL,
    }
}

/// What was saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A machine with its memory and its disk.
    Full,
    /// A disk.
    Disk,
}

impl Kind {
    /// The files that it has.
    pub(super) fn files(self) -> &'static [&'static str] {
        match self {
            Self::Full => FULL,
            Self::Disk => DISK_ONLY,
        }
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Full => "full",
            Self::Disk => "disk",
        })
    }
}

/// What a snapshot is and holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The format's version: 1.
    pub version: u32,
    /// Sixteen hexadecimal digits.
    pub id: String,
    /// The user's name for it.
    pub name: Option<String>,
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
    /// Which life of the host it was made in.
    pub boot: String,
    /// Its files, each with its length, and its hash once it is sealed.
    pub files: Vec<FileRecord>,
    /// The hash of all the rest, so that no damage to it goes unnoticed.
    pub sum: String,
}

/// A file of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub length: u64,
    /// Its hash, in hexadecimal, once it is known.
    pub hash: Option<String>,
}

impl Manifest {
    /// Whether all its hashes are known.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.files.iter().all(|file| file.hash.is_some())
    }

    /// The record of a file.
    pub(super) fn file(&self, name: &str) -> Option<&FileRecord> {
        self.files.iter().find(|file| file.name == name)
    }

    /// With the hash that belongs to it.
    ///
    /// # Errors
    /// It cannot be written as JSON.
    pub fn summed(mut self) -> Result<Self, serde_json::Error> {
        self.sum = self.hash()?;
        Ok(self)
    }

    /// The hash of all of it but that hash.
    fn hash(&self) -> Result<String, serde_json::Error> {
        let rest = Self { sum: String::new(), ..self.clone() };
        Ok(blake3::hash(&serde_json::to_vec(&rest)?).to_hex().to_string())
    }

    /// Whether both are of the same saved state, whatever name each has here.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let bare = |of: &Self| Self { name: None, sum: String::new(), ..of.clone() };
        bare(self) == bare(other)
    }

    /// Reads one, as hostile input, that should be of this id.
    pub(super) fn parse(text: &[u8], id: &str) -> Result<Self, String> {
        let manifest: Self = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        manifest.check(id)?;
        Ok(manifest)
    }

    /// Reads one, as hostile input, of whatever id.
    ///
    /// # Errors
    /// What in it no snapshot has.
    pub fn read(text: &[u8]) -> Result<Self, String> {
        let manifest: Self = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        if !is_id(&manifest.id) {
            return Err(format!("{:?} is no id", manifest.id));
        }
        manifest.check(&manifest.id)?;
        Ok(manifest)
    }

    fn check(&self, id: &str) -> Result<(), String> {
        if self.version != VERSION {
            return Err(format!("it is of version {}, and this program knows version {VERSION}", self.version));
        }
        let sum = self.hash().map_err(|error| error.to_string())?;
        if self.sum != sum {
            return Err(format!("its hash is {sum}, and it says {:?}", self.sum));
        }
        if self.id != id {
            return Err(format!("it is that of snapshot {:?}", self.id));
        }
        let texts = [&self.created, &self.origin, &self.image, &self.boot];
        let texts = texts.into_iter().chain(&self.name);
        for text in texts {
            if text.chars().count() > MAX_TEXT || text.chars().any(char::is_control) {
                return Err("a text in it is too long, or no text".to_owned());
            }
        }
        if self.layers.len() > MAX_LAYERS || !self.layers.iter().all(|layer| is_id(layer) && layer != id) {
            return Err("the layers that it stands on are no snapshots, or too many".to_owned());
        }
        let names = self.files.iter().map(|file| file.name.as_str());
        if !names.eq(self.kind.files().iter().copied()) {
            return Err("it does not name the files that such a snapshot has".to_owned());
        }
        let sealed = self.files.iter().filter(|file| file.hash.is_some()).count();
        if sealed != 0 && sealed != self.files.len() {
            return Err("some of its files have a hash, and some have none".to_owned());
        }
        let is_hash = |text: &String| blake3::Hash::from_hex(text.as_bytes()).is_ok();
        if !self.files.iter().filter_map(|file| file.hash.as_ref()).all(is_hash) {
            return Err("a hash in it is none".to_owned());
        }
        if let Some(file) = self.files.iter().find(|file| file.length > most(&file.name)) {
            return Err(format!("{}: {} bytes, over {}", file.name, file.length, most(&file.name)));
        }
        let length = |name| self.file(name).map_or(0, |file| file.length);
        if self.kind == Kind::Full && length(MEMORY) != self.memory_bytes {
            return Err("its memory is not as long as the machine's".to_owned());
        }
        Ok(())
    }
}
