//! One layer and the raw image below it become one raw image.

use super::error::LayerError;
use super::host::{HostFile, read_full, write_full};
use super::layer::{self, State};
use super::{BLOCK, BLOCK_LEN};

/// Makes the data file of a layer over a raw image what the two are together: a raw image. Nothing is synced, and
/// the map is of no more use. Both files of the layer were written back whole, and nobody writes to any of the three.
///
/// Costs what the layer holds in pieces, and what the image holds: little, where it is an empty file system.
///
/// # Errors
/// The map is none, or what the host says.
pub fn flatten<F: HostFile>(base: &F, data: &F, map: &F) -> Result<(), LayerError> {
    let size = layer::read_header(map)?;
    let base_size = base.size().map_err(LayerError::io("see the length of the image below"))?;
    for chunk in 0..size.div_ceil(layer::CHUNK_BYTES) {
        let start = chunk.saturating_mul(layer::CHUNK_BYTES);
        let end = start.saturating_add(layer::CHUNK_BYTES).min(size);
        let states = layer::read_states(map, chunk)?;
        let state = |block: u64| {
            let within = usize::try_from(block.saturating_sub(start / BLOCK)).unwrap_or(usize::MAX);
            states.get(within).copied().unwrap_or(State::Absent)
        };
        // What lies where the map does not say data means nothing.
        let mut at = start;
        while let Some(found) = next_block(data, at, end, "seek in the data file")? {
            let kept = state(found) == State::Data;
            let mut next = found;
            while next < end / BLOCK && (state(next) == State::Data) == kept {
                next = next.saturating_add(1);
            }
            if !kept {
                let length = next.saturating_sub(found).saturating_mul(BLOCK);
                data.punch_hole(found.saturating_mul(BLOCK), length).map_err(LayerError::io("free room"))?;
            }
            at = next.saturating_mul(BLOCK);
        }
        let mut at = start;
        while let Some(found) = next_block(base, at, end.min(base_size), "seek in the image below")? {
            let offset = found.saturating_mul(BLOCK);
            if state(found) == State::Absent {
                // Cut short, it ends in zeros.
                let mut bytes = [0; BLOCK_LEN];
                read_full(base, &mut bytes, offset).map_err(LayerError::io("read the image below"))?;
                if bytes.iter().any(|byte| *byte != 0) {
                    write_full(data, &bytes, offset).map_err(LayerError::io("write the data file"))?;
                }
            }
            at = offset.saturating_add(BLOCK);
        }
    }
    Ok(())
}

/// The first block at or after `at` that may hold data, if it begins before `end`.
fn next_block<F: HostFile>(file: &F, at: u64, end: u64, what: &'static str) -> Result<Option<u64>, LayerError> {
    if at >= end {
        return Ok(None);
    }
    let found = file.next_data(at).map_err(LayerError::io(what))?;
    Ok(found.map(|found| found / BLOCK).filter(|block| block.saturating_mul(BLOCK) < end))
}
