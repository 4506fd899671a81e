//! The pure core against a model of the guest and of a host socket, in random order.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use proptest::prelude::*;

use super::connection::{BUFFER_SIZE, HostShutdown};
use super::model::{CID, GuestSocket, PORT, Pattern};
use super::muxer::{ConnectionId, HOST_CID, MAX_CONNECTIONS, Muxer, Outgoing};
use super::packet::{Header, Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM};

/// A socket pair, seen from its middle.
#[derive(Debug, Default)]
struct Pair {
    to_vmm: VecDeque<u8>,
    from_vmm: VecDeque<u8>,
    host_done: bool,
    host_deaf: bool,
    vmm_done: bool,
    vmm_deaf: bool,
    vmm_closed: bool,
}

/// What a socket buffer of the model holds.
const SOCKET_BUFFER: usize = 40_000;

#[derive(Debug)]
struct VmmEnd(Rc<RefCell<Pair>>);

impl Drop for VmmEnd {
    fn drop(&mut self) {
        self.0.borrow_mut().vmm_closed = true;
    }
}

struct World {
    muxer: Muxer<VmmEnd>,
    id: ConnectionId,
    pair: Rc<RefCell<Pair>>,
    guest: GuestSocket,
    host_wrote: Pattern,
    host_read: Pattern,
    guest_wrote: Pattern,
    guest_read: Pattern,
    most_held: usize,
}

impl World {
    fn new(guest_buffer: u32) -> Self {
        let mut muxer = Muxer::new(CID, 5000);
        let pair = Rc::new(RefCell::new(Pair::default()));
        let id = muxer.connect(VmmEnd(Rc::clone(&pair)), PORT).unwrap();
        Self {
            muxer,
            id,
            pair,
            guest: GuestSocket::new(guest_buffer),
            host_wrote: Pattern::default(),
            host_read: Pattern::default(),
            guest_wrote: Pattern::default(),
            guest_read: Pattern::default(),
            most_held: 0,
        }
    }

    fn open(guest_buffer: u32) -> Self {
        let mut world = Self::new(guest_buffer);
        world.pump_out(4096);
        world.pump_in();
        world
    }

    fn event(&mut self, readable: bool, writable: bool, hung_up: bool) {
        let id = self.id;
        self.muxer.update(id, |c| c.on_host_event(readable, writable, hung_up));
        self.flush();
    }

    // ---- what the device does ----

    fn write(&self, bytes: &[u8]) -> Option<usize> {
        let mut pair = self.pair.borrow_mut();
        if pair.host_deaf {
            return None;
        }
        let count = bytes.len().min(SOCKET_BUFFER - pair.from_vmm.len());
        pair.from_vmm.extend(&bytes[..count]);
        Some(count)
    }

    fn flush(&mut self) {
        let id = self.id;
        while let Some(connection) = self.muxer.get(id) {
            let held = connection.held().to_vec();
            if held.is_empty() || connection.socket().is_none() {
                break;
            }
            let result = self.write(&held);
            self.muxer.update(id, |c| match result {
                None => c.host_refuses(),
                Some(0) => c.host_write_blocks(),
                Some(count) => c.held_taken(count),
            });
        }
        while let Some(Some(what)) = self.muxer.update(id, |c| c.take_host_shutdown()) {
            let mut pair = self.pair.borrow_mut();
            match what {
                HostShutdown::Read => pair.vmm_deaf = true,
                HostShutdown::Write => pair.vmm_done = true,
            }
        }
    }

    fn pump_in(&mut self) -> bool {
        let Some((header, payload)) = self.guest.out.pop_front() else {
            return false;
        };
        self.packet(&header, &payload);
        true
    }

