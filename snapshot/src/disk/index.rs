//! Which layer each block comes from: one table for the whole chain, so that its depth costs nothing.
//!
//! A *cell* is one atomic byte for one block. Its low seven bits are the block's *source*:
//!
//! | source | reads come from | what the live layer's map file says |
//! |---|---|---|
//! | 0 | nowhere: zeros | the same |
//! | 1 to 64 | that layer, 1 being the bottom | the same |
//! | [`NEW_DATA`] | the live layer | something older |
//! | [`NEW_ZERO`] | nowhere: zeros | something older |
//!
//! The highest bit, [`BELOW`], says that the layers under the live one show data for this block. It never changes, so
//! whoever rewrites a cell can take it over from any earlier value, and the live layer's state of a block follows from
//! its cell alone: from the live layer: *data*; from nowhere and `BELOW`: *zero*; otherwise *absent*.
//!
//! State and "not on the map yet" share one atom on purpose. With a dirty bit beside the state, a write that finds a
//! block already made data by another queue could return, and be flushed, before that queue has set the bit.
//!
//! Cells live in *chunks* of 4,096 (16 MiB of disk; one page of the map file). A chunk whose cells are all alike has
//! no memory of its own. The table costs 24 bytes a chunk (30 KiB for 20 GiB) and 4 KiB for each mixed chunk,
//! so 256 KiB for each GiB that is written here and there, and nothing for an image's solid parts.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use super::layer::State;

/// Blocks of a chunk.
pub(super) const CHUNK: usize = 4096;
const WORD: usize = u64::BITS as usize;
const WORDS: usize = CHUNK / WORD;

const BELOW: u8 = 0x80;
const SOURCE: u8 = 0x7f;
const NEW_DATA: u8 = 0x7e;
const NEW_ZERO: u8 = 0x7d;
/// The live layer's number where there is none. No layer has it: they end at 64.
pub(super) const NOT_LIVE: u8 = 0x7f;

type Cells = [AtomicU8; CHUNK];

#[derive(Debug)]
struct Slot {
    /// Every cell, while there are none.
    uniform: u8,
    cells: OnceLock<Box<Cells>>,
}

impl Slot {
    fn cell(&self, block: usize) -> u8 {
        match self.cells.get() {
            Some(cells) => cells.get(block).map_or(0, |cell| cell.load(Ordering::Acquire)),
            None => self.uniform,
        }
    }

    /// The cells, made now if need be. Another thread that wants them too waits for an allocation at the most.
    fn cells(&self) -> &Cells {
        self.cells.get_or_init(|| cells_of(self.uniform))
    }
}

/// The blocks of one chunk whose states are to go to the map file, as they were when they were taken.
#[derive(Debug)]
pub(super) struct Taken {
    /// Which chunk, so which page of the map.
    pub(super) chunk: usize,
    blocks: [u64; WORDS],
    data: [u64; WORDS],
}

impl Taken {
    /// The blocks, as numbers within the chunk, in rising order, each with whether it was data.
    pub(super) fn blocks(&self) -> impl DoubleEndedIterator<Item = (usize, bool)> {
        let all = |words: [u64; WORDS]| move |block| words.get(block / WORD).is_some_and(|w| w & mask(block) != 0);
        let (taken, data) = (all(self.blocks), all(self.data));
        (0..CHUNK).filter(move |block| taken(*block)).map(move |block| (block, data(block)))
    }
}

/// What [`Index::clear`] found in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// It read as zeros already.
    Zeros,
    /// It showed a lower layer's data.
    Below,
    /// It was the live layer's own data.
    Data,
}

/// The table.
#[derive(Debug)]
pub(super) struct Index {
    live: u8,
    slots: Vec<Slot>,
    /// A bit for each chunk that may have new cells, set after the cell.
    new: Vec<AtomicU64>,
}

