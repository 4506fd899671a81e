//! The loop that owns every device, answers the supervisor and ends the machine.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;

use rustix::event::epoll;
use vmm_control::{ControlError, ControlSocket, Event, Mark, Request, Stats, StopReason};
use vmm_sys_util::eventfd::EventFd;

use crate::confine::{Program, confine};
use crate::machine::{Console, Machine, MadeOf, VSOCK};
use crate::mailbox::{Inbox, Mailbox, Message};
use crate::pause::Pause;
use crate::serial::{BACKLOG, Serial};
use crate::vcpu::{self, Handle, Shared};
use crate::virtio::device::Device;
use crate::virtio::mmio::{Transport, Written};
use crate::writer::Writer;

const CONTROL: u64 = u64::MAX;
const MAILBOX: u64 = u64::MAX - 1;
const SOCKETS: u64 = u64::MAX - 2;
const FRAMES: u64 = u64::MAX - 3;
pub(crate) const WRITER: u64 = u64::MAX - 4;

/// A machine whose vCPUs run.
#[derive(Debug)]
pub struct EventLoop {
    pub(crate) control: ControlSocket,
    pub(crate) machine: Running,
    pub(crate) pause: Pause,
    /// What writes the machine's memory out while it goes on.
    pub(crate) writer: Option<Writer>,
    pub(crate) poll: OwnedFd,
    marks: Vec<Mark>,
    /// vCPUs that wait for the reset of a device.
    resetting: Vec<(usize, Sender<()>)>,
    console_dropped: u64,
}

#[derive(Debug)]
pub(crate) struct Running {
    // Dropped last: it keeps the eventfds' registrations alive.
    pub(crate) vm: Arc<kvm_ioctls::VmFd>,
    _absorbed: Vec<EventFd>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) transports: Vec<Transport>,
    kicks: Vec<(usize, EventFd)>,
    console: Option<Console>,
    pub(crate) vcpus: Vec<Handle>,
    pub(crate) made_of: MadeOf,
    /// The device index of the network interface.
    net: Option<usize>,
}

impl EventLoop {
    /// Starts the vCPUs.
    pub fn start(machine: Machine, control: ControlSocket, mailbox: &Mailbox) -> std::io::Result<Self> {
        vcpu::prepare_kicks();
        let mut transports = machine.transports;
        // Those of a saved machine are paused; of a fresh one no device has a queue.
        for transport in &mut transports {
            transport.device.resume();
        }
        let mut vcpus = Vec::new();
        for (id, fd) in (0u8..).zip(machine.vcpus) {
            vcpus.push(Handle::start(id, fd, machine.shared.clone(), mailbox.clone())?);
        }
        let machine = Running {
            vm: machine.vm,
            _absorbed: machine.absorbed,
            shared: machine.shared,
            transports,
            kicks: machine.kicks,
            console: machine.console,
            vcpus,
            made_of: machine.made_of,
            net: machine.net,
        };
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let (marks, resetting) = (Vec::new(), Vec::new());
        let (pause, writer) = (Pause::default(), None);
        Ok(Self { control, machine, pause, writer, poll, marks, resetting, console_dropped: 0 })
    }