    fn packet(&mut self, header: &Header, payload: &[u8]) {
        let Some((id, accepted)) = self.muxer.on_packet(header) else {
            return;
        };
        if accepted > 0 {
            assert_eq!(accepted as usize, payload.len());
            let mut rest = payload;
            if self.muxer.get(id).unwrap().host_takes() {
                match self.write(rest) {
                    None => {
                        self.muxer.update(id, |c| c.host_refuses());
                    }
                    Some(count) => {
                        let count32 = u32::try_from(count).unwrap();
                        self.muxer.update(id, |c| c.host_took(count32));
                        rest = &rest[count..];
                    }
                }
            }
            self.muxer.update(id, |c| c.hold(rest));
        }
        self.flush();
        let held = self.muxer.get(id).map_or(0, |c| c.held().len());
        self.most_held = self.most_held.max(held);
    }

    fn pump_out(&mut self, capacity: usize) -> bool {
        loop {
            let (header, payload) = match self.muxer.next_outgoing() {
                None => return false,
                Some(Outgoing::Control(header)) => (header, Vec::new()),
                Some(Outgoing::Data { id, limit }) => {
                    let mut pair = self.pair.borrow_mut();
                    let count = capacity.min(limit as usize).min(pair.to_vmm.len());
                    if count == 0 {
                        let ended = pair.host_done;
                        drop(pair);
                        self.muxer.update(id, |c| {
                            if ended {
                                c.host_ended();
                            } else {
                                c.host_read_blocks();
                            }
                        });
                        continue;
                    }
                    let bytes = pair.to_vmm.drain(..count).collect();
                    drop(pair);
                    let count = u32::try_from(count).unwrap();
                    (self.muxer.sent(id, count).unwrap(), bytes)
                }
            };
            self.guest.on_packet(&header, &payload);
            return true;
        }
    }

    // ---- what the host does ----

    fn host_write(&mut self, len: usize) {
        let mut pair = self.pair.borrow_mut();
        if pair.host_done || pair.vmm_closed || pair.vmm_deaf {
            return;
        }
        let len = len.min(SOCKET_BUFFER - pair.to_vmm.len());
        pair.to_vmm.extend(self.host_wrote.make(len));
        self.host_wrote.offset += len;
        drop(pair);
        self.event(true, false, false);
    }

    fn host_read(&mut self, len: usize) {
        let mut pair = self.pair.borrow_mut();
        let len = len.min(pair.from_vmm.len());
        let bytes: Vec<u8> = pair.from_vmm.drain(..len).collect();
        drop(pair);
        self.host_read.check(&bytes);
        self.event(false, true, false);
    }

    fn host_end(&mut self) {
        self.pair.borrow_mut().host_done = true;
        self.event(true, false, false);
    }

    fn host_close(&mut self) {
        {
            let mut pair = self.pair.borrow_mut();
            pair.host_done = true;
            pair.host_deaf = true;
            pair.from_vmm.clear();
        }
        self.event(true, true, true);
    }

    // ---- what the guest does ----

    fn guest_write(&mut self, len: usize) {
        let bytes = self.guest_wrote.make(len);
        self.guest_wrote.offset += self.guest.send(&bytes);
    }

    fn guest_read(&mut self, len: usize) {
        let bytes = self.guest.read(len);
        self.guest_read.check(&bytes);
    }

    /// Moves packets and reads on both sides until nothing changes.
    fn run_dry(&mut self) {
        loop {
            let before = (self.host_read.offset, self.guest_read.offset);
            let mut moved = false;
            while self.pump_out(4052) {
                moved = true;
            }
            while self.pump_in() {
                moved = true;
            }
            self.guest_read(usize::MAX);
            self.host_read(usize::MAX);
            if !moved && before == (self.host_read.offset, self.guest_read.offset) {
                return;
            }
        }
    }

    fn is_gone(&self) -> bool {
        self.muxer.get(self.id).is_none() && self.pair.borrow().vmm_closed
    }
}

#[derive(Clone, Debug)]
enum Step {
    HostWrite(usize),
    HostRead(usize),
    GuestWrite(usize),
    GuestRead(usize),
    ToGuest(usize),
    FromGuest,
    HostEnd,
    GuestEnd,
    GuestClose,
    HostClose,
}

