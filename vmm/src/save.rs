//! Saves a paused machine: writes it out, or has a copy of this process do that ([`crate::live`]).
//!
//! Whatever can fail comes first, and what it did is of no consequence: the disks go on in their new layers only when all else
//! is done, by an exchange that cannot fail. So after a failure the machine is what it was, but that its disks were flushed.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use kvm_bindings::kvm_irqchip;
use snapshot::disk::{Disk, DiskError, LayerFiles};
use vmm_control::Saved;

use crate::clock::Stopped;
use crate::event_loop::EventLoop;
use crate::image::{self, ImageError};
use crate::machine::VSOCK;
use crate::state::vcpu::{CallError, VcpuState};
use crate::state::{CHIPS, DeviceState, MachineState};
use crate::virtio::device::Device;
use crate::vsock::State as VsockState;
use crate::writer::WriterError;

/// Why a machine was not saved.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SaveError {
    /// It runs.
    #[error("the machine is not paused")]
    NotPaused,
    /// Memory is being written.
    #[error("another save of the machine is still being written")]
    Busy,
    /// Descriptors do not match the machine.
    #[error("save request: {0} descriptors, where this machine's takes {1}")]
    Descriptors(usize, usize),
    /// A file that has something in it already.
    #[error("{0} file: it is not empty")]
    NotEmpty(&'static str),
    /// The state file.
    #[error("state file: {0}")]
    State(#[from] io::Error),
    /// Guest memory or its file.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A vCPU.
    #[error("vCPU {0}: {1}")]
    Vcpu(usize, CallError),
    /// The interrupt controllers.
    #[error("KVM: KVM_GET_IRQCHIP: {0}")]
    Chips(kvm_ioctls::Error),
    /// A disk.
    #[error("disk {0}: {1}")]
    Disk(usize, DiskError),
    /// The copy of this process that writes while the machine goes on.
    #[error(transparent)]
    Writer(#[from] WriterError),
    /// It cannot be waited for.
    #[error("the process that would write the memory: {0}")]
    Watch(io::Error),
}

/// A machine's state, and what else a save has brought about when nothing of it counts yet.
pub(crate) struct Taken {
    pub(crate) state: (Vec<u8>, File),
    pub(crate) memory: File,
    pub(crate) pagemap: File,
    /// How the disks will go on.
    pub(crate) disks: Vec<(usize, Disk)>,
    /// When the disks had been flushed.
    pub(crate) flushed: Instant,
}

impl EventLoop {
    /// Saves while the machine stands still; `descriptors` are in the order of [`vmm_control::Request::Save`].
    pub(crate) fn save(&mut self, descriptors: Vec<OwnedFd>) -> Result<Saved, SaveError> {
        let taken = self.take(descriptors)?;
        let (bytes, state) = &taken.state;
        state.write_all_at(bytes, 0)?;
        let state_bytes = bytes.len() as u64;
        let memory_bytes =
            image::Writer::default().write(&self.machine.made_of.memory, &taken.pagemap, &taken.memory)?;
        self.switch(taken.disks);
        Ok(Saved { state_bytes, memory_bytes })
    }

    /// Does all that can fail, short of the writing.
    pub(crate) fn take(&mut self, descriptors: Vec<OwnedFd>) -> Result<Taken, SaveError> {
        let (true, Some(stopped)) = (self.pause.is_complete(), self.pause.stopped.clone()) else {
            return Err(SaveError::NotPaused);
        };
        if self.writer.is_some() {
            return Err(SaveError::Busy);
        }
        let found = descriptors.len();
        let mut files = descriptors.into_iter().map(File::from);
        let writable = self.disks().filter(|(_, block)| block.is_writable()).count();
        let needed = writable.saturating_mul(2).saturating_add(3);
        let (Some(state), Some(memory), Some(pagemap), true) =
            (files.next(), files.next(), files.next(), found == needed)
        else {
            return Err(SaveError::Descriptors(found, needed));
        };
        for (file, name) in [(&state, "state"), (&memory, "memory")] {
            if file.metadata()?.len() != 0 {
                return Err(SaveError::NotEmpty(name));
            }
        }
        let disks = self.cut(files)?;
        let flushed = Instant::now();
        let bytes = self.state(stopped)?.to_bytes();
        Ok(Taken { state: (bytes, state), memory, pagemap, disks, flushed })
    }

    /// Has the disks go on in their new layers.
    pub(crate) fn switch(&mut self, disks: Vec<(usize, Disk)>) {
        for (device, disk) in disks {
            if let Some(Device::Block(block)) = self.machine.transports.get_mut(device).map(|known| &mut known.device) {
                block.replace_disk(disk);
            }
        }
    }

    /// The disks, with the indices of their devices.
    fn disks(&self) -> impl Iterator<Item = (usize, &crate::virtio::block::Block)> {
        self.machine.transports.iter().enumerate().filter_map(|(index, transport)| match &transport.device {
            Device::Block(block) => Some((index, block)),
            _ => None,
        })
    }

    /// Each writable disk as it will go on, with the index of its device.
    fn cut(&self, mut files: impl Iterator<Item = File>) -> Result<Vec<(usize, Disk)>, SaveError> {
        let mut cut = Vec::new();
        for (number, (device, block)) in self.disks().enumerate().filter(|(_, (_, block))| block.is_writable()) {
            let (Some(data), map) = (files.next(), files.next()) else { break };
            let disk = block.cut(LayerFiles { data, map }).map_err(|error| SaveError::Disk(number, error))?;
            cut.push((device, disk));
        }
        Ok(cut)
    }

    /// Everything but memory and disks. The vCPUs first, since delivering what waits may change the interrupt controllers.
    fn state(&self, clock: Stopped) -> Result<MachineState, SaveError> {
        let machine = &self.machine;
        let made_of = &machine.made_of;
        let take = |(index, (parked, cpuid)): (usize, (&crate::pause::Parked, &Vec<_>))| {
            VcpuState::take(&parked.vcpu, cpuid, &made_of.msrs).map_err(|error| SaveError::Vcpu(index, error))
        };
        let vcpus = self.pause.vcpus.iter().zip(&made_of.cpuid).enumerate().map(take).collect::<Result<_, _>>()?;
        let chip = |chip_id| {
            let mut chip = kvm_irqchip { chip_id, ..Default::default() };
            machine.vm.get_irqchip(&mut chip).map(|()| chip).map_err(SaveError::Chips)
        };
        let chips = (0..CHIPS).map(chip).collect::<Result<_, _>>()?;
        let device = |transport: &crate::virtio::mmio::Transport| DeviceState {
            id: transport.device.id(),
            transport: transport.save(),
        };
        let vsock = match machine.transports.get(VSOCK).map(|transport| &transport.device) {
            Some(Device::Vsock(device)) => device.save(),
            _ => VsockState { next_host_port: 0, reset_owed: true },
        };
        Ok(MachineState {
            facts: made_of.facts.clone(),
            vcpus,
            chips,
            clock,
            devices: machine.transports.iter().map(device).collect(),
            vsock,
            serial: machine.shared.serial.as_ref().map(crate::serial::Serial::save),
        })
    }
}
