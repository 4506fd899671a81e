//! How a device interrupts the guest.
//!
//! An irqfd (an eventfd that KVM waits on) suits devices that interrupt now and then. For a pin of the I/O APIC the kernel
//! injects it from a work queue, so each one costs two switches of threads, and some time after it was raised it may not
//! have arrived. A disk's threads tell KVM themselves: it has arrived when the call returns, which a save relies on.

use std::sync::Arc;

use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

/// Something that interrupts the guest.
pub trait Interrupt: std::fmt::Debug + Send + Sync {
    /// Does it. Never blocks, and cannot fail in a way that anybody could mend.
    fn raise(&self);
}

impl Interrupt for EventFd {
    fn raise(&self) {
        // The only failure is a full counter: the interrupt is pending already.
        let _ = self.write(1);
    }
}

/// An edge-triggered pin of KVM's I/O APIC.
#[derive(Debug)]
pub struct Pin {
    vm: Arc<VmFd>,
    gsi: u32,
}

impl Pin {
    /// Pin `gsi`, which nothing else uses.
    pub fn new(vm: Arc<VmFd>, gsi: u32) -> Self {
        Self { vm, gsi }
    }
}

impl Interrupt for Pin {
    /// Lowers the pin, then raises it, and leaves it so. Threads that share a pin need no lock: if it is up already when one
    /// comes to raise it, another raised it after this one had lowered it, so in any case an edge follows what the thread
    /// has to tell. The other way round, a thread that is preempted between the two would swallow the others' edges.
    fn raise(&self) {
        // KVM takes any level of a pin that exists.
        let _ = self.vm.set_irq_line(self.gsi, false);
        let _ = self.vm.set_irq_line(self.gsi, true);
    }
}
