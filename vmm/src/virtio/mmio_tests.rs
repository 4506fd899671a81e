#![allow(clippy::arithmetic_side_effects, clippy::cast_possible_truncation)]

use std::sync::Arc;

use proptest::prelude::*;
use virtio_queue::QueueState;
use vmm_sys_util::eventfd::EventFd;

use super::*;
use crate::memory::{device_pages, guest_ram};
use crate::virtio::rng::Rng;

impl RegisterPage {
    /// What the guest would read.
    fn load(&self, offset: u64) -> u32 {
        self.pages.as_volatile_slice().load(self.start + offset as usize, Ordering::Acquire).unwrap()
    }
}

const RAM: u64 = 4 << 20;

/// An entropy device in reset, its page, and its interrupt.
fn transport() -> (Transport, RegisterPage, EventFd) {
    let ram = guest_ram(RAM).unwrap();
    let pages = Arc::new(device_pages(0x1000).unwrap());
    let page = RegisterPage::new(pages, 0);
    let eventfd = || EventFd::new(libc::EFD_NONBLOCK).unwrap();
    let interrupt = eventfd();
    let device = Device::Rng(Rng::new(ram.clone(), interrupt.try_clone().unwrap(), eventfd()));
    (Transport::new(device, page.clone(), ram), page, interrupt)
}

/// A driver that does everything right, up to but without the last step.
fn set_up(transport: &mut Transport) {
    for (offset, value) in [
        (STATUS, 0),
        (STATUS, 1),
        (STATUS, 3),
        (DRIVER_FEATURES_SEL, 1),
        (DRIVER_FEATURES, 1),
        (DRIVER_FEATURES_SEL, 0),
        (DRIVER_FEATURES, 0),
        (STATUS, 11),
        (QUEUE_SEL, 0),
        (QUEUE_SIZE, 16),
        (QUEUE_DESC, 0x1000),
        (QUEUE_AVAIL, 0x2000),
        (QUEUE_USED, 0x3000),
        (QUEUE_READY, 1),
    ] {
        assert_eq!(transport.write(offset, value), Written::Done);
    }
}

#[test]
fn a_driver_that_follows_the_rules_gets_a_running_device() {
    let (mut transport, page, interrupt) = transport();
    assert_eq!(page.load(MAGIC), u32::from_le_bytes(*b"virt"));
    assert_eq!((page.load(VERSION), page.load(DEVICE_ID)), (2, 4));
    transport.write(DEVICE_FEATURES_SEL, 1);
    assert_eq!(page.load(DEVICE_FEATURES), 1, "version 1 alone");
    set_up(&mut transport);
    assert_eq!((page.load(QUEUE_SIZE_MAX), page.load(QUEUE_READY)), (64, 1));
    transport.write(STATUS, 15);
    assert_eq!(page.load(STATUS), 15);
    assert_eq!(page.load(INTERRUPT_STATUS), 1, "always, so that reading it costs no exit");
    assert!(interrupt.read().is_err(), "nothing to report");
}

#[test]
fn status_only_goes_forward_one_step_at_a_time() {
    let (mut transport, page, _) = transport();
    for (wrong, now) in [(3, 0), (15, 0), (2, 0)] {
        transport.write(STATUS, wrong);
        assert_eq!(page.load(STATUS), now);
    }
    transport.write(STATUS, 1);
    transport.write(STATUS, 11);
    assert_eq!(page.load(STATUS), 1);
    transport.write(STATUS, 3);
    transport.write(STATUS, 1);
    assert_eq!(page.load(STATUS), 3, "bits are not cleared but by a reset");
    transport.write(STATUS, 0);
    assert_eq!(page.load(STATUS), 0);
}

#[test]
fn features_that_were_not_offered_are_refused() {
    for (half, value) in [(0, 1 << 29), (0, 1 << 28), (1, 1 << 2 | 1), (1, 0)] {
        let (mut transport, page, _) = transport();
        transport.write(STATUS, 1);
        transport.write(STATUS, 3);
        transport.write(DRIVER_FEATURES_SEL, 1);
        transport.write(DRIVER_FEATURES, 1);
        transport.write(DRIVER_FEATURES_SEL, half);
        transport.write(DRIVER_FEATURES, value);
        transport.write(STATUS, 11);
        assert_eq!(page.load(STATUS), 3, "{half} {value:#x}");
    }
}

/// CVE-2026-5747: a queue that is rewritten under a running device.
#[test]
fn a_running_device_keeps_its_queues() {
    let (mut transport, _, _) = transport();
    set_up(&mut transport);
    let shaped = transport.save().queues;
    transport.write(STATUS, 15);
    for offset in (0..0x100).step_by(4).filter(|offset| *offset != STATUS) {
        for value in [0, 1, 2, 0xffff_ffff] {
            transport.write(offset, value);
        }
    }
    let after = transport.save();
    assert_eq!((after.status, after.driver_features), (15, 1 << 32));
    assert_eq!(after.queues, shaped);
}

