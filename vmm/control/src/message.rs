//! What the two sides say to each other.

use serde::{Deserialize, Serialize};

/// Most vCPUs of a machine.
pub const MAX_VCPUS: u8 = 32;
/// Least guest memory, in bytes: below it a stock kernel and its initramfs do not start.
pub const MIN_MEMORY: u64 = 64 << 20;
/// Most bytes of a kernel command line, without its NUL: Linux reads 2,048 with it.
pub const MAX_CMDLINE: usize = 2047;
/// Most disks of a machine.
pub const MAX_DISKS: usize = 8;
/// Most layers of one disk: a longer chain is flattened first.
pub const MAX_LAYERS: usize = 64;
/// Most initramfs archives, which are loaded back to back.
pub const MAX_INITRDS: usize = 4;
/// Most memory images of a saved machine, one over the other.
pub const MAX_MEMORY_FILES: usize = 4;

/// From the supervisor to the VMM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Build the machine and run it. Descriptors, in this order: `/dev/kvm`; the kernel; each initramfs
    /// archive; for each disk, its layers from the bottom: data then map (a raw base layer has data alone);
    /// then, if `console` is set, the file that the serial console's output goes to; then, if `net` is set, the socket
    /// of messages that its frames go to and come from.
    Start(Config),
    /// Instead of [`Request::Start`]: build the machine from what [`Request::Save`] wrote, and let it go on.
    /// Descriptors, in this order: `/dev/kvm`; the state file; each memory image, the oldest first; then disks, console
    /// and net as for a start. Answered by [`Event::Running`] or [`Event::Refused`].
    Restore(Restore),
    /// Stop the vCPUs and let the devices finish what they hold. Answered by [`Event::Paused`]. The guest's clock stands still
    /// until [`Request::Resume`].
    Pause,
    /// Go on. Answered by [`Event::Resumed`]; so is one to a machine that runs. Sent before [`Event::Paused`] came, it calls the
    /// pause off: both answers come, one after the other.
    Resume,
    /// Only while paused: write the machine out. Descriptors, in this order: the state file and the memory file, both
    /// readable, writable and empty; the VMM's own `/proc/PID/pagemap`, which the supervisor opened; then for each
    /// disk that is not read-only, the data and the map of its next live layer, fresh from `snapshot::disk::create_layer`.
    /// Answered by [`Event::Saved`] or [`Event::SaveFailed`]; until then nothing else is. The machine stays paused.
    Save,
    /// Only while paused, and with the descriptors of [`Request::Save`]: take the machine's state, give the disks their next
    /// layers, and go on, while a copy of the VMM writes state and memory out. Answered by [`Event::Taken`] as soon as the machine goes on, and
    /// then by [`Event::Saved`] or [`Event::SaveFailed`]. [`Event::SaveFailed`] in place of [`Event::Taken`] leaves the machine
    /// paused, as for a [`Request::Save`]. Until the last answer there is no other save.
    SaveLive,
    /// Connect to a vsock port of the guest. One descriptor: a connected stream socket, whose other end
    /// the supervisor keeps. It is held until the guest's vsock driver is up, and while the machine is paused. A refusal
    /// closes it.
    Connect {
        /// The guest's vsock port.
        port: u32,
    },
    /// Report [`Event::Stats`].
    Stats,
    /// Stop the vCPUs, drain the disks, and end with [`Event::Stopped`].
    Stop,
}

/// A machine, as the supervisor asks for it. Descriptors come with the message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Number of vCPUs, 1 to [`MAX_VCPUS`].
    pub vcpus: u8,
    /// Guest memory in bytes, a multiple of 4 KiB.
    pub memory: u64,
    /// The kernel command line.
    pub cmdline: String,
    /// How many initramfs archives come with the message.
    pub initrds: u8,
    /// The disks, in the order in which the guest sees them (`vda`, `vdb`, …).
    pub disks: Vec<Disk>,
    /// Whether there is a serial console (`ttyS0`, output only).
    pub console: bool,
    /// The network interface, if there is one.
    pub net: Option<Net>,
}

/// A saved machine, as the supervisor asks for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Restore {
    /// The machine. It has to be what was saved; each disk has one layer more. No kernel is loaded, so the command line is not
    /// looked at, and no initramfs archive comes with the message whatever `initrds` says.
    pub config: Config,
    /// How many memory images come with the message: 1 for a flat one, up to [`MAX_MEMORY_FILES`].
    pub memory_files: u8,
}

/// A network interface. Its frames go to the socket that comes with the message, one a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Net {
    /// The guest's hardware address.
    pub mac: [u8; 6],
}

/// One disk: a chain of layers, the last of them live unless the disk is read-only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// What the guest reads as the disk's serial number, at most 20 ASCII bytes.
    pub serial: String,
    /// Refuse writes. Every layer is then immutable.
    pub read_only: bool,
    /// Whether the bottom layer is a raw image, without a map.
    pub raw_base: bool,
    /// Number of layers, 1 to [`MAX_LAYERS`].
    pub layers: u8,
    /// Number of request queues, 1 to 8.
    pub queues: u8,
}

