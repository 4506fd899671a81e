//! Standing still and going on.
//!
//! First the vCPUs: each leaves the guest with nothing pending and lends its descriptor. Until the last has, the loop goes on
//! as always, since a vCPU may wait for it. Then the devices bring to an end what they hold, and nothing of the guest's changes any
//! more. Going on is one path, for a paused machine and a restored one: clocks, devices ([`Device::resume`]), vCPUs.

use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::Instant;

use kvm_ioctls::VcpuFd;
use virtio_queue::Queue;
use vmm_control::{Event, StopReason};

use crate::clock::Stopped;
use crate::event_loop::EventLoop;
use crate::virtio::device::Device;

/// A vCPU that lent its descriptor.
#[derive(Debug)]
pub(crate) struct Parked {
    id: u8,
    pub(crate) vcpu: VcpuFd,
    back: Sender<VcpuFd>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Phase {
    #[default]
    Running,
    /// Some vCPUs have not left the guest.
    Vcpus,
    /// Some devices hold something.
    Devices,
    Paused,
}

/// How far a pause has come.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    phase: Phase,
    /// In the order of their ids, once all are there.
    pub(crate) vcpus: Vec<Parked>,
    /// The guest's clocks when the last vCPU had left the guest.
    pub(crate) stopped: Option<Stopped>,
    /// Go on as soon as the pause is complete.
    called_off: bool,
    /// When it was asked for, and when it was complete.
    pub(crate) since: Option<(Instant, Instant)>,
}

impl Pause {
    /// Whether no vCPU runs.
    pub(crate) fn stands_still(&self) -> bool {
        matches!(self.phase, Phase::Devices | Phase::Paused)
    }

    /// Whether nothing of the guest's changes.
    pub(crate) fn is_complete(&self) -> bool {
        self.phase == Phase::Paused
    }

    /// Gives the vCPUs their descriptors back.
    pub(crate) fn let_go(&mut self) {
        self.phase = Phase::Running;
        for Parked { vcpu, back, .. } in self.vcpus.drain(..) {
            // A thread that is not there ended the machine, and says so.
            let _ = back.send(vcpu);
        }
    }
}

impl EventLoop {
    pub(crate) fn begin_pause(&mut self) {
        match self.pause.phase {
            Phase::Running => {
                self.pause.phase = Phase::Vcpus;
                let now = Instant::now();
                self.pause.since = Some((now, now));
                self.machine.shared.pausing.store(true, Ordering::Release);
                for vcpu in &self.machine.vcpus {
                    vcpu.kick();
                }
            }
            Phase::Vcpus | Phase::Devices => {}
            Phase::Paused => self.tell(&Event::Paused),
        }
    }

    /// A vCPU left the guest. After the last, the clocks are read and the devices paused.
    pub(crate) fn on_vcpu_paused(&mut self, id: u8, vcpu: VcpuFd, back: Sender<VcpuFd>) -> Option<StopReason> {
        self.pause.vcpus.push(Parked { id, vcpu, back });
        if self.pause.vcpus.len() < self.machine.vcpus.len() {
            return None;
        }
        self.pause.vcpus.sort_by_key(|parked| parked.id);
        let vcpus: Vec<&VcpuFd> = self.pause.vcpus.iter().map(|parked| &parked.vcpu).collect();
        match Stopped::read(&self.machine.vm, &vcpus, self.machine.made_of.scaled) {
            Ok(stopped) => self.pause.stopped = Some(stopped),
            Err(error) => return Some(StopReason::KvmFailed { error: error.to_string() }),
        }
        self.pause.phase = Phase::Devices;
        let mut complete = true;
        for transport in &mut self.machine.transports {
            complete &= transport.device.pause();
        }
        if complete { self.paused() } else { None }
    }

    /// A disk's thread gave a queue back.
    pub(crate) fn on_queue_paused(
        &mut self,
        device: usize,
        index: usize,
        queue: Option<Box<Queue>>,
    ) -> Option<StopReason> {
        if let Some(Device::Block(block)) = self.machine.transports.get_mut(device).map(|known| &mut known.device) {
            block.paused(index, queue);
        }
        let pausing = |device: &Device| matches!(device, Device::Block(block) if block.is_pausing());
        let complete = !self.machine.transports.iter().any(|transport| pausing(&transport.device));
        if complete && self.pause.phase == Phase::Devices { self.paused() } else { None }
    }

    fn paused(&mut self) -> Option<StopReason> {
        self.pause.phase = Phase::Paused;
        if let Some((_, complete)) = &mut self.pause.since {
            *complete = Instant::now();
        }
        self.tell(&Event::Paused);
        if std::mem::take(&mut self.pause.called_off) { self.resume() } else { None }
    }

    /// Goes on, or will when the pause is complete. A clock that cannot be put back ends the machine.
    pub(crate) fn resume(&mut self) -> Option<StopReason> {
        match self.pause.phase {
            Phase::Running => self.tell(&Event::Resumed),
            Phase::Vcpus | Phase::Devices => self.pause.called_off = true,
            Phase::Paused => {
                if let Err(error) = self.go_on() {
                    return Some(error);
                }
                self.tell(&Event::Resumed);
            }
        }
        None
    }

    /// Lets a machine go on whose pause is complete.
    pub(crate) fn go_on(&mut self) -> Result<(), StopReason> {
        let vcpus: Vec<&VcpuFd> = self.pause.vcpus.iter().map(|parked| &parked.vcpu).collect();
        let going = self.pause.stopped.as_ref().map_or(Ok(()), |at| at.go_on(&self.machine.vm, &vcpus));
        going.map_err(|error| StopReason::KvmFailed { error: error.to_string() })?;
        for transport in &mut self.machine.transports {
            transport.device.resume();
        }
        self.machine.shared.pausing.store(false, Ordering::Release);
        self.pause.let_go();
        Ok(())
    }

    pub(crate) fn tell(&self, event: &Event) {
        // Its end is seen where its requests are read.
        let _ = self.control.send(event, &[]);
    }
}
