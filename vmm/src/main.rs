//! `bulkhead-vmm`: one microVM. The jailer starts it, with the control socket as descriptor 3 and no argument.
//!
//! It has its own `main`, so that the standard library's set-up does not run: that reads files of `/proc`, which the
//! jail does not have, and prepares a stack for a message about stack overflow, which here is a plain SIGSEGV.
#![cfg_attr(not(test), no_main)]

use std::os::fd::{FromRawFd, OwnedFd};

use vmm::confine::{Program, confine};
use vmm::event_loop::EventLoop;
use vmm::machine;
use vmm::mailbox::mailbox;
use vmm::restore;
use vmm_control::{ControlSocket, Event, Request};

/// Where the supervisor put the control socket.
const CONTROL_FD: i32 = 3;

/// What the C library calls. Returns the exit status.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn main() -> libc::c_int {
    match run() {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("bulkhead-vmm: {error}");
            1
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    // The kernel would show the number of the descriptor that it was executed from.
    rustix::thread::set_name(c"vmm-start")?;
    confine(Program::Start)?;
    // A client that is gone is an error of a write, and not our end; so is a file that may not grow.
    for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
        // SAFETY: no other thread exists, and to ignore a signal runs no code.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // SAFETY: nothing else in this process has opened or taken descriptor 3. If it is not open, or not a socket, the
    // first call on it fails.
    let control = ControlSocket::from_fd(unsafe { OwnedFd::from_raw_fd(CONTROL_FD) });
    let (request, descriptors) = control.receive()?;
    let (sender, inbox) = mailbox()?;
    let built = match request {
        Request::Start(config) => machine::build(&config, descriptors, &sender),
        Request::Restore(restore) => restore::build(&restore, descriptors, &sender),
        _ => return Err("control socket: the first message is neither a start nor a restore request".into()),
    };
    let machine = match built {
        Ok(machine) => machine,
        Err(error) => {
            control.send(&Event::Refused { error: error.to_string() }, &[])?;
            return Ok(());
        }
    };
    control.send(&Event::Running, &[])?;
    Ok(EventLoop::start(machine, control, &sender)?.run(inbox)?)
}
