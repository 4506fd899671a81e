//! The layers of a machine's disk above its image.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::machine::{MachineError, create, open_plainly};
use crate::store::sync_directory;

/// They, from the bottom, by their data files, beside each of which lies its map. The last one takes what is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layers(Vec<PathBuf>);

/// The data file of a run's own layer.
pub(crate) fn own(directory: &Path, stem: &str) -> PathBuf {
    directory.join("disk").join(stem).with_extension("data")
}

impl Layers {
    /// Makes layers in a machine's directory, on top of others.
    pub(crate) fn make(
        directory: &Path,
        below: Vec<PathBuf>,
        stems: &[String],
        size: u64,
        durable: bool,
    ) -> Result<Self, MachineError> {
        let mut all = below;
        for stem in stems {
            let data = own(directory, stem);
            make(&data, size, durable)?;
            all.push(data);
        }
        if durable {
            sync_directory(&directory.join("disk"))?;
        }
        Ok(Self(all))
    }

    /// How many.
    pub(super) fn number(&self) -> usize {
        self.0.len()
    }

    /// Their descriptors, data then map, the last ones writable.
    pub(super) fn open(&self) -> Result<Vec<OwnedFd>, MachineError> {
        let mut files = Vec::new();
        for (index, data) in self.0.iter().enumerate() {
            let live = index.checked_add(1) == Some(self.0.len());
            let flags = if live { OFlags::RDWR } else { OFlags::RDONLY };
            for path in [data.clone(), data.with_extension("map")] {
                let file = open_plainly(&path, flags);
                files.push(file.map_err(|error| MachineError::File { path, error })?);
            }
        }
        Ok(files)
    }
}

/// Makes one empty layer.
pub(crate) fn make(data: &Path, size: u64, durable: bool) -> Result<(File, File), MachineError> {
    let map = data.with_extension("map");
    let files = (create(data)?, create(&map)?);
    snapshot::disk::create_layer(&files.0, &files.1, size)
        .map_err(|error| MachineError::Layer { path: data.to_owned(), error: error.to_string() })?;
    if durable {
        for (file, path) in [(&files.0, data), (&files.1, map.as_path())] {
            file.sync_all().map_err(|error| MachineError::File { path: path.to_owned(), error })?;
        }
    }
    Ok(files)
}
