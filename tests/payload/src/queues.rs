//! Virtio devices driven by hand, and badly: every step of the protocol is taken, with contents that no driver writes.
//!
//! What a device is told to write to is always memory of this process or none at all: the guest's kernel must live to
//! the end, so that the end says something. What it is told to read is anything.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use crate::ports::{Random, mark};

/// Registers of virtio-mmio.
mod register {
    pub(super) const MAGIC: usize = 0x00;
    pub(super) const DEVICE: usize = 0x08;
    pub(super) const FEATURES: usize = 0x10;
    pub(super) const FEATURES_SELECT: usize = 0x14;
    pub(super) const ACCEPTED: usize = 0x20;
    pub(super) const ACCEPTED_SELECT: usize = 0x24;
    pub(super) const QUEUE: usize = 0x30;
    pub(super) const QUEUE_MAX: usize = 0x34;
    pub(super) const QUEUE_SIZE: usize = 0x38;
    pub(super) const QUEUE_READY: usize = 0x44;
    pub(super) const NOTIFY: usize = 0x50;
    pub(super) const ACKNOWLEDGE: usize = 0x64;
    pub(super) const STATUS: usize = 0x70;
    pub(super) const RINGS: [usize; 3] = [0x80, 0x90, 0xa0];
}

/// Descriptor flags.
const NEXT: u16 = 1;
const WRITE: u16 = 2;

const PAGE: usize = 4096;
const WINDOWS: usize = 18;
const WINDOW_BASE: i64 = 0xc000_1000;
/// Pages of this process that a device may use: three rings for each of four queues, and buffers.
const PAGES: usize = 64;
const BUFFERS: usize = 16;
/// Every ring of this size lies within a page, also when it begins in its middle.
const MOST: u16 = 64;

/// The windows of all devices, and pages whose physical addresses are known.
pub(crate) struct Machine {
    windows: *mut u32,
    pages: *mut u8,
    frames: Vec<u64>,
}

// SAFETY: all access through the pointers is volatile, and that threads disturb each other is what they are for.
unsafe impl Sync for Machine {}

fn map(length: usize, flags: i32, file: i32, offset: i64) -> Option<*mut libc::c_void> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), length, access, flags, file, offset) };
    (at != libc::MAP_FAILED).then_some(at)
}

impl Machine {
    /// Maps everything; nothing if the kernel does not let us.
    pub(crate) fn open() -> Option<Self> {
        let memory = File::options().read(true).write(true).open("/dev/mem").ok()?;
        let windows = map(WINDOWS * PAGE, libc::MAP_SHARED, memory.as_raw_fd(), WINDOW_BASE)?.cast();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_LOCKED | libc::MAP_POPULATE;
        let pages: *mut u8 = map(PAGES * PAGE, flags, -1, 0)?.cast();
        let table = File::open("/proc/self/pagemap").ok()?;
        let mut frames = Vec::new();
        for page in 0..PAGES {
            let mut entry = [0; 8];
            table.read_exact_at(&mut entry, ((pages as usize / PAGE + page) * 8) as u64).ok()?;
            let frame = u64::from_le_bytes(entry) & ((1 << 55) - 1);
            frames.push((frame != 0).then_some(frame * PAGE as u64)?);
        }
        Some(Self { windows, pages, frames })
    }

    fn read(&self, window: usize, register: usize) -> u32 {
        // SAFETY: callers give a window below WINDOWS and a register below a page.
        unsafe { self.windows.add((window * PAGE + register) / 4).read_volatile() }
    }

    fn write(&self, window: usize, register: usize, value: u32) {
        // SAFETY: as above.
        unsafe { self.windows.add((window * PAGE + register) / 4).write_volatile(value) };
    }

    /// Stores bytes in a page of ours.
    fn store(&self, page: usize, offset: usize, bytes: &[u8]) {
        for (index, byte) in bytes.iter().enumerate() {
            let at = (page % PAGES) * PAGE + (offset + index) % PAGE;
            // SAFETY: the index is below PAGES * PAGE.
            unsafe { self.pages.add(at).write_volatile(*byte) };
        }
    }

    /// Stores a descriptor, in two halves: a device that reads meanwhile sees each of them whole, and so never an address
    /// that is none of ours.
    fn store_descriptor(&self, page: usize, slot: usize, [address, rest]: [u64; 2]) {
        // SAFETY: callers give a page below PAGES and a slot below a page's 256.
        let at = unsafe { self.pages.add(page * PAGE + slot * 16) }.cast::<u64>();
        // SAFETY: as above; a page is aligned to more than 16.
        unsafe { at.write_volatile(address) };
        // SAFETY: as above.
        let at = unsafe { at.add(1) };
        // SAFETY: as above.
        unsafe { at.write_volatile(rest) };
    }

