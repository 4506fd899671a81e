//! How a run ended: what is recorded, and what the client is told.

use std::time::Duration;

use guest::host::AgentError;
use guest::message::{ExitRecord, StartFailure, printable};
use vmm_control::StopReason;

use crate::clock;
use crate::frame::Exit;
use crate::spec::{Phase, State};
use crate::units::show_duration;

/// The reason where the kernel killed a VMM for its memory.
const OUT_OF_MEMORY: &str = "out-of-memory";
/// What that means.
pub(super) const OUT_OF_MEMORY_IS: &str = "the VMM reached the memory limit of its cgroup, and the kernel killed it";

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ending {
    phase: Phase,
    /// In words, for the record.
    reason: String,
    /// The client's exit status.
    code: u8,
    /// What the client is told, if the status does not say it all.
    error: Option<String>,
    /// Whether the end of the console explains it.
    quote_console: bool,
    /// The snapshot that the run goes on from.
    snapshot: Option<String>,
}

impl Ending {
    /// The command ended.
    pub(super) fn command(record: &ExitRecord, command: &str) -> Self {
        let exit = exit_of(record, command);
        let reason = match record {
            ExitRecord::Exited { .. } => "exited".to_owned(),
            ExitRecord::Signaled { signal, .. } => format!("killed by signal {signal}"),
            ExitRecord::KilledOom => "out of memory".to_owned(),
            ExitRecord::FailedToStart { .. } => "did not start".to_owned(),
        };
        Self { phase: Phase::Stopped, reason, code: exit.code, error: exit.error, quote_console: false, snapshot: None }
    }

    /// The command ran for as long as it may.
    pub(super) fn timed_out(id: &str, after: Duration) -> Self {
        let after = show_duration(after);
        Self {
            phase: Phase::Stopped,
            reason: format!("timeout after {after}"),
            code: 124,
            error: Some(format!("run {id}: ended after {after} (--timeout)")),
            quote_console: false,
            snapshot: None,
        }
    }

    /// Someone asked for it: `why` is "removed (bulkhead rm -f)", or a signal of the supervisor's.
    pub(super) fn asked(id: &str, why: &str) -> Self {
        let error = Some(format!("run {id}: {why}"));
        Self { phase: Phase::Stopped, reason: why.to_owned(), code: 125, error, quote_console: false, snapshot: None }
    }

    /// The machine was saved: the run goes on from the snapshot.
    pub(super) fn saved(id: &str, snapshot: String) -> Self {
        let error = Some(format!("run {id}: paused, and saved as snapshot {snapshot}; bulkhead resume {id} goes on"));
        let reason = format!("saved as snapshot {snapshot}");
        Self { phase: Phase::Paused, reason, code: 125, error, quote_console: false, snapshot: Some(snapshot) }
    }

    /// The client is gone, and the run with it.
    pub(super) fn client_gone() -> Self {
        let reason = "its client went away".to_owned();
        Self { phase: Phase::Stopped, reason, code: 125, error: None, quote_console: false, snapshot: None }
    }

    /// The run did not come to run its command.
    pub(super) fn not_started(id: &str, why: impl std::fmt::Display) -> Self {
        Self::fault(&format!("cannot start run {id}"), why.to_string(), false)
    }

    /// The guest did not boot in time.
    pub(super) fn late(id: &str, after: Duration, detail: &str) -> Self {
        let after = show_duration(after);
        let detail = if detail.is_empty() { String::new() } else { format!(" ({detail})") };
        let why = format!("the guest did not boot within {after}{detail}; give it more --start-timeout");
        Self::fault(&format!("cannot start run {id}"), why, true)
    }

    /// The machine ended before the command.
    pub(super) fn machine(id: &str, reason: &StopReason, booted: bool) -> Self {
        let when = if booted { "before the command ended" } else { "while it booted" };
        let (what, quote) = match reason {
            StopReason::PowerOff => (format!("the guest powered off {when}"), true),
            StopReason::Reset { by } => {
                let by = printable(by);
                (format!("the guest's kernel reset the machine {when} ({by}): it panicked or rebooted"), true)
            }
            StopReason::Asked => (format!("the VMM was stopped {when}"), false),
            StopReason::StorageFailed { disk, error } => (format!("disk {disk} failed: {}", printable(error)), false),
            StopReason::KvmFailed { error } => (format!("KVM failed: {}", printable(error)), true),
        };
        Self::fault(&format!("run {id}"), what, quote)
    }

    /// The VMM died.
    pub(super) fn vmm_died(id: &str, how: &str) -> Self {
        Self::fault(&format!("run {id}"), format!("its VMM ended unexpectedly ({how})"), true)
    }

    /// The kernel killed the VMM, because its cgroup had no more memory to give.
    pub(super) fn out_of_memory(id: &str) -> Self {
        let error = format!("run {id}: {OUT_OF_MEMORY}: {OUT_OF_MEMORY_IS}");
        let reason = OUT_OF_MEMORY.to_owned();
        Self { phase: Phase::Failed, reason, code: 125, error: Some(error), quote_console: false, snapshot: None }
    }

    /// The agent could not go on.
    pub(super) fn agent(id: &str, error: &AgentError) -> Self {
        Self::fault(&format!("run {id}"), format!("the guest's agent: {error}"), true)
    }