    /// Runs until the machine ends, tells the supervisor why, and returns.
    pub fn run(mut self, inbox: Inbox) -> std::io::Result<()> {
        let add =
            |fd: BorrowedFd<'_>, token, flags| epoll::add(&self.poll, fd, epoll::EventData::new_u64(token), flags);
        let readable = epoll::EventFlags::IN;
        add(self.control.as_fd(), CONTROL, readable)?;
        add(as_fd(inbox.wake_fd()), MAILBOX, readable)?;
        for (token, (_, kick)) in (0u64..).zip(&self.machine.kicks) {
            add(as_fd(kick), token, readable)?;
        }
        let device = |index: usize| self.machine.transports.get(index).map(|transport| &transport.device);
        if let Some(Device::Vsock(device)) = device(VSOCK) {
            add(device.epoll_fd(), SOCKETS, epoll::EventFlags::empty())?;
        }
        let net = self.machine.net;
        if let Some(Device::Net(device)) = net.and_then(device) {
            add(device.socket(), FRAMES, readable | epoll::EventFlags::OUT | epoll::EventFlags::ET)?;
        }
        // The driver of a restored machine may be up.
        self.watch_sockets()?;
        // The last thread exists, everything is set up, and nothing of the guest's has been looked at yet.
        rustix::thread::set_name(c"vmm-main")?;
        confine(Program::Main)?;
        let mut events = Vec::with_capacity(64);
        let reason = 'machine: loop {
            events.clear();
            match epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for event in &events {
                let stop = match event.data.u64() {
                    CONTROL => {
                        let stop = self.on_control();
                        self.watch_sockets()?;
                        stop
                    }
                    MAILBOX => {
                        let stop = self.on_mailbox(&inbox);
                        self.watch_sockets()?;
                        stop
                    }
                    SOCKETS => {
                        self.serve(VSOCK)?;
                        None
                    }
                    FRAMES => {
                        self.serve(net.unwrap_or(usize::MAX))?;
                        None
                    }
                    WRITER => {
                        self.on_writer();
                        None
                    }
                    kick => {
                        self.on_kick(usize::try_from(kick).unwrap_or(usize::MAX))?;
                        None
                    }
                };
                if let Some(reason) = stop {
                    break 'machine reason;
                }
            }
        };
        self.end(reason, inbox);
        Ok(())
    }

    fn device(&mut self, index: usize) -> Option<&mut Device> {
        self.machine.transports.get_mut(index).map(|transport| &mut transport.device)
    }

    /// One message of the supervisor. Its end, or nonsense from it, ends the machine.
    fn on_control(&mut self) -> Option<StopReason> {
        match self.control.receive::<Request>() {
            Ok((Request::Connect { port }, mut descriptors)) => {
                let stream: Option<OwnedFd> = descriptors.pop();
                if let (Some(stream), Some(Device::Vsock(device))) = (stream, self.device(VSOCK)) {
                    // A refused descriptor is closed, which the supervisor sees.
                    device.connect(stream, port);
                }
                None
            }
            Ok((Request::Stats, _)) => {
                let _ = self.control.send(&Event::Stats(self.stats()), &[]);
                None
            }
            Ok((Request::Pause, _)) => {
                self.begin_pause();
                None
            }
            Ok((Request::Resume, _)) => self.resume(),
            Ok((Request::Save, descriptors)) => {
                let event = match self.save(descriptors) {
                    Ok(saved) => Event::Saved(saved),
                    Err(error) => Event::SaveFailed { error: error.to_string() },
                };
                self.tell(&event);
                None
            }
            Ok((Request::SaveLive, descriptors)) => self.save_live(descriptors),
            Ok((Request::Stop | Request::Start(_) | Request::Restore(_), _)) => Some(StopReason::Asked),
            Err(ControlError::TooManyDescriptors) => None,
            Err(_) => Some(StopReason::Asked),
        }
    }

    fn on_mailbox(&mut self, inbox: &Inbox) -> Option<StopReason> {
        for message in inbox.batch() {
            match message {
                Message::RegisterWrite { device, offset, value, done } => {
                    let Some(transport) = self.machine.transports.get_mut(device) else { continue };
                    if transport.write(offset, value) == Written::Resetting {
                        self.resetting.push((device, done));
                    } else {
                        let _ = done.send(());
                    }
                }
                Message::Mark(mark) => self.marks.push(mark),
                Message::QueueReleased { device } => self.on_released(device),
                Message::VcpuPaused { id, vcpu, back } => {
                    if let Some(stop) = self.on_vcpu_paused(id, vcpu, back) {
                        return Some(stop);
                    }
                }
                Message::QueuePaused { device, index, queue } => {
                    if let Some(stop) = self.on_queue_paused(device, index, queue) {
                        return Some(stop);
                    }
                }
                Message::QueueBroken { device } => self.broken(device),
                Message::DiskFull { disk, full } => {
                    let event = if full { Event::DiskFull { disk } } else { Event::DiskRoom { disk } };
                    let _ = self.control.send(&event, &[]);
                }
                Message::Stop(reason) => return Some(reason),
            }
        }
        self.write_console();
        None
    }

    /// A disk's thread gave its queue back. After the last, the vCPU that reset the device goes on.
    fn on_released(&mut self, device: usize) {
        let Some(transport) = self.machine.transports.get_mut(device) else { return };
        if let Device::Block(block) = &mut transport.device
            && block.released()
        {
            transport.finish_reset();
            self.resetting.retain(|(waiting, done)| {
                if *waiting == device {
                    let _ = done.send(());
                }
                *waiting != device
            });
        }
    }

    fn broken(&mut self, device: usize) {
        if let Some(transport) = self.machine.transports.get_mut(device) {
            transport.needs_reset();
        }
    }

    fn on_kick(&mut self, index: usize) -> std::io::Result<()> {
        let Some((device, kick)) = self.machine.kicks.get(index) else { return Ok(()) };
        let device = *device;
        let _ = kick.read();
        self.serve(device)
    }

    /// Has a device of this thread do its work, unless the machine stands still: then its turn comes when that goes on. If the
    /// guest broke it, it does nothing more until its driver resets it.
    fn serve(&mut self, device: usize) -> std::io::Result<()> {
        if self.pause.stands_still() {
            return Ok(());
        }
        let broken = match self.device(device) {
            Some(Device::Vsock(sockets)) => sockets.process().is_err(),
            Some(Device::Rng(rng)) => rng.process().is_err(),
            Some(Device::Net(net)) => net.process().is_err(),
            _ => false,
        };
        if broken {
            self.broken(device);
            self.watch_sockets()?;
        }
        Ok(())
    }

    /// Host sockets wait while the guest has no driver for them, or broke the device, and while the machine stands still.
    pub(crate) fn watch_sockets(&self) -> std::io::Result<()> {
        let transport = self.machine.transports.get(VSOCK);
        let Some(Device::Vsock(device)) = transport.map(|transport| &transport.device) else { return Ok(()) };
        let watched = device.is_active() && !self.pause.stands_still();
        let flags = if watched { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        Ok(epoll::modify(&self.poll, device.epoll_fd(), epoll::EventData::new_u64(SOCKETS), flags)?)
    }

    /// Passes the console's output on. What its reader does not take at once is dropped and counted: nobody here waits
    /// for a file, and how much is kept is the supervisor's business.
    fn write_console(&mut self) {
        let Some(console) = &mut self.machine.console else { return };
        // As many as there can have been when we were woken: vCPUs that print without end must not keep us here.
        let bytes: Vec<u8> = console.bytes.try_iter().take(BACKLOG).collect();
        let written = console.file.write(&bytes).unwrap_or(0);
        self.console_dropped = self.console_dropped.saturating_add(bytes.len().saturating_sub(written) as u64);
    }

    fn stats(&self) -> Stats {
        let transports = &self.machine.transports;
        let blocks = transports.iter().filter_map(|transport| match &transport.device {
            Device::Block(block) => Some(block.stats()),
            _ => None,
        });
        let net = transports.iter().find_map(|transport| match &transport.device {
            Device::Net(net) => Some(net.stats()),
            _ => None,
        });
        let serial = self.machine.shared.serial.as_ref().map_or(0, Serial::dropped);
        Stats {
            exits: self.machine.shared.exits.counts(),
            marks: self.marks.clone(),
            blocks: blocks.collect(),
            console_dropped: self.console_dropped.saturating_add(serial),
            net: net.unwrap_or_default(),
        }
    }

    /// Stops the vCPUs, then lets the disks finish what they hold, then reports.
    fn end(mut self, reason: StopReason, inbox: Inbox) {
        self.machine.shared.stopping.store(true, Ordering::Release);
        // A vCPU that waits for a register write hears that nobody answers any more.
        self.resetting.clear();
        drop(inbox);
        self.pause.let_go();
        for vcpu in &self.machine.vcpus {
            vcpu.kick();
        }
        for vcpu in std::mem::take(&mut self.machine.vcpus) {
            vcpu.join();
        }
        self.write_console();
        for transport in &mut self.machine.transports {
            if let Device::Block(block) = &mut transport.device {
                block.end();
            }
        }
        let stats = self.stats();
        let _ = self.control.send(&Event::Stopped { reason, stats }, &[]);
    }
}

fn as_fd(fd: &EventFd) -> BorrowedFd<'_> {
    use std::os::fd::AsRawFd;
    // SAFETY: the descriptor belongs to the eventfd, which outlives the borrow.
    unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }
}
