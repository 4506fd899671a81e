//! The machine that unpacks an image: its disk is the image, and nothing else is in it.
//!
//! This process is its parent, without a supervisor: the machine's life is the import's. What comes back is hostile, and
//! as little as can be: whether it is done, or a line that says why not.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use guest::build::{BUILDER_WORD, BuildReport, status};
use guest::host::{Agent, AgentError, Exec, Welcome};
use guest::message::{ExecKind, ExecSpec, ExitRecord, printable};
use vmm_control::{ControlError, Event, Request, StopReason};

use super::disk;
use super::source::{LayerStream, SourceError};
use super::store::Workplace;
use crate::spec::Machine;
use crate::supervisor::layers::Layers;
use crate::supervisor::{Ground, MachineError, Vmm, tail};

/// How long a builder has to boot.
const BOOT_PATIENCE: Duration = Duration::from_secs(120);
/// How long it has to power off, with nothing left to write.
const OFF_PATIENCE: Duration = Duration::from_secs(30);
/// How long a VMM has to say why a machine ended.
const WHY_PATIENCE: Duration = Duration::from_secs(2);
/// Most bytes of what the builder says that are kept.
const MAX_SAID: usize = 4096;

/// Why a builder made no image.
#[derive(Debug, thiserror::Error)]
pub(super) enum BuilderError {
    /// The source broke.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The disk.
    #[error(transparent)]
    Disk(#[from] disk::DiskError),
    /// The machine did not start.
    #[error("builder: {0}")]
    Machine(#[from] MachineError),
    /// The archive is no good.
    #[error("it cannot be unpacked: {0}")]
    Archive(String),
    /// It is too large.
    #[error("it does not fit: {0}; give it more room with --disk")]
    Full(String),
    /// The host has no room.
    #[error("the host's file system is full, where {0} is; make room, or set BULKHEAD_HOME to where there is some")]
    HostFull(PathBuf),
    /// The builder ran out of memory.
    #[error("the builder ran out of memory: an archive that needs so much is damaged, or an attack")]
    Memory,
    /// Anything else that ended it.
    #[error("builder: {0}")]
    Broken(String),
}

/// A machine that builds, and what it says.
struct Builder {
    vmm: Vmm,
    events: Receiver<Result<Event, ControlError>>,
    host_full: Arc<AtomicBool>,
    place: PathBuf,
}

/// Has a machine unpack `stream` into the empty file system that `machine` has as its image. Call it on the main thread.
pub(super) fn build(
    workplace: &Workplace,
    machine: &Machine,
    layered: bool,
    stream: &mut LayerStream<'_>,
) -> Result<BuildReport, BuilderError> {
    let mut builder = Builder::start(workplace, machine)?;
    let agent = builder.boot()?;
    let outcome = run(&agent, layered, stream);
    // The cause before its effects: a source that broke ends the builder, and a builder that died ends the stream.
    if let Some(error) = stream.take_error() {
        return Err(error.into());
    }
    let report = match outcome {
        Err(AgentError::Gone) => return Err(builder.why()),
        Err(error) => return Err(BuilderError::Broken(error.to_string())),
        Ok((record, said)) => judge(&record, &said)?,
    };
    builder.power_off(&agent)?;
    Ok(report)
}

/// The word that makes a machine a builder, for the kernel's command line.
pub(super) fn cmdline() -> String {
    format!("-- {BUILDER_WORD}")
}

impl Builder {
    fn start(workplace: &Workplace, machine: &Machine) -> Result<Self, BuilderError> {
        let place = workplace.path().canonicalize().map_err(|error| MachineError::System("its directory", error))?;
        let layers = Layers::make(&place, Vec::new(), &["1".to_owned()], machine.disk, true)?;
        let vmm = Vmm::start(&Ground::find(&machine.jail), &place, machine, &layers, None, None)?;
        let (sender, events) = channel();
        let host_full = Arc::<AtomicBool>::default();
        let (full, control) = (Arc::clone(&host_full), vmm.control());
        vmm.watch(move |event| {
            if let Ok(Event::DiskFull { .. }) = event {
                // A run waits for room. An import that does not fit is better told.
                full.store(true, Ordering::Release);
                let _ = control.send(&Request::Stop, &[]);
            }
            // Nobody listens once the import has ended.
            let _ = sender.send(event);
        })?;
        Ok(Self { vmm, events, host_full, place })
    }

    fn boot(&mut self) -> Result<Agent, BuilderError> {
        let mut entropy = vec![0; 64];
        rustix::rand::getrandom(&mut entropy, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| BuilderError::Broken(format!("getrandom: {error}")))?;
        let welcome = Welcome { epoch: 1, renew_identity: false, entropy, hostname: "builder".to_owned() };
        let deadline = Instant::now().checked_add(BOOT_PATIENCE).unwrap_or_else(Instant::now);
        match Agent::connect(self.vmm.dialler(), &welcome, deadline) {
            Ok(agent) => Ok(agent),
            Err(AgentError::Gone) => Err(self.why()),
            Err(error) => Err(BuilderError::Broken(error.to_string())),
        }
    }

    /// Why the machine ended.
    fn why(&mut self) -> BuilderError {
        let deadline = Instant::now().checked_add(WHY_PATIENCE).unwrap_or_else(Instant::now);
        loop {
            let event = self.events.recv_timeout(deadline.saturating_duration_since(Instant::now()));
            if self.host_full.load(Ordering::Acquire) {
                return BuilderError::HostFull(self.place.clone());
            }
            return BuilderError::Broken(match event {
                Ok(Ok(Event::Refused { error })) => printable(&error),
                Ok(Ok(Event::Stopped { reason, .. })) => match reason {
                    StopReason::StorageFailed { disk, error } => format!("disk {disk} failed: {}", printable(&error)),
                    StopReason::KvmFailed { error } => format!("KVM failed: {}", printable(&error)),
                    StopReason::Reset { by } => {
                        let console = tail(&self.place.join("console.log"));
                        let console = console.map_or(String::new(), |tail| format!("; its console ends with: {tail}"));
                        format!("its kernel reset the machine ({}){console}", printable(&by))
                    }
                    StopReason::PowerOff | StopReason::Asked => "it powered off before it was done".to_owned(),
                },
                Ok(Ok(_)) => continue,
                Ok(Err(_)) | Err(_) => {
                    let how = self.vmm.reap(WHY_PATIENCE);
                    let words =
                        tail(&self.place.join("vmm.log")).map_or(String::new(), |words| format!("; it said: {words}"));
                    format!("its VMM ended unexpectedly ({how}){words}")
                }
            });
        }
    }

    /// Ends the machine and sees that it has ended as it should: then its disk is what it says.
    fn power_off(mut self, agent: &Agent) -> Result<(), BuilderError> {
        agent.poweroff(Duration::ZERO).map_err(|error| BuilderError::Broken(error.to_string()))?;
        let deadline = Instant::now().checked_add(OFF_PATIENCE).unwrap_or_else(Instant::now);
        loop {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Ok(Event::Stopped { reason: StopReason::PowerOff, .. })) => break,
                Ok(Ok(Event::Stopped { reason, .. })) => {
                    return Err(BuilderError::Broken(format!("it did not power off: {reason:?}")));
                }
                Ok(Ok(_)) => {}
                Ok(Err(_)) | Err(_) => {
                    return Err(BuilderError::Broken(format!(
                        "it did not power off: {}",
                        self.vmm.reap(Duration::ZERO)
                    )));
                }
            }
        }
        self.vmm.reap(OFF_PATIENCE);
        Ok(())
    }
}