impl Index {
    /// A table of `blocks` blocks without a source. `live` is the number of the layer that takes writes.
    pub(super) fn new(blocks: usize, live: u8) -> Self {
        let chunks = blocks.div_ceil(CHUNK);
        Self {
            live,
            slots: std::iter::repeat_with(|| Slot { uniform: 0, cells: OnceLock::new() }).take(chunks).collect(),
            new: std::iter::repeat_with(AtomicU64::default).take(chunks.div_ceil(WORD)).collect(),
        }
    }

    /// Lays one page of a layer's map over what the layers below it gave. Bottom first, while the disk is opened.
    pub(super) fn apply(&mut self, chunk: usize, layer: u8, states: &[State; CHUNK]) {
        let live = self.live;
        let next = |old: u8, state: State| match (state, layer == live) {
            (State::Absent, _) => old,
            (State::Data, true) => old & BELOW | layer,
            (State::Data, false) => BELOW | layer,
            (State::Zero, true) => old & BELOW,
            (State::Zero, false) => 0,
        };
        let Some(slot) = self.slots.get_mut(chunk) else { return };
        let uniform = slot.uniform;
        let mut cells = slot.cells.take().unwrap_or_else(|| cells_of(uniform));
        for (cell, state) in cells.iter_mut().zip(states) {
            let cell = cell.get_mut();
            *cell = next(*cell, *state);
        }
        let first = cells.first_mut().map_or(0, |cell| *cell.get_mut());
        if cells.iter_mut().all(|cell| *cell.get_mut() == first) {
            slot.uniform = first;
        } else {
            slot.cells = OnceLock::from(cells);
        }
    }

    /// A table for the same blocks in which `live` is the number of a new layer, all absent, over those that there were. Every
    /// change was taken.
    pub(super) fn below_a_new_layer(&self, live: u8) -> Self {
        let below = |cell: u8| match cell & SOURCE {
            0 | NEW_ZERO => 0,
            NEW_DATA => BELOW | self.live,
            source => BELOW | source,
        };
        let slot = |slot: &Slot| Slot {
            uniform: below(slot.uniform),
            cells: slot.cells.get().map_or_else(OnceLock::new, |cells| {
                OnceLock::from(Box::new(
                    cells.each_ref().map(|cell| AtomicU8::new(below(cell.load(Ordering::Acquire)))),
                ))
            }),
        };
        Self {
            live,
            slots: self.slots.iter().map(slot).collect(),
            new: self.new.iter().map(|_| AtomicU64::default()).collect(),
        }
    }

    /// The source of the first of `blocks`, and those from there on that share it. `blocks` is not empty.
    pub(super) fn run(&self, blocks: Range<usize>) -> (u8, Range<usize>) {
        let source = self.source(blocks.start);
        let same = blocks.clone().skip(1).take_while(|block| self.source(*block) == source).count();
        (source, blocks.start..blocks.start.saturating_add(1).saturating_add(same))
    }

    fn source(&self, block: usize) -> u8 {
        match self.slots.get(block / CHUNK).map_or(0, |slot| slot.cell(block % CHUNK)) & SOURCE {
            NEW_DATA => self.live,
            NEW_ZERO => 0,
            source => source,
        }
    }

    fn found(&self, cell: u8) -> Found {
        match cell & SOURCE {
            0 | NEW_ZERO => Found::Zeros,
            NEW_DATA => Found::Data,
            source if source == self.live => Found::Data,
            _ => Found::Below,
        }
    }

    /// Makes `blocks` data of the live layer, where a write of them has just returned from the host.
    pub(super) fn set_data(&self, blocks: Range<usize>) {
        for (chunk, slot, blocks) in self.chunks(blocks) {
            if slot.cells.get().is_none() && self.found(slot.uniform) == Found::Data {
                continue;
            }
            let mut new = false;
            for cell in slot.cells().get(blocks).unwrap_or_default() {
                let old = cell.load(Ordering::Acquire);
                if self.found(old) != Found::Data {
                    // A plain store may overrun another queue's change, as the later of the two, but loses nothing
                    // of it: the rest of the cell never changes.
                    cell.store(old & BELOW | NEW_DATA, Ordering::Release);
                    new = true;
                } else if old & SOURCE == NEW_DATA {
                    // Another queue's, which may not have come to the line after this loop.
                    new = true;
                }
            }
            if new {
                self.set_new(chunk);
            }
        }
    }