fn sizes() -> impl Strategy<Value = usize> {
    prop_oneof![Just(1), 1..100_usize, 1000..70_000_usize]
}

fn traffic() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => sizes().prop_map(Step::HostWrite),
        3 => sizes().prop_map(Step::HostRead),
        3 => sizes().prop_map(Step::GuestWrite),
        3 => sizes().prop_map(Step::GuestRead),
        6 => (1..5000_usize).prop_map(Step::ToGuest),
        6 => Just(Step::FromGuest),
    ]
}

fn anything() -> impl Strategy<Value = Step> {
    prop_oneof![
        60 => traffic(),
        1 => Just(Step::HostEnd),
        1 => Just(Step::GuestEnd),
        1 => Just(Step::GuestClose),
        1 => Just(Step::HostClose),
    ]
}

fn apply(world: &mut World, step: &Step) {
    match *step {
        Step::HostWrite(len) => world.host_write(len),
        Step::HostRead(len) => world.host_read(len),
        Step::GuestWrite(len) => world.guest_write(len),
        Step::GuestRead(len) => world.guest_read(len),
        Step::ToGuest(capacity) => {
            world.pump_out(capacity);
        }
        Step::FromGuest => {
            world.pump_in();
        }
        Step::HostEnd => world.host_end(),
        Step::GuestEnd => world.guest.shutdown(SHUTDOWN_SEND),
        Step::GuestClose => world.guest.close(),
        Step::HostClose => world.host_close(),
    }
    assert!(world.most_held <= BUFFER_SIZE as usize);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// Whatever the order, all bytes arrive once and in order, and a half-close ends only its half.
    #[test]
    fn all_bytes_arrive_in_every_order(
        steps in prop::collection::vec(traffic(), 0..300),
        guest_buffer in prop_oneof![Just(1_u32), 1..3000_u32, Just(64 * 1024), Just(256 * 1024), Just(u32::MAX)],
        host_first in any::<bool>(),
    ) {
        let mut world = World::open(guest_buffer);
        for step in &steps {
            apply(&mut world, step);
        }
        world.run_dry();
        prop_assert_eq!(world.guest_read.offset, world.host_wrote.offset);
        prop_assert_eq!(world.host_read.offset, world.guest_wrote.offset);
        // Each half closes while the other still works.
        if host_first {
            world.host_end();
            world.run_dry();
            prop_assert!(world.guest.at_end() && !world.guest.reset);
            world.guest_write(1000);
            world.run_dry();
            world.guest.shutdown(SHUTDOWN_SEND);
        } else {
            world.guest.shutdown(SHUTDOWN_SEND);
            world.run_dry();
            prop_assert!(world.pair.borrow().vmm_done && !world.pair.borrow().vmm_closed);
            world.host_write(1000);
            world.run_dry();
            world.host_end();
        }
        world.run_dry();
        prop_assert_eq!(world.guest_read.offset, world.host_wrote.offset);
        prop_assert_eq!(world.host_read.offset, world.guest_wrote.offset);
        prop_assert!(world.is_gone());
        prop_assert!(world.guest.at_end());
    }

    /// Ends at any time, in any order, by anyone: nothing arrives wrong, nothing stays behind.
    #[test]
    fn no_order_of_ends_leaves_a_connection_behind(
        steps in prop::collection::vec(anything(), 0..300),
        guest_buffer in prop_oneof![1..3000_u32, Just(256 * 1024)],
    ) {
        let mut world = World::new(guest_buffer);
        for step in &steps {
            apply(&mut world, step);
        }
        world.run_dry();
        world.host_end();
        world.run_dry();
        world.guest.close();
        world.run_dry();
        prop_assert!(world.is_gone(), "{:?}", world.muxer);
        prop_assert_eq!(world.muxer.count(), 0);
    }

    /// Garbage of every kind: no panic, nothing grows, an honest connection beside it lives.
    #[test]
    fn garbage_neither_panics_nor_grows(
        packets in prop::collection::vec(
            (0..4_u64, 0..3_u64, 4998..5003_u32, any::<bool>(), 0..9_u16, 0..3_u16, 0..5_u32,
             any::<u32>(), any::<u32>(), prop_oneof![Just(0_u32), 0..300_000_u32]),
            0..200),
    ) {
        let mut world = World::open(4096);
        for (src_cid, dst_cid, dst_port, ours, op, kind, flags, buf_alloc, fwd_cnt, len) in packets {
            let header = Header {
                src_cid, dst_cid, dst_port, len, op, kind, flags, buf_alloc, fwd_cnt,
                src_port: if ours { PORT } else { 1 },
            };
            if let Some((id, accepted)) = world.muxer.on_packet(&header) {
                prop_assert!(accepted == 0 || accepted == len);
                let bytes = vec![0; accepted as usize];
                world.muxer.update(id, |c| c.hold(&bytes));
            }
        }
        let mut waiting = 0;
        while world.muxer.next_outgoing().is_some() {
            waiting += 1;
        }
        prop_assert!(waiting <= 64 + 4, "{waiting} packets waited");
    }
}

