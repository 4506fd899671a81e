//! A descriptor chain (virtio 1.2, section 2.7.5), each descriptor read once.
//!
//! The virtio-queue crate's own iterator follows indirect tables, which may be longer than any queue, also when they were
//! not offered, and ends in silence where a chain breaks. Ours knows only what we offer, and says when it breaks.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// Bytes of a descriptor in its table.
const DESCRIPTOR: u64 = 16;

/// A chain loops, leaves its table, or refers to a table of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a descriptor chain loops, leaves its table, or refers to another")]
pub struct BrokenChain;

/// The descriptors of one chain. After an error it ends.
#[derive(Debug)]
pub struct Chain<'m, M> {
    mem: &'m M,
    table: GuestAddress,
    size: u16,
    next: Option<u16>,
    left: u16,
}

impl<'m, M: GuestMemory> Chain<'m, M> {
    /// The chain of `queue` that begins with the descriptor `head`.
    pub fn new(mem: &'m M, queue: &Queue, head: u16) -> Self {
        let size = queue.size();
        Self { mem, table: GuestAddress(queue.desc_table()), size, next: Some(head), left: size }
    }

    fn read(&self, index: u16) -> Option<Descriptor> {
        let at = self.table.0.checked_add(u64::from(index).checked_mul(DESCRIPTOR)?)?;
        let descriptor: Descriptor = self.mem.read_obj(GuestAddress(at)).ok()?;
        (index < self.size && !descriptor.refers_to_indirect_table()).then_some(descriptor)
    }
}

impl<M: GuestMemory> Iterator for Chain<'_, M> {
    type Item = Result<Descriptor, BrokenChain>;

    fn next(&mut self) -> Option<Self::Item> {
        let index = self.next.take()?;
        // A chain as long as the table has been everywhere: one more step would be a loop.
        let Some(left) = self.left.checked_sub(1) else { return Some(Err(BrokenChain)) };
        self.left = left;
        let Some(descriptor) = self.read(index) else { return Some(Err(BrokenChain)) };
        self.next = descriptor.has_next().then(|| descriptor.next());
        Some(Ok(descriptor))
    }
}

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects)]
mod tests {
    use proptest::prelude::*;
    use virtio_queue::QueueState;

    use super::*;
    use crate::memory::{Ram, guest_ram};

    const SIZE: u16 = 8;

    fn chain<'m>(ram: &'m Ram, table: &[[u64; 2]], head: u16) -> Chain<'m, Ram> {
        for (index, words) in (0u64..).zip(table) {
            ram.write_obj(words[0], GuestAddress(0x1000 + index * 16)).unwrap();
            ram.write_obj(words[1], GuestAddress(0x1008 + index * 16)).unwrap();
        }
        let state = QueueState { max_size: SIZE, size: SIZE, ready: true, desc_table: 0x1000, ..QueueState::default() };
        Chain::new(ram, &Queue::try_from(state).unwrap(), head)
    }

    /// Length, flags, next.
    fn entry(length: u64, flags: u64, next: u64) -> [u64; 2] {
        [0x4000, length | flags << 32 | next << 48]
    }

    fn lengths(chain: Chain<'_, Ram>) -> Vec<Result<u32, BrokenChain>> {
        chain.map(|descriptor| descriptor.map(|descriptor| descriptor.len())).collect()
    }

    #[test]
    fn chains_end_where_they_say_or_break() {
        let ram = guest_ram(2 << 20).unwrap();
        let whole = [entry(1, 1, 2), entry(9, 0, 0), entry(2, 1, 3), entry(3, 0, 7)];
        assert_eq!(lengths(chain(&ram, &whole, 0)), [Ok(1), Ok(2), Ok(3)]);
        let loops = lengths(chain(&ram, &[entry(1, 1, 0)], 0));
        assert_eq!((loops.len(), loops.last()), (9, Some(&Err(BrokenChain))));
        assert_eq!(lengths(chain(&ram, &[entry(1, 1, 8)], 0)), [Ok(1), Err(BrokenChain)]);
        assert_eq!(lengths(chain(&ram, &whole, 8)), [Err(BrokenChain)]);
        // An indirect table, at the beginning and further on.
        let table = [entry(1, 1, 1), entry(32, 4, 0)];
        assert_eq!(lengths(chain(&ram, &table, 0)), [Ok(1), Err(BrokenChain)]);
        assert_eq!(lengths(chain(&ram, &table, 1)), [Err(BrokenChain)]);
    }

    proptest! {
        #[test]
        fn any_table_gives_an_end(words in prop::collection::vec(any::<[u64; 2]>(), 8), head: u16) {
            let ram = guest_ram(2 << 20).unwrap();
            prop_assert!(chain(&ram, &words, head).count() <= usize::from(SIZE) + 1);
        }
    }
}