    fn load16(&self, page: usize, offset: usize) -> u16 {
        // SAFETY: page and offset are constants of this file, below the limits.
        unsafe { self.pages.add(page * PAGE + offset).cast::<u16>().read_volatile() }
    }

    /// The devices: window and kind.
    pub(crate) fn devices(&self) -> Vec<(usize, u32)> {
        let there = (0..WINDOWS).filter(|window| self.read(*window, register::MAGIC) == u32::from_le_bytes(*b"virt"));
        there.map(|window| (window, self.read(window, register::DEVICE))).filter(|(_, kind)| *kind != 0).collect()
    }
}

/// How bad.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manners {
    /// Requests that a device has to serve.
    Good,
    /// Anything goes, from one thread.
    Bad,
    /// Several threads do it to the same queues at once. Two halves of two descriptors may come together, so each half
    /// has to be harmless to the guest itself with any other.
    Crowded,
}

/// An address where there is no memory, in both of its halves.
fn nowhere(random: &mut Random) -> u64 {
    let high = random.below(4) as u64;
    (0xd000_0000 | random.next() & 0x0fff_ffff) | if high == 0 { random.next() << 32 } else { (high - 1) << 32 }
}

fn descriptor(machine: &Machine, random: &mut Random, manners: Manners) -> [u64; 2] {
    let ours = machine.frames[BUFFERS + random.below(PAGES - BUFFERS)] + random.below(2048) as u64;
    let mut length = random.below(2048) as u32;
    let mut flags = [0, NEXT, WRITE, NEXT | WRITE, random.next() as u16][random.below(5)];
    let address = if random.below(4) == 0 { nowhere(random) } else { ours };
    if manners == Manners::Bad && random.below(8) == 0 {
        // Over the end of memory, or all of it: to read.
        length = random.next() as u32;
        flags &= !WRITE;
    }
    let next = if random.below(8) == 0 { random.next() as u16 } else { random.below(usize::from(MOST)) as u16 };
    encode(address, length, flags, next)
}

/// The two halves of a descriptor.
fn encode(address: u64, length: u32, flags: u16, next: u16) -> [u64; 2] {
    [address, u64::from(length) | u64::from(flags) << 32 | u64::from(next) << 48]
}

/// Pages of a queue's rings.
fn rings(queue: usize) -> [usize; 3] {
    [queue * 3, queue * 3 + 1, queue * 3 + 2]
}

/// Resets a device and brings it up; says how many of its queues may be used.
fn bring_up(machine: &Machine, window: usize, random: &mut Random, manners: Manners) -> usize {
    let set = |register, value| machine.write(window, register, value);
    let odd = |random: &mut Random| manners != Manners::Good && random.below(16) == 0;
    set(register::STATUS, 0);
    for _ in 0..100_000 {
        if machine.read(window, register::STATUS) == 0 {
            break;
        }
        std::hint::spin_loop();
    }
    set(register::STATUS, 1);
    set(register::STATUS, 3);
    for half in 0..2 {
        set(register::FEATURES_SELECT, half);
        set(register::ACCEPTED_SELECT, half);
        let offered = machine.read(window, register::FEATURES);
        let accepted = if half == 1 { offered } else { offered & random.next() as u32 };
        set(register::ACCEPTED, if odd(random) { random.next() as u32 } else { accepted });
    }
    set(register::STATUS, 11);
    let mut queues = 0;
    for queue in 0..4 {
        set(register::QUEUE, queue as u32);
        let most = machine.read(window, register::QUEUE_MAX);
        if most == 0 {
            break;
        }
        queues = queue + 1;
        let size = 1 << random.below(most.min(u32::from(MOST)).ilog2() as usize + 1);
        let size = if manners == Manners::Good { u32::from(MOST).min(most) } else { size };
        set(register::QUEUE_SIZE, if odd(random) { random.below(100) as u32 } else { size });
        for (ring, page) in register::RINGS.into_iter().zip(rings(queue)) {
            machine.store(page, 0, &[0; PAGE]);
            let aligned = machine.frames[page] + 16 * if odd(random) { random.below(64) as u64 } else { 0 };
            let address = if odd(random) { nowhere(random) } else { aligned + u64::from(odd(random)) };
            set(ring, address as u32);
            set(ring + 4, (address >> 32) as u32);
        }
        set(register::QUEUE_READY, 1);
    }
    set(register::STATUS, 15);
    // Once more: it runs already, so this is to change nothing.
    set(register::STATUS, 15);
    queues
}

