//! Every device, saved and restored behind its transport.
#![allow(clippy::arithmetic_side_effects, clippy::cast_possible_truncation)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use snapshot::disk::{Disk, LayerFiles, create_layer};
use virtio_queue::QueueState;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::block::{Backing, Block, Counters};
use super::device::Device;
use super::mmio::{RegisterPage, Transport, TransportError, TransportState, Written};
use super::net::Net;
use super::rng::Rng;
use super::vsock::VsockDevice;
use crate::mailbox::{Inbox, Message, mailbox};
use crate::memory::{Ram, device_pages, guest_ram};

const MEMORY: u64 = 8 << 20;
const KINDS: [&str; 4] = ["block", "vsock", "rng", "net"];

struct Machine {
    transport: Transport,
    inbox: Inbox,
    interrupt: EventFd,
    /// Of a network interface's socket.
    _other: Option<std::os::fd::OwnedFd>,
}

/// A device of a kind in reset.
fn machine(kind: &str, ram: &Ram) -> Machine {
    let eventfd = |flags| EventFd::new(flags).unwrap();
    let kicks = |count: usize| (0..count).map(|_| eventfd(libc::EFD_NONBLOCK)).collect::<Vec<_>>();
    let interrupt = eventfd(libc::EFD_NONBLOCK);
    let raise = interrupt.try_clone().unwrap();
    let (mailbox, inbox) = mailbox().unwrap();
    let mut other = None;
    let device = match kind {
        "block" => {
            let (data, map) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
            create_layer(&data, &map, 1 << 20).unwrap();
            let backing = Backing {
                disk: Arc::new(Disk::open(vec![LayerFiles { data, map: Some(map) }], false).unwrap()),
                device: 0,
                index: 0,
                id: [0; 20],
                ram: ram.clone(),
                interrupt: Arc::new(raise),
                mailbox,
                counters: Arc::new(Counters::default()),
            };
            Device::Block(Block::new(backing, false, (0..2).map(|_| eventfd(0)).collect()).unwrap())
        }
        "vsock" => Device::Vsock(VsockDevice::new(ram.clone(), raise, kicks(3)).unwrap()),
        "rng" => Device::Rng(Rng::new(ram.clone(), raise, kicks(1).pop().unwrap())),
        _ => {
            let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
            other = Some(pair.1);
            Device::Net(Net::new(ram.clone(), raise, kicks(2), [2, 0, 0, 0, 0, 2], pair.0))
        }
    };
    let page = RegisterPage::new(Arc::new(device_pages(0x1000).unwrap()), 0);
    Machine { transport: Transport::new(device, page, ram.clone()), inbox, interrupt, _other: other }
}

/// A driver that sets every queue up.
fn set_up(transport: &mut Transport) {
    let queues = transport.device.queue_sizes().len() as u32;
    let mut write = |offset, value| assert_eq!(transport.write(offset, value), Written::Done);
    for (offset, value) in [(0x70, 0), (0x70, 1), (0x70, 3), (0x24, 1), (0x20, 1), (0x70, 11)] {
        write(offset, value);
    }
    for queue in 0..queues {
        let at = 0x10_0000 * (queue + 1);
        for (offset, value) in
            [(0x30, queue), (0x38, 16), (0x80, at), (0x90, at + 0x4000), (0xa0, at + 0x8000), (0x44, 1)]
        {
            write(offset, value);
        }
    }
    write(0x70, 15);
}

