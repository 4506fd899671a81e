//! A snapshot that stands on others becomes one that stands on none.

use std::fs::File;
use std::path::PathBuf;

use super::error::{StoreError, at};
use super::manifest::{DISK, IMPORTED};
use super::{Depth, Meta, Snapshot, Snapshots};
use crate::disk::{LayerFiles, merge};

impl Snapshots {
    /// Makes a snapshot of the same machine or disk whose layers are one, over the image. What is not the disk is the
    /// same files, under hard links, since nobody ever writes to them. That changes when they were last changed, so the
    /// original is hashed once more before it is used.
    ///
    /// # Errors
    /// It, or one that it stands on, is damaged; or the medium's.
    pub fn flatten(
        &self,
        snapshot: &Snapshot,
        created: String,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Snapshot, StoreError> {
        snapshot.verify(Depth::IfNeeded, progress)?;
        let manifest = snapshot.manifest();
        let pending = self.begin(None)?;
        let mut all = snapshot.below()?;
        all.push(snapshot.clone());
        let open = |path: PathBuf| File::open(&path).map_err(at(&path));
        let mut layers = Vec::new();
        for one in &all {
            layers.push(LayerFiles { data: open(one.path(DISK[0]))?, map: Some(open(one.path(DISK[1]))?) });
        }
        let [data, map] = DISK.map(|name| pending.create(name));
        merge(&layers, &data?, &map?, progress)
            .map_err(|source| StoreError::Disk { id: snapshot.id().to_owned(), source })?;
        if snapshot.is_imported() {
            pending.write(IMPORTED, b"")?;
        }
        for name in manifest.kind.files().iter().filter(|name| !DISK.contains(name)) {
            pending.link(&snapshot.path(name), name)?;
        }
        let flat = pending.publish(Meta {
            created,
            kind: manifest.kind,
            origin: manifest.origin.clone(),
            epoch: manifest.epoch,
            image: manifest.image.clone(),
            layers: Vec::new(),
            disk_bytes: manifest.disk_bytes,
            memory_bytes: manifest.memory_bytes,
            vcpus: manifest.vcpus,
        })?;
        flat.seal(progress)?;
        self.find(flat.id())
    }
}
