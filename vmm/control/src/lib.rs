//! The control socket between a supervisor and its VMM.
//!
//! One `SOCK_SEQPACKET` Unix socket joins the two. One packet is one message: JSON of at most
//! [`MAX_MESSAGE`] bytes, with up to [`MAX_DESCRIPTORS`] descriptors attached. The VMM opens no path:
//! everything that it touches comes through here, so what it can reach is what the supervisor chose.
//!
//! The supervisor sends [`Request::Start`] or [`Request::Restore`] first and once. The VMM answers [`Event::Running`] or
//! [`Event::Refused`]; later come any number of the other events, and [`Event::Stopped`] is the last.
//! When either side's end closes, the other ends too.
//!
//! The supervisor treats what it reads here as hostile: a guest may have taken the VMM over.
#![forbid(unsafe_code)]

mod message;
mod socket;

pub use message::{
    BlockStats, Config, Disk, Event, ExitCounts, MAX_CMDLINE, MAX_DISKS, MAX_INITRDS, MAX_LAYERS, MAX_MEMORY_FILES,
    MAX_VCPUS, MIN_MEMORY, Mark, Net, NetStats, Request, Restore, Saved, Standstill, Stats, StopReason,
};
pub use socket::{ControlError, ControlSocket, MAX_DESCRIPTORS, MAX_MESSAGE};