impl Machine {
    fn pause(&mut self) {
        let mut complete = self.transport.device.pause();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !complete {
            assert!(Instant::now() < deadline, "the device does not pause");
            for message in self.inbox.batch() {
                if let (Message::QueuePaused { index, queue, .. }, Device::Block(block)) =
                    (message, &mut self.transport.device)
                {
                    block.paused(index, queue);
                    complete = !block.is_pausing();
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn every_device_goes_on_where_it_was_saved() {
    for kind in KINDS {
        let ram = guest_ram(MEMORY).unwrap();
        let mut first = machine(kind, &ram);
        set_up(&mut first.transport);
        first.pause();
        let saved = first.transport.save();
        assert_eq!(saved.status, 15, "{kind}");
        assert_eq!(saved.served, (1 << saved.queues.len()) - 1, "{kind}");
        let mut second = machine(kind, &ram);
        second.transport.restore(saved.clone()).unwrap();
        // A restored device is paused: it can be saved at once, and has not looked at anything.
        assert_eq!(second.transport.save(), saved, "{kind}");
        assert!(second.interrupt.read().is_err(), "{kind}");
        second.transport.device.resume();
        assert!(second.interrupt.read().is_ok(), "{kind}: the guest is told once, whatever it knows");
        second.pause();
        assert_eq!(second.transport.save(), saved, "{kind}");
        // The first goes on as well.
        first.transport.device.resume();
        first.pause();
        assert_eq!(first.transport.save(), saved, "{kind}");
    }
}

/// The last buffers were offered, and the kick for them lost with the machine that was saved.
#[test]
fn what_was_offered_before_is_served_without_a_kick() {
    let ram = guest_ram(MEMORY).unwrap();
    let mut first = machine("rng", &ram);
    set_up(&mut first.transport);
    let saved = first.transport.save();
    for (at, word) in [(0x10_0000, 0x4000), (0x10_0008, 16 | 2 << 32), (0x10_4000, 1 << 16)] {
        ram.write_obj::<u64>(word, GuestAddress(at)).unwrap();
    }
    let mut second = machine("rng", &ram);
    second.transport.restore(saved).unwrap();
    second.transport.device.resume();
    let Device::Rng(rng) = &mut second.transport.device else { unreachable!() };
    rng.process().unwrap();
    assert_eq!(ram.read_obj::<u16>(GuestAddress(0x10_8002)).unwrap(), 1);
    assert_eq!(second.transport.save().queues.first().map(|queue| (queue.next_avail, queue.next_used)), Some((1, 1)));
}

#[test]
fn a_device_that_the_guest_broke_stays_broken() {
    let ram = guest_ram(MEMORY).unwrap();
    let mut first = machine("rng", &ram);
    set_up(&mut first.transport);
    ram.write_obj(999u16, GuestAddress(0x10_4002)).unwrap();
    let Device::Rng(rng) = &mut first.transport.device else { unreachable!() };
    rng.process().unwrap_err();
    first.transport.needs_reset();
    let saved = first.transport.save();
    assert_eq!((saved.status, saved.served), (15 | 64, 0));
    let mut second = machine("rng", &ram);
    second.transport.restore(saved).unwrap();
    second.transport.device.resume();
    let Device::Rng(rng) = &mut second.transport.device else { unreachable!() };
    rng.process().unwrap();
    set_up(&mut second.transport);
    assert_eq!(second.transport.save().status, 15, "until the driver resets it");
}

#[test]
fn a_state_that_no_driver_can_bring_about_is_refused() {
    let ram = guest_ram(MEMORY).unwrap();
    let mut first = machine("net", &ram);
    set_up(&mut first.transport);
    let sound = first.transport.save();
    let refused = |change: &dyn Fn(&mut TransportState)| {
        let mut state = sound.clone();
        change(&mut state);
        machine("net", &ram).transport.restore(state).unwrap_err()
    };
    assert_eq!(refused(&|state| state.status = 7), TransportError::Status(7));
    assert_eq!(refused(&|state| state.status = 11), TransportError::Status(11));
    assert_eq!(
        refused(&|state| state.driver_features = 1 << 32 | 1 << 29),
        TransportError::Features(1 << 32 | 1 << 29)
    );
    assert_eq!(refused(&|state| state.driver_features = 0), TransportError::Features(0));
    assert_eq!(refused(&|state| state.queues.truncate(1)), TransportError::Queues);
    assert_eq!(refused(&|state| state.queues[0].max_size = 512), TransportError::Queues);
    assert_eq!(refused(&|state| state.served = 7), TransportError::Queue(2));
    assert_eq!(refused(&|state| state.served = 1), TransportError::Queues);
    assert_eq!(refused(&|state| state.queues[1].ready = false), TransportError::Queue(1));
    assert_eq!(refused(&|state| state.queues[1].size = 3), TransportError::Queue(1));
    assert_eq!(refused(&|state| state.queues[1].used_ring = MEMORY - 8), TransportError::Queue(1));
    assert_eq!(refused(&|state| state.queues[0].desc_table = u64::MAX - 15), TransportError::Queue(0));
}

fn any_queue() -> impl Strategy<Value = QueueState> {
    let address = || prop_oneof![(0..MEMORY / 16).prop_map(|at| at * 16), any::<u64>()];
    let size = || prop_oneof![Just(16u16), Just(256), any::<u16>()];
    (size(), size(), any::<(u16, u16, bool)>(), address(), address(), address()).prop_map(
        |(max_size, size, (next_avail, next_used, ready), desc_table, avail_ring, used_ring)| QueueState {
            max_size,
            size,
            next_avail,
            next_used,
            event_idx_enabled: false,
            ready,
            desc_table,
            avail_ring,
            used_ring,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    /// Whatever is restored, the device works or says that it is broken.
    #[test]
    fn no_state_harms_a_device(
        kind in 1..KINDS.len(),
        status in prop_oneof![Just(15u32), Just(15 | 64), any::<u32>()],
        features in prop_oneof![Just(1u64 << 32), any::<u64>()],
        served in 0u32..8,
        queues in prop::collection::vec(any_queue(), 3),
        sels in any::<(u32, u32, u32)>(),
        ring in any::<u16>(),
    ) {
        let ram = guest_ram(MEMORY).unwrap();
        let mut machine = machine(KINDS[kind], &ram);
        let mut queues = queues;
        let sizes = machine.transport.device.queue_sizes();
        queues.truncate(sizes.len());
        for (queue, size) in queues.iter_mut().zip(sizes) {
            queue.max_size = size;
            if queue.avail_ring < MEMORY - 4 {
                ram.write_obj(ring, GuestAddress(queue.avail_ring + 2)).unwrap();
            }
        }
        let state = TransportState {
            status,
            device_features_sel: sels.0,
            driver_features_sel: sels.1,
            driver_features: features,
            queue_sel: sels.2,
            queues,
            served,
        };
        if machine.transport.restore(state).is_ok() {
            machine.transport.device.resume();
            match &mut machine.transport.device {
                Device::Vsock(device) => drop(device.process()),
                Device::Rng(device) => drop(device.process()),
                Device::Net(device) => drop(device.process()),
                Device::Block(_) => unreachable!(),
            }
            drop(machine.transport.save());
        }
    }
}
