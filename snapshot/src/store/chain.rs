//! What a run's disk is made of, above its image.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::{StoreError, at};
use super::{is_id, read_small, write_whole};

/// Most bytes of the file: 64 layers of either kind.
const MAX_BYTES: u64 = 16 << 10;
/// Most layers.
const MAX_LAYERS: usize = 64;
/// Longest stem of a file's name.
const MAX_STEM: usize = 16;

/// The layers of a run's disk, from the bottom. The last one is the run's own, and takes what is written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chain {
    /// They.
    pub layers: Vec<ChainLayer>,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum ChainLayer {
    /// The disk layer of a snapshot, by its id.
    Snapshot(String),
    /// A layer of the run's own: what its files' names begin with, in the run's directory `disk`.
    Own(String),
}

impl Chain {
    /// Where it lies in a run's directory.
    pub const PLACE: &str = "disk/chain.json";

    /// Reads it.
    ///
    /// # Errors
    /// It is not there, or not what it should be.
    pub fn read(path: &Path) -> Result<Self, StoreError> {
        let wrong = |why: String| StoreError::Chain { path: path.to_owned(), why };
        let text = read_small(path, MAX_BYTES).map_err(at(path))?;
        let chain: Self = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        chain.check().map_err(wrong)?;
        Ok(chain)
    }

    /// Writes it, whole and on the medium, or not at all.
    ///
    /// # Errors
    /// The medium's.
    pub fn write(&self, path: &Path) -> Result<(), StoreError> {
        self.check().map_err(|why| StoreError::Chain { path: path.to_owned(), why })?;
        let text = serde_json::to_vec(self).map_err(|error| at(path)(error.into()))?;
        write_whole(path, &text)
    }

    /// The snapshot that the disk stands on.
    #[must_use]
    pub fn top_snapshot(&self) -> Option<&String> {
        self.layers.iter().rev().find_map(|layer| match layer {
            ChainLayer::Snapshot(id) => Some(id),
            ChainLayer::Own(_) => None,
        })
    }

    /// Whether a snapshot's layer is among them.
    #[must_use]
    pub fn stands_on(&self, snapshot: &str) -> bool {
        self.layers.iter().any(|layer| matches!(layer, ChainLayer::Snapshot(id) if id == snapshot))
    }

    fn check(&self) -> Result<(), String> {
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            return Err(format!("{} layers; 1 to {MAX_LAYERS} make a disk", self.layers.len()));
        }
        for layer in &self.layers {
            let sound = match layer {
                ChainLayer::Snapshot(id) => is_id(id),
                ChainLayer::Own(stem) => {
                    !stem.is_empty() && stem.len() <= MAX_STEM && stem.bytes().all(|byte| byte.is_ascii_digit())
                }
            };
            if !sound {
                return Err(format!("{layer:?} is no layer"));
            }
        }
        Ok(())
    }
}
