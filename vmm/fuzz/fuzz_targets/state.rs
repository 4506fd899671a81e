//! The state of a machine: the body of a file, and what its transports make of it.
#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use vm_memory::MmapRegion;
use vmm::memory::{Ram, device_pages, guest_ram};
use vmm::state::MachineState;
use vmm::virtio::device::Device;
use vmm::virtio::mmio::{RegisterPage, Transport};
use vmm::virtio::rng::Rng;
use vmm::virtio::vsock::VsockDevice;
use vmm_sys_util::eventfd::EventFd;

/// Guest memory is never unmapped, so all runs share it.
static RAM: LazyLock<Ram> = LazyLock::new(|| guest_ram(4 << 20).expect("memory"));
static PAGES: LazyLock<Arc<MmapRegion<()>>> = LazyLock::new(|| Arc::new(device_pages(0x1000).expect("a page")));

fn eventfd() -> EventFd {
    EventFd::new(0o4000).expect("an eventfd")
}

/// A device of this kind, if it is one that needs nothing of the host.
fn device(id: u32) -> Option<Device> {
    let ram = RAM.clone();
    match id {
        4 => Some(Device::Rng(Rng::new(ram, eventfd(), eventfd()))),
        19 => Some(Device::Vsock(VsockDevice::new(ram, eventfd(), vec![eventfd()]).expect("a device"))),
        _ => None,
    }
}

fuzz_target!(|body: &[u8]| {
    let mut file = b"BHKSTATE\x01\0\0\0".to_vec();
    file.extend((body.len() as u32).to_le_bytes());
    file.extend(body);
    let Ok(state) = MachineState::from_bytes(&file) else { return };
    let written = state.to_bytes();
    assert_eq!(written.len(), file.len());
    assert_eq!(MachineState::from_bytes(&written).expect("what was written is read").to_bytes(), written);
    for saved in state.devices {
        let Some(device) = device(saved.id) else { continue };
        let mut transport = Transport::new(device, RegisterPage::new(PAGES.clone(), 0), RAM.clone());
        if transport.restore(saved.transport.clone()).is_err() {
            continue;
        }
        assert_eq!(transport.save().status, saved.transport.status);
        transport.device.resume();
        match &mut transport.device {
            Device::Rng(rng) => drop(rng.process()),
            Device::Vsock(vsock) => drop(vsock.process()),
            _ => {}
        }
        let _ = transport.save();
    }
});