    /// We could not go on.
    pub(super) fn ours(id: &str, error: impl std::fmt::Display) -> Self {
        Self::fault(&format!("run {id}"), error.to_string(), false)
    }

    fn fault(thing: &str, reason: String, quote_console: bool) -> Self {
        let error = Some(format!("{thing}: {reason}"));
        Self { phase: Phase::Failed, reason, code: 125, error, quote_console, snapshot: None }
    }

    /// Whether the machine can be powered off in good order: it is not the one that failed.
    pub(super) fn is_orderly(&self) -> bool {
        self.phase == Phase::Stopped
    }

    /// What is recorded.
    pub(super) fn state(&self, started: Option<String>, epoch: u64) -> State {
        State {
            state: self.phase,
            reason: Some(self.reason.clone()),
            exit_code: self.snapshot.is_none().then_some(self.code),
            started,
            ended: self.snapshot.is_none().then(clock::now),
            epoch,
            saved: self.snapshot.clone(),
            left_ms: None,
        }
    }

    /// The snapshot that the run goes on from.
    pub(super) fn snapshot(&self) -> Option<&str> {
        self.snapshot.as_deref()
    }

    /// Whether the command ended by itself, and well.
    pub(super) fn is_success(&self) -> bool {
        self.code == 0
    }

    /// Whether the client is told this.
    pub(super) fn says(&self, words: &str) -> bool {
        self.error.as_ref().is_some_and(|error| error.contains(words))
    }

    /// What was promised beside the command could not be done.
    pub(super) fn spoil(&mut self, id: &str, why: &str) {
        if self.is_success() {
            self.code = 125;
            self.error = Some(format!("run {id}: {why}"));
        }
    }

    /// What the client is told. `console` is the end of what the guest's kernel said, if it was recorded.
    pub(super) fn exit(&self, console: Option<String>) -> Exit {
        let error = self.error.as_ref().map(|error| match console {
            _ if !self.quote_console => error.clone(),
            Some(tail) => format!("{error}; its console ends with:\n  {tail}"),
            None => format!("{error}; run it with --console to see what the guest's kernel says"),
        });
        Exit { code: self.code, error, reason: Some(self.reason.clone()), ..Exit::default() }
    }
}

/// What a client is told when its command ended.
pub(super) fn exit_of(record: &ExitRecord, command: &str) -> Exit {
    let error = match record {
        ExitRecord::Exited { .. } | ExitRecord::Signaled { .. } => None,
        ExitRecord::KilledOom => {
            Some(format!("{command:?}: killed: out of memory in the guest; give the run more with -m"))
        }
        ExitRecord::FailedToStart { kind, message } => Some(match kind {
            StartFailure::NotFound => format!("{command:?}: not found in the image"),
            StartFailure::NotExecutable => format!("{command:?}: cannot be executed: {}", printable(message)),
            _ => format!("{command:?}: cannot be started: {}", printable(message)),
        }),
    };
    Exit { code: record.status(), error, ..Exit::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(record: &ExitRecord) -> u8 {
        Ending::command(record, "x").exit(None).code
    }

    #[test]
    fn statuses_are_those_that_people_know() {
        assert_eq!(code(&ExitRecord::Exited { code: 7 }), 7);
        assert_eq!(code(&ExitRecord::Signaled { signal: 15, core: false }), 143);
        assert_eq!(code(&ExitRecord::KilledOom), 137);
        let not_found = ExitRecord::FailedToStart { kind: StartFailure::NotFound, message: String::new() };
        assert_eq!(code(&not_found), 127);
        assert_eq!(Ending::timed_out("8fc20000", Duration::from_secs(2)).exit(None).code, 124);
        assert_eq!(Ending::machine("8fc20000", &StopReason::PowerOff, true).exit(None).code, 125);
    }

    #[test]
    fn a_command_that_ends_by_itself_needs_no_words() {
        assert_eq!(Ending::command(&ExitRecord::Exited { code: 3 }, "x").exit(Some("boot".into())).error, None);
    }

    #[test]
    fn a_reset_quotes_the_console() {
        let ending = Ending::machine("8fc20000", &StopReason::Reset { by: "triple-fault".into() }, false);
        let told = ending.exit(Some("Kernel panic".into())).error.unwrap();
        assert!(told.starts_with("run 8fc20000: the guest's kernel reset the machine while it booted"), "{told}");
        assert!(told.ends_with("\n  Kernel panic"), "{told}");
        assert!(ending.exit(None).error.unwrap().contains("--console"));
        assert!(!ending.is_orderly());
    }

    #[test]
    fn a_vmm_without_memory_ends_with_a_reason_of_its_own() {
        let ending = Ending::out_of_memory("8fc20000");
        assert_eq!(ending.state(None, 1).reason.as_deref(), Some("out-of-memory"));
        assert!(ending.exit(None).error.unwrap().starts_with("run 8fc20000: out-of-memory: "));
    }

    #[test]
    fn words_of_the_guest_cannot_drive_a_terminal() {
        let record = ExitRecord::FailedToStart { kind: StartFailure::Other, message: "\x1b]0;x\x07".into() };
        let told = exit_of(&record, "a\x1bb").error.unwrap();
        assert!(!told.contains('\x1b') && !told.contains('\x07'), "{told:?}");
        let reset = StopReason::Reset { by: "\x1b[2J".into() };
        assert!(!Ending::machine("8", &reset, true).exit(None).error.unwrap().contains('\x1b'));
    }
}