/// The head of what a device takes for a request: of a disk, or of a socket.
fn request_head(kind: u32, random: &mut Random, manners: Manners) -> Vec<u8> {
    let mut head = Vec::new();
    if kind == 2 && manners == Manners::Good {
        // Read the first two sectors.
        head.resize(16, 0);
    } else if kind == 2 {
        let kinds = [0, 0, 1, 1, 4, 8, 11, 13, random.next() as u32];
        head.extend(kinds[random.below(kinds.len())].to_le_bytes());
        head.extend((random.next() as u32).to_le_bytes());
        let sector = if random.below(4) == 0 { random.next() } else { random.below(1 << 12) as u64 };
        head.extend(sector.to_le_bytes());
    } else {
        // A packet: addresses, ports, length, type, operation, flags, credit.
        head.extend(if random.below(4) == 0 { random.next() } else { 3 }.to_le_bytes());
        head.extend(if random.below(4) == 0 { random.next() } else { 2 }.to_le_bytes());
        head.extend((random.next() as u32).to_le_bytes());
        head.extend((random.below(4) as u32).to_le_bytes());
        head.extend(if random.below(4) == 0 { random.next() as u32 } else { random.below(64) as u32 }.to_le_bytes());
        head.extend(1u16.to_le_bytes());
        head.extend((random.below(9) as u16).to_le_bytes());
        head.extend((random.below(4) as u32).to_le_bytes());
        head.extend((random.next() as u32).to_le_bytes());
        head.extend((random.next() as u32).to_le_bytes());
    }
    head
}

/// Fills a queue and tells the device.
fn fill(machine: &Machine, window: usize, kind: u32, queue: usize, random: &mut Random, manners: Manners) {
    let [descriptors, available, used] = rings(queue);
    let index = machine.load16(available, 2);
    if manners == Manners::Good {
        // Head, data, status: a request of a disk. The same chain has a place to write to for the others.
        let page = |n: usize| machine.frames[BUFFERS + n];
        machine.store(BUFFERS, 0, &request_head(kind, random, manners));
        machine.store_descriptor(descriptors, 0, encode(page(0), 44, if kind == 4 { WRITE } else { NEXT }, 1));
        machine.store_descriptor(descriptors, 1, encode(page(1), 1024, NEXT | WRITE, 2));
        machine.store_descriptor(descriptors, 2, encode(page(2), 1, WRITE, 0));
        if kind == 2 {
            machine.store_descriptor(descriptors, 0, encode(page(0), 16, NEXT, 1));
        } else if kind == 19 {
            machine.store_descriptor(descriptors, 0, encode(page(0), 44, 0, 0));
        }
        machine.store(available, 4 + usize::from(index % MOST) * 2, &0u16.to_le_bytes());
        machine.store(available, 2, &index.wrapping_add(1).to_le_bytes());
        machine.write(window, register::NOTIFY, queue as u32);
        // It has all the time that it needs: what is used is seen below.
        for _ in 0..2_000_000 {
            if machine.load16(used, 2) != 0 {
                break;
            }
            std::hint::spin_loop();
        }
        if machine.load16(used, 2) != 0 {
            mark(40 + kind as u8);
        }
        return;
    }
    for slot in 0..usize::from(MOST) {
        if random.below(3) != 0 {
            machine.store_descriptor(descriptors, slot, descriptor(machine, random, manners));
        }
        let head = if random.below(16) == 0 { random.next() as u16 } else { random.below(usize::from(MOST)) as u16 };
        machine.store(available, 4 + slot * 2, &head.to_le_bytes());
    }
    for page in BUFFERS..PAGES {
        machine.store(page, random.below(2048), &request_head(kind, random, manners));
    }
    let step = if random.below(16) == 0 { random.next() as u16 } else { random.below(8) as u16 };
    machine.store(available, 2, &index.wrapping_add(step).to_le_bytes());
    machine.store(available, 0, &(random.below(2) as u16).to_le_bytes());
    machine.write(window, register::NOTIFY, if random.below(16) == 0 { random.next() as u32 } else { queue as u32 });
    machine.write(window, register::ACKNOWLEDGE, random.next() as u32);
}

/// Brings every device up again and again, and fills its queues.
pub(crate) fn misuse(machine: &Machine, seed: u64, manners: Manners, rounds: usize) {
    let mut random = Random::new(seed);
    for _ in 0..rounds {
        for (window, kind) in machine.devices() {
            let queues = bring_up(machine, window, &mut random, manners);
            let times = if manners == Manners::Good { 1 } else { 12 };
            for _ in 0..times {
                // The queue on which the guest speaks: of a socket, the second.
                let queue = if kind == 19 && manners == Manners::Good { 1 } else { random.below(queues.max(1)) };
                let queue = if kind != 19 && manners == Manners::Good { 0 } else { queue };
                fill(machine, window, kind, queue, &mut random, manners);
                if manners != Manners::Good && random.below(8) == 0 {
                    let value = random.next() as u32;
                    machine.write(window, register::STATUS, [value, 15, 128, 11][random.below(4)]);
                }
            }
        }
    }
}
