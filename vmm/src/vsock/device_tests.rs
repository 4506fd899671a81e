//! The whole device over guest memory, hand-made rings and real socket pairs.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, poll};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::ChainError;
use super::device::{Error, QUEUE_SIZES, State, Vsock};
use super::model::{CID, GuestSocket, PORT, Pattern};
use super::muxer::MAX_CONNECTIONS;
use super::packet::{HEADER_SIZE, Header, Op, SHUTDOWN_SEND};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const SIZE: u16 = 16;

/// The driver's side of one queue, with a page of buffer for each descriptor.
struct Ring {
    base: u64,
    buffers: u64,
    offered: u16,
    seen: u16,
    free: Vec<u16>,
}

impl Ring {
    fn new(index: u64) -> Self {
        Self {
            base: 0x1000 + index * 0x4000,
            buffers: 0x10_0000 + index * 0x20_0000,
            offered: 0,
            seen: 0,
            free: (0..SIZE).rev().collect(),
        }
    }

    fn queue(&self) -> Queue {
        let mut queue = Queue::new(SIZE).unwrap();
        queue.set_desc_table_address(Some(u32::try_from(self.base).unwrap()), None);
        queue.set_avail_ring_address(Some(u32::try_from(self.base + 0x1000).unwrap()), None);
        queue.set_used_ring_address(Some(u32::try_from(self.base + 0x2000).unwrap()), None);
        queue.set_ready(true);
        queue
    }

    fn buffer(&self, descriptor: u16) -> u64 {
        self.buffers + u64::from(descriptor) * 0x2_0000
    }

    fn describe(&self, mem: &Mem, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        let at = self.base + u64::from(index) * 16;
        mem.write_obj(address, GuestAddress(at)).unwrap();
        mem.write_obj(len, GuestAddress(at + 8)).unwrap();
        mem.write_obj(flags, GuestAddress(at + 12)).unwrap();
        mem.write_obj(next, GuestAddress(at + 14)).unwrap();
    }

    fn offer(&mut self, mem: &Mem, head: u16) {
        let slot = self.base + 0x1004 + u64::from(self.offered % SIZE) * 2;
        mem.write_obj(head, GuestAddress(slot)).unwrap();
        self.offered = self.offered.wrapping_add(1);
        mem.write_obj(self.offered, GuestAddress(self.base + 0x1002)).unwrap();
    }

    fn used(&mut self, mem: &Mem) -> Option<(u16, u32)> {
        let index: u16 = mem.read_obj(GuestAddress(self.base + 0x2002)).unwrap();
        if index == self.seen {
            return None;
        }
        let slot = self.base + 0x2004 + u64::from(self.seen % SIZE) * 8;
        self.seen = self.seen.wrapping_add(1);
        let head: u32 = mem.read_obj(GuestAddress(slot)).unwrap();
        let len = mem.read_obj(GuestAddress(slot + 4)).unwrap();
        Some((u16::try_from(head).unwrap(), len))
    }
}

type Mem = GuestMemoryMmap<()>;

struct Machine {
    mem: Mem,
    device: Vsock,
    queues: Vec<Queue>,
    rings: [Ring; 3],
    guest: GuestSocket,
    guest_wrote: Pattern,
    guest_read: Pattern,
    interrupts: usize,
    /// How the guest cuts its packets: whether the header shares a descriptor with the payload.
    split: usize,
}

impl Machine {
    fn with(device: Vsock) -> Self {
        let mem = Mem::from_ranges(&[(GuestAddress(0), 0x80_0000)]).unwrap();
        let rings = [Ring::new(0), Ring::new(1), Ring::new(2)];
        let queues = rings.iter().map(Ring::queue).collect();
        Self {
            mem,
            device,
            queues,
            rings,
            guest: GuestSocket::new(256 * 1024),
            guest_wrote: Pattern::default(),
            guest_read: Pattern::default(),
            interrupts: 0,
            split: 0,
        }
    }

    fn new() -> Self {
        let mut machine = Self::with(Vsock::new(CID, 70_000).unwrap());
        machine.offer_receive_buffers(4096);
        machine
    }

