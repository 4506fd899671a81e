//! What each command does, with its options.

pub(crate) mod completion;
pub(crate) mod cp;
pub(crate) mod doctor;
pub(crate) mod exec;
pub(crate) mod fork;
pub(crate) mod inspect;
pub(crate) mod jail;
mod launch;
pub(crate) mod list;
pub(crate) mod pause;
pub(crate) mod policy;
mod process;
mod resolve;
pub(crate) mod rm;
pub(crate) mod run;
mod saved_spec;
mod scope;
pub(crate) mod snapshot;
pub(crate) mod stats;

use std::io::{self, Write};
use std::os::unix::net::UnixStream;

use clap::ValueEnum;

use crate::client::{ClientError, unexpected};
use crate::frame::{Exit, Frame, Request, Stage};
use crate::home::Home;
use crate::image::progress::Progress;
use crate::say;
use crate::store::{Listed, Store, StoreError};

/// How results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    // For people.
    Table,
    // For programs. (Documentation here would be printed at length by --help.)
    Json,
}

/// Opens the runs, without what died meanwhile.
fn open_store() -> Result<Store, String> {
    let home = Home::find().map_err(|error| error.to_string())?;
    let store = Store::open(&home).map_err(|error| error.to_string())?;
    store.sweep().map_err(|error| error.to_string())?;
    Ok(store)
}

/// Connects to the supervisor of a run.
fn dial(given: &str) -> Result<(Listed, UnixStream), String> {
    let run = running(given)?;
    let connection = run.directory.dial().map_err(|error| format!("run {}: {error}", run.spec.id))?;
    Ok((run, connection))
}

/// A run that has a supervisor.
fn running(given: &str) -> Result<Listed, String> {
    let home = Home::find().map_err(|error| error.to_string())?;
    let store = Store::open(&home).map_err(|error| error.to_string())?;
    let run = store.find(given).map_err(|error| error.to_string())?;
    if run.state.is_live() {
        return Ok(run);
    }
    Err(StoreError::NotRunning { id: run.spec.id, phase: run.state.state }.to_string())
}

/// Has a run's supervisor do something, and says what came of it; gives the exit status.
fn order(given: &str, request: Request) -> Result<u8, String> {
    let (listed, mut connection) = dial(given)?;
    let failed = |error: &dyn std::fmt::Display| format!("run {}: {error}", listed.spec.id);
    Frame::Request(request).write(&mut connection).map_err(|error| failed(&error))?;
    let mut bar = Bar::new(false);
    loop {
        match Frame::read(&mut connection).map_err(|error| failed(&error))? {
            Some(Frame::Progress(stage)) => bar.show(stage),
            Some(Frame::Exit(exit)) => {
                drop(bar);
                return Ok(report(&exit));
            }
            Some(other) => return Err(failed(&unexpected(&other))),
            None => return Err(failed(&ClientError::Lost)),
        }
    }
}

/// How far a save is, on a terminal.
#[derive(Debug)]
struct Bar {
    quiet: bool,
    shown: Option<(&'static str, Progress)>,
}

impl Bar {
    fn new(quiet: bool) -> Self {
        Self { quiet, shown: None }
    }

    fn show(&mut self, stage: Stage) {
        let (what, done, total) = match stage {
            Stage::Writing { done, total } => ("saving memory", done, Some(total)),
            Stage::Hashing { done } => ("hashing", done, None),
        };
        let (_, progress) = match self.shown.take() {
            Some(last) if last.0 == what => self.shown.insert(last),
            _ => self.shown.insert((what, Progress::new(what, total, self.quiet))),
        };
        progress.at(done);
    }
}

/// Tells the user of an end that needs words; gives the exit status.
fn report(exit: &Exit) -> u8 {
    exit.error.iter().chain(&exit.notes).for_each(|text| say(text));
    exit.code
}

/// Prints a result. Output that nobody reads is no error.
pub(crate) fn print(text: &str) -> Result<(), String> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(format!("standard output: {error}")),
        _ => Ok(()),
    }
}

/// Columns as wide as they need; the last one as it comes.
fn table(rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = Vec::new();
    for row in rows {
        widths.resize(widths.len().max(row.len()), 0);
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}