#[test]
fn ten_mebibytes_pass_both_ways_with_one_byte_reads_of_the_guest() {
    const TOTAL: usize = 10 * 1024 * 1024;
    let mut world = World::open(256 * 1024);
    while world.guest_read.offset < TOTAL || world.host_read.offset < TOTAL {
        world.host_write((TOTAL - world.host_wrote.offset).min(30_000));
        world.guest_write((TOTAL - world.guest_wrote.offset).min(65_536));
        while world.pump_out(3700) {}
        while world.pump_in() {}
        for _ in 0..world.guest.received.len() {
            world.guest_read(1);
        }
        world.host_read(7001);
    }
    assert_eq!(world.host_wrote.offset, TOTAL);
    assert_eq!(world.guest_wrote.offset, TOTAL);
}

/// Fault class 22: sender and receiver both wait once the window is used up.
#[test]
fn a_window_used_up_opens_again_when_half_of_it_is_free() {
    let mut world = World::open(256 * 1024);
    while world.guest.room() > 0 {
        world.guest_write(65_536);
    }
    while world.pump_in() {}
    while world.pump_out(4052) {}
    assert!(world.guest.room() < BUFFER_SIZE as usize / 2);
    world.guest.ops.clear();
    let mut taken = 0;
    while !world.guest.ops.contains(&Op::CreditUpdate) {
        world.host_read(1000);
        taken += 1000;
        assert!(taken <= BUFFER_SIZE as usize / 2 + 1000, "no credit update");
        while world.pump_out(4052) {}
    }
    assert!(world.guest.room() >= BUFFER_SIZE as usize / 2);
}

/// A guest that limits its sending to its own small buffer must not wait for half of ours.
#[test]
fn a_guest_with_a_small_buffer_is_told_of_credit_in_time() {
    let mut world = World::open(1000);
    for _ in 0..500 {
        world.guest_write(1000);
        world.run_dry();
    }
    assert_eq!(world.host_read.offset, 500_000);
}

/// Fault class 22: bytes dropped on partial writes.
#[test]
fn what_the_host_does_not_take_is_kept_and_no_more_than_the_window() {
    let mut world = World::open(256 * 1024);
    let mut sent = 0;
    loop {
        let before = world.guest_wrote.offset;
        world.guest_write(65_536);
        while world.pump_in() {}
        while world.pump_out(4052) {}
        if world.guest_wrote.offset == before {
            break;
        }
        sent += 1;
        assert!(sent < 100, "the host never read, and the guest never stopped");
    }
    assert!(world.most_held <= BUFFER_SIZE as usize);
    world.run_dry();
    assert_eq!(world.host_read.offset, world.guest_wrote.offset);
}

