//! `bulkhead-netfilter`: one guest's network. A supervisor starts it, with the control socket as descriptor 3 and no
//! argument.
#![deny(unsafe_op_in_unsafe_fn)]

use std::os::fd::{FromRawFd, OwnedFd};
use std::process::ExitCode;

use netfilter::reactor;
use netfilter_control::ControlSocket;
use rustix::process::{Signal, set_parent_process_death_signal};

/// Where the supervisor put the control socket.
const CONTROL_FD: i32 = 3;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bulkhead-netfilter: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    // The supervisor's end is ours, even if it cannot say so. If it has ended already, the control socket tells.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // SAFETY: nothing else in this process has opened or taken descriptor 3. If it is not open, or not a socket, the
    // first call on it fails.
    let control = ControlSocket::from_fd(unsafe { OwnedFd::from_raw_fd(CONTROL_FD) });
    Ok(reactor::serve(control)?)
}
