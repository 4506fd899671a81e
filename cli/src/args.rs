//! The command line: what may be said, and what it means before any file is looked at.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::units::{parse_duration, parse_size};

/// Guest memory when `-m` does not say.
const DEFAULT_MEMORY: &str = "1G";

/// Runs untrusted code in a sealed microVM of its own.
#[derive(Debug, Parser)]
#[command(
    name = "bulkhead",
    version,
    disable_help_subcommand = true,
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = "Exit status of run and exec: the command's own; 128+N if signal N ended it; 124 after --timeout; \
                  125 if bulkhead failed;\n126 if the command cannot be executed; 127 if it was not found.\n\n\
                  Files: $BULKHEAD_HOME, else /var/lib/bulkhead for root and ~/.local/state/bulkhead for others."
)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create a run and start it: a command in a microVM of its own
    Run(Box<Run>),
    /// Run another command in a running run
    Exec(Exec),
    /// List runs
    #[command(visible_aliases = ["ls", "ps"])]
    List(List),
    /// Print the counters of a running run's VMM, as JSON
    #[command(hide = true)]
    Stats {
        /// Id, unique beginning of an id, or name
        run: String,
    },
    /// The process that owns a run
    #[command(hide = true)]
    Supervise {
        /// The run's directory
        directory: PathBuf,
    },
}

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
    /// Working directory, made if it is missing
    #[arg(short, long, value_name = "PATH", value_parser = workdir)]
    pub(crate) workdir: Option<String>,
    /// User, by name or number
    #[arg(short, long, value_name = "USER[:GROUP]", value_parser = user)]
    pub(crate) user: Option<String>,
}

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
    #[arg(value_name = "RUN COMMAND", required = true, num_args = 2.., trailing_var_arg = true)]
    words: Vec<String>,
}

impl Exec {
    /// The run and the command's words.
    pub(crate) fn run_and_command(&self) -> (&str, &[String]) {
        split(&self.words)
    }
}

/// The first word and the others, without the `--` that may stand between them. One positional takes
/// them all, so that options end at the first word: with two, clap goes on looking for options of ours
/// until the second.
fn split(words: &[String]) -> (&str, &[String]) {
    match words {
        [first, dashes, rest @ ..] if dashes == "--" => (first, rest),
        [first, rest @ ..] => (first, rest),
        [] => ("", &[]),
    }
}

