//! `bulkhead run`: a command in a microVM of its own.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use snapshot::store::{Chain, ChainLayer, Snapshots};
use vmm_control::Stats;

use super::fork::{create, run_from, verify};
use super::launch::{Outcome, take_part};
use super::process::{Process, check_terminal, split, warn_of_misplaced};
use super::resolve::{check_host, make_spec};
use super::{Format, print};
use crate::FAILED;
use crate::home::Home;
use crate::spec::Port;
use crate::store::Store;
use crate::units::{parse_duration, parse_size};

/// Guest memory when `-m` does not say.
const DEFAULT_MEMORY: &str = "1G";

/// `bulkhead run`
#[derive(Debug, Args)]
#[command(
    override_usage = "bulkhead run [OPTIONS] IMAGE [--] [COMMAND [ARG...]]\n       bulkhead run --from SNAPSHOT [OPTIONS] [--] [COMMAND [ARG...]]",
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
    /// Take a snapshot each time that the command has run for so long, at least 10s
    #[arg(long, value_name = "TIME", value_parser = snapshot_every)]
    pub(crate) snapshot_every: Option<Duration>,
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
    /// Go on from a snapshot in place of booting an image: with its machine, and a command of its own or the one that runs there
    #[arg(long, value_name = "SNAPSHOT", conflicts_with_all = ["cpus", "memory", "disk", "kernel", "modules", "console", "entrypoint", "cmdline_extra", "disk_layers", "require_cgroup", "io_max", "allow_unenforced", "users"])]
    pub(crate) from: Option<String>,
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
    #[arg(value_name = "IMAGE [COMMAND]", required_unless_present = "from", num_args = 1.., trailing_var_arg = true)]
    words: Vec<String>,
}

impl Run {
    /// The image and the command's words. A run that goes on from a snapshot names no image.
    pub(crate) fn image_and_command(&self) -> (&str, &[String]) {
        match self.from {
            Some(_) => ("", self.words.strip_prefix(&["--".to_owned()][..]).unwrap_or(&self.words)),
            None => split(&self.words),
        }
    }
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
    outcome.tell(args.format, args.quiet)
}

fn attempt(args: &Run, outcome: &mut Outcome) -> Result<(), String> {
    let (image, command) = args.image_and_command();
    let starting = |error: &dyn std::fmt::Display| format!("cannot start run: {error}");
    check_terminal(&args.process).map_err(|error| starting(&error))?;
    let home = Home::find().map_err(|error| starting(&error))?;
    let from = match &args.from {
        Some(given) => {
            let snapshots = Snapshots::open(home.path()).map_err(|error| starting(&error))?;
            let snapshot = snapshots.find(given).map_err(|error| starting(&error))?;
            verify(&snapshot, args.quiet || args.dry_run).map_err(|error| starting(&error))?;
            Some((snapshots, snapshot))
        }
        None => None,
    };
    let spec = match &from {
        Some((_, snapshot)) => run_from(args, &home, snapshot, command),
        None => make_spec(args, &home, image, command),
    };
    let mut spec = spec.map_err(|error| starting(&error))?;
    if args.dry_run {
        let text = serde_json::to_string_pretty(&spec).map_err(|error| starting(&error))?;
        return print(&format!("{text}\n"));
    }
    check_host(&spec).map_err(|error| starting(&error))?;
    let store = Store::open(&home).map_err(|error| starting(&error))?;
    store.sweep().map_err(|error| starting(&error))?;
    let (directory, lock) = match &from {
        Some((snapshots, snapshot)) => {
            create(&store, snapshots, snapshot, &mut spec).map_err(|error| starting(&error))?
        }
        None => {
            let own = (1..=spec.machine.disk_layers).map(|number| ChainLayer::Own(number.to_string()));
            store.create(&mut spec, &Chain { layers: own.collect() }, 0).map_err(|error| starting(&error))?
        }
    };

    let exit = take_part(&store, &directory, &spec, lock, false, outcome)?;
    if let (Some(path), Some(stats)) = (&args.stats_file, &exit.stats) {
        write_stats(path, stats)?;
    }
    Ok(())
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

/// Each costs the guest a moment, and one layer of its disk.
fn snapshot_every(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text).map_err(|error| error.to_string())?;
    if time < Duration::from_secs(10) {
        return Err("less than 10s: each snapshot stops the guest for a moment".to_owned());
    }
    Ok(time)
}

fn label(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').unwrap_or((text, ""));
    if name.is_empty() || text.contains(char::is_control) {
        return Err("not NAME or NAME=VALUE".to_owned());
    }
    Ok((name.to_owned(), value.to_owned()))
}

/// A run's name. Word characters only, so that it is safe in a path, a terminal and a host name.
pub(super) fn run_name(text: &str) -> Result<String, String> {
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
    fn labels_have_names() {
        assert_eq!(label("a=b=c").unwrap(), ("a".to_owned(), "b=c".to_owned()));
        assert_eq!(label("a").unwrap(), ("a".to_owned(), String::new()));
        assert!(label("=b").is_err() && label("").is_err() && label("a=\n").is_err());
    }
}
