//! What a copy of the VMM does, in which the allocator's lock may be held for ever: writing an image allocates nothing.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs::File;

use vm_memory::{Bytes, GuestAddress};
use vmm::image::Writer;
use vmm::{generation, memory};

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: it hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How often the allocator is called meanwhile.
fn calls<T>(what: impl FnOnce() -> T) -> (u64, T) {
    let before = COUNT.with(Cell::get);
    let result = what();
    (COUNT.with(Cell::get) - before, result)
}

#[test]
fn writing_an_image_calls_no_allocator() {
    assert!(calls(|| vec![1u8; 10]).0 > 0, "it is counted");
    let memory = memory::fresh(128 << 20).unwrap();
    generation::renew(&memory.ram).unwrap();
    for at in (0..128u64 << 20).step_by(12 << 10) {
        memory.ram.write_obj(at | 1, GuestAddress(at)).unwrap();
    }
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let [first, second] = [(), ()].map(|()| tempfile::tempfile().unwrap());
    let mut writer = Writer::default();
    let (number, written) = calls(|| writer.write(&memory, &pagemap, &first));
    assert_eq!(number, 0);
    assert!(written.unwrap() >= 40 << 20);
    // Of a machine that goes on from one as well.
    let memory = memory::saved(128 << 20, &[first]).unwrap();
    memory.ram.write_obj(1u8, GuestAddress(0)).unwrap();
    generation::renew(&memory.ram).unwrap();
    let (number, written) = calls(|| writer.write(&memory, &pagemap, &second));
    assert_eq!(number, 0);
    assert!(written.unwrap() >= 40 << 20);
    // And if it fails.
    let read_only = File::open("/dev/null").unwrap();
    let (number, failed) = calls(|| writer.write(&memory, &pagemap, &read_only).is_err());
    assert_eq!((number, failed), (0, true));
}
