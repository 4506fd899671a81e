//! `bulkhead-jailer`: makes one process, takes from it what its program does not need, and has it become that program.
//!
//! It has its own `main`: the standard library's set-up would only cost system calls, and it would open `/dev/null` where a
//! standard stream is closed, which here is refused.
#![cfg_attr(not(test), no_main)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

mod child;
mod elf;
mod landlock;
mod parent;
mod sys;

use jailer::STATUS;
use jailer::report::{Step, send_failed};
use rustix::io::Errno;

/// A step that failed, and why.
type Failure = (Step, Errno);

/// Names the step in which something failed.
trait In<T> {
    /// The result of a step.
    fn during(self, step: Step) -> Result<T, Failure>;
}

impl<T, E: Into<Errno>> In<T> for Result<T, E> {
    fn during(self, step: Step) -> Result<T, Failure> {
        self.map_err(|error| (step, error.into()))
    }
}

/// What the C library calls. Returns the exit status.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn main() -> libc::c_int {
    match parent::run() {
        Ok(()) => 0,
        Err((step, error)) => {
            // Where there is no socket for reports, the exit status tells.
            if let Ok(status) = sys::given(STATUS) {
                send_failed(status, step, error);
            }
            i32::from(step as u8)
        }
    }
}