#[test]
fn a_guest_that_overruns_its_credit_is_reset() {
    let mut world = World::open(256 * 1024);
    let header = world.guest.header(Op::Data, 0, 60_000);
    let bytes = vec![0; 60_000];
    for _ in 0..6 {
        world.packet(&header, &bytes);
    }
    while world.pump_out(4052) {}
    assert!(world.guest.reset && world.is_gone());
}

#[test]
fn starved_of_credit_it_asks_once_and_then_waits() {
    let mut world = World::open(0);
    world.host_write(100);
    for _ in 0..10 {
        world.pump_out(4052);
    }
    let asked = |world: &World| {
        let ops = world.guest.ops.iter();
        ops.filter(|op| **op == Op::CreditRequest).count()
    };
    assert_eq!(asked(&world), 1);
    // An answer without credit asks for no further question.
    while world.pump_in() {}
    for _ in 0..10 {
        world.pump_out(4052);
    }
    assert_eq!(asked(&world), 1);
    world.guest.buf_alloc = 4096;
    world.guest.push(Op::CreditUpdate, 0, Vec::new());
    world.run_dry();
    assert_eq!(world.guest_read.offset, 100);
}

#[test]
fn the_guest_cannot_connect_outwards() {
    let mut world = World::open(4096);
    let request = Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: 77,
        dst_port: 1024,
        kind: TYPE_STREAM,
        op: Op::Request as u16,
        ..Header::default()
    };
    assert_eq!(world.muxer.on_packet(&request), None);
    let answers: Vec<_> = std::iter::from_fn(|| world.muxer.next_outgoing())
        .filter_map(|out| match out {
            Outgoing::Control(header) if header.op == Op::Reset as u16 => Some(header),
            _ => None,
        })
        .collect();
    assert_eq!(answers.len(), 1);
    assert_eq!((answers[0].src_port, answers[0].dst_port), (1024, 77));
}

#[test]
fn a_flood_of_strays_gets_a_bounded_number_of_resets() {
    let mut world = World::open(4096);
    for src_port in 0..10_000 {
        let stray = Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port,
            dst_port: 1,
            kind: TYPE_STREAM,
            op: Op::Data as u16,
            ..Header::default()
        };
        world.muxer.on_packet(&stray);
    }
    assert_eq!(world.muxer.counters().resets_dropped, 10_000 - 64);
    let answers = std::iter::from_fn(|| world.muxer.next_outgoing()).count();
    assert!(answers <= 64 + 1);
    // A reset is never answered by a reset.
    let mut reset =
        Header { src_cid: CID, dst_cid: HOST_CID, kind: TYPE_STREAM, op: Op::Reset as u16, ..Header::default() };
    for kind in [TYPE_STREAM, 2, 77] {
        reset.kind = kind;
        world.muxer.on_packet(&reset);
    }
    assert_eq!(world.muxer.next_outgoing(), None);
}

#[test]
fn data_after_the_end_is_answered_with_a_reset() {
    let mut world = World::open(4096);
    world.guest.shutdown(SHUTDOWN_SEND);
    world.pump_in();
    let header = world.guest.header(Op::Data, 0, 3);
    world.packet(&header, b"abc");
    world.run_dry();
    assert!(world.guest.reset && world.is_gone());
    assert_eq!(world.host_read.offset, 0);
}

/// The guest's `close` gets its answer at once; what it sent before still reaches a slow host.
#[test]
fn what_was_sent_before_a_close_outlives_it() {
    let mut world = World::open(256 * 1024);
    world.guest_write(65_536);
    world.guest_write(65_536);
    world.guest.close();
    while world.pump_in() {}
    while world.pump_out(4052) {}
    assert!(world.guest.reset, "close waits for its answer");
    assert!(!world.is_gone());
    world.run_dry();
    assert_eq!(world.host_read.offset, 131_072);
    assert!(world.is_gone());
}

