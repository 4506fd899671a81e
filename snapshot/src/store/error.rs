//! What can be wrong with snapshots.

use std::io;
use std::path::{Path, PathBuf};

use super::Dependent;
use super::archive::ArchiveError;
use crate::disk::DiskError;

/// Why something cannot be done with a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file or directory.
    #[error("{path}: {error}", path = path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// No such snapshot.
    #[error("snapshot {0:?}: there is none with this id or name; bulkhead snapshot list shows all")]
    Unknown(String),
    /// More than one.
    #[error("snapshot {given:?}: {} ids begin so: {}", ids.len(), ids.join(", "))]
    Ambiguous {
        /// What was given.
        given: String,
        /// The candidates.
        ids: Vec<String>,
    },
    /// A name that is taken.
    #[error("name {name:?}: snapshot {id} has it already; choose another --name, or remove that snapshot")]
    NameTaken {
        /// The name.
        name: String,
        /// Who has it.
        id: String,
    },
    /// Something stands on it.
    #[error("snapshot {id}: {} on it: {}; remove that first", if dependents.len() == 1 { "something stands" } else { "others stand" }, listed(dependents))]
    InUse {
        /// Which.
        id: String,
        /// What.
        dependents: Vec<Dependent>,
    },
    /// A file of it is not what was saved.
    #[error("snapshot {id}: {file}: {why}; what was saved is lost, or lies in another copy of the snapshot")]
    Damaged {
        /// Which.
        id: String,
        /// Its file.
        file: String,
        /// What is wrong.
        why: String,
    },
    /// It was not sealed before the host went down.
    #[error("snapshot {id}: the host went down before its files were hashed; whether they are whole is not known")]
    NeverSealed {
        /// Which.
        id: String,
    },
    /// What is asked is for another kind of snapshot.
    #[error("snapshot {id}: {why}")]
    Unfit {
        /// Which.
        id: String,
        /// Why not.
        why: String,
    },
    /// The layers of its disk.
    #[error("snapshot {id}: its disk: {source}")]
    Disk {
        /// Which.
        id: String,
        /// What is wrong with them.
        source: DiskError,
    },
    /// Another snapshot has the id of one that is to be imported.
    #[error(
        "snapshot {id}: there is one of this id here, and it is not the archive's; remove it to import that (bulkhead snapshot rm {id})"
    )]
    Exists {
        /// Which.
        id: String,
    },
    /// A file that holds snapshots, or is to.
    #[error("the archive: {0}")]
    Archive(ArchiveError),
    /// A file that says what a run's disk is made of, and is wrong.
    #[error("{path}: {why}", path = path.display())]
    Chain {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
}

impl StoreError {
    /// Whether a file is simply not there.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { error, .. } if error.kind() == io::ErrorKind::NotFound)
    }
}

fn listed(dependents: &[Dependent]) -> String {
    const SHOWN: usize = 8;
    let mut words: Vec<String> = dependents.iter().take(SHOWN).map(ToString::to_string).collect();
    let more = dependents.len().saturating_sub(SHOWN);
    words.extend((more > 0).then(|| format!("{more} more")));
    words.join(", ")
}

/// Names the path of an error.
pub(super) fn at(path: &Path) -> impl FnOnce(io::Error) -> StoreError + use<'_> {
    move |error| StoreError::Io { path: path.to_owned(), error }
}
