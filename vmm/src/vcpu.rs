//! A vCPU: its set-up, its thread, its exits.
//!
//! A vCPU thread owns its KVM descriptor and nothing else. An exit is handled with atomics, or, for a virtio
//! register, by a message to the event loop. No exit takes a lock, waits for a file or logs: a guest decides how
//! many exits there are.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Instant;

use kvm_bindings::{CpuId, Msrs, kvm_cpuid_entry2};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_control::{ExitCounts, Mark, StopReason};

use crate::boot;
use crate::confine::{Program, confine};
use crate::layout;
use crate::mailbox::{Mailbox, Message};
use crate::serial::Serial;

/// What all vCPUs share.
#[derive(Debug)]
pub struct Shared {
    /// Set once, before the vCPUs are kicked for the last time.
    pub stopping: AtomicBool,
    /// Set before the vCPUs are kicked to hand their descriptors over, until they get them back.
    pub pausing: AtomicBool,
    /// Exits to user space.
    pub exits: Exits,
    /// The serial console, if there is one.
    pub serial: Option<Serial>,
    /// Number of virtio devices.
    pub virtio_devices: usize,
    /// When the machine began to be built.
    pub start: Instant,
    marks: [AtomicBool; 256],
}

impl Shared {
    /// For a machine with so many devices, which began to be built at `start`.
    pub fn new(virtio_devices: usize, serial: Option<Serial>, start: Instant) -> Self {
        Self {
            stopping: AtomicBool::new(false),
            pausing: AtomicBool::new(false),
            exits: Exits::default(),
            serial,
            virtio_devices,
            start,
            marks: [const { AtomicBool::new(false) }; 256],
        }
    }
}

/// Counters of exits to user space.
#[derive(Debug, Default)]
pub struct Exits {
    port_reads: AtomicU64,
    port_writes: AtomicU64,
    mmio_reads: AtomicU64,
    mmio_writes: AtomicU64,
    interrupted: AtomicU64,
    other: AtomicU64,
}

impl Exits {
    /// What was counted until now.
    pub fn counts(&self) -> ExitCounts {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counts = ExitCounts {
            total: 0,
            port_reads: load(&self.port_reads),
            port_writes: load(&self.port_writes),
            mmio_reads: load(&self.mmio_reads),
            mmio_writes: load(&self.mmio_writes),
            interrupted: load(&self.interrupted),
            other: load(&self.other),
        };
        let ExitCounts { port_reads, port_writes, mmio_reads, mmio_writes, interrupted, other, .. } = counts;
        let total = [port_reads, port_writes, mmio_reads, mmio_writes, interrupted, other].iter().sum();
        ExitCounts { total, ..counts }
    }
}

/// Sets up a fresh vCPU. The first one starts at the PVH entry; the others wait for the kernel to start them.
pub fn configure(fd: &VcpuFd, cpuid: &[kvm_cpuid_entry2], id: u8, entry: u32) -> Result<(), kvm_ioctls::Error> {
    // CPUID before MSRs: since Linux 6.13 MSRs that depend on it read as 0 otherwise (Firecracker issue 6120).
    let table = CpuId::from_entries(cpuid).map_err(|_| kvm_ioctls::Error::new(libc::E2BIG))?;
    fd.set_cpuid2(&table)?;
    let msrs = boot::entry_msrs();
    let list = Msrs::from_entries(&msrs).map_err(|_| kvm_ioctls::Error::new(libc::E2BIG))?;
    if fd.set_msrs(&list)? != msrs.len() {
        return Err(kvm_ioctls::Error::new(libc::EINVAL));
    }
    if id == 0 {
        let mut sregs = fd.get_sregs()?;
        boot::entry_system_registers(&mut sregs);
        fd.set_sregs(&sregs)?;
        fd.set_regs(&boot::entry_registers(entry))?;
    }
    Ok(())
}

/// A running vCPU thread.
#[derive(Debug)]
pub struct Handle(JoinHandle<()>);

impl Handle {
    /// Starts the thread. It runs until the guest or the loop stops the machine.
    pub fn start(id: u8, fd: VcpuFd, shared: Arc<Shared>, mailbox: Mailbox) -> std::io::Result<Self> {
        let vcpu = Vcpu { id, shared, mailbox };
        let thread = std::thread::Builder::new().name(format!("vcpu{id}")).stack_size(256 << 10);
        Ok(Self(thread.spawn(move || vcpu.run(fd))?))
    }