    fn connected() -> (Self, UnixStream) {
        let mut machine = Self::new();
        let host = machine.connect();
        machine.run();
        assert!(machine.guest.host_port.is_some());
        (machine, host)
    }

    fn connect(&mut self) -> UnixStream {
        let (host, end) = UnixStream::pair().unwrap();
        host.set_nonblocking(true).unwrap();
        self.device.connect(OwnedFd::from(end), PORT).unwrap();
        host
    }

    /// Two descriptors a buffer, as older Linux kernels offer them.
    fn offer_receive_buffers(&mut self, len: u32) {
        let ring = &mut self.rings[0];
        while ring.free.len() >= 2 {
            let (head, body) = (ring.free.pop().unwrap(), ring.free.pop().unwrap());
            ring.describe(&self.mem, head, ring.buffer(head), 44, NEXT | WRITE, body);
            ring.describe(&self.mem, body, ring.buffer(body), len, WRITE, 0);
            ring.offer(&self.mem, head);
        }
    }

    fn process(&mut self) -> Result<bool, Error> {
        let interrupt = self.device.process(&self.mem, &mut self.queues)?;
        self.interrupts += usize::from(interrupt);
        Ok(interrupt)
    }

    fn wants_processing(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.device.epoll_fd(), PollFlags::IN)];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).unwrap() > 0
    }

    /// Offers one packet of the guest, in pieces of descriptors.
    fn transmit(&mut self, header: &Header, payload: &[u8]) -> bool {
        let mut bytes = header.to_bytes().to_vec();
        bytes.extend(payload);
        let pieces: Vec<&[u8]> = match self.split {
            0 => vec![&bytes],
            1 => vec![&bytes[..HEADER_SIZE], &bytes[HEADER_SIZE..]],
            _ => bytes.chunks(bytes.len().div_ceil(4).max(1)).collect(),
        };
        let pieces: Vec<_> = pieces.into_iter().filter(|piece| !piece.is_empty()).collect();
        let ring = &mut self.rings[1];
        if ring.free.len() < pieces.len() {
            return false;
        }
        let chain: Vec<u16> = pieces.iter().map(|_| ring.free.pop().unwrap()).collect();
        for (index, piece) in pieces.iter().enumerate() {
            let (flags, next) = match chain.get(index + 1) {
                Some(next) => (NEXT, *next),
                None => (0, 0),
            };
            let at = ring.buffer(chain[index]);
            self.mem.write_slice(piece, GuestAddress(at)).unwrap();
            let len = u32::try_from(piece.len()).unwrap();
            ring.describe(&self.mem, chain[index], at, len, flags, next);
        }
        ring.offer(&self.mem, chain[0]);
        true
    }

    /// Takes back what the device used, and hands the packets to the guest's socket.
    fn reap(&mut self) -> bool {
        let mut any = false;
        while let Some((head, _)) = self.rings[1].used(&self.mem) {
            any = true;
            let mut descriptor = head;
            loop {
                self.rings[1].free.push(descriptor);
                let at = self.rings[1].base + u64::from(descriptor) * 16;
                let flags: u16 = self.mem.read_obj(GuestAddress(at + 12)).unwrap();
                if flags & NEXT == 0 {
                    break;
                }
                descriptor = self.mem.read_obj(GuestAddress(at + 14)).unwrap();
            }
        }
        while let Some((head, len)) = self.rings[0].used(&self.mem) {
            any = true;
            let ring = &mut self.rings[0];
            let at = ring.base + u64::from(head) * 16;
            let body: u16 = self.mem.read_obj(GuestAddress(at + 14)).unwrap();
            let mut header = [0; HEADER_SIZE];
            self.mem.read_slice(&mut header, GuestAddress(ring.buffer(head))).unwrap();
            let mut payload = vec![0; len as usize - HEADER_SIZE];
            self.mem.read_slice(&mut payload, GuestAddress(ring.buffer(body))).unwrap();
            ring.offer(&self.mem, head);
            self.guest.on_packet(&Header::from_bytes(&header), &payload);
        }
        any
    }

    /// One round of everything but the host's and the guest's own reads and writes.
    fn step(&mut self) -> bool {
        let mut moved = false;
        while let Some((header, payload)) = self.guest.out.pop_front() {
            if !self.transmit(&header, &payload) {
                self.guest.out.push_front((header, payload));
                break;
            }
            moved = true;
        }
        if (moved && self.kicks(1)) || self.wants_processing() {
            self.process().unwrap();
        }
        if self.reap() {
            moved = true;
            if self.kicks(0) {
                self.process().unwrap();
            }
        }
        moved
    }

    /// Whether the device wants to hear of new buffers: else the driver does not kick.
    fn kicks(&self, ring: usize) -> bool {
        let at = GuestAddress(self.rings[ring].base + 0x2000);
        self.mem.read_obj::<u16>(at).unwrap() & 1 == 0
    }

    /// Goes on until nothing moves.
    fn run(&mut self) {
        while self.step() || self.wants_processing() {}
    }

    fn guest_write(&mut self, len: usize) {
        let bytes = self.guest_wrote.make(len);
        self.guest_wrote.offset += self.guest.send(&bytes);
    }

    fn guest_read(&mut self, len: usize) {
        let bytes = self.guest.read(len);
        self.guest_read.check(&bytes);
    }
}