/// `bulkhead list`
#[derive(Debug, Args)]
pub(crate) struct List {
    /// Ended runs too
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Ids alone
    #[arg(short, long)]
    pub(crate) quiet: bool,
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

fn cmdline(text: &str) -> Result<String, String> {
    if text.chars().all(|c| c == ' ' || c.is_ascii_graphic()) {
        Ok(text.to_owned())
    } else {
        Err("not printable ASCII".to_owned())
    }
}

/// What is wrong with a command line, in one line: clap's message and tips, without its usage, which `--help` shows.
pub(crate) fn wrong_usage(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let said =
        text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    let mut line = String::new();
    // No option can be passed as a value where we take values.
    for part in said.filter(|part| !part.is_empty() && !part.starts_with("tip: to pass")) {
        if !line.is_empty() {
            line.push_str(if line.ends_with(':') { " " } else { "; " });
        }
        line.push_str(part.strip_prefix("error: ").unwrap_or(part));
    }
    line
}

/// An option of ours that stands among the command's words and looks as if it was meant for us: it is
/// the first of them, or its value reads as ours would. Nothing when the user wrote `--`.
pub(crate) fn misplaced_option(argv: &[OsString], subcommand: &str, words: &[String]) -> Option<String> {
    if argv.iter().any(|word| word == "--") {
        return None;
    }
    let known = Cli::command();
    let known = known.find_subcommand(subcommand)?;
    for (index, word) in words.iter().enumerate() {
        let Some(name) = word.strip_prefix("--") else { continue };
        let (name, joined) = name.split_once('=').map_or((name, None), |(name, value)| (name, Some(value)));
        let option = known.get_arguments().find(|option| {
            !option.is_hide_set() && option.get_long_and_visible_aliases().is_some_and(|all| all.contains(&name))
        });
        let Some(option) = option else { continue };
        let value = joined.or_else(|| words.get(index.checked_add(1)?).map(String::as_str)).unwrap_or("");
        let ours = match option.get_long() {
            Some("memory" | "disk") => parse_size(value).is_ok() && value.parse::<u64>().is_err(),
            Some("timeout" | "start-timeout") => parse_duration(value).is_ok(),
            _ => false,
        };
        if index == 0 || ours {
            return Some(format!("--{name}"));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(words: &[&str]) -> Result<Run, clap::Error> {
        let cli = Cli::try_parse_from(["bulkhead", "run"].iter().chain(words))?;
        match cli.command {
            Command::Run(run) => Ok(*run),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn options_end_at_the_image() {
        let parsed = run(&["-m", "2G", "--cpu", "2", "busybox", "ls", "-m", "--rm", "-it"]).unwrap();
        assert_eq!((parsed.memory, parsed.cpus, parsed.rm), (2 << 30, 2, false));
        assert_eq!(parsed.image_and_command().1, ["ls", "-m", "--rm", "-it"]);
        let parsed = run(&["busybox", "-m", "1G"]).unwrap();
        assert_eq!((parsed.memory, parsed.image_and_command().1.join(" ")), (1 << 30, "-m 1G".to_owned()));
    }

    #[test]
    fn two_dashes_are_accepted_anywhere_before_the_command_and_never_needed() {
        for words in [
            &["busybox", "ls", "-l"][..],
            &["busybox", "--", "ls", "-l"],
            &["--", "busybox", "ls", "-l"],
            &["-q", "--", "busybox", "ls", "-l"],
        ] {
            let parsed = run(words).unwrap();
            let (image, command) = parsed.image_and_command();
            assert_eq!((image, command.join(" ")), ("busybox", "ls -l".to_owned()), "{words:?}");
        }
        // The command's own dashes are its own.
        assert_eq!(run(&["busybox", "sh", "--", "-x"]).unwrap().image_and_command().1, ["sh", "--", "-x"]);
    }

    #[test]
    fn an_unknown_option_before_the_image_is_an_error() {
        assert!(run(&["--memroy", "4G", "busybox"]).is_err());
        assert!(run(&["-m", "busybox"]).is_err());
        assert!(run(&[]).is_err());
    }

    #[test]
    fn bad_values_are_refused() {
        for words in [
            &["--cpus", "0", "x"][..],
            &["--cpus", "33", "x"],
            &["--cpus", "1.5", "x"],
            &["-m", "much", "x"],
            &["--timeout", "15", "x"],
            &["--name", "../x", "x"],
            &["--name", "-x", "x"],
            &["--name", "", "x"],
            &["-w", "tmp", "x"],
            &["-u", "a:b:c", "x"],
            &["-u", ":g", "x"],
            &["--cmdline-extra", "a\nb", "x"],
        ] {
            assert!(run(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn what_is_wrong_fits_a_line() {
        let said = |words: &[&str]| wrong_usage(&run(words).unwrap_err());
        assert_eq!(said(&["--cpus", "1.5", "x"]), "invalid value '1.5' for '--cpus <N>': not a whole number");
        let said = said(&["--memroy", "4G", "x"]);
        assert_eq!(said, "unexpected argument '--memroy' found; tip: a similar argument exists: '--memory'");
        let none = wrong_usage(&run(&[]).unwrap_err());
        assert!(none.starts_with("the following required arguments were not provided: <IMAGE"), "{none}");
        assert_eq!(wrong_usage(&run(&["--name", "a\nb", "x"]).unwrap_err()).lines().count(), 1);
    }

    #[test]
    fn short_options_combine() {
        let parsed = run(&["-it", "-eA=1", "-e", "B", "-u", "1000:1000", "-w/tmp", "busybox"]).unwrap();
        assert!(parsed.process.interactive && parsed.process.tty);
        assert_eq!(parsed.process.env, ["A=1", "B"]);
        assert!(parsed.image_and_command().1.is_empty());
    }

    #[test]
    fn an_option_after_the_image_is_noticed_when_it_looks_like_ours() {
        let check = |words: &[&str]| {
            let argv: Vec<OsString> = ["bulkhead", "run", "busybox"].iter().chain(words).map(OsString::from).collect();
            let words: Vec<String> = words.iter().filter(|w| **w != "--").map(|w| (*w).to_owned()).collect();
            misplaced_option(&argv, "run", &words)
        };
        assert_eq!(check(&["--memory", "4G", "sh"]).as_deref(), Some("--memory"));
        assert_eq!(check(&["--rm"]).as_deref(), Some("--rm"));
        assert_eq!(check(&["sh", "--timeout", "15m"]).as_deref(), Some("--timeout"));
        assert_eq!(check(&["sh", "--memory=4G"]).as_deref(), Some("--memory"));
        for fine in [
            &["sh", "-c", "x"][..],
            &["curl", "--timeout", "15"],
            &["tool", "--name", "x", "--rm"],
            &["java", "--memory", "4096"],
            &["--", "sh", "--timeout", "15m"],
        ] {
            assert_eq!(check(fine), None, "{fine:?}");
        }
    }
}
