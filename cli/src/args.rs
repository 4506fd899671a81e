//! The command line: what may be said, and what it means before any file is looked at. Each command's own
//! options stand with the command.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgAction, CommandFactory, Parser, Subcommand};

use crate::commands::{completion, cp, doctor, exec, fork, inspect, list, pause, policy, rm, run, snapshot};
use crate::image::ImageCommand;
use crate::units::{parse_duration, parse_size};

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
    Run(Box<run::Run>),
    /// Run another command in a running run
    Exec(exec::Exec),
    /// List runs
    #[command(visible_aliases = ["ls", "ps"])]
    List(list::List),
    /// Images: make, list, look at, remove
    #[command(subcommand)]
    Image(ImageCommand),
    /// Import and manage guest kernels
    #[command(subcommand_required = true, arg_required_else_help = true)]
    Kernel {
        /// What to do.
        #[command(subcommand)]
        command: crate::kernel::Command,
    },
    /// Network policies: check one, ask what it says, put one in force, draft one
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    /// Print everything about runs, as JSON
    Inspect(inspect::Inspect),
    /// Copy files between here and a running run
    Cp(cp::Cp),
    /// Stop a run's machine, with all that runs in it, where it is
    Pause(pause::Pause),
    /// Let a paused run go on
    Resume(pause::Resume),
    /// Make new runs that go on where a run or a snapshot is
    Fork(fork::Fork),
    /// Snapshots: take one, list, look at, check, remove, move to another host
    #[command(subcommand)]
    Snapshot(snapshot::SnapshotCommand),
    /// Remove runs
    Rm(rm::Rm),
    /// Check whether this host can run microVMs, and say how to mend what is not right
    Doctor(doctor::Doctor),
    /// Print completions for a shell
    Completion(completion::Completion),
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
        /// Whether a directory for artifacts came along
        #[arg(long)]
        artifacts: bool,
    },
}

/// What is wrong with a command line, in one line: clap's message and tips, without its usage, which `--help` shows. Where
/// the message does not say what would be right, the next step is that help.
pub(crate) fn wrong_usage(error: &clap::Error, argv: &[OsString]) -> String {
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
    let (command, words) = command_of(argv);
    if let Some(option) = value_like_an_option(error, &command, argv) {
        line = option;
    }
    let says_what_is_right = matches!(error.kind(), ErrorKind::ValueValidation | ErrorKind::InvalidValue);
    if !says_what_is_right && !line.contains("; tip: ") {
        line.push_str(&format!("; see bulkhead {words}--help"));
    }
    line
}

/// The command that is meant, and the words for it, each with a space after it.
fn command_of(argv: &[OsString]) -> (clap::Command, String) {
    let (mut command, mut words) = (Cli::command(), String::new());
    // Its arguments are shown as clap shows them.
    command.build();
    for word in argv.iter().skip(1).map_while(|word| word.to_str()) {
        let Some(next) = command.find_subcommand(word).cloned() else { break };
        words.push_str(&format!("{word} "));
        command = next;
    }
    (command, words)
}

/// What to say of `-m -5`: that the option lacks its value, since what follows it reads as another option.
fn value_like_an_option(error: &clap::Error, command: &clap::Command, argv: &[OsString]) -> Option<String> {
    let Some(ContextValue::String(found)) =
        error.get(ContextKind::InvalidArg).filter(|_| error.kind() == ErrorKind::UnknownArgument)
    else {
        return None;
    };
    let at = argv.iter().position(|word| word.to_str().is_some_and(|word| word.starts_with(found.as_str())))?;
    let (before, word) = (argv.get(at.checked_sub(1)?)?.to_str()?, argv.get(at)?.to_str()?);
    let option = command.get_arguments().find(|option| {
        let long = before
            .strip_prefix("--")
            .is_some_and(|name| option.get_long_and_visible_aliases().is_some_and(|all| all.contains(&name)));
        long || option.get_short().is_some_and(|short| before == format!("-{short}"))
    })?;
    let takes_one = matches!(option.get_action(), ArgAction::Set | ArgAction::Append);
    takes_one.then(|| format!("{option}: {word:?} after it reads as an option, not as its value"))
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
    use crate::commands::run::Run;

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
        assert_eq!((parsed.memory, parsed.cpus.count, parsed.rm), (2 << 30, 2, false));
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
            &["--cpus", "1.5.5", "x"],
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
        let wrong_usage = |error: &clap::Error| wrong_usage(error, &["bulkhead".into(), "run".into()]);
        let said = |words: &[&str]| wrong_usage(&run(words).unwrap_err());
        assert_eq!(
            said(&["--cpus", "two", "x"]),
            "invalid value 'two' for '--cpus <N>': expected a number from 0.01 to 32 with at most three decimals"
        );
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