/// Reads what is there. `None` at the end of the stream.
fn host_read(host: &mut UnixStream, pattern: &mut Pattern, limit: usize) -> Option<usize> {
    let mut bytes = vec![0; limit];
    match host.read(&mut bytes) {
        Ok(0) => None,
        Ok(count) => {
            pattern.check(&bytes[..count]);
            Some(count)
        }
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Some(0),
        Err(error) => panic!("{error}"),
    }
}

fn host_write(host: &mut UnixStream, pattern: &mut Pattern, limit: usize) {
    match host.write(&pattern.make(limit)) {
        Ok(count) => pattern.offset += count,
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn two_mebibytes_pass_both_ways_at_any_pace(
        guest_reads in 1..100_000_usize, host_reads in 1000..100_000_usize,
        writes in 1000..100_000_usize, buffer in 1..4096_u32, split in 0..3_usize,
        guest_buffer in prop_oneof![Just(5000_u32), Just(256 * 1024)],
    ) {
        const TOTAL: usize = 2 * 1024 * 1024;
        let buffer = buffer.max(200);
        let mut machine = Machine::with(Vsock::new(CID, 70_000).unwrap());
        machine.split = split;
        machine.guest.buf_alloc = guest_buffer;
        machine.offer_receive_buffers(buffer);
        let mut host = machine.connect();
        machine.run();
        let (mut wrote, mut read) = (Pattern::default(), Pattern::default());
        let mut rounds = 0;
        while machine.guest_read.offset < TOTAL || read.offset < TOTAL {
            let left = TOTAL - wrote.offset;
            host_write(&mut host, &mut wrote, writes.min(left));
            machine.guest_write(writes.min(TOTAL - machine.guest_wrote.offset));
            machine.step();
            machine.guest_read(guest_reads.max(500));
            host_read(&mut host, &mut read, host_reads).unwrap();
            rounds += 1;
            prop_assert!(rounds < 100_000, "stalled at {} and {}", machine.guest_read.offset, read.offset);
        }
        // Half-close, host first; then the guest.
        host.shutdown(Shutdown::Write).unwrap();
        machine.run();
        prop_assert!(machine.guest.at_end() && !machine.guest.reset);
        machine.guest_write(10);
        machine.guest.shutdown(SHUTDOWN_SEND);
        machine.run();
        prop_assert_eq!(host_read(&mut host, &mut read, 100), Some(10));
        prop_assert_eq!(host_read(&mut host, &mut read, 100), None);
        prop_assert_eq!(machine.device.connections(), 0);
    }

    /// Rings and buffers full of noise: an error or not, but no panic and no endless loop.
    #[test]
    fn noise_in_the_rings_neither_panics_nor_loops(
        noise in prop::collection::vec(any::<u16>(), 3 * 0x2000 / 2),
        small in any::<bool>(),
    ) {
        let mut machine = Machine::new();
        let _host = machine.connect();
        for (index, value) in noise.iter().enumerate() {
            // Small numbers make chains that hold together more often.
            let value = if small { value % 8 } else { *value };
            let (ring, offset) = (index as u64 / 0x1000, index as u64 % 0x1000 * 2);
            machine.mem.write_obj(value, GuestAddress(0x1000 + ring * 0x4000 + offset)).unwrap();
        }
        for _ in 0..4 {
            if machine.process().is_err() {
                break;
            }
        }
    }
}

#[test]
fn a_connection_carries_bytes_both_ways() {
    let (mut machine, mut host) = Machine::connected();
    assert_eq!(machine.device.config(), [3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(machine.guest.host_port, Some(70_000));
    host.write_all(b"ping").unwrap();
    machine.run();
    assert_eq!(machine.guest.read(100), b"ping");
    machine.guest.send(b"pong");
    machine.run();
    let mut answer = [0; 4];
    host.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"pong");
}

#[test]
fn a_connection_waits_for_the_driver_and_survives_its_first_reset() {
    let mut machine = Machine::new();
    let mut host = machine.connect();
    host.write_all(b"early").unwrap();
    machine.device.reset();
    machine.run();
    assert_eq!(machine.guest.read(100), b"early");
    // Now the guest knows it: a reset ends it.
    machine.device.reset();
    assert_eq!(host.read(&mut [0; 1]).unwrap(), 0);
    assert_eq!(machine.device.connections(), 0);
}

/// Fault class 15: buffers come back while the host has long been readable and makes no new edge.
#[test]
fn data_that_waited_for_a_buffer_is_sent_when_one_comes() {
    let mut machine = Machine::with(Vsock::new(CID, 70_000).unwrap());
    let mut host = machine.connect();
    machine.run();
    machine.offer_receive_buffers(100);
    machine.process().unwrap();
    machine.run();
    let mut wrote = Pattern::default();
    host_write(&mut host, &mut wrote, 5000);
    machine.run();
    machine.guest_read(usize::MAX);
    machine.run();
    assert_eq!(machine.guest_read.offset + machine.guest.received.len(), 5000);
}

/// Fault class 21: level-triggered events that nobody can serve.
#[test]
fn a_starved_connection_costs_no_wake_ups() {
    let (mut machine, mut host) = Machine::connected();
    let mut wrote = Pattern::default();
    // The guest reads nothing: credit runs out with bytes left over.
    for _ in 0..20 {
        host_write(&mut host, &mut wrote, 60_000);
        machine.run();
    }
    assert_eq!(machine.guest.received.len(), 256 * 1024);
    assert!(wrote.offset > 256 * 1024);
    assert!(!machine.wants_processing());
    // Not even a hang-up spins; what was written before still arrives.
    drop(host);
    machine.run();
    assert!(!machine.wants_processing());
    while machine.guest_read.offset < wrote.offset {
        machine.guest_read(1000);
        machine.run();
    }
    assert!(machine.guest.at_end());
    assert_eq!(machine.device.connections(), 0);
}

/// A process forked for a snapshot holds copies of all descriptors: closing ours is not enough.
#[test]
fn a_stream_ends_although_a_copy_of_its_descriptor_lives() {
    let mut machine = Machine::new();
    let (mut host, end) = UnixStream::pair().unwrap();
    host.set_nonblocking(true).unwrap();
    let _copy = end.try_clone().unwrap();
    machine.device.connect(OwnedFd::from(end), PORT).unwrap();
    machine.run();
    machine.guest.close();
    machine.run();
    assert_eq!(machine.device.connections(), 0);
    assert_eq!(host.read(&mut [0; 1]).unwrap(), 0);
    // Nor does the copy wake a device that knows the connection no more.
    assert_eq!(host.write(b"x").unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
    assert!(!machine.wants_processing());
}

/// Fault class 57: a host that is gone for good after a half-close gives its slot back.
#[test]
fn a_close_after_a_half_close_frees_the_slot() {
    let (mut machine, host) = Machine::connected();
    host.shutdown(Shutdown::Write).unwrap();
    machine.run();
    assert_eq!(machine.device.connections(), 1);
    drop(host);
    machine.run();
    assert_eq!(machine.device.connections(), 0);
    assert!(!machine.guest.sends());
}

#[test]
fn a_host_that_never_reads_stops_the_guest_and_nothing_else() {
    let (mut machine, mut host) = Machine::connected();
    for _ in 0..50 {
        machine.guest_write(60_000);
        machine.run();
    }
    assert_eq!(machine.guest.room(), 0);
    assert!(!machine.wants_processing());
    host.write_all(b"still there").unwrap();
    machine.run();
    assert_eq!(machine.guest.read(100), b"still there");
    // Then it reads, and all of it is there.
    let mut read = Pattern::default();
    while read.offset < machine.guest_wrote.offset {
        host_read(&mut host, &mut read, 10_000).unwrap();
        machine.run();
    }
}

/// Fault class 20: one busy device on the thread that serves them all.
#[test]
fn one_call_does_a_bounded_amount_and_asks_for_another() {
    let (mut machine, mut host) = Machine::connected();
    machine.guest.buf_alloc = u32::MAX;
    let mut total = 0;
    let header = machine.guest.header(Op::Data, 0, 100_000);
    for _ in 0..SIZE {
        machine.transmit(&header, &vec![7; 100_000]);
    }
    let drain = std::thread::spawn(move || {
        host.set_nonblocking(false).unwrap();
        let mut bytes = vec![0; 1 << 20];
        let mut total = 0;
        while let Ok(count @ 1..) = host.read(&mut bytes) {
            total += count;
        }
        total
    });
    machine.process().unwrap();
    while machine.rings[1].used(&machine.mem).is_some() {
        total += 1;
    }
    assert!(total <= 11, "{total} packets of 100,000 bytes in one call");
    assert!(machine.wants_processing());
    drop(machine);
    drain.join().unwrap();
}

#[test]
fn a_thousand_and_twenty_four_connections_and_not_one_more() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    rustix::process::setrlimit(
        rustix::process::Resource::Nofile,
        rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum },
    )
    .unwrap();
    let mut machine = Machine::new();
    let hosts: Vec<_> = (0..MAX_CONNECTIONS).map(|_| machine.connect()).collect();
    let (_host, end) = UnixStream::pair().unwrap();
    let error = machine.device.connect(OwnedFd::from(end), 99).unwrap_err();
    assert_eq!(error.to_string(), "no vsock connection to guest port 99: all 1024 are in use");
    drop(hosts);
    machine.run();
    assert_eq!(machine.device.connections(), 0);
    machine.connect();
}

/// Fault classes 5 and 18: lengths come from the descriptors.
#[test]
fn a_header_that_promises_more_than_the_chain_has_is_an_error() {
    let (mut machine, _host) = Machine::connected();
    let mut header = machine.guest.header(Op::Data, 0, 0);
    header.len = 5;
    machine.transmit(&header, b"four");
    assert!(matches!(machine.process(), Err(Error::Chain(ChainError::Short { have: 4, need: 5, .. }))));
}

#[test]
fn chains_that_are_not_whole_are_errors() {
    type Shape = (&'static str, fn(&Ring, &Mem));
    let shapes: [Shape; 7] = [
        ("short", |r, m| r.describe(m, 0, 0x10_0000, 43, 0, 0)),
        ("writable", |r, m| r.describe(m, 0, 0x10_0000, 44, WRITE, 0)),
        ("outside", |r, m| r.describe(m, 0, 0x7f_fff0, 44, 0, 0)),
        ("wrapping", |r, m| r.describe(m, 0, u64::MAX - 3, 44, 0, 0)),
        ("breaks off", |r, m| r.describe(m, 0, 0x10_0000, 44, NEXT, SIZE)),
        ("loops", |r, m| r.describe(m, 0, 0x10_0000, 44, NEXT, 0)),
        ("nested", |r, m| r.describe(m, 0, r.base, 16, INDIRECT, 0)),
    ];
    for (name, shape) in shapes {
        let (mut machine, _host) = Machine::connected();
        shape(&machine.rings[1], &machine.mem);
        machine.rings[1].offer(&machine.mem, 0);
        let result = machine.process();
        assert!(matches!(result, Err(Error::Chain(_))), "{name}: {result:?}");
    }
    // A head outside of the table.
    let (mut machine, _host) = Machine::connected();
    machine.rings[1].offer(&machine.mem, SIZE);
    assert!(machine.process().is_err());
    // A buffer for the guest without room for a byte.
    let mut machine = Machine::with(Vsock::new(CID, 70_000).unwrap());
    let _host = machine.connect();
    machine.rings[0].describe(&machine.mem, 0, 0x10_0000, 44, WRITE, 0);
    machine.rings[0].offer(&machine.mem, 0);
    assert!(machine.process().is_err());
}

/// Fault class 8: an index that runs ahead of the ring.
#[test]
fn an_available_index_too_far_ahead_is_an_error() {
    for ring in [0, 1] {
        let (mut machine, mut host) = Machine::connected();
        host.write_all(b"x").unwrap();
        let index = machine.rings[ring].offered.wrapping_add(SIZE + 20);
        let at = GuestAddress(machine.rings[ring].base + 0x1002);
        machine.mem.write_obj(index, at).unwrap();
        assert!(matches!(machine.process(), Err(Error::Ring(_))));
    }
}

#[test]
fn a_guest_that_drains_is_not_interrupted() {
    let (mut machine, _host) = Machine::connected();
    machine.mem.write_obj(1_u16, GuestAddress(machine.rings[1].base + 0x1000)).unwrap();
    let before = machine.interrupts;
    machine.guest.push(Op::CreditUpdate, 0, Vec::new());
    machine.run();
    assert_eq!(machine.interrupts, before);
}

/// Fault class 23, `faults.md` 1 to 4: the guest hears of the restore once, and no new connection comes
/// before it has acted. Several times in a chain, since the second time has its own faults.
#[test]
fn a_restored_guest_is_told_to_reset_before_it_gets_new_connections() {
    let mut state = State { next_host_port: 1, reset_owed: false };
    for round in 0..5 {
        let mut machine = Machine::with(Vsock::restore(CID, state).unwrap());
        machine.offer_receive_buffers(4096);
        let _host = machine.connect();
        machine.run();
        if round > 0 {
            // No buffer: it stays owed, also across another save.
            assert!(machine.guest.host_port.is_none());
            assert!(machine.device.save().reset_owed);
            let ring = &mut machine.rings[2];
            for head in 0..2 {
                ring.describe(&machine.mem, head, ring.buffer(head), 8, WRITE, 0);
                machine.mem.write_obj(0x55_u32, GuestAddress(ring.buffer(head))).unwrap();
                ring.offer(&machine.mem, head);
            }
            assert!(machine.process().unwrap());
            assert_eq!(machine.rings[2].used(&machine.mem), Some((0, 4)));
            let at = GuestAddress(machine.rings[2].buffer(0));
            assert_eq!(machine.mem.read_obj::<u32>(at).unwrap(), 0);
            machine.run();
            assert!(machine.guest.host_port.is_none(), "before the guest acted");
            machine.rings[2].offer(&machine.mem, 0);
            machine.process().unwrap();
            assert_eq!(machine.rings[2].used(&machine.mem), None, "told twice");
            machine.run();
        }
        assert!(machine.guest.host_port.is_some());
        let next = machine.device.save();
        assert!(next.reset_owed && next.next_host_port > state.next_host_port);
        state = next;
    }
}

/// Sizes that the queues of the crate accept.
#[test]
fn queue_sizes_are_powers_of_two() {
    for size in QUEUE_SIZES {
        assert!(Queue::new(size).is_ok());
    }
}