/// What a builder said, as far as it is kept.
#[derive(Debug, Default)]
struct Said {
    stdout: Bounded,
    stderr: Bounded,
}

#[derive(Debug, Default)]
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = MAX_SAID.saturating_sub(self.0.len());
        self.0.extend_from_slice(bytes.get(..room).unwrap_or(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn run(agent: &Agent, layered: bool, stream: &mut LayerStream<'_>) -> Result<(ExitRecord, Said), AgentError> {
    let kind = ExecKind::BuildImage { layered };
    let exec = agent.exec(ExecSpec { id: "build".to_owned(), kind, stdin: true, ..ExecSpec::default() })?;
    let mut said = Said::default();
    let record = std::thread::scope(|scope| {
        let Said { stdout, stderr } = &mut said;
        let exec: &Exec = &exec;
        let pumps = [scope.spawn(|| exec.copy_stdout(stdout)), scope.spawn(|| exec.copy_stderr(stderr))];
        let sent = exec.copy_stdin(stream);
        if let Err(error @ AgentError::Source(_)) = sent {
            // It waits for the rest, which does not come.
            let _ = exec.signal(9, true);
            return Err(error);
        }
        let record = exec.wait();
        for pump in pumps {
            match pump.join() {
                Ok(copied) => drop(copied?),
                Err(_) => return Err(AgentError::Gone),
            }
        }
        sent?;
        record
    })?;
    Ok((record, said))
}

fn judge(record: &ExitRecord, said: &Said) -> Result<BuildReport, BuilderError> {
    let why = printable(String::from_utf8_lossy(&said.stderr.0).trim());
    Err(match record {
        ExitRecord::Exited { code: status::DONE } => {
            return serde_json::from_slice(&said.stdout.0)
                .map_err(|error| BuilderError::Broken(format!("it does not say what it did: {error}")));
        }
        ExitRecord::Exited { code: status::ARCHIVE } => BuilderError::Archive(why),
        ExitRecord::Exited { code: status::FULL } => BuilderError::Full(why),
        ExitRecord::Exited { .. } => BuilderError::Broken(why),
        ExitRecord::KilledOom => BuilderError::Memory,
        // What cannot be allocated aborts.
        ExitRecord::Signaled { signal: 6, .. } if why.contains("memory allocation") => BuilderError::Memory,
        ExitRecord::Signaled { signal: 6, .. } => BuilderError::Broken(why),
        ExitRecord::Signaled { signal, .. } => BuilderError::Broken(format!("killed by signal {signal}")),
        ExitRecord::FailedToStart { message, .. } => BuilderError::Broken(printable(message)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(stdout: &str, stderr: &str) -> Said {
        Said { stdout: Bounded(stdout.into()), stderr: Bounded(stderr.into()) }
    }

    #[test]
    fn only_a_report_is_a_success() {
        let exited = |code| ExitRecord::Exited { code };
        let report = r#"{"members":3,"bytes":10,"without_acl":0}"#;
        assert_eq!(judge(&exited(0), &said(report, "")).unwrap().members, 3);
        for wrong in ["", "{}", r#"{"members":3,"bytes":10,"without_acl":0,"more":1}"#] {
            assert!(matches!(judge(&exited(0), &said(wrong, "")), Err(BuilderError::Broken(_))), "{wrong}");
        }
        let error = judge(&exited(status::FULL), &said(report, "x\x1b[2J: no room\n")).unwrap_err().to_string();
        assert_eq!(error, "it does not fit: x\u{fffd}[2J: no room; give it more room with --disk");
        assert!(matches!(judge(&exited(status::ARCHIVE), &said("", "x")), Err(BuilderError::Archive(_))));
        assert!(matches!(judge(&exited(77), &said("", "x")), Err(BuilderError::Broken(_))));
        let aborted = ExitRecord::Signaled { signal: 6, core: false };
        let allocation = said("", "memory allocation of 4294967296 bytes failed");
        assert!(matches!(judge(&aborted, &allocation), Err(BuilderError::Memory)));
        assert!(matches!(judge(&aborted, &said("", "panicked at x")), Err(BuilderError::Broken(_))));
        assert!(matches!(judge(&ExitRecord::KilledOom, &said("", "")), Err(BuilderError::Memory)));
    }

    #[test]
    fn what_a_builder_says_is_kept_within_bounds() {
        let mut bounded = Bounded::default();
        for _ in 0..100 {
            bounded.write_all(&[b'x'; 1000]).unwrap();
        }
        assert_eq!(bounded.0.len(), MAX_SAID);
    }
}
