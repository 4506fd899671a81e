//! What each command does.

use std::ffi::{OsStr, OsString};
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use vmm_control::Stats;

use crate::args::{self, misplaced_option};
use crate::client::{ClientError, Mode, attach, unexpected};
use crate::environment;
use crate::frame::{Exec, Exit, Frame, Request};
use crate::home::{Home, Image, ProgramFiles};
use crate::launch::{self, Lifetime};
use crate::preflight::{check_kernel, check_memory, disk_size, open_kvm};
use crate::spec::{Machine, Process, Spec};
use crate::store::{Listed, RunDirectory, Store, StoreError};
use crate::{say, terminal};

/// Memory is given in these pieces.
const PAGE: u64 = 4096;

/// `bulkhead run`: returns the exit status.
pub(crate) fn run(args: &args::Run, argv: &[OsString]) -> Result<u8, String> {
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

/// `bulkhead exec`: returns the exit status.
pub(crate) fn exec(args: &args::Exec, argv: &[OsString]) -> Result<u8, String> {
    let (run, command) = args.run_and_command();
    warn_of_misplaced(argv, "exec", command);
    check_terminal(&args.process)?;
    if command.is_empty() {
        return Err("exec: no command".to_owned());
    }
    let env = environment::resolve(&args.process.env, |name| std::env::var_os(name)).map_err(|e| e.to_string())?;
    let (listed, mut connection) = dial(run)?;
    let request = Request::Exec(Exec {
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
    let exit = attach(&connection, mode);
    terminal::restore();
    Ok(report(&exit.map_err(|error| failed(&error))?))
}

/// `bulkhead list`
pub(crate) fn list(args: &args::List) -> Result<u8, String> {
    let home = Home::find().map_err(|error| error.to_string())?;
    let store = Store::open(&home).map_err(|error| error.to_string())?;
    store.sweep().map_err(|error| error.to_string())?;
    let mut runs = store.all();
    runs.retain(|run| args.all || run.state.state.is_live());
    let text = if args.quiet { runs.iter().map(|run| format!("{}\n", run.spec.id)).collect() } else { table(&runs) };
    quietly(io::stdout().write_all(text.as_bytes()))?;
    Ok(0)
}

/// `bulkhead stats`
pub(crate) fn stats(run: &str) -> Result<u8, String> {
    let (listed, mut connection) = dial(run)?;
    let failed = |error: &dyn std::fmt::Display| format!("run {}: {error}", listed.spec.id);
    Frame::Request(Request::Stats).write(&mut connection).map_err(|error| failed(&error))?;
    match Frame::read(&mut connection).map_err(|error| failed(&error))? {
        Some(Frame::Stats(stats)) => {
            let mut text = serde_json::to_string(&stats).map_err(|error| failed(&error))?;
            text.push('\n');
            quietly(io::stdout().write_all(text.as_bytes()))?;
            Ok(0)
        }
        Some(Frame::Exit(exit)) => Ok(report(&exit)),
        Some(other) => Err(failed(&unexpected(&other))),
        None => Err(failed(&ClientError::Lost)),
    }
}

/// Everything that was asked for, resolved and checked.
fn make_spec(
    args: &args::Run,
    home: &Home,
    image: &str,
    command: &[String],
) -> Result<Spec, Box<dyn std::error::Error>> {
    let env = environment::resolve(&args.process.env, |name| std::env::var_os(name))?;
    let image = home.image(image)?;
    let kernel = home.kernel(args.kernel.as_deref())?;
    let files = ProgramFiles::find()?;
    check_kernel(&kernel)?;
    let disk = disk_size(args.disk, &image.name, image.size)?;
    check_memory(args.memory, &std::fs::read_to_string("/proc/meminfo").unwrap_or_default())?;
    open_kvm()?;
    let command = command_in(&image, command)?;
    Ok(Spec {
        version: 1,
        id: String::new(),
        name: args.name.clone(),
        ephemeral: args.rm || args.name.is_none(),
        machine: Machine {
            image_file: canonical(&image.root)?,
            image: image.name,
            kernel_file: canonical(&kernel.vmlinux)?,
            initrds: vec![canonical(&kernel.modules)?, canonical(&files.agent)?],
            kernel: kernel.name,
            vmm: canonical(&files.vmm)?,
            cpus: args.cpus,
            memory: args.memory.next_multiple_of(PAGE),
            disk,
            disk_layers: args.disk_layers,
            console: args.console,
            cmdline_extra: args.cmdline_extra.clone(),
        },
        process: Process {
            command,
            env: environment::merge(&image.config.env, &env),
            workdir: args.process.workdir.clone().or_else(|| non_empty(image.config.workdir)),
            user: args.process.user.clone().or_else(|| non_empty(image.config.user)),
            stdin: args.process.interactive,
            tty: args.process.tty,
            term: terminal::kind(),
        },
        start_timeout_ms: millis(args.start_timeout),
        timeout_ms: args.timeout.map(millis),
    })
}

/// The command line that runs: the image's entry point, then what was asked for or what the image says.
fn command_in(image: &Image, command: &[String]) -> Result<Vec<String>, String> {
    let arguments = if command.is_empty() { &image.config.cmd } else { command };
    let whole: Vec<String> = image.config.entrypoint.iter().chain(arguments).cloned().collect();
    match whole.first() {
        Some(first) if !first.is_empty() => Ok(whole),
        Some(_) => Err("the command is empty".to_owned()),
        None => Err(format!("image {:?} has no command of its own; give one after its name", image.name)),
    }
}

fn canonical(path: &Path) -> Result<std::path::PathBuf, String> {
    path.canonicalize().map_err(|error| format!("{}: {error}", path.display()))
}

fn non_empty(text: Option<String>) -> Option<String> {
    text.filter(|text| !text.is_empty())
}

fn millis(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
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

/// A terminal for the command is one here: its size and its keys come from it.
fn check_terminal(process: &args::Process) -> Result<(), String> {
    if process.tty && !terminal::is_here() {
        return Err("the input device is not a TTY".to_owned());
    }
    Ok(())
}

fn warn_of_misplaced(argv: &[OsString], subcommand: &str, command: &[String]) {
    if let Some(option) = misplaced_option(argv, subcommand, command) {
        say(&format!(
            "warning: {option} stands after the {} and so belongs to the command; options of bulkhead go before it \
             (write -- to silence this)",
            if subcommand == "run" { "image" } else { "run" }
        ));
    }
}

/// Connects to the supervisor of a run.
fn dial(given: &str) -> Result<(Listed, UnixStream), String> {
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
fn report(exit: &Exit) -> u8 {
    if let Some(error) = &exit.error {
        say(error);
    }
    exit.code
}

fn write_stats(path: &Path, stats: &Stats) -> Result<(), String> {
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = serde_json::to_string(stats).map_err(|error| failed(&error))?;
    std::fs::write(path, text).map_err(|error| failed(&error))
}

/// Output that nobody reads is no error.
fn quietly(result: io::Result<()>) -> Result<(), String> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(format!("standard output: {error}")),
        _ => Ok(()),
    }
}

/// Runs as a table whose columns are as wide as they need.
fn table(runs: &[Listed]) -> String {
    let mut rows = vec![["ID", "NAME", "IMAGE", "STATE"].map(str::to_owned)];
    rows.extend(runs.iter().map(|run| {
        let state = match &run.state.reason {
            Some(reason) => format!("{} ({})", run.state.state, guest::message::printable(reason)),
            None => run.state.state.to_string(),
        };
        [run.spec.id.clone(), run.spec.name.clone().unwrap_or_default(), run.spec.machine.image.clone(), state]
    }));
    let mut widths = [0; 4];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let line = |row: &[String; 4]| {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::home::ImageConfig;

    fn image(entrypoint: &[&str], cmd: &[&str]) -> Image {
        let list = |of: &[&str]| of.iter().map(|s| (*s).to_owned()).collect();
        let config = ImageConfig { entrypoint: list(entrypoint), cmd: list(cmd), ..ImageConfig::default() };
        Image { name: "x".into(), root: "/r".into(), size: 0, config }
    }

    #[test]
    fn the_entry_point_goes_before_every_command() {
        let asked = ["ls".to_owned()];
        assert_eq!(command_in(&image(&[], &["sh"]), &[]).unwrap(), ["sh"]);
        assert_eq!(command_in(&image(&[], &["sh"]), &asked).unwrap(), ["ls"]);
        assert_eq!(command_in(&image(&["tini", "--"], &["sh"]), &asked).unwrap(), ["tini", "--", "ls"]);
        assert!(command_in(&image(&[], &[]), &[]).unwrap_err().contains("no command of its own"));
        assert!(command_in(&image(&[], &[]), &[String::new()]).is_err());
    }
}
