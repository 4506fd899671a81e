//! A new live layer on top of an open disk, which freezes the one below it: a snapshot's cut.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::flush::Joined;
use super::host::HostFile;
use super::{Disk, DiskError, Layer, LayerFiles, MAX_LAYERS, layer, sizes};

impl<F: HostFile> Disk<F> {
    /// The same disk with one layer more, which takes every change from now on. The layer that was live so far is flushed, and
    /// is immutable from the moment that the new disk is used: whoever uses that one must never write to this one again. If the
    /// new disk is not used after all, this one goes on as before. No call that changes the disk may run meanwhile.
    ///
    /// Costs the flush, and memory as large as the index; neither the data nor the maps of other layers are read.
    ///
    /// # Errors
    /// The flush fails, the disk is read-only or has all the layers that it may have, or the new layer does not fit it.
    pub fn with_layer(&self, files: LayerFiles<F>) -> Result<Self, DiskError> {
        self.live()?;
        self.flush()?;
        let number = self.layers.len();
        let fail = |source| DiskError::Layer { layer: number, source };
        if number >= MAX_LAYERS {
            return Err(DiskError::LayerCount { count: number.saturating_add(1) });
        }
        let LayerFiles { data, map: Some(map) } = files else { return Err(DiskError::NoMap { layer: number }) };
        let (size, len) = sizes(&data, Some(&map)).map_err(fail)?;
        if size != self.size {
            // The guest knows the disk's size, so it may not grow either.
            return Err(DiskError::Resizes { layer: number, size, below: self.size });
        }
        let live = u8::try_from(number.saturating_add(1)).unwrap_or(u8::MAX);
        let mut index = self.index.below_a_new_layer(live);
        layer::read_map(&map, len, live, &mut index).map_err(fail)?;
        let mut layers = self.layers.clone();
        layers.push(Arc::new(Layer { data, map: Some(map), len }));
        Ok(Self { layers, index, size, read_only: false, failed: AtomicBool::new(false), flushes: Joined::default() })
    }
}
