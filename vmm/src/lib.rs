//! The virtual machine monitor: boots an unmodified Linux kernel on KVM, with virtio-mmio devices.
//!
//! Threads: one event loop, which owns every device; one thread for each vCPU, which owns no device and takes no
//! lock; one thread for each disk queue, which is the only one that touches a disk. The VMM opens no path: what
//! it uses arrives as descriptors over the control socket (see the crate `vmm-control`).

pub mod acpi;
pub mod boot;
pub mod clock;
pub mod confine;
pub mod cpuid;
pub mod event_loop;
pub mod generation;
pub mod image;
pub mod interrupt;
pub mod layout;
mod live;
pub mod machine;
pub mod mailbox;
pub mod memory;
pub mod pause;
pub mod restore;
mod save;
pub mod serial;
pub mod state;
pub mod vcpu;
pub mod virtio;
pub mod vsock;
mod wiring;
mod writer;