/// From the VMM to the supervisor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Event {
    /// The machine was built and its vCPUs run.
    Running,
    /// The machine could not be built. Nothing ran.
    Refused {
        /// Names the thing, the value and the reason.
        error: String,
    },
    /// The vCPUs stand still, the devices hold nothing, and nothing of the guest's changes until it goes on.
    Paused,
    /// The machine goes on.
    Resumed,
    /// The machine was written out. Its disks go on in the layers that came with the request; those below them are part of what
    /// was saved, and never change again. Nothing was synced but the layer below: the supervisor syncs the files.
    Saved(Saved),
    /// The machine goes on after a [`Request::SaveLive`], its disks in the layers that came with it. What was saved is of the moment
    /// before; it is being written.
    Taken(Standstill),
    /// It was not written out. The machine is still paused, and whole: its disks are as they were, and neither the files nor the layers
    /// that came with the request are of any use. After [`Event::Taken`], however, it runs, and its disks are in the new layers
    /// for good: the files alone are of no use.
    SaveFailed {
        /// Names the thing and the reason.
        error: String,
    },
    /// The host's file system is full: writes of this disk wait until there is room.
    DiskFull {
        /// The disk's index.
        disk: u8,
    },
    /// The host's file system has room again.
    DiskRoom {
        /// The disk's index.
        disk: u8,
    },
    /// The answer to [`Request::Stats`].
    Stats(Stats),
    /// The machine ended. The VMM exits after this.
    Stopped {
        /// Why.
        reason: StopReason,
        /// What it had done.
        stats: Stats,
    },
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Saved {
    /// Length of the state file.
    pub state_bytes: u64,
    /// Bytes in the memory file that are not a hole. Its length is that of the guest's memory.
    pub memory_bytes: u64,
}

/// How long a machine stood still for a live save: parts that follow each other, in nanoseconds of the host's monotonic clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Standstill {
    /// From the request to pause until the vCPUs had left the guest and the devices held nothing.
    pub quiesce: u64,
    /// Until the request to save.
    pub request: u64,
    /// The disks were flushed, and got their new layers.
    pub disks: u64,
    /// The state was taken.
    pub state: u64,
    /// The VMM was copied.
    pub fork: u64,
    /// Clocks, devices and vCPUs went on.
    pub resume: u64,
}

impl Standstill {
    /// All of it.
    pub fn total(&self) -> u64 {
        let Self { quiesce, request, disks, state, fork, resume } = *self;
        [quiesce, request, disks, state, fork, resume].into_iter().fold(0, u64::saturating_add)
    }
}

/// Why a machine ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum StopReason {
    /// The guest powered off.
    PowerOff,
    /// The guest reset the machine: a reboot, or the end of a panic. `by` says which of the ways it took.
    Reset {
        /// `acpi`, `keyboard` or `triple-fault`.
        by: String,
    },
    /// The supervisor asked, or went away.
    Asked,
    /// A disk failed for good: its data may not be on the medium.
    StorageFailed {
        /// The disk's index.
        disk: u8,
        /// What the host's kernel said.
        error: String,
    },
    /// KVM could not go on running the guest.
    KvmFailed {
        /// What KVM said.
        error: String,
    },
}

/// Counters of one machine, from its start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stats {
    /// Exits to user space until now.
    pub exits: ExitCounts,
    /// Marks that the guest wrote to port 0x3f0, in their order. A guest may write any byte there, and only
    /// the first of each counts: these are for measuring, nothing relies on them.
    pub marks: Vec<Mark>,
    /// Each disk's counters.
    pub blocks: Vec<BlockStats>,
    /// Bytes of the serial console that were dropped because nobody took them in time.
    pub console_dropped: u64,
    /// The network interface's counters; all zero without one.
    pub net: NetStats,
}

/// What a network interface has moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetStats {
    /// Frames from the guest.
    pub frames_out: u64,
    /// Their bytes.
    pub bytes_out: u64,
    /// Frames to the guest.
    pub frames_in: u64,
    /// Their bytes.
    pub bytes_in: u64,
    /// Frames of either direction that were too short, too long, ill-formed, or had nowhere to go.
    pub frames_dropped: u64,
}

/// A mark that the guest wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mark {
    /// The byte.
    pub mark: u8,
    /// Exits to user space until then, its own included.
    pub exits: ExitCounts,
    /// Microseconds since the VMM began to build the machine.
    pub micros: u64,
}

/// Exits to user space, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExitCounts {
    /// All of them.
    pub total: u64,
    /// Reads of I/O ports.
    pub port_reads: u64,
    /// Writes to I/O ports.
    pub port_writes: u64,
    /// Reads of addresses without memory.
    pub mmio_reads: u64,
    /// Writes to addresses without memory, virtio registers among them.
    pub mmio_writes: u64,
    /// Interrupted by a signal of ours.
    pub interrupted: u64,
    /// Anything else.
    pub other: u64,
}

/// Counters of one disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockStats {
    /// Requests completed.
    pub requests: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Bytes read by the guest.
    pub read_bytes: u64,
    /// Bytes written by the guest.
    pub written_bytes: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Wake-ups of the disk's thread.
    pub wakeups: u64,
}
