//! Signals of the client: passed on to the command, or the end of the client.

use std::io;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::Signals;

/// So many requests to end, and the client goes without waiting for the command.
const INSISTENCE: u32 = 3;

/// What to do about a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reaction {
    /// The terminal has a new size.
    Resize,
    /// The command gets it.
    Forward(u8),
    /// The client ends as if it had killed it.
    End(u8),
}

/// How a client stands when a signal arrives.
#[derive(Debug, Default)]
pub(crate) struct Stance {
    /// Whether the command runs: before that there is nobody to pass a signal on to.
    pub(crate) started: bool,
    /// Whether the terminal is raw: keys reach the command as bytes, so a signal is meant for the client.
    pub(crate) raw: bool,
    /// Requests to end so far.
    pub(crate) insisted: u32,
}

impl Stance {
    /// Decides.
    pub(crate) fn react(&mut self, signal: i32) -> Option<Reaction> {
        let number = u8::try_from(signal).ok()?;
        if signal == SIGWINCH {
            return Some(Reaction::Resize);
        }
        if matches!(signal, SIGINT | SIGTERM) {
            self.insisted = self.insisted.saturating_add(1);
        }
        if !self.started || self.raw || self.insisted >= INSISTENCE {
            return Some(Reaction::End(number.saturating_add(128)));
        }
        Some(Reaction::Forward(number))
    }
}

/// Begins to catch the signals that matter, but for those that our parent wants ignored (`nohup`, or a
/// shell's background job).
pub(crate) fn catch() -> io::Result<Signals> {
    catch_these(&[SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH])
}

/// The same, of those that end a command which passes none on.
pub(crate) fn catch_ends() -> io::Result<Signals> {
    catch_these(&[SIGHUP, SIGINT, SIGTERM])
}

fn catch_these(wanted: &[i32]) -> io::Result<Signals> {
    let ignored = ignored(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
    Signals::new(wanted.iter().filter(|signal| ignored & bit(**signal) == 0))
}

fn bit(signal: i32) -> u64 {
    u32::try_from(signal).ok().and_then(|signal| 1_u64.checked_shl(signal.wrapping_sub(1))).unwrap_or(0)
}

/// The set of ignored signals in a process's status file.
fn ignored(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_reach_the_command_once_it_runs() {
        let mut stance = Stance::default();
        assert_eq!(stance.react(SIGTERM), Some(Reaction::End(143)));
        let mut stance = Stance { started: true, ..Stance::default() };
        assert_eq!(stance.react(SIGINT), Some(Reaction::Forward(2)));
        assert_eq!(stance.react(SIGUSR1), Some(Reaction::Forward(10)));
        assert_eq!(stance.react(SIGINT), Some(Reaction::Forward(2)));
        assert_eq!(stance.react(SIGINT), Some(Reaction::End(130)), "the third ends the client");
    }

    #[test]
    fn a_raw_terminals_client_ends_by_a_signal() {
        let mut stance = Stance { started: true, raw: true, insisted: 0 };
        assert_eq!(stance.react(SIGWINCH), Some(Reaction::Resize));
        assert_eq!(stance.react(SIGHUP), Some(Reaction::End(129)));
    }

    #[test]
    fn what_is_ignored_stays_so() {
        let mask = ignored("Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t0\n");
        assert!(mask & bit(SIGHUP) != 0 && mask & bit(SIGINT) == 0);
        assert_eq!(ignored(""), 0);
    }
}
