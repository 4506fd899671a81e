//! The jail: how a supervisor starts a process that it does not trust.
//!
//! Two programs work together. The supervisor's side is [`Jail::start`]: it starts `bulkhead-jailer` with a [`Request`] and
//! with descriptors, and hears on a socket what came of it ([`report`]). The jailer makes one process, which is the
//! supervisor's direct child and process 1 of its own namespaces, and exits. That process takes from itself, step by step
//! ([`report::Step`]), all that it does not need, and becomes the target.
//!
//! Nothing starts less confined than was asked for: a step that fails ends the start, and its name and reason come back.

pub mod cgroup;
mod hint;
mod host;
pub mod launch;
pub mod report;
pub mod request;
mod seen;
mod start;
pub mod users;

pub use host::landlock_version;
pub use request::{Limits, Part, Request, Target};
pub use seen::{NAMESPACES, Seen, Thread, started};
pub use start::{Ended, Jail, JailError, Jailed, Starting};

/// Descriptors of the jailer: the target's one descriptor, which stays in this place.
pub const CONTROL: i32 = 3;
/// Where reports go.
pub const STATUS: i32 = 4;
/// The target's program file.
pub const PROGRAM: i32 = 5;
/// The cgroup that the target is born in, if there is one.
pub const CGROUP: i32 = 6;
