//! What `run` and `exec` have in common: how a command runs.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use crate::args::misplaced_option;
use crate::environment::{EnvironmentError, merge, read_file, resolve};
use crate::{say, terminal};

/// How a command runs, for `run` and `exec` alike.
#[derive(Debug, Args)]
pub(crate) struct Process {
    /// Pass standard input on to the command; without it, its input is empty
    #[arg(short, long)]
    pub(crate) interactive: bool,
    /// Give the command a terminal; needs one here
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// Set a variable, or pass on one of ours by its name (repeatable)
    #[arg(short, long = "env", value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// Set the variables of a file, a line each; -e goes before them (repeatable)
    #[arg(long, value_name = "FILE")]
    pub(crate) env_file: Vec<PathBuf>,
    /// Working directory, made if it is missing
    #[arg(short, long, value_name = "PATH", value_parser = workdir)]
    pub(crate) workdir: Option<String>,
    /// User, by name or number
    #[arg(short, long, value_name = "USER[:GROUP]", value_parser = user)]
    pub(crate) user: Option<String>,
}

impl Process {
    /// The variables that were asked for.
    pub(super) fn environment(&self) -> Result<Vec<String>, EnvironmentError> {
        let here = |name: &str| std::env::var_os(name);
        let mut variables = Vec::new();
        for file in &self.env_file {
            variables = merge(&variables, &read_file(file, here)?);
        }
        Ok(merge(&variables, &resolve(&self.env, here)?))
    }
}

/// The first word and the others, without the `--` that may stand between them. One positional takes
/// them all, so that options end at the first word: with two, clap goes on looking for options of ours
/// until the second.
pub(super) fn split(words: &[String]) -> (&str, &[String]) {
    match words {
        [first, dashes, rest @ ..] if dashes == "--" => (first, rest),
        [first, rest @ ..] => (first, rest),
        [] => ("", &[]),
    }
}

/// A terminal for the command is one here: its size and its keys come from it.
pub(super) fn check_terminal(process: &Process) -> Result<(), String> {
    check_terminal_for(process.tty)
}

/// The same for a command that has one (`true`) or not.
pub(super) fn check_terminal_for(tty: bool) -> Result<(), String> {
    if tty && !terminal::is_here() {
        return Err("the input device is not a TTY; leave -t out, or start it in a terminal".to_owned());
    }
    Ok(())
}

pub(super) fn warn_of_misplaced(argv: &[OsString], subcommand: &str, command: &[String]) {
    if let Some(option) = misplaced_option(argv, subcommand, command) {
        say(&format!(
            "warning: {option} stands after the {} and so belongs to the command; options of bulkhead go before it \
             (write -- to silence this)",
            if subcommand == "run" { "image" } else { "run" }
        ));
    }
}

fn workdir(text: &str) -> Result<String, String> {
    match text {
        _ if !text.starts_with('/') => Err("not an absolute path".to_owned()),
        _ if text.contains('\0') => Err("has a NUL byte".to_owned()),
        _ => Ok(text.to_owned()),
    }
}

fn user(text: &str) -> Result<String, String> {
    let fine = |part: &str| !part.is_empty() && !part.contains(|c: char| c.is_control() || c == ':');
    let (user, group) = text.split_once(':').map_or((text, None), |(user, group)| (user, Some(group)));
    if fine(user) && group.is_none_or(fine) { Ok(text.to_owned()) } else { Err("not USER or USER:GROUP".to_owned()) }
}
