//! `bulkhead-vmm`: one microVM. A supervisor starts it, with the control socket as descriptor 3 and no argument.

use std::os::fd::{FromRawFd, OwnedFd};
use std::process::ExitCode;

use rustix::process::{Signal, set_parent_process_death_signal};
use vmm::event_loop::EventLoop;
use vmm::machine;
use vmm::mailbox::mailbox;
use vmm_control::{ControlSocket, Event, Request};

/// Where the supervisor put the control socket.
const CONTROL_FD: i32 = 3;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bulkhead-vmm: {error}");
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
    let (Request::Start(config), descriptors) = control.receive()? else {
        return Err("control socket: the first message is not a start request".into());
    };
    let (sender, inbox) = mailbox()?;
    let started = machine::build(&config, descriptors, &sender);
    let machine = match started {
        Ok(machine) => machine,
        Err(error) => {
            control.send(&Event::Refused { error: error.to_string() }, &[])?;
            return Ok(());
        }
    };
    control.send(&Event::Running, &[])?;
    Ok(EventLoop::start(machine, control, &sender)?.run(inbox)?)
}
