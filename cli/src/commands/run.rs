//! `bulkhead run`: a command in a microVM of its own.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use guest::message::printable;
use jailer::launch::{self, Lifetime};
use serde::Serialize;
use vmm_control::Stats;

use super::process::{Process, check_terminal, split, warn_of_misplaced};
use super::resolve::{check_host, make_spec};
use super::scope::{self, Start};
use super::{Format, print};
use crate::client::{ClientError, Mode, attach};
use crate::files::copy::{Guest, Inwards};
use crate::files::pack::Owner;
use crate::frame::{Frame, Request, Size};
use crate::home::Home;
use crate::spec::{Artifacts, Machine, Port, Spec};
use crate::store::{RunDirectory, Store};
use crate::units::{parse_duration, parse_size};
use crate::{FAILED, say, terminal};

/// Most bytes of a dead supervisor's words.
const MAX_WORDS: u64 = 4096;
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
    /// Number of CPUs, up to 32; a part of one bounds the CPU time of all
    #[arg(long, visible_alias = "cpu", value_name = "N", default_value = "1", value_parser = super::jail::cpus)]
    pub(crate) cpus: super::jail::Cpus,
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
    /// What goes before the command in place of the image's entry point, whose command then does not count; "" for nothing
    #[arg(long, value_name = "COMMAND")]
    pub(crate) entrypoint: Option<String>,
    /// Offer a port of the guest here, on 127.0.0.1 unless an address is given (repeatable)
    #[arg(short = 'p', long = "publish", value_name = "[ADDRESS:]PORT:GUESTPORT", value_parser = port, help_heading = "Network")]
    pub(crate) ports: Vec<Port>,
    /// What it may reach.
    #[command(flatten)]
    pub(crate) network: super::policy::Given,
    /// How the VMM is confined.
    #[command(flatten)]
    pub(crate) jail: super::jail::Jail,
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
    /// Copy a file or directory in before the command starts [DEST: the working directory] (repeatable)
    #[arg(long = "input", value_name = "PATH[:DEST]")]
    pub(crate) inputs: Vec<String>,
    /// Copy what matches out when the run ends, however it ends; relative to the working directory (repeatable)
    #[arg(long = "artifact", value_name = "GLOB")]
    pub(crate) artifacts: Vec<String>,
    /// Where artifacts go [default: ./artifacts-ID]
    #[arg(long, value_name = "DIR")]
    pub(crate) artifact_dir: Option<PathBuf>,
    /// Most bytes of artifacts, all together
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    pub(crate) artifact_limit: u64,
    /// Note something on the run, for inspect and list (repeatable)
    #[arg(long = "label", value_name = "NAME[=VALUE]", value_parser = label)]
    pub(crate) labels: Vec<(String, String)>,
    /// Print what would run, as JSON, and start nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// How to tell what came of it: json is one line at the end of standard error
    #[arg(long, value_enum, default_value = "table")]
    pub(crate) format: Format,
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

/// What came of a run.
#[derive(Debug, Default, Serialize)]
struct Outcome {
    id: Option<String>,
    name: Option<String>,
    exit_code: u8,
    reason: Option<String>,
    error: Option<String>,
    notes: Vec<String>,
}

/// `bulkhead run`: returns the exit status.
pub(crate) fn run(args: &Run, argv: &[OsString]) -> Result<u8, String> {
    let (_, command) = args.image_and_command();
    if !args.quiet {
        warn_of_misplaced(argv, "run", command);
    }
    let mut outcome = Outcome { name: args.name.clone(), ..Outcome::default() };
    if let Err(error) = attempt(args, &mut outcome) {
        (outcome.exit_code, outcome.error) = (FAILED, Some(error));
    }
    terminal::restore();
    match args.format {
        Format::Json => {
            let text = serde_json::to_string(&outcome).map_err(|error| error.to_string())?;
            // As the last line: what the command itself wrote there comes before.
            let _ = writeln!(io::stderr(), "{text}");
        }
        Format::Table => {
            outcome.error.iter().chain(outcome.notes.iter().filter(|_| !args.quiet)).for_each(|text| say(text));
        }
    }
    Ok(outcome.exit_code)
}

