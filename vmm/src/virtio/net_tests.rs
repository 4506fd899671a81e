#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]
#![allow(clippy::cast_possible_truncation)]

use proptest::prelude::*;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};
use virtio_queue::QueueState;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::memory::guest_ram;

const TO: u64 = 0x1_0000;
const FROM: u64 = 0x2_0000;
const DATA: u64 = 0x10_0000;
const WRITABLE: u16 = 2;
const NEXT: u16 = 1;

/// A guest's driver, byte by byte, and the filter's end of the socket.
struct Rig {
    net: Net,
    ram: Ram,
    filter: OwnedFd,
    interrupt: EventFd,
}

impl Rig {
    fn new() -> Self {
        let ram = guest_ram(4 << 20).unwrap();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, filter) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let event = || EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let interrupt = event();
        let net =
            Net::new(ram.clone(), interrupt.try_clone().unwrap(), vec![event(), event()], [2, 0, 0, 0, 0, 1], ours);
        let mut rig = Self { net, ram, filter, interrupt };
        let queue = |at: u64| {
            let state = QueueState {
                max_size: 256,
                size: 256,
                ready: true,
                desc_table: at,
                avail_ring: at + 0x2000,
                used_ring: at + 0x4000,
                ..QueueState::default()
            };
            Some(Queue::try_from(state).unwrap())
        };
        assert!(rig.net.activate(vec![queue(TO), queue(FROM)], FEATURES));
        rig
    }

    fn descriptor(&self, queue: u64, index: u16, at: u64, length: u32, flags: u16, next: u16) {
        let entry = GuestAddress(queue + u64::from(index) * 16);
        self.ram.write_obj(at, entry).unwrap();
        self.ram.write_obj(length, GuestAddress(entry.0 + 8)).unwrap();
        self.ram.write_obj(flags, GuestAddress(entry.0 + 12)).unwrap();
        self.ram.write_obj(next, GuestAddress(entry.0 + 14)).unwrap();
    }

    /// Makes the chain that begins with `head` available.
    fn offer(&self, queue: u64, head: u16) {
        let at = GuestAddress(queue + 0x2002);
        let index: u16 = self.ram.read_obj(at).unwrap();
        self.ram.write_obj(head, GuestAddress(queue + 0x2004 + u64::from(index % 256) * 2)).unwrap();
        self.ram.write_obj(index.wrapping_add(1), at).unwrap();
    }

    fn used(&self, queue: u64) -> u16 {
        self.ram.read_obj(GuestAddress(queue + 0x4002)).unwrap()
    }

    /// The length of a used buffer.
    fn used_length(&self, queue: u64, n: u16) -> u32 {
        self.ram.read_obj(GuestAddress(queue + 0x4008 + u64::from(n) * 8)).unwrap()
    }

    /// The guest sends a frame, its header in a descriptor of its own.
    fn frame(&self, index: u16, header: [u8; HEADER], bytes: &[u8]) {
        let at = DATA + u64::from(index) * 0x2_0000;
        self.ram.write_slice(&header, GuestAddress(at)).unwrap();
        self.ram.write_slice(bytes, GuestAddress(at + 0x100)).unwrap();
        self.descriptor(FROM, index * 2, at, HEADER as u32, NEXT, index * 2 + 1);
        self.descriptor(FROM, index * 2 + 1, at + 0x100, bytes.len() as u32, 0, 0);
        self.offer(FROM, index * 2);
    }

    /// The guest offers a buffer in two parts.
    fn buffer(&self, index: u16, length: u32) {
        let at = DATA + 0x10_0000 + u64::from(index) * 0x2_0000;
        self.descriptor(TO, index * 2, at, 20, NEXT | WRITABLE, index * 2 + 1);
        self.descriptor(TO, index * 2 + 1, at + 20, length - 20, WRITABLE, 0);
        self.offer(TO, index * 2);
    }

    fn heard(&self) -> Option<Vec<u8>> {
        let mut bytes = vec![0; MAX_FRAME + 1];
        let (length, _) = recv(&self.filter, &mut *bytes, RecvFlags::DONTWAIT).ok()?;
        bytes.truncate(length);
        Some(bytes)
    }

    fn tell(&self, bytes: &[u8]) {
        assert_eq!(send(&self.filter, bytes, SendFlags::DONTWAIT).unwrap(), bytes.len());
    }

    fn interrupted(&self) -> bool {
        self.interrupt.read().is_ok()
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|n| (n * 7 % 251) as u8).collect()
}

#[test]
fn frames_of_every_length_go_both_ways_unchanged() {
    let mut rig = Rig::new();
    for (n, length) in (0u16..).zip([ETHERNET, 60, 1514, 40_000, MAX_FRAME]) {
        rig.frame(0, [0; HEADER], &pattern(length));
        rig.net.process().unwrap();
        assert_eq!((rig.heard(), rig.used(FROM)), (Some(pattern(length)), n + 1));
        assert!(rig.interrupted() && !rig.interrupted());

        rig.buffer(0, (HEADER + MAX_FRAME) as u32);
        rig.tell(&pattern(length));
        rig.net.process().unwrap();
        assert_eq!((rig.used(TO), rig.used_length(TO, n)), (n + 1, (HEADER + length) as u32));
        let mut whole = vec![0; HEADER + length];
        rig.ram.read_slice(&mut whole, GuestAddress(DATA + 0x10_0000)).unwrap();
        assert_eq!((&whole[..HEADER], &whole[HEADER..]), (&TO_GUEST[..], &pattern(length)[..]));
        assert!(rig.interrupted());
    }
    assert_eq!((rig.net.stats().frames_out, rig.net.stats().frames_in, rig.net.stats().frames_dropped), (5, 5, 0));
}

