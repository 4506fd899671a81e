//! The disk device behind hand-made rings, with a driver in the test's thread.
#![allow(clippy::arithmetic_side_effects, clippy::cast_possible_truncation)]

use std::fs::File;
use std::time::{Duration, Instant};

use snapshot::disk::{LayerFiles, create_layer};
use virtio_queue::QueueState;
use vm_memory::{Address, Bytes, GuestAddress};

use super::*;
use crate::mailbox::{Inbox, Message, mailbox};
use crate::memory::guest_ram;

const DISK: u64 = 8 << 20;
const DESC: u64 = 0x1000;
const AVAIL: u64 = 0x4000;
const USED: u64 = 0x6000;
const HEADER: u64 = 0x9000;
const STATUS: u64 = 0x9800;
const DATA: u64 = 0x1_0000;

struct Driver {
    block: Block,
    ram: Ram,
    kick: EventFd,
    interrupt: EventFd,
    inbox: Inbox,
    offered: u16,
}

impl Driver {
    fn new(read_only: bool) -> Self {
        let (data, map) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        create_layer(&data, &map, DISK).unwrap();
        Self::over(vec![LayerFiles { data, map: Some(map) }], read_only)
    }

    fn over(layers: Vec<LayerFiles<File>>, read_only: bool) -> Self {
        let ram = guest_ram(4 << 20).unwrap();
        let interrupt = Arc::new(EventFd::new(libc::EFD_NONBLOCK).unwrap());
        let (sender, inbox) = mailbox().unwrap();
        let backing = Backing {
            disk: Arc::new(Disk::open(layers, read_only).unwrap()),
            device: 7,
            index: 0,
            id: *b"a disk of this test!",
            ram: ram.clone(),
            interrupt: interrupt.clone(),
            mailbox: sender,
            counters: Arc::new(Counters::default()),
        };
        let kick = EventFd::new(0).unwrap();
        let block = Block::new(backing, read_only, vec![kick.try_clone().unwrap()]).unwrap();
        let interrupt = interrupt.try_clone().unwrap();
        let mut driver = Self { block, ram, kick, interrupt, inbox, offered: 0 };
        driver.activate();
        driver
    }

    fn activate(&mut self) {
        self.activate_with(1 << VIRTIO_BLK_F_FLUSH);
    }

    fn activate_with(&mut self, features: u64) {
        for ring in [AVAIL, USED] {
            self.ram.write_slice(&[0; 0x1000], GuestAddress(ring)).unwrap();
        }
        self.offered = 0;
        let state = QueueState {
            max_size: QUEUE_SIZE,
            size: QUEUE_SIZE,
            ready: true,
            desc_table: DESC,
            avail_ring: AVAIL,
            used_ring: USED,
            ..QueueState::default()
        };
        assert!(self.block.activate(vec![Some(Queue::try_from(state).unwrap())], features));
    }

    /// Writes a chain of (address, length, device may write) from descriptor `first` on into the ring.
    fn place(&mut self, first: u16, chain: &[(u64, u32, bool)]) {
        for (index, (address, length, writable)) in (first..).zip(chain) {
            let at = GuestAddress(DESC + 16 * u64::from(index));
            let last = usize::from(index - first) + 1 == chain.len();
            let flags = u16::from(!last) | u16::from(*writable) << 1;
            self.ram.write_obj(*address, at).unwrap();
            self.ram.write_obj(*length, at.unchecked_add(8)).unwrap();
            self.ram.write_obj(flags, at.unchecked_add(12)).unwrap();
            self.ram.write_obj(index + 1, at.unchecked_add(14)).unwrap();
        }
        let slot = AVAIL + 4 + 2 * u64::from(self.offered % QUEUE_SIZE);
        self.ram.write_obj(first, GuestAddress(slot)).unwrap();
        self.offered += 1;
    }

    /// Offers all that was placed.
    fn kick(&self) {
        self.ram.write_obj(self.offered, GuestAddress(AVAIL + 2)).unwrap();
        self.kick.write(1).unwrap();
    }