fn attempt(args: &Run, outcome: &mut Outcome) -> Result<(), String> {
    let (image, command) = args.image_and_command();
    let starting = |error: &dyn std::fmt::Display| format!("cannot start run: {error}");
    check_terminal(&args.process).map_err(|error| starting(&error))?;
    let home = Home::find().map_err(|error| starting(&error))?;
    let mut spec = make_spec(args, &home, image, command).map_err(|error| starting(&error))?;
    if args.dry_run {
        let text = serde_json::to_string_pretty(&spec).map_err(|error| starting(&error))?;
        return print(&format!("{text}\n"));
    }
    check_host(&spec).map_err(|error| starting(&error))?;
    let store = Store::open(&home).map_err(|error| starting(&error))?;
    store.sweep().map_err(|error| starting(&error))?;
    let (directory, lock) = store.create(&mut spec).map_err(|error| starting(&error))?;
    outcome.id = Some(spec.id.clone());

    let size = args.process.tty.then(terminal::size);
    let launched = launch(&directory, &spec, size, &lock);
    // From here on the supervisor's copy of the lock is the only one.
    drop(lock);
    let (connection, mut log) = match launched {
        Ok(launched) => launched,
        Err(error) => {
            // It never ran: what remains of it says nothing to anyone.
            let _ = directory.remove();
            return Err(format!("cannot start run {}: {error}", spec.id));
        }
    };
    let mode = Mode { stdin: args.process.interactive, tty: args.process.tty };
    let notes = &mut outcome.notes;
    let exit = attach(&connection, mode, &mut || copy_inputs(&directory, &spec, notes));
    terminal::restore();
    if let Some(artifacts) = spec.artifacts.as_ref().filter(|artifacts| artifacts.own) {
        // Only if it is empty.
        let _ = std::fs::remove_dir(&artifacts.directory);
    }
    match exit {
        Ok(exit) => {
            if let (Some(path), Some(stats)) = (&args.stats_file, &exit.stats) {
                write_stats(path, stats)?;
            }
            (outcome.exit_code, outcome.error, outcome.reason) = (exit.code, exit.error, exit.reason);
            outcome.notes.extend(exit.notes);
            Ok(())
        }
        Err(error) => {
            // The supervisor takes a closed connection for the end of the run.
            drop(connection);
            let words =
                if matches!(error, ClientError::Lost | ClientError::Frame(_)) { last_words(&mut log) } else { None };
            clean_up(&store, &directory);
            match words {
                Some(words) => Err(format!("run {}: {error}; it said: {words}", spec.id)),
                None => Err(format!("run {}: {error}", spec.id)),
            }
        }
    }
}

/// Copies the inputs in, as files of the user who the command runs as.
fn copy_inputs(directory: &RunDirectory, spec: &Spec, notes: &mut Vec<String>) -> Result<(), String> {
    let dial = || directory.dial().map_err(|error| error.to_string());
    let guest = Guest { dial: &dial };
    let owner = match &spec.process.user {
        Some(_) => guest.stat("/", false, Some("")).map(|user| Owner::Numbers(user.uid, user.gid))?,
        None => Owner::Numbers(0, 0),
    };
    for input in &spec.inputs {
        let source = input.source.to_str().ok_or_else(|| format!("--input {}: not UTF-8", input.source.display()))?;
        let workdir = format!("{}/", spec.process.workdir.as_deref().unwrap_or("/").trim_end_matches('/'));
        // Without a destination it goes into the working directory under its own name.
        let (destination, into) = match input.destination.as_str() {
            "" => (workdir.as_str(), true),
            destination => (destination, false),
        };
        let how = Inwards { owner, follow: false, make_parents: true, into };
        let packed = guest.copy_in(source, destination, how).map_err(|error| format!("--input: {error}"))?;
        notes.extend(packed.left_out.into_iter().map(|note| format!("--input: {note}")));
    }
    Ok(())
}

/// Starts the run's supervisor, which outlives us, with our connection to it. Its last words, if it dies, are in the file.
fn launch(
    directory: &RunDirectory,
    spec: &Spec,
    size: Option<Size>,
    lock: &File,
) -> Result<(UnixStream, File), String> {
    let text = |error: io::Error| error.to_string();
    let artifacts = spec.artifacts.as_ref().map(open_artifacts).transpose()?;
    let (connection, theirs) = UnixStream::pair().map_err(text)?;
    let request = Request::Primary { size, hold: !spec.inputs.is_empty() };
    Frame::Request(request).write(&mut &connection).map_err(|error| error.to_string())?;
    let mut descriptors = vec![theirs.as_fd(), lock.as_fd()];
    descriptors.extend(artifacts.as_ref().map(AsFd::as_fd));
    let log = directory.path().join("supervisor.log");
    let log =
        OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(log).map_err(text)?;
    let started = start_supervisor(directory, &spec.machine, &descriptors, log.try_clone().map_err(text)?);
    if let (Err(_), Some(artifacts)) = (&started, spec.artifacts.as_ref().filter(|artifacts| artifacts.own)) {
        let _ = std::fs::remove_dir(&artifacts.directory);
    }
    started.map_err(text)?;
    Ok((connection, log))
}

