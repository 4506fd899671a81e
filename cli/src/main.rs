//! `bulkhead`: runs untrusted code in a sealed microVM of its own.
//!
//! One program, two roles: the client, which is what a user starts, and the supervisor of a run, which a
//! client starts and which owns the run.
#![forbid(unsafe_code)]

mod args;
mod client;
mod clock;
mod commands;
mod environment;
mod events;
mod files;
mod frame;
mod home;
mod image;
mod kernel;
mod preflight;
mod signals;
mod spec;
mod store;
mod supervisor;
mod terminal;
mod units;
mod upstream;

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
            say(&args::wrong_usage(&error, &argv));
            return ExitCode::from(FAILED);
        }
    };
    let result = match cli.command {
        Command::Run(run) => commands::run::run(&run, &argv),
        Command::Exec(exec) => commands::exec::exec(&exec, &argv),
        Command::List(list) => commands::list::list(&list),
        Command::Image(command) => image::run(&command),
        Command::Kernel { command } => kernel::command(&command),
        Command::Policy(command) => commands::policy::policy(&command),
        Command::Inspect(inspect) => commands::inspect::inspect(&inspect),
        Command::Cp(cp) => commands::cp::cp(&cp),
        Command::Pause(pause) => commands::pause::pause(&pause),
        Command::Resume(resume) => commands::pause::resume(&resume),
        Command::Fork(fork) => commands::fork::fork(&fork),
        Command::Snapshot(command) => commands::snapshot::snapshot(&command),
        Command::Rm(rm) => commands::rm::rm(&rm),
        Command::Doctor(doctor) => commands::doctor::doctor(&doctor),
        Command::Completion(completion) => commands::completion::completion(&completion),
        Command::Stats { run } => commands::stats::stats(&run),
        Command::Supervise { directory, artifacts } => supervisor::supervise(&directory, artifacts).map(|()| 0),
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

/// What there is to say to the user: each line says who speaks. When nobody reads it, nobody misses it.
fn say(text: &str) {
    use std::io::Write;
    for line in text.lines() {
        // A name in it may be a guest's or a package's, and a terminal obeys much of what it is shown.
        let line = line.replace(|character: char| character.is_control() && character != '\t', "\u{fffd}");
        let _ = writeln!(std::io::stderr(), "bulkhead: {line}");
    }
}
