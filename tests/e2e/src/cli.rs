//! `bulkhead` with a state directory of a test's own.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use crate::command::{Output, Running, output};
use crate::host;

/// A state directory and the client that uses it.
#[derive(Debug)]
pub(crate) struct Bulkhead {
    home: tempfile::TempDir,
}

impl Bulkhead {
    /// With a fresh state directory.
    pub(crate) fn new() -> Self {
        Self { home: host::state() }
    }

    /// With a fresh state directory that has kernels alone.
    pub(crate) fn without_images() -> Self {
        Self { home: host::state_without_images() }
    }

    /// The state directory.
    pub(crate) fn home(&self) -> &Path {
        self.home.path()
    }

    /// The client with these arguments. A guest has long to boot: how long it takes in an emulated machine says nothing.
    pub(crate) fn command<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Command {
        let mut command = Command::new(host::bulkhead());
        command.env_clear().env("BULKHEAD_HOME", self.home.path()).env("PATH", "/usr/bin:/bin");
        let (run, rest) = arguments.split_at(usize::from(arguments.first().is_some_and(|word| word.as_ref() == "run")));
        command.args(run);
        if !run.is_empty() && !arguments.iter().any(|word| word.as_ref() == "--start-timeout") {
            command.args(["--start-timeout", "4m"]);
        }
        command.args(rest);
        command
    }

    /// Runs the client to its end.
    pub(crate) fn output<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Output {
        output(&mut self.command(arguments), b"")
    }

    /// Runs the client with this standard input.
    pub(crate) fn with_input<S: AsRef<OsStr>>(&self, arguments: &[S], input: &[u8]) -> Output {
        output(&mut self.command(arguments), input)
    }

    /// Starts the client beside the test.
    pub(crate) fn start<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Running {
        Running::start(&mut self.command(arguments))
    }

    /// Starts a kept run whose command does nothing but be there, and waits until it is.
    pub(crate) fn reside(&self, name: &str, options: &[&str]) -> Running {
        let words = ["sh", "-c", "echo here; exec sleep 100000"];
        let mut resident = self.start(&[&["run", "--name", name], options, &["busybox"], &words].concat());
        resident.until_printed("here\n");
        resident
    }

    /// Runs a shell script in a running run to its end.
    pub(crate) fn shell(&self, run: &str, script: &str) -> Output {
        self.output(&["exec", run, "sh", "-c", script])
    }

    /// The directories of runs that exist.
    pub(crate) fn runs(&self) -> Vec<std::path::PathBuf> {
        let Ok(entries) = std::fs::read_dir(self.home.path().join("runs")) else { return Vec::new() };
        entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect()
    }
}
