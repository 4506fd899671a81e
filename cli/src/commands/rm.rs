//! `bulkhead rm`.

use std::io;
use std::time::{Duration, Instant};

use clap::Args;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{open_store, print};
use crate::frame::{Frame, Request};
use crate::store::{RunDirectory, Store};
use crate::{FAILED, say};

/// How long a supervisor may take to end its run at once, before it is killed.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the kernel may take to end what was killed.
const KILL_PATIENCE: Duration = Duration::from_secs(10);

/// `bulkhead rm`
#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// Also runs that are running: they are ended at once
    #[arg(short, long)]
    force: bool,
    /// Ids, unique beginnings of ids, or names
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<String>,
}

/// `bulkhead rm`: each that can be removed is, and named on standard output.
pub(crate) fn rm(args: &Rm) -> Result<u8, String> {
    let store = open_store()?;
    let mut code = 0;
    for given in &args.runs {
        match remove(&store, given, args.force) {
            Ok(()) => print(&format!("{given}\n"))?,
            Err(error) => {
                say(&error);
                code = FAILED;
            }
        }
    }
    Ok(code)
}

fn remove(store: &Store, given: &str, force: bool) -> Result<(), String> {
    // A directory whose files cannot be read is found by its whole id.
    let directory = match store.find(given) {
        Ok(run) => run.directory,
        Err(error) => store.directory(given).ok_or_else(|| error.to_string())?,
    };
    let id = directory.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    if directory.is_alive() {
        if !force {
            return Err(format!("run {id}: it is running; bulkhead rm -f ends it at once and removes it"));
        }
        end(&directory).map_err(|error| format!("run {id}: {error}"))?;
    }
    directory.remove().map_err(|error| format!("run {id}: {error}"))
}

/// Ends a run: its supervisor is asked, then killed.
fn end(directory: &RunDirectory) -> Result<(), String> {
    let deadline = Instant::now() + PATIENCE;
    let mut supervisor = None;
    while directory.is_alive() {
        // A supervisor that has only just started does not listen yet; one that ends does not any more.
        if supervisor.is_none()
            && let Ok(mut connection) = directory.dial()
        {
            // Who listens there, says the kernel. Held by a descriptor, the number cannot come to mean another process.
            let peer = socket_peercred(&connection).map_err(|error| error.to_string())?;
            supervisor = pidfd_open(peer.pid, PidfdFlags::empty()).ok();
            let stop = Request::Stop { orderly: false, why: "removed (bulkhead rm -f)".to_owned() };
            let _ = Frame::Request(stop).write(&mut connection);
        }
        if Instant::now() > deadline {
            let Some(supervisor) = supervisor else {
                return Err("its supervisor does not answer, and who it is cannot be found out".to_owned());
            };
            pidfd_send_signal(&supervisor, Signal::KILL).map_err(|error| format!("its supervisor: {error}"))?;
            return await_death(directory);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn await_death(directory: &RunDirectory) -> Result<(), String> {
    let deadline = Instant::now() + KILL_PATIENCE;
    while directory.is_alive() {
        if Instant::now() > deadline {
            return Err(format!("its supervisor was killed and does not go: {}", io::ErrorKind::TimedOut));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
