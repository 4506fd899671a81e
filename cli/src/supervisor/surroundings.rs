//! What a supervisor inherits from whoever started it, and does not leave at that: limits and signals.

use std::io;
use std::sync::mpsc::SyncSender;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::Happening;

/// Allows as many descriptors as may be allowed, for us and for the VMM, which has one for each connection to the guest.
/// Whether that is enough was checked before the run was made.
pub(super) fn raise_descriptor_limit() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?)
}

/// Ends the run in good order when we are asked to end, as a host does that shuts down.
pub(super) fn watch_signals(main: SyncSender<Happening>) -> io::Result<()> {
    let mut caught = Signals::new([SIGHUP, SIGINT, SIGTERM])?;
    let watch = move || {
        for signal in caught.forever() {
            let name = match signal {
                SIGHUP => "SIGHUP",
                SIGINT => "SIGINT",
                _ => "SIGTERM",
            };
            // The main thread may be ending the run already.
            let _ =
                main.try_send(Happening::Asked { orderly: true, why: format!("its supervisor was ended by {name}") });
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(watch)?;
    Ok(())
}
