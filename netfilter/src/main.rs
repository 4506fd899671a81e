//! `bulkhead-netfilter`: one guest's network. The jailer starts it, with the control socket as descriptor 3 and no argument.
//!
//! It has its own `main`, so that the standard library's set-up does not run: that reads files of `/proc`, which the jail
//! does not have.
#![cfg_attr(not(test), no_main)]
#![deny(unsafe_op_in_unsafe_fn)]

use std::os::fd::{FromRawFd, OwnedFd};

use netfilter::reactor;
use netfilter_control::ControlSocket;

/// Where the supervisor put the control socket.
const CONTROL_FD: i32 = 3;

/// What the C library calls. Returns the exit status.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn main() -> libc::c_int {
    match run() {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("bulkhead-netfilter: {error}");
            1
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    // The kernel would show the number of the descriptor that it was executed from.
    rustix::thread::set_name(c"netfilter")?;
    // What it does not need, it cannot do, before anything of the guest's is looked at. The jailer has set no_new_privs; but
    // nothing here depends on who started us.
    rustix::thread::set_no_new_privs(true)?;
    seccomp_lists::NETFILTER.install()?;
    // A connection that is gone is an error of a write, and not our end.
    // SAFETY: no other thread exists, and to ignore a signal runs no code.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    // SAFETY: nothing else in this process has opened or taken descriptor 3. If it is not open, or not a socket, the
    // first call on it fails.
    let control = ControlSocket::from_fd(unsafe { OwnedFd::from_raw_fd(CONTROL_FD) });
    Ok(reactor::serve(control)?)
}
