//! `bulkhead exec`: another command in a running run.

use std::ffi::OsString;

use clap::Args;

use super::process::{Process, check_terminal, split, warn_of_misplaced};
use super::{dial, report};
use crate::client::{Mode, attach};
use crate::frame::{self, Frame, Request};
use crate::terminal;

/// `bulkhead exec`
#[derive(Debug, Args)]
#[command(
    override_usage = "bulkhead exec [OPTIONS] RUN [--] COMMAND [ARG...]",
    after_help = "Options end at RUN: what follows belongs to the command. Variables, working directory and user are \
                  the run's\nunless said otherwise. When this client goes away, its command is killed."
)]
pub(crate) struct Exec {
    /// How the command runs.
    #[command(flatten)]
    pub(crate) process: Process,
    /// Id, unique beginning of an id, or name; then the command
    #[arg(value_name = "RUN [COMMAND]", required = true, num_args = 1.., trailing_var_arg = true)]
    words: Vec<String>,
}

impl Exec {
    /// The run and the command's words.
    pub(crate) fn run_and_command(&self) -> (&str, &[String]) {
        split(&self.words)
    }
}

/// `bulkhead exec`: returns the exit status.
pub(crate) fn exec(args: &Exec, argv: &[OsString]) -> Result<u8, String> {
    let (run, command) = args.run_and_command();
    warn_of_misplaced(argv, "exec", command);
    check_terminal(&args.process)?;
    if command.is_empty() {
        return Err("exec: no command; write one after the run".to_owned());
    }
    let env = args.process.environment().map_err(|error| error.to_string())?;
    let (listed, mut connection) = dial(run)?;
    let request = Request::Exec(frame::Exec {
        command: command.to_vec(),
        env,
        workdir: args.process.workdir.clone(),
        user: args.process.user.clone(),
        stdin: args.process.interactive,
        tty: args.process.tty.then(terminal::size),
        term: terminal::kind(),
    });
    let failed = |error: &dyn std::fmt::Display| format!("run {}: {error}", listed.spec.id);
    Frame::Request(request).write(&mut connection).map_err(|error| failed(&error))?;
    let mode = Mode { stdin: args.process.interactive, tty: args.process.tty };
    let exit = attach(&connection, mode, &mut || Ok(()));
    terminal::restore();
    Ok(report(&exit.map_err(|error| failed(&error))?))
}