#[test]
fn what_is_no_frame_is_dropped_and_counted() {
    let mut rig = Rig::new();
    rig.frame(0, [0; HEADER], &pattern(ETHERNET - 1));
    rig.frame(1, [0; HEADER], &pattern(MAX_FRAME + 1));
    let (mut checksum, mut segments) = ([0; HEADER], [0; HEADER]);
    (checksum[0], segments[1]) = (1, 1);
    rig.frame(2, checksum, &pattern(60));
    rig.frame(3, segments, &pattern(60));
    // Shorter than a header; writable; beyond memory.
    rig.descriptor(FROM, 20, DATA, 11, 0, 0);
    rig.offer(FROM, 20);
    rig.descriptor(FROM, 21, DATA, 100, WRITABLE, 0);
    rig.offer(FROM, 21);
    rig.descriptor(FROM, 22, 4 << 20, 100, 0, 0);
    rig.offer(FROM, 22);
    rig.net.process().unwrap();
    assert_eq!((rig.used(FROM), rig.heard(), rig.net.stats().frames_dropped), (7, None, 7));

    rig.buffer(0, 100);
    rig.tell(&pattern(89));
    rig.tell(&pattern(88));
    rig.net.process().unwrap();
    assert_eq!((rig.used(TO), rig.used_length(TO, 0)), (1, 100), "the buffer waits for a frame that it can hold");
    assert_eq!(rig.net.stats().frames_dropped, 8);
}

#[test]
fn a_filter_that_sends_no_frames_cannot_keep_us_busy() {
    let mut rig = Rig::new();
    for _ in 0..BUDGET + 1 {
        rig.tell(&pattern(ETHERNET - 1));
    }
    rig.net.process().unwrap();
    assert_eq!(rig.net.stats().frames_dropped, BUDGET as u64);
    rig.net.process().unwrap();
    assert_eq!(rig.net.stats().frames_dropped, BUDGET as u64 + 1);
}

#[test]
fn a_frame_waits_for_a_buffer_and_a_full_socket_for_room() {
    let mut rig = Rig::new();
    rig.tell(&pattern(60));
    rig.tell(&pattern(61));
    rig.net.process().unwrap();
    assert_eq!(rig.used(TO), 0);
    rig.buffer(0, 1000);
    rig.buffer(1, 1000);
    rig.net.process().unwrap();
    assert_eq!((rig.used_length(TO, 0), rig.used_length(TO, 1)), (HEADER as u32 + 60, HEADER as u32 + 61));

    // Until the socket takes no more; then each goes once, in order, and none is lost.
    let mut offered = 0;
    while offered < 200 && u32::from(rig.used(FROM)) == offered {
        rig.ram.write_obj(offered, GuestAddress(DATA + 0x100)).unwrap();
        let mut bytes = pattern(30_000);
        bytes[..4].copy_from_slice(&offered.to_le_bytes());
        rig.frame(0, [0; HEADER], &bytes);
        rig.net.process().unwrap();
        offered += 1;
    }
    assert!(offered < 200 && rig.net.stats().frames_dropped == 0);
    for n in 0..offered {
        assert_eq!(rig.heard().unwrap()[..4], n.to_le_bytes());
        rig.net.process().unwrap();
    }
    assert_eq!((u32::from(rig.used(FROM)), rig.heard()), (offered, None));
}

#[test]
fn without_a_filter_there_is_no_network_and_the_device_goes_on() {
    let mut rig = Rig::new();
    let Rig { filter, .. } = std::mem::replace(&mut rig, Rig::new());
    drop(filter);
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None).unwrap();
    rig.net.frames.socket = ours;
    drop(theirs);
    rig.buffer(0, 1000);
    rig.frame(0, [0; HEADER], &pattern(60));
    rig.net.process().unwrap();
    assert_eq!((rig.used(FROM), rig.used(TO), rig.net.stats().frames_dropped), (1, 0, 1));
}

#[test]
fn a_busy_guest_leaves_time_for_others_and_is_not_forgotten() {
    let mut rig = Rig::new();
    rig.ram.write_slice(&[0; 100], GuestAddress(DATA)).unwrap();
    for index in 0..200 {
        rig.descriptor(FROM, index, DATA, HEADER as u32 + 20, 0, 0);
        rig.offer(FROM, index);
    }
    let _ = rig.net.kicks[0].read();
    rig.net.process().unwrap();
    assert_eq!(usize::from(rig.used(FROM)), BUDGET);
    rig.net.kicks[0].read().expect("it asks to be called again");
}

#[test]
fn a_broken_ring_ends_the_device_until_its_reset() {
    let mut rig = Rig::new();
    rig.descriptor(FROM, 0, DATA, 100, NEXT, 0);
    rig.offer(FROM, 0);
    assert_eq!(rig.net.process(), Err(Broken));
    rig.frame(1, [0; HEADER], &pattern(60));
    assert_eq!((rig.net.process(), rig.heard()), (Ok(()), None));
}

proptest! {
    #[test]
    fn any_descriptors_are_borne(words in prop::collection::vec(any::<(u64, u32, u16, u16)>(), 16), heads in prop::collection::vec(0u16..20, 1..16)) {
        let mut rig = Rig::new();
        for (index, (at, length, flags, next)) in (0u16..).zip(words) {
            for queue in [TO, FROM] {
                rig.descriptor(queue, index, at % (5 << 20), length % 0x2_0000, flags & 7, next % 20);
            }
        }
        for head in heads {
            rig.offer(TO, head);
            rig.offer(FROM, head);
        }
        rig.tell(&pattern(60));
        while rig.net.process().is_ok() && rig.net.queues.is_some() && rig.net.kicks[0].read().is_ok() {}
    }
}
