//! What each command does, with its options.

pub(crate) mod exec;
pub(crate) mod list;
mod process;
mod resolve;
pub(crate) mod run;
pub(crate) mod stats;

use std::io;
use std::os::unix::net::UnixStream;

use crate::frame::Exit;
use crate::home::Home;
use crate::say;
use crate::store::{Listed, Store, StoreError};

/// Connects to the supervisor of a run.
pub(super) fn dial(given: &str) -> Result<(Listed, UnixStream), String> {
    let home = Home::find().map_err(|error| error.to_string())?;
    let store = Store::open(&home).map_err(|error| error.to_string())?;
    let run = store.find(given).map_err(|error| error.to_string())?;
    let id = run.spec.id.clone();
    if !run.state.state.is_live() {
        return Err(StoreError::NotRunning { id, phase: run.state.state }.to_string());
    }
    let connection = run.directory.dial().map_err(|error| format!("run {id}: {error}"))?;
    Ok((run, connection))
}

/// Tells the user of an end that needs words; gives the exit status.
pub(super) fn report(exit: &Exit) -> u8 {
    if let Some(error) = &exit.error {
        say(error);
    }
    exit.code
}

/// Output that nobody reads is no error.
pub(crate) fn quietly(result: io::Result<()>) -> Result<(), String> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(format!("standard output: {error}")),
        _ => Ok(()),
    }
}