    /// Makes the vCPU leave guest mode, or not enter it, once.
    pub fn kick(&self) {
        kick::send(&self.0);
    }

    /// Waits for the thread to end; the loop has set `stopping` and kicked it.
    pub fn join(self) {
        // A panic aborts the process, so there is no other outcome to report.
        let _ = self.0.join();
    }
}

struct Vcpu {
    id: u8,
    shared: Arc<Shared>,
    mailbox: Mailbox,
}

impl Vcpu {
    fn run(self, mut fd: VcpuFd) {
        if let Err(error) = confine(Program::Vcpu) {
            self.mailbox.send(Message::Stop(StopReason::KvmFailed { error: format!("vCPU: seccomp: {error}") }));
            return;
        }
        let mut armed = kick::arm(fd.get_kvm_run());
        let count = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        let exits = &self.shared.exits;
        // A kick sets the flag of the next entry, so one that arrives after this check is not lost.
        while !self.shared.stopping.load(Ordering::Acquire) {
            let pausing = self.shared.pausing.load(Ordering::Acquire);
            let mut left = false;
            if pausing {
                // One more entry, which ends before the guest runs: KVM completes the access that the last exit was for, or
                // comes out with the rest of it.
                fd.set_kvm_immediate_exit(1);
            }
            let stop = match fd.run() {
                Ok(VcpuExit::IoOut(port, data)) => {
                    count(&exits.port_writes);
                    data.first().and_then(|byte| self.port_write(port, *byte))
                }
                Ok(VcpuExit::IoIn(port, data)) => {
                    count(&exits.port_reads);
                    self.port_read(port, data);
                    None
                }
                Ok(VcpuExit::MmioRead(_, data)) => {
                    count(&exits.mmio_reads);
                    data.fill(0xff);
                    None
                }
                Ok(VcpuExit::MmioWrite(address, data)) => {
                    count(&exits.mmio_writes);
                    if !self.mmio_write(address, data) {
                        return;
                    }
                    None
                }
                Ok(VcpuExit::Shutdown) => {
                    count(&exits.other);
                    Some(StopReason::Reset { by: "triple-fault".into() })
                }
                Ok(VcpuExit::Intr) => {
                    count(&exits.interrupted);
                    fd.set_kvm_immediate_exit(0);
                    None
                }
                Ok(other) => {
                    count(&exits.other);
                    Some(StopReason::KvmFailed { error: format!("unexpected exit {other:?}") })
                }
                Err(error) if error.errno() == libc::EINTR || error.errno() == libc::EAGAIN => {
                    count(&exits.interrupted);
                    fd.set_kvm_immediate_exit(0);
                    left = pausing;
                    None
                }
                Err(error) => Some(StopReason::KvmFailed { error: format!("KVM_RUN: {error}") }),
            };
            if let Some(reason) = stop {
                self.mailbox.send(Message::Stop(reason));
                return;
            }
            if left {
                // While the descriptor is lent, its page may go: a kick must not touch it.
                drop(armed);
                match self.hand_over(fd) {
                    Some(back) => fd = back,
                    None => return,
                }
                // A kick that came before this is not lost either: what it was for was set before it was sent.
                armed = kick::arm(fd.get_kvm_run());
            }
        }
    }

    /// Lends the event loop the descriptor, so that this thread need not be allowed what only the loop does with it, and waits for
    /// it to come back. Nothing comes when the loop ends.
    fn hand_over(&self, vcpu: VcpuFd) -> Option<VcpuFd> {
        let (back, returned) = channel();
        self.mailbox.send(Message::VcpuPaused { id: self.id, vcpu, back });
        returned.recv().ok()
    }

