//! `bulkhead`: runs untrusted code in a sealed microVM of its own.
//!
//! One program, two roles: the client, which is what a user starts, and the supervisor of a run, which a
//! client starts and which owns the run.
#![deny(unsafe_code)]

mod args;
mod client;
mod clock;
mod commands;
mod environment;
mod frame;
mod home;
mod image;
mod kernel;
mod launch;
mod preflight;
mod signals;
mod spec;
mod store;
mod supervisor;
mod terminal;
mod units;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;

use crate::args::{Cli, Command};

/// Exit status of a failure of ours.
const FAILED: u8 = 125;

fn main() -> ExitCode {
    let argv: Vec<OsString> = std::env::args_os().collect();
    let cli = match Cli::try_parse_from(&argv) {
        Ok(cli) => cli,
        // Help and version, for which a closed pipe is quiet; without a command, the help is what to say.
        Err(error) if !error.use_stderr() || error.kind() == DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { FAILED } else { 0 });
        }
        Err(error) => {
            say(&args::wrong_usage(&error));
            return ExitCode::from(FAILED);
        }
    };
    let result = match cli.command {
        Command::Run(run) => commands::run::run(&run, &argv),
        Command::Exec(exec) => commands::exec::exec(&exec, &argv),
        Command::List(list) => commands::list::list(&list),
        Command::Image(command) => image::run(&command),
        Command::Kernel { command } => kernel::command(&command),
        Command::Stats { run } => commands::stats::stats(&run),
        Command::Supervise { directory } => supervisor::supervise(directory).map(|()| 0),
    };
    terminal::restore();
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            say(&error);
            ExitCode::from(FAILED)
        }
    }
}

/// A line for the user. When nobody reads it, nobody misses it.
fn say(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "bulkhead: {text}");
}