/// A device that is started twice would serve its queues from their beginning again, and a disk would wait at its next
/// reset for more queues than it lent out.
#[test]
fn a_running_device_is_not_started_again() {
    let (mut transport, _, _) = transport();
    set_up(&mut transport);
    transport.write(STATUS, 15);
    let ram = transport.ram.clone();
    // One buffer of 16 bytes, for the device to fill.
    for (at, word) in [(0x1000, 0x4000), (0x1008, 16 | 2 << 32), (0x2000, 1 << 16)] {
        ram.write_obj::<u64>(word, vm_memory::GuestAddress(at)).unwrap();
    }
    for served in [1, 0] {
        ram.write_obj::<u16>(0, vm_memory::GuestAddress(0x3002)).unwrap();
        let Device::Rng(rng) = &mut transport.device else { unreachable!() };
        rng.process().unwrap();
        assert_eq!(ram.read_obj::<u16>(vm_memory::GuestAddress(0x3002)).unwrap(), served);
        transport.write(STATUS, 15);
    }
}

#[test]
fn a_ready_queue_keeps_its_shape() {
    let (mut transport, _, _) = transport();
    set_up(&mut transport);
    let before = transport.save().queues;
    transport.write(QUEUE_SIZE, 32);
    transport.write(QUEUE_DESC, 0x8000);
    transport.write(QUEUE_READY, 0);
    assert_eq!(transport.save().queues, before);
}

/// Firecracker 1.5: a ring partly outside memory crashed at activation.
#[test]
fn a_queue_that_is_not_wholly_in_memory_needs_a_reset() {
    let end = u32::try_from(RAM).unwrap();
    for (register, value) in [
        (QUEUE_SIZE, 0),
        (QUEUE_SIZE, 3),
        (QUEUE_SIZE, 128),
        (QUEUE_SIZE, 0x1_0010),
        (QUEUE_DESC, 0x1008),
        (QUEUE_AVAIL, 0x2001),
        (QUEUE_USED, 0x3002),
        (QUEUE_DESC, end),
        (QUEUE_DESC, end - 0x80),
        (QUEUE_AVAIL, end - 2),
        (QUEUE_USED, end - 4),
        (QUEUE_USED + 4, 1),
        (QUEUE_DESC + 4, 0xffff_ffff),
    ] {
        let (mut transport, page, interrupt) = transport();
        set_up(&mut transport);
        let queue = &mut transport.state.queues[0];
        queue.ready = false;
        transport.write(register, value);
        transport.write(QUEUE_READY, 1);
        transport.write(STATUS, 15);
        assert_eq!(page.load(STATUS), 11 | 64, "{register:#x} {value:#x}");
        assert_eq!(page.load(INTERRUPT_STATUS), 3);
        assert!(interrupt.read().is_ok(), "the driver is told");
        transport.write(STATUS, 0);
        assert_eq!((page.load(STATUS), page.load(INTERRUPT_STATUS)), (0, 1));
        set_up(&mut transport);
        transport.write(STATUS, 15);
        assert_eq!(page.load(STATUS), 15, "a reset brings it back");
    }
}

#[test]
fn a_device_without_its_queue_does_not_run() {
    let (mut transport, page, _) = transport();
    set_up(&mut transport);
    transport.state.queues[0] = QueueState { max_size: 64, ..QueueState::default() };
    transport.write(STATUS, 15);
    assert_eq!(page.load(STATUS), 11 | 64);
}

#[test]
fn a_driver_that_gives_up_can_start_again() {
    let (mut transport, page, _) = transport();
    set_up(&mut transport);
    transport.write(STATUS, 128);
    assert_eq!(page.load(STATUS), 11 | 128);
    transport.write(STATUS, 15);
    assert_eq!(page.load(STATUS), 11 | 128, "no way forward");
    set_up(&mut transport);
    transport.write(STATUS, 15);
    assert_eq!(page.load(STATUS), 15);
}

proptest! {
    /// Whatever is written, the device never runs with a queue that was not checked, and never forgets what it is.
    #[test]
    fn no_sequence_of_writes_breaks_the_rules(
        writes in prop::collection::vec((0u64..0x140, prop_oneof![0u32..20, any::<u32>()]), 0..200),
    ) {
        let (mut transport, page, _) = transport();
        for (offset, value) in writes {
            transport.write(offset, value);
            let state = transport.save();
            prop_assert_eq!(page.load(MAGIC), u32::from_le_bytes(*b"virt"));
            prop_assert_eq!(page.load(STATUS), state.status);
            prop_assert!(page.load(INTERRUPT_STATUS) & 1 == 1);
            if state.status & 15 == 15 {
                let sound = state.queues.iter().all(|queue| !queue.ready || checked_queue(queue, &transport.ram).is_some());
                prop_assert!(sound);
            }
        }
    }
}