    /// The four ways to stop, the mark, the serial console; all else is ignored.
    fn port_write(&self, port: u16, value: u8) -> Option<StopReason> {
        match (port, value) {
            (layout::SLEEP_CONTROL_PORT, layout::SLEEP_S5) => Some(StopReason::PowerOff),
            (layout::RESET_PORT, layout::RESET_VALUE) => Some(StopReason::Reset { by: "acpi".into() }),
            (layout::KEYBOARD_PORT, layout::KEYBOARD_RESET) => Some(StopReason::Reset { by: "keyboard".into() }),
            (layout::MARK_PORT, mark) => {
                let seen = self.shared.marks.get(usize::from(mark))?;
                if !seen.swap(true, Ordering::Relaxed) {
                    let micros = u64::try_from(self.shared.start.elapsed().as_micros()).unwrap_or(u64::MAX);
                    self.mailbox.send(Message::Mark(Mark { mark, exits: self.shared.exits.counts(), micros }));
                }
                None
            }
            (port, value) => {
                let (serial, offset) = self.serial(port)?;
                if serial.write(offset, value) {
                    self.mailbox.wake();
                }
                None
            }
        }
    }

    /// Nothing answers with all ones, as an empty bus does. The keyboard controller and the clock that are not
    /// there answer "idle": all ones would make a kernel that asks wait for them.
    fn port_read(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        let value = match port {
            layout::KEYBOARD_PORT | layout::CMOS_DATA_PORT | layout::SLEEP_STATUS_PORT => Some(0),
            port => self.serial(port).map(|(serial, offset)| serial.read(offset)),
        };
        if let (Some(value), Some(first)) = (value, data.first_mut()) {
            *first = value;
        }
    }

    fn serial(&self, port: u16) -> Option<(&Serial, u16)> {
        let offset = port.checked_sub(layout::SERIAL_PORT).filter(|offset| *offset < 8)?;
        self.shared.serial.as_ref().map(|serial| (serial, offset))
    }

    /// Passes a 32-bit write of a virtio register to the event loop and waits until it took effect. Returns
    /// whether the loop is still there.
    fn mmio_write(&self, address: u64, data: &[u8]) -> bool {
        let Some(window) = address.checked_sub(layout::VIRTIO_BASE) else { return true };
        let device = usize::try_from(window / layout::VIRTIO_WINDOW).unwrap_or(usize::MAX);
        let (true, Ok(value)) = (device < self.shared.virtio_devices, <[u8; 4]>::try_from(data)) else { return true };
        // A channel for each write: when the loop ends, it drops the sender, and this vCPU goes on.
        let (done, written) = channel();
        let message = Message::RegisterWrite {
            device,
            offset: window % layout::VIRTIO_WINDOW,
            value: u32::from_le_bytes(value),
            done,
        };
        self.mailbox.send(message) && written.recv().is_ok()
    }
}

/// Getting a vCPU out of guest mode, without a race.
///
/// A signal alone would be lost if it came between the last check and `KVM_RUN`. So its handler sets
/// `immediate_exit` in the thread's own `kvm_run` page, and the next `KVM_RUN` returns at once.
mod kick {
    use std::os::unix::thread::JoinHandleExt;

    use super::{Cell, JoinHandle};

    thread_local! {
        static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(std::ptr::null_mut()) };
    }

    fn signal() -> libc::c_int {
        libc::SIGRTMIN()
    }

    extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
        IMMEDIATE_EXIT.with(|cell| {
            let flag = cell.get();
            if !flag.is_null() {
                // SAFETY: `arm` stored the address of a byte in a `kvm_run` page that stays mapped until its guard
                // is dropped on this same thread; a byte store is async-signal-safe.
                unsafe { flag.write_volatile(1) };
            }
        });
    }

    /// While it lives, kicks reach this thread's vCPU.
    pub(super) struct Armed;

    pub(super) fn arm(run: &mut kvm_bindings::kvm_run) -> Armed {
        IMMEDIATE_EXIT.with(|cell| cell.set(&raw mut run.immediate_exit));
        Armed
    }

    impl Drop for Armed {
        fn drop(&mut self) {
            IMMEDIATE_EXIT.with(|cell| cell.set(std::ptr::null_mut()));
        }
    }

    pub(super) fn send(thread: &JoinHandle<()>) {
        // SAFETY: the handle has not been joined, so its thread id is valid; `prepare` ran before the thread was
        // started, so the signal's default action cannot strike.
        unsafe { libc::pthread_kill(thread.as_pthread_t(), signal()) };
    }

    pub(super) fn prepare() {
        // It can only fail for a signal number out of range.
        let _ = vmm_sys_util::signal::register_signal_handler(signal(), on_kick);
    }
}

/// Installs the handler of kicks. Called once, before the first vCPU thread starts.
pub fn prepare_kicks() {
    kick::prepare();
}