    /// Makes the first of `blocks` read as zeros, and those from there on that are like it; returns what they were
    /// and which. With `keep_data`, the live layer's data is only found, not changed. `blocks` is not empty.
    pub(super) fn clear(&self, blocks: Range<usize>, keep_data: bool) -> (Found, Range<usize>) {
        // Not past the end of a chunk, so that the chunk's bit is set before anyone acts on what was found.
        let Some((chunk, slot, within)) = self.chunks(blocks.clone()).next() else {
            return (Found::Zeros, blocks);
        };
        let run = |len: usize| blocks.start..blocks.start.saturating_add(len);
        if slot.cells.get().is_none() && self.found(slot.uniform) == Found::Zeros {
            return (Found::Zeros, run(within.len()));
        }
        let (mut first, mut len, mut new) = (None, 0usize, false);
        for cell in slot.cells().get(within).unwrap_or_default() {
            let old = cell.load(Ordering::Acquire);
            let found = self.found(old);
            if *first.get_or_insert(found) != found {
                break;
            }
            // Only if it still is what it was found to be: else another queue's request came between, which may
            // as well have come after.
            let to_zero = |now: u8| (self.found(now) == found).then_some(now & BELOW | NEW_ZERO);
            if found == Found::Below || found == Found::Data && !keep_data {
                new |= cell.fetch_update(Ordering::AcqRel, Ordering::Acquire, to_zero).is_ok();
            }
            new |= old & SOURCE == NEW_ZERO;
            len = len.saturating_add(1);
        }
        if new {
            self.set_new(chunk);
        }
        (first.unwrap_or(Found::Zeros), run(len))
    }

    /// Takes the new cells, and leaves none. Every change that returned before this call is among them, or was
    /// taken before.
    pub(super) fn take_new(&self) -> Vec<Taken> {
        let mut all = Vec::new();
        for (chunk, slot) in self.slots.iter().enumerate() {
            // Both levels in the opposite order of those who set them, so that nothing falls between.
            let Some(cells) = self.take_chunk(chunk).then(|| slot.cells.get()).flatten() else { continue };
            let mut taken = Taken { chunk, blocks: [0; WORDS], data: [0; WORDS] };
            for ((cells, blocks), data) in cells.chunks(WORD).zip(&mut taken.blocks).zip(&mut taken.data) {
                for (bit, cell) in cells.iter().enumerate() {
                    let clean = |cell: u8| match cell & SOURCE {
                        NEW_DATA => Some(cell & BELOW | self.live),
                        NEW_ZERO => Some(cell & BELOW),
                        _ => None,
                    };
                    if clean(cell.load(Ordering::Acquire)).is_none() {
                        continue;
                    }
                    if let Ok(old) = cell.fetch_update(Ordering::AcqRel, Ordering::Acquire, clean) {
                        *blocks |= mask(bit);
                        *data |= if old & SOURCE == NEW_DATA { mask(bit) } else { 0 };
                    }
                }
            }
            if taken.blocks != [0; WORDS] {
                all.push(taken);
            }
        }
        all
    }