/// The host closes with bytes still unread in the guest, and with bytes it never sent on.
#[test]
fn what_the_host_wrote_before_a_close_outlives_it() {
    let mut world = World::open(10_000);
    world.host_write(40_000);
    world.host_close();
    world.run_dry();
    assert_eq!(world.guest_read.offset, 40_000);
    assert!(world.is_gone() && world.guest.at_end());
}

#[test]
fn a_guest_that_stops_reading_ends_the_writes_of_the_host() {
    let mut world = World::open(4096);
    world.guest.shutdown(SHUTDOWN_RECEIVE);
    world.pump_in();
    assert!(world.pair.borrow().vmm_deaf && !world.pair.borrow().vmm_done);
    world.guest_write(1000);
    world.run_dry();
    assert_eq!(world.host_read.offset, 1000);
    world.guest.shutdown(SHUTDOWN_SEND);
    world.run_dry();
    assert!(world.is_gone());
}

#[test]
fn a_refused_connection_is_closed() {
    let mut world = World::new(4096);
    world.pump_out(4096);
    world.guest.out.clear();
    world.guest.push(Op::Reset, 0, Vec::new());
    world.run_dry();
    assert!(world.is_gone());
}

#[test]
fn duplicates_and_answers_to_nothing_reset_the_connection() {
    for op in [Op::Request, Op::Response] {
        let mut world = World::open(4096);
        world.guest.push(op, 0, Vec::new());
        world.run_dry();
        assert!(world.guest.reset && world.is_gone(), "{op:?}");
    }
}

#[test]
fn connections_are_limited_and_ports_are_not_reused_while_in_use() {
    let mut muxer: Muxer<()> = Muxer::new(CID, u32::MAX - 2);
    let mut ids = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        ids.push(muxer.connect((), PORT).unwrap());
    }
    assert!(muxer.connect((), PORT).is_err());
    let ports: std::collections::BTreeSet<u32> = ids.iter().map(|id| id.0).collect();
    assert_eq!(ports.len(), MAX_CONNECTIONS);
    assert!(!ports.contains(&u32::MAX) && ports.contains(&1024));
    assert!(ports.iter().all(|port| *port >= 1024));
    // Closing before the guest was asked leaves nothing in line.
    for id in &ids {
        muxer.update(*id, |c| c.on_host_event(false, false, true));
    }
    assert_eq!((muxer.count(), muxer.has_turns()), (0, false));
}

#[test]
fn a_reset_keeps_only_what_the_driver_never_heard_of() {
    let mut world = World::open(4096);
    let held = Rc::new(RefCell::new(Pair::default()));
    let late = world.muxer.connect(VmmEnd(Rc::clone(&held)), PORT).unwrap();
    world.muxer.reset();
    assert!(world.is_gone());
    assert!(world.muxer.get(late).is_some() && !held.borrow().vmm_closed);
    match world.muxer.next_outgoing() {
        Some(Outgoing::Control(header)) => assert_eq!(header.op, Op::Request as u16),
        other => panic!("{other:?}"),
    }
}

/// One talkative connection does not keep the others from their turn.
#[test]
fn turns_go_round() {
    let mut muxer: Muxer<u32> = Muxer::new(CID, 5000);
    let ids: Vec<_> = (0..3).map(|n| muxer.connect(n, PORT).unwrap()).collect();
    while muxer.next_outgoing().is_some() {}
    for id in &ids {
        let response = Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port: PORT,
            dst_port: id.0,
            kind: TYPE_STREAM,
            op: Op::Response as u16,
            buf_alloc: 1 << 20,
            ..Header::default()
        };
        muxer.on_packet(&response);
    }
    let mut order = Vec::new();
    for _ in 0..9 {
        let Some(Outgoing::Data { id, .. }) = muxer.next_outgoing() else {
            panic!("no turn");
        };
        muxer.sent(id, 100);
        order.push(id);
    }
    assert_eq!(order, [ids.clone(), ids.clone(), ids].concat());
}
