//! The generation id: 16 random bytes that are new in every machine and at every restore (Microsoft, "Virtual Machine Generation
//! ID"). A guest's kernel that is told of a change reseeds its random generator, so that machines that go on from one snapshot draw
//! different numbers.

use std::io;
use std::sync::Arc;

use kvm_ioctls::VmFd;
use rustix::rand::{GetRandomFlags, getrandom};
use vm_memory::{Bytes, GuestAddress};

use crate::interrupt::{Interrupt, Pin};
use crate::layout;
use crate::memory::Ram;

/// Writes a new one.
pub fn renew(ram: &Ram) -> io::Result<()> {
    let mut id = [0; 16];
    // So few bytes come whole, or not at all.
    getrandom(&mut id, GetRandomFlags::empty())?;
    ram.write_slice(&id, GuestAddress(layout::GENERATION_ID)).map_err(io::Error::other)
}

/// Tells the guest that it changed. After the interrupt controllers have their state, which has no room for this.
pub fn tell(vm: &Arc<VmFd>) {
    Pin::new(Arc::clone(vm), layout::GENERATION_GSI).raise();
}