    /// Makes the blocks new again, after their states did not reach the map.
    pub(super) fn put_back(&self, all: &[Taken]) {
        for taken in all {
            let Some(slot) = self.slots.get(taken.chunk) else { continue };
            for (block, _) in taken.blocks() {
                let Some(cell) = slot.cells().get(block) else { continue };
                // Whatever it is by now.
                let _ = cell.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| match self.found(now) {
                    Found::Data => Some(now & BELOW | NEW_DATA),
                    Found::Zeros => Some(now & BELOW | NEW_ZERO),
                    Found::Below => None,
                });
            }
            self.set_new(taken.chunk);
        }
    }

    /// Whether a block of a chunk has data below the live layer.
    pub(super) fn below(&self, chunk: usize, block: usize) -> bool {
        self.slots.get(chunk).is_some_and(|slot| slot.cell(block) & BELOW != 0)
    }

    fn set_new(&self, chunk: usize) {
        if let Some(word) = self.new.get(chunk / WORD) {
            word.fetch_or(mask(chunk), Ordering::AcqRel);
        }
    }

    fn take_chunk(&self, chunk: usize) -> bool {
        let Some(word) = self.new.get(chunk / WORD) else { return false };
        word.load(Ordering::Acquire) & mask(chunk) != 0
            && word.fetch_and(!mask(chunk), Ordering::AcqRel) & mask(chunk) != 0
    }

    /// `blocks` chunk by chunk: the chunk's number, its slot, and the blocks within it.
    fn chunks(&self, blocks: Range<usize>) -> impl Iterator<Item = (usize, &Slot, Range<usize>)> {
        let slots = self.slots.iter().enumerate().skip(blocks.start / CHUNK);
        slots.map_while(move |(chunk, slot)| {
            let base = chunk.saturating_mul(CHUNK);
            let within = blocks.start.saturating_sub(base)..blocks.end.saturating_sub(base).min(CHUNK);
            (!within.is_empty()).then_some((chunk, slot, within))
        })
    }

    /// Bytes of memory that the table takes.
    #[cfg(test)]
    #[allow(clippy::arithmetic_side_effects)]
    pub(super) fn memory(&self) -> usize {
        let chunks = self.slots.iter().filter(|slot| slot.cells.get().is_some()).count();
        self.slots.len() * size_of::<Slot>() + self.new.len() * 8 + chunks * CHUNK
    }
}

fn cells_of(cell: u8) -> Box<Cells> {
    Box::new(std::array::from_fn(|_| AtomicU8::new(cell)))
}

/// The bit of a number within its word.
fn mask(number: usize) -> u64 {
    1u64.checked_shl(u32::try_from(number % WORD).unwrap_or(0)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The instant between another queue's change of a cell and its note of the chunk.
    fn half_done(cell: u8) -> Index {
        let index = Index::new(10, 1);
        index.slots[0].cells()[3].store(cell, Ordering::Release);
        index
    }

    fn taken(index: &Index) -> Vec<(usize, bool)> {
        index.take_new().iter().flat_map(Taken::blocks).collect()
    }

    #[test]
    fn a_block_that_another_queue_has_just_changed_is_not_forgotten() {
        let index = half_done(NEW_DATA);
        assert_eq!(taken(&index), []);
        index.set_data(3..4);
        assert_eq!(taken(&index), [(3, true)]);
        assert_eq!(taken(&index), []);

        let index = half_done(NEW_ZERO | BELOW);
        assert_eq!(index.clear(3..10, false), (Found::Zeros, 3..10));
        assert_eq!(taken(&index), [(3, false)]);
        assert!(index.below(0, 3));
    }

    #[test]
    fn alike_chunks_take_no_memory() {
        let mut index = Index::new(3 * CHUNK, 2);
        let empty = index.memory();
        index.apply(1, 1, &[State::Data; CHUNK]);
        assert_eq!(index.memory(), empty);
        assert_eq!(index.run(CHUNK..3 * CHUNK), (1, CHUNK..2 * CHUNK));
        let mut states = [State::Absent; CHUNK];
        states[7] = State::Zero;
        index.apply(1, 2, &states);
        assert_eq!(index.memory(), empty + CHUNK);
        assert_eq!(index.run(CHUNK + 7..3 * CHUNK), (0, CHUNK + 7..CHUNK + 8));
        index.apply(1, 2, &[State::Data; CHUNK]);
        assert_eq!(index.memory(), empty, "alike again");
        index.set_data(CHUNK..2 * CHUNK);
        assert_eq!(index.memory(), empty, "nothing to change");
    }
}
