//! `bulkhead run`: a command in a microVM of its own.

use std::ffi::{OsStr, OsString};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use vmm_control::Stats;

use super::process::{Process, check_terminal, split, warn_of_misplaced};
use super::report;
use super::resolve::make_spec;
use crate::client::{ClientError, Mode, attach};
use crate::frame::{Frame, Request};
use crate::home::Home;
use crate::launch::{self, Lifetime};
use crate::store::{RunDirectory, Store};
use crate::terminal;
use crate::units::{parse_duration, parse_size};

/// Guest memory when `-m` does not say.
const DEFAULT_MEMORY: &str = "1G";

/// `bulkhead run`
#[derive(Debug, Args)]
#[command(
    override_usage = "bulkhead run [OPTIONS] IMAGE [--] [COMMAND [ARG...]]",
    after_help = "Options end at IMAGE: what follows belongs to the command. Sizes are binary: 4G, 4GB and 4GiB are \
                  the same.\nA run without --name is removed when it ends; a named one is kept unless --rm is given."
)]
pub(crate) struct Run {
    /// How the command runs.
    #[command(flatten)]
    pub(crate) process: Process,
    /// Number of CPUs, 1 to 32
    #[arg(long, visible_alias = "cpu", value_name = "N", default_value = "1", value_parser = cpus)]
    pub(crate) cpus: u8,
    /// Guest memory, at least 64M
    #[arg(short, long, value_name = "SIZE", default_value = DEFAULT_MEMORY, value_parser = parse_size)]
    pub(crate) memory: u64,
    /// Size of the disk [default: the image's]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) disk: Option<u64>,
    /// End the run when the command has run for so long: 30s, 15m, 8h
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) timeout: Option<Duration>,
    /// Give up when the guest has not booted after so long
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub(crate) start_timeout: Duration,
    /// A name for the run, which is then kept when it ends
    #[arg(long, value_parser = run_name)]
    pub(crate) name: Option<String>,
    /// Remove the run when it ends, even if it has a name
    #[arg(long)]
    pub(crate) rm: bool,
    /// Guest kernel [default: the newest]
    #[arg(long, value_name = "NAME")]
    pub(crate) kernel: Option<String>,
    /// Give the guest all of its kernel's modules, read-only at /lib/modules
    #[arg(long)]
    pub(crate) modules: bool,
    /// Record the guest's serial console in the run's console.log; slows the boot
    #[arg(long)]
    pub(crate) console: bool,
    /// Say nothing but results and errors
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// More words for the kernel's command line
    #[arg(long, hide = true, value_name = "WORDS", default_value = "", value_parser = cmdline)]
    pub(crate) cmdline_extra: String,
    /// Number of disk layers above the image
    #[arg(long, hide = true, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u8).range(1..=63))]
    pub(crate) disk_layers: u8,
    /// Write the VMM's last counters here, as JSON
    #[arg(long, hide = true, value_name = "PATH")]
    pub(crate) stats_file: Option<PathBuf>,
    /// The image, then the command [default: the image's]
    #[arg(value_name = "IMAGE [COMMAND]", required = true, num_args = 1.., trailing_var_arg = true)]
    words: Vec<String>,
}

impl Run {
    /// The image and the command's words.
    pub(crate) fn image_and_command(&self) -> (&str, &[String]) {
        split(&self.words)
    }
}

/// `bulkhead run`: returns the exit status.
pub(crate) fn run(args: &Run, argv: &[OsString]) -> Result<u8, String> {
    let (image, command) = args.image_and_command();
    if !args.quiet {
        warn_of_misplaced(argv, "run", command);
    }
    let starting = |error: &dyn std::fmt::Display| format!("cannot start run: {error}");
    check_terminal(&args.process).map_err(|error| starting(&error))?;
    let home = Home::find().map_err(|error| starting(&error))?;
    let store = Store::open(&home).map_err(|error| starting(&error))?;
    store.sweep().map_err(|error| starting(&error))?;
    let mut spec = make_spec(args, &home, image, command).map_err(|error| starting(&error))?;
    let (directory, lock) = store.create(&mut spec).map_err(|error| starting(&error))?;

    let size = args.process.tty.then(terminal::size);
    let (connection, theirs) = UnixStream::pair().map_err(|error| starting(&error))?;
    let launched =
        Frame::Request(Request::Primary { size }).write(&mut &connection).map_err(|error| error.to_string()).and_then(
            |()| start_supervisor(&directory, &[theirs.as_fd(), lock.as_fd()]).map_err(|error| error.to_string()),
        );
    if let Err(error) = launched {
        // It never ran: what remains of it says nothing to anyone.
        let _ = directory.remove();
        return Err(format!("cannot start run {}: {error}", spec.id));
    }
    // From here on the supervisor's copies are the only ones.
    drop((theirs, lock));

    let mode = Mode { stdin: args.process.interactive, tty: args.process.tty };
    let exit = attach(&connection, mode);
    terminal::restore();
    match exit {
        Ok(exit) => {
            if let (Some(path), Some(stats)) = (&args.stats_file, &exit.stats) {
                write_stats(path, stats)?;
            }
            Ok(report(&exit))
        }
        Err(error) => {
            if matches!(error, ClientError::Lost | ClientError::Frame(_)) {
                clean_up(&store, &directory, spec.ephemeral);
            }
            Err(format!("run {}: {error}", spec.id))
        }
    }
}

/// Starts the run's supervisor, which outlives us.
fn start_supervisor(directory: &RunDirectory, descriptors: &[std::os::fd::BorrowedFd<'_>]) -> io::Result<()> {
    // Nothing is written there but the last words of a supervisor that panics.
    let log = directory.path().join("supervisor.log");
    let errors = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(log)?;
    let arguments = [OsStr::new("supervise"), directory.path().as_os_str()];
    let own = Path::new("/proc/self/exe").canonicalize()?;
    launch::start(&own, &arguments, descriptors, errors, Lifetime::Own)?;
    Ok(())
}

/// Removes what a dead supervisor left. Its connection ends a moment before its lock does. What cannot be
/// removed now is left to the next command.
fn clean_up(store: &Store, directory: &RunDirectory, ephemeral: bool) {
    for _ in 0..50 {
        if !ephemeral || store.sweep().is_err() || !directory.path().exists() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

fn write_stats(path: &Path, stats: &Stats) -> Result<(), String> {
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = serde_json::to_string(stats).map_err(|error| failed(&error))?;
    std::fs::write(path, text).map_err(|error| failed(&error))
}

fn cpus(text: &str) -> Result<u8, String> {
    match text.parse::<u64>() {
        Ok(n @ 1..=32) => u8::try_from(n).map_err(|e| e.to_string()),
        Ok(n) => Err(format!("{n} is outside 1 to {}", vmm_control::MAX_VCPUS)),
        Err(_) => Err("not a whole number".to_owned()),
    }
}

/// A run's name. Word characters only, so that it is safe in a path, a terminal and a host name.
fn run_name(text: &str) -> Result<String, String> {
    let word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if text.len() > 63 {
        return Err("longer than 63 characters".to_owned());
    }
    if !text.starts_with(|c: char| c.is_ascii_alphanumeric()) || !text.chars().all(word) {
        return Err("names begin with a letter or digit and go on with letters, digits, '.', '_' and '-'".to_owned());
    }
    Ok(text.to_owned())
}

fn cmdline(text: &str) -> Result<String, String> {
    if text.chars().all(|c| c == ' ' || c.is_ascii_graphic()) {
        Ok(text.to_owned())
    } else {
        Err("not printable ASCII".to_owned())
    }
}