    fn offer(&mut self, chain: &[(u64, u32, bool)]) {
        self.place(0, chain);
        self.kick();
    }

    fn wait(&self, mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !done() {
            assert!(Instant::now() < deadline, "the device did not answer");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Offers a chain and waits until it is used. Returns the length that the device says it wrote.
    fn answer(&mut self, chain: &[(u64, u32, bool)]) -> u32 {
        self.offer(chain);
        let offered = self.offered;
        self.wait(|| self.ram.read_obj::<u16>(GuestAddress(USED + 2)).unwrap() == offered);
        self.wait(|| self.interrupt.read().is_ok());
        let slot = USED + 4 + 8 * u64::from((offered - 1) % QUEUE_SIZE);
        self.ram.read_obj(GuestAddress(slot + 4)).unwrap()
    }

    fn header(&self, kind: u32, sector: u64) {
        self.ram.write_obj(kind, GuestAddress(HEADER)).unwrap();
        self.ram.write_obj(0u32, GuestAddress(HEADER + 4)).unwrap();
        self.ram.write_obj(sector, GuestAddress(HEADER + 8)).unwrap();
        self.ram.write_obj(0xffu8, GuestAddress(STATUS)).unwrap();
    }

    fn status(&self) -> u8 {
        self.ram.read_obj(GuestAddress(STATUS)).unwrap()
    }

    /// One request in the layout that Linux uses. Returns its status.
    fn request(&mut self, kind: u32, sector: u64, length: u32, device_writes: bool) -> u8 {
        self.header(kind, sector);
        let data = (DATA, length, device_writes);
        let chain = [(HEADER, 16, false), data, (STATUS, 1, true)];
        let chain: Vec<_> = chain.into_iter().filter(|(_, length, _)| *length > 0).collect();
        self.answer(&chain);
        self.status()
    }

    fn fill(&self, byte: u8) {
        self.ram.write_slice(&[byte; 8192], GuestAddress(DATA)).unwrap();
    }

    fn data(&self) -> Vec<u8> {
        let mut bytes = vec![0; 8192];
        self.ram.read_slice(&mut bytes, GuestAddress(DATA)).unwrap();
        bytes
    }
}

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

#[test]
fn what_is_written_is_read_again() {
    let mut driver = Driver::new(false);
    driver.fill(7);
    assert_eq!(driver.request(OUT, 16, 8192, false), 0);
    assert_eq!(driver.request(FLUSH, 0, 0, false), 0);
    driver.fill(0);
    assert_eq!(driver.request(IN, 16, 8192, true), 0);
    assert_eq!(driver.data(), [7; 8192]);
    let stats = driver.block.stats();
    assert_eq!((stats.requests, stats.failed, stats.read_bytes, stats.written_bytes), (3, 0, 8192, 8192));
}

#[test]
fn the_disk_has_an_id() {
    let mut driver = Driver::new(false);
    assert_eq!(driver.request(GET_ID, 0, 20, true), 0);
    assert_eq!(&driver.data()[..20], b"a disk of this test!");
}

#[test]
fn discard_and_write_zeroes_take_ranges() {
    let mut driver = Driver::new(false);
    for (kind, flags) in [(DISCARD, 0u32), (WRITE_ZEROES, 0), (WRITE_ZEROES, 1)] {
        driver.fill(9);
        assert_eq!(driver.request(OUT, 0, 8192, false), 0);
        let range = [8u64.to_le_bytes().as_slice(), &8u32.to_le_bytes(), &flags.to_le_bytes()].concat();
        driver.ram.write_slice(&range, GuestAddress(DATA)).unwrap();
        assert_eq!(driver.request(kind, 0, 16, false), 0);
        assert_eq!(driver.request(IN, 0, 8192, true), 0);
        assert_eq!(driver.data(), [[9; 4096], [0; 4096]].concat());
    }
    for (sectors, flags) in [(8u32, 2u32), (8, 1), (u32::MAX, 0)] {
        let range = [0u64.to_le_bytes().as_slice(), &sectors.to_le_bytes(), &flags.to_le_bytes()].concat();
        driver.ram.write_slice(&range, GuestAddress(DATA)).unwrap();
        assert_eq!(driver.request(DISCARD, 0, 16, false), 2, "unsupported: {sectors} {flags}");
    }
    assert_eq!(driver.request(DISCARD, 0, 15, false), 2);
}

#[test]
fn what_the_disk_cannot_do_fails_and_harms_nothing() {
    let mut driver = Driver::new(false);
    let end = DISK / 512;
    for (kind, sector, length, device_writes) in [
        (IN, end, 4096, true),
        (IN, end - 1, 4096, true),
        (IN, u64::MAX, 4096, true),
        (IN, 1, 4096, true),
        (IN, 0, 512, true),
        (OUT, end - 8, 8192, false),
    ] {
        assert_eq!(driver.request(kind, sector, length, device_writes), 1, "{kind} {sector} {length}");
    }
    assert_eq!(driver.request(99, 0, 4096, true), 2, "an unknown kind");
    assert_eq!(driver.request(IN, 0, 4096, true), 0);
}

#[test]
fn a_read_only_disk_stays_as_it_is() {
    let mut driver = Driver::new(true);
    assert_ne!(driver.block.features() & 1 << VIRTIO_BLK_F_RO, 0);
    assert_eq!(driver.request(OUT, 0, 4096, false), 1);
    assert_eq!(driver.request(IN, 0, 4096, true), 0);
}

#[test]
fn a_request_may_be_cut_into_any_pieces() {
    let mut driver = Driver::new(false);
    driver.fill(3);
    driver.header(OUT, 0);
    let chain =
        [(HEADER, 5, false), (HEADER + 5, 11, false), (DATA, 1, false), (DATA + 1, 4095, false), (STATUS, 1, true)];
    driver.answer(&chain);
    assert_eq!(driver.status(), 0);
    driver.header(IN, 0);
    // Data and status in one descriptor: the last byte is the status.
    assert_eq!(driver.answer(&[(HEADER, 16, false), (DATA + 8192, 4097, true)]), 4097);
    assert_eq!(driver.ram.read_obj::<u8>(GuestAddress(DATA + 8192 + 4096)).unwrap(), 0);
}

#[test]
fn a_chain_that_cannot_be_answered_is_given_back_empty() {
    let mut driver = Driver::new(false);
    for chain in [
        vec![(HEADER, 16, false)],
        vec![(HEADER, 15, false), (STATUS, 1, true)],
        vec![(STATUS, 1, true), (HEADER, 16, false)],
        vec![(HEADER, 16, false), (0xf000_0000, 4096, true), (STATUS, 1, true)],
        vec![(HEADER, 16, false), ((4 << 20) - 8, 4096, true), (STATUS, 1, true)],
        vec![(u64::MAX - 4, 16, false), (STATUS, 1, true)],
    ] {
        driver.header(IN, 0);
        assert_eq!(driver.answer(&chain), 0);
        assert_eq!(driver.status(), 0xff);
    }
    assert_eq!(driver.block.stats().failed, 6);
    assert_eq!(driver.request(IN, 0, 4096, true), 0, "and the next one is served");
}

#[test]
fn one_request_cannot_ask_for_the_same_memory_without_end() {
    let mut driver = Driver::new(false);
    driver.header(IN, 0);
    let mut chain = vec![(HEADER, 16, false)];
    chain.extend(std::iter::repeat_n((0, 4 << 20, true), 100));
    chain.push((STATUS, 1, true));
    driver.answer(&chain);
    assert_eq!(driver.status(), 1);
}

/// Firecracker 1.2: an index further ahead than the ring is long.
#[test]
fn a_broken_ring_is_reported_once_and_left_alone() {
    let mut driver = Driver::new(false);
    driver.ram.write_obj(QUEUE_SIZE + 1, GuestAddress(AVAIL + 2)).unwrap();
    driver.kick.write(1).unwrap();
    let mut heard = 0;
    driver.wait(|| {
        heard += usize::from(matches!(driver.inbox.next(), Some(Message::QueueBroken { device: 7 })));
        heard == 1
    });
    for _ in 0..10 {
        driver.kick.write(1).unwrap();
    }
    std::thread::sleep(Duration::from_millis(50));
    assert!(driver.inbox.next().is_none());
    assert_eq!(driver.block.reset(), Reset::Pending);
    driver.wait(|| matches!(driver.inbox.next(), Some(Message::QueueReleased { device: 7 })));
    assert!(driver.block.released());
    driver.activate();
    assert_eq!(driver.request(IN, 0, 4096, true), 0, "a reset brings it back");
}

#[test]
fn a_reset_waits_for_the_thread_to_let_go() {
    let mut driver = Driver::new(false);
    assert_eq!(driver.request(IN, 0, 4096, true), 0);
    for _ in 0..20 {
        assert_eq!(driver.block.reset(), Reset::Pending);
        driver.wait(|| matches!(driver.inbox.next(), Some(Message::QueueReleased { .. })));
        assert!(driver.block.released());
        assert_eq!(driver.block.reset(), Reset::Done);
        driver.activate();
        assert_eq!(driver.request(IN, 0, 4096, true), 0);
    }
    driver.block.end();
}

/// What a driver offered before it reset the device, or before the machine ended, is not all served first: it may be
/// gigabytes.
#[test]
fn a_reset_waits_for_one_request_not_for_all_that_were_offered() {
    let (data, map) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    create_layer(&data, &map, 64 << 20).unwrap();
    let mut driver = Driver::over(vec![LayerFiles { data, map: Some(map) }], false);
    driver.header(IN, 0);
    let mut chain = vec![(HEADER, 16, false)];
    chain.extend(std::iter::repeat_n((2 << 20, 2 << 20, true), 32));
    chain.push((STATUS, 1, true));
    // Each of the ring's slots names the same chain.
    driver.offered = QUEUE_SIZE - 1;
    driver.offer(&chain);
    let used = |driver: &Driver| driver.ram.read_obj::<u16>(GuestAddress(USED + 2)).unwrap();
    driver.wait(|| used(&driver) > 0);
    assert_eq!(driver.block.reset(), Reset::Pending);
    driver.wait(|| matches!(driver.inbox.next(), Some(Message::QueueReleased { device: 7 })));
    assert!(used(&driver) < QUEUE_SIZE, "all were served first");
}

/// Virtio 1.2, 5.2.6.2: a driver that cannot flush relies on each write being durable when it is done.
#[test]
fn without_flush_each_change_is_durable_when_it_is_done() {
    let (data, map) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    create_layer(&data, &map, DISK).unwrap();
    let map_state = map.try_clone().unwrap();
    let state = || {
        let mut byte = [0xff];
        std::os::unix::fs::FileExt::read_exact_at(&map_state, &mut byte, 4096).unwrap();
        byte[0]
    };
    let mut driver = Driver::over(vec![LayerFiles { data, map: Some(map) }], false);
    assert_eq!(driver.request(OUT, 0, 4096, false), 0);
    assert_eq!(state(), 0, "it can flush, and has not");
    driver.block.reset();
    driver.wait(|| matches!(driver.inbox.next(), Some(Message::QueueReleased { device: 7 })));
    assert!(driver.block.released());
    driver.activate_with(0);
    assert_eq!(driver.request(OUT, 0, 4096, false), 0);
    assert_eq!(state(), 1);
}

/// `/dev/full` has no room for anything.
#[test]
fn a_request_that_waits_for_room_can_be_given_up() {
    let full = File::options().read(true).write(true).open("/dev/full").unwrap();
    let map = tempfile::tempfile().unwrap();
    create_layer(&tempfile::tempfile().unwrap(), &map, DISK).unwrap();
    let mut driver = Driver::over(vec![LayerFiles { data: full, map: Some(map) }], false);
    let heard = |driver: &Driver| {
        let mut heard = None;
        driver.wait(|| {
            heard = driver.inbox.next();
            heard.is_some()
        });
        heard.unwrap()
    };
    for _ in 0..2 {
        driver.header(OUT, 0);
        driver.offer(&[(HEADER, 16, false), (DATA, 4096, false), (STATUS, 1, true)]);
        assert!(matches!(heard(&driver), Message::DiskFull { disk: 0, full: true }));
        assert_eq!(driver.block.reset(), Reset::Pending);
        assert!(matches!(heard(&driver), Message::DiskFull { disk: 0, full: false }), "nothing waits any more");
        assert!(matches!(heard(&driver), Message::QueueReleased { device: 7 }));
        assert_eq!(driver.status(), 0xff);
        assert!(driver.block.released());
        driver.activate();
    }
    driver.header(OUT, 0);
    driver.offer(&[(HEADER, 16, false), (DATA, 4096, false), (STATUS, 1, true)]);
    assert!(matches!(heard(&driver), Message::DiskFull { disk: 0, full: true }));
    driver.block.end();
}

/// Interrupts are held back for a batch, but not while a request of it waits for the host.
#[test]
fn what_is_done_is_told_before_a_wait_for_room() {
    let full = File::options().read(true).write(true).open("/dev/full").unwrap();
    let map = tempfile::tempfile().unwrap();
    create_layer(&tempfile::tempfile().unwrap(), &map, DISK).unwrap();
    let mut driver = Driver::over(vec![LayerFiles { data: full, map: Some(map) }], false);
    driver.header(OUT, 0);
    let read = HEADER + 64;
    driver.ram.write_slice(&[0; 16], GuestAddress(read)).unwrap();
    let answered = [(read, 16, false), (DATA, 4096, true), (STATUS + 1, 1, true)];
    driver.place(0, &answered);
    driver.place(3, &[(HEADER, 16, false), (DATA, 4096, false), (STATUS, 1, true)]);
    driver.place(6, &answered);
    driver.kick();
    driver.wait(|| matches!(driver.inbox.next(), Some(Message::DiskFull { full: true, .. })));
    assert_eq!(driver.ram.read_obj::<u16>(GuestAddress(USED + 2)).unwrap(), 1);
    driver.wait(|| driver.block.stats().interrupts == 1);
    driver.block.end();
}

#[test]
fn a_batch_is_told_in_halves() {
    let mut driver = Driver::new(false);
    driver.header(IN, 0);
    for turn in 0..16u16 {
        driver.place(3 * turn, &[(HEADER, 16, false), (DATA, 4096, true), (STATUS, 1, true)]);
    }
    driver.kick();
    driver.wait(|| driver.ram.read_obj::<u16>(GuestAddress(USED + 2)).unwrap() == 16);
    // After 8, 4 and 4 more.
    driver.wait(|| driver.block.stats().interrupts == 3);
    driver.block.end();
}

/// Linux switches interrupts off while it reaps, and looks again before it switches them on.
#[test]
fn a_guest_that_is_reaping_is_not_interrupted() {
    let mut driver = Driver::new(false);
    driver.ram.write_obj(1u16, GuestAddress(AVAIL)).unwrap();
    driver.header(IN, 0);
    for count in 1..=16u16 {
        driver.offer(&[(HEADER, 16, false), (DATA, 4096, true), (STATUS, 1, true)]);
        driver.wait(|| driver.ram.read_obj::<u16>(GuestAddress(USED + 2)).unwrap() == count);
    }
    assert_eq!((driver.block.stats().requests, driver.block.stats().interrupts), (16, 0));
    driver.ram.write_obj(0u16, GuestAddress(AVAIL)).unwrap();
    assert_eq!(driver.request(IN, 0, 4096, true), 0);
    assert_eq!(driver.block.stats().interrupts, 1);
}

impl Driver {
    /// Has the thread give its queue back.
    fn pause(&mut self) {
        let mut complete = self.block.pause();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !complete {
            assert!(Instant::now() < deadline, "the queue does not come back");
            if let Some(Message::QueuePaused { device: 7, index, queue }) = self.inbox.next() {
                self.block.paused(index, queue);
                complete = !self.block.is_pausing();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn used(&self) -> u16 {
        self.ram.read_obj(GuestAddress(USED + 2)).unwrap()
    }
}

#[test]
fn a_paused_disk_serves_nothing_and_goes_on_with_everything() {
    let mut driver = Driver::new(false);
    assert_eq!(driver.request(IN, 0, 4096, true), 0);
    driver.pause();
    driver.header(IN, 0);
    driver.offer(&[(HEADER, 16, false), (DATA, 4096, true), (STATUS, 1, true)]);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(driver.used(), 1);
    let state = driver.block.queues().pop().flatten().unwrap();
    assert_eq!((state.next_avail, state.next_used), (1, 1));
    driver.block.resume();
    driver.wait(|| driver.used() == 2);
    driver.wait(|| driver.interrupt.read().is_ok());
    // A reset finds nothing of the pause.
    assert_eq!(driver.block.reset(), Reset::Pending);
    driver.wait(|| matches!(driver.inbox.next(), Some(Message::QueueReleased { .. })));
    assert!(driver.block.released());
    driver.activate();
    assert_eq!(driver.request(IN, 0, 4096, true), 0);
}

/// A pause comes in the middle of many requests. Each is answered once: those that were begun before, the others after.
#[test]
fn a_pause_in_the_middle_loses_and_doubles_no_request() {
    let mut driver = Driver::new(false);
    driver.header(IN, 0);
    let chain = [(HEADER, 16, false), (DATA, 2 << 20, true), (STATUS, 1, true)];
    driver.offered = QUEUE_SIZE - 2;
    driver.offer(&chain);
    let offered = driver.offered;
    let mut pauses = 0;
    while driver.used() < offered {
        driver.pause();
        let state = driver.block.queues().pop().flatten().unwrap();
        assert_eq!((state.next_avail, state.next_used), (driver.used(), driver.used()));
        let now = driver.used();
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(driver.used(), now);
        if now > pauses {
            assert!(driver.interrupt.read().is_ok(), "what is answered was told");
        }
        pauses = now;
        driver.block.resume();
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(driver.block.stats().requests, u64::from(offered));
    driver.block.end();
}

#[test]
fn a_disk_that_was_cut_writes_to_its_new_layer_alone() {
    use std::os::unix::fs::FileExt;
    let file = || tempfile::tempfile().unwrap();
    let files = [file(), file(), file(), file()];
    create_layer(&files[0], &files[1], DISK).unwrap();
    create_layer(&files[2], &files[3], DISK).unwrap();
    let layer =
        |n: usize| LayerFiles { data: files[n].try_clone().unwrap(), map: Some(files[n + 1].try_clone().unwrap()) };
    let mut driver = Driver::over(vec![layer(0)], false);
    driver.fill(1);
    assert_eq!(driver.request(OUT, 0, 8192, false), 0);
    driver.pause();
    let cut = driver.block.cut(layer(2)).unwrap();
    driver.block.replace_disk(cut);
    driver.block.resume();
    driver.fill(2);
    assert_eq!(driver.request(OUT, 8, 4096, false), 0);
    driver.fill(0);
    assert_eq!(driver.request(IN, 0, 8192, true), 0);
    assert_eq!(driver.data(), [[1; 4096], [2; 4096]].concat());
    let mut below = vec![0; 8192];
    files[0].read_exact_at(&mut below, 0).unwrap();
    assert_eq!(below, [1; 8192], "frozen");
    // The map of the layer below was flushed by the cut.
    let frozen = Disk::open(vec![layer(0)], true).unwrap();
    let read = snapshot::disk::Bytes::new(vec![0; 4096]);
    frozen.read(4096, &read).unwrap();
    assert_eq!(read.into_inner(), [1; 4096]);
}
