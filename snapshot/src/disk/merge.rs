//! Several layers become one.

use super::error::{DiskError, LayerError};
use super::host::{HostFile, read_full, write_full};
use super::layer::{self, State};
use super::{BLOCK, BLOCK_LEN, LayerFiles, create_layer};

/// Writes into two empty files the layer that `layers`, bottom first, are together: over whatever lies below them it makes
/// the same disk. Nothing is synced. `progress` hears of the bytes that were copied.
///
/// A block that is zero stays so, since what will lie below is not known here.
///
/// # Errors
/// A layer is none, or what the host says.
pub fn merge<F: HostFile>(
    layers: &[LayerFiles<F>],
    data: &F,
    map: &F,
    progress: &mut dyn FnMut(u64),
) -> Result<(), DiskError> {
    let Some(top) = layers.len().checked_sub(1) else { return Err(DiskError::LayerCount { count: 0 }) };
    let of = |layer: usize| move |source: LayerError| DiskError::Layer { layer, source };
    let mut size = 0;
    for (number, files) in layers.iter().enumerate() {
        let Some(map) = &files.map else { return Err(DiskError::NoMap { layer: number }) };
        let own = layer::read_header(map).map_err(of(number))?;
        if own < size {
            return Err(DiskError::Shrinks { layer: number, size: own, below: size });
        }
        size = own;
    }
    create_layer(data, map, size).map_err(of(top))?;
    let mut block = [0; BLOCK_LEN];
    for chunk in 0..size.div_ceil(layer::CHUNK_BYTES) {
        let first = chunk.saturating_mul(layer::CHUNK_BYTES) / BLOCK;
        let mut merged = layer::no_states();
        for (number, files) in layers.iter().enumerate() {
            let Some(map) = &files.map else { continue };
            let states = layer::read_states(map, chunk).map_err(of(number))?;
            for (index, (own, to)) in (first..).zip(states.into_iter().zip(&mut merged)) {
                if own != State::Absent {
                    *to = (own, number, index);
                }
            }
        }
        for (state, number, index) in &merged {
            let (State::Data, Some(files)) = (state, layers.get(*number)) else { continue };
            let offset = index.saturating_mul(BLOCK);
            // A data file may end early only after its last data, which opening it as a disk would check as well.
            let length = read_full(&files.data, &mut block, offset).map_err(LayerError::io("read the data file"));
            let length = length.map_err(of(*number))?;
            if length < BLOCK_LEN {
                let (found, needed) = (offset.saturating_add(length as u64), offset.saturating_add(BLOCK));
                return Err(of(*number)(LayerError::DataLength { found, needed }));
            }
            // Where data is a hole, it is zeros.
            if block.iter().any(|byte| *byte != 0) {
                write_full(data, &block, offset).map_err(LayerError::io("write the merged data")).map_err(of(top))?;
            }
            progress(BLOCK);
        }
        let states = merged.map(|(state, ..)| state);
        layer::put_states(map, chunk, size, &states)
            .map_err(LayerError::io("write the merged map"))
            .map_err(of(top))?;
    }
    Ok(())
}