/// Opens the directory that artifacts go to, and makes it.
fn open_artifacts(artifacts: &Artifacts) -> Result<OwnedFd, String> {
    let path = &artifacts.directory;
    let failed = |error: io::Error| format!("--artifact-dir {}: {error}", path.display());
    match std::fs::create_dir(path) {
        Err(error) if artifacts.own || error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    File::open(path).map(OwnedFd::from).map_err(failed)
}

/// What a supervisor that died wrote before.
fn last_words(log: &mut File) -> Option<String> {
    log.rewind().ok()?;
    let mut text = Vec::new();
    log.take(MAX_WORDS).read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text).lines().map(printable).collect::<Vec<_>>().join("\n  ");
    Some(text).filter(|text| !text.is_empty())
}

fn start_supervisor(
    directory: &RunDirectory,
    machine: &Machine,
    descriptors: &[BorrowedFd<'_>],
    log: File,
) -> io::Result<()> {
    let own = Path::new("/proc/self/exe").canonicalize()?;
    let Start { program, mut arguments, environment } = scope::supervisor(&own, directory.path(), machine);
    if descriptors.len() > 2 {
        arguments.push("--artifacts".into());
    }
    let arguments: Vec<&OsStr> = arguments.iter().map(OsString::as_os_str).collect();
    // Nothing is written to its log but the last words of a supervisor that panics.
    launch::start(&program, &arguments, &environment, descriptors, log, Lifetime::Own)?;
    Ok(())
}

/// Waits for the end of a supervisor that is dead or on its way, and removes what it left. Its connection ends before its
/// lock does. What cannot be removed now is left to the next command.
fn clean_up(store: &Store, directory: &RunDirectory) {
    for _ in 0..500 {
        if !directory.is_alive() {
            let _ = store.sweep();
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn write_stats(path: &Path, stats: &Stats) -> Result<(), String> {
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = serde_json::to_string(stats).map_err(|error| failed(&error))?;
    std::fs::write(path, text).map_err(|error| failed(&error))
}

/// `8080:80`, `0.0.0.0:8080:80`, `[::1]:8080:80`
fn port(text: &str) -> Result<Port, String> {
    let number = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
    let parse = || {
        let (rest, guest) = text.rsplit_once(':')?;
        let (address, host) = rest.rsplit_once(':').unwrap_or(("127.0.0.1", rest));
        let address = address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(address);
        Some(Port { address: address.parse().ok()?, host: number(host)?, guest: number(guest)? })
    };
    parse().ok_or_else(|| "expected [ADDRESS:]PORT:GUESTPORT, such as 8080:80 or 0.0.0.0:8080:80".to_owned())
}

fn label(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').unwrap_or((text, ""));
    if name.is_empty() || text.contains(char::is_control) {
        return Err("not NAME or NAME=VALUE".to_owned());
    }
    Ok((name.to_owned(), value.to_owned()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_supervisor_is_quoted_and_cannot_drive_a_terminal() {
        let mut log = tempfile::tempfile().unwrap();
        assert_eq!(last_words(&mut log), None);
        log.write_all(b"thread 'main' panicked at x:1:\n\x1b[2Jwhy\n").unwrap();
        assert_eq!(last_words(&mut log).unwrap(), "thread 'main' panicked at x:1:\n  \u{fffd}[2Jwhy");
        log.write_all(&vec![b'x'; 1 << 20]).unwrap();
        assert!(last_words(&mut log).unwrap().len() < 2 * 4096);
    }

    #[test]
    fn labels_have_names() {
        assert_eq!(label("a=b=c").unwrap(), ("a".to_owned(), "b=c".to_owned()));
        assert_eq!(label("a").unwrap(), ("a".to_owned(), String::new()));
        assert!(label("=b").is_err() && label("").is_err() && label("a=\n").is_err());
    }
}
