//! The run's machine between two stretches of its life: stopped, and let go on.
//!
//! Whoever asks does the work on a thread of its own, one at a time; the main thread passes on what the VMM answers, and
//! alone writes the run's state. The workload is stopped before the machine is, and goes on after it, with a clock and
//! random numbers that are fresh: the same steps for each way in which a machine can go on.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use guest::host::{Agent, AgentError, Frozen, Welcome};
use guest::message::printable;
use jailer::Part;
use jailer::cgroup::MemoryLimit;
use serde_json::json;
use vmm_control::{ControlError, ControlSocket, Event, Request};

use super::machine::{Pagemap, Vmm};
use super::serve::Shared;
use super::{Happening, entropy};

/// How long a workload may take to stop. What does not stop waits in the guest's kernel, mostly for its disk.
const FREEZE_PATIENCE: Duration = Duration::from_secs(10);
/// How long an agent may take to begin an epoch. The image's own program may make keys meanwhile.
pub(super) const THAW_PATIENCE: Duration = Duration::from_secs(120);
/// How long a VMM may take to stop its vCPUs and finish what its disks are doing, or to start them again.
const VMM_PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks how far something is.
pub(super) const LOOK: Duration = Duration::from_millis(500);

/// How long who needs the guest waits for one that is being saved.
const PASSING_PATIENCE: Duration = Duration::from_secs(300);

/// Why a run's guest cannot be used now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotNow {
    /// It has not booted yet.
    Starting,
    /// It is paused.
    Paused,
}

impl NotNow {
    /// In words, for a run of this id.
    pub(super) fn words(self, id: &str) -> String {
        match self {
            Self::Starting => format!("run {id}: it is still starting; try again in a moment"),
            Self::Paused => format!("run {id}: it is paused; bulkhead resume {id} lets it go on"),
        }
    }
}

/// How the machine stands.
#[derive(Debug)]
enum Stand {
    Starting,
    Running(Agent),
    Paused(Arc<Frozen>),
}

/// The machine's stand, and the way to its VMM.
#[derive(Debug)]
pub(super) struct Epochs {
    control: Arc<ControlSocket>,
    pub(super) pages: Pagemap,
    /// Of the VMM's cgroup.
    pub(super) limit: Option<MemoryLimit>,
    /// Whether what the VMM makes ends with it, even if it cannot see to that itself.
    pub(super) contained: bool,
    /// Of the epoch.
    number: AtomicU64,
    stand: Mutex<Stand>,
    /// Where the VMM's answers go, while one is waited for.
    answers: Mutex<Option<SyncSender<Event>>>,
    /// Held while the stand is being changed.
    turn: Mutex<()>,
    ended: AtomicBool,
    /// Whether the machine stands still for a moment only, and goes on by itself.
    passing: Mutex<bool>,
    passed: Condvar,
}

/// Until it is dropped, who needs the guest waits for the machine to go on.
pub(super) struct Passing<'a>(&'a Epochs);

impl Drop for Passing<'_> {
    fn drop(&mut self) {
        *locked(&self.0.passing) = false;
        self.0.passed.notify_all();
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Epochs {
    /// For a machine that begins its epoch of this number.
    pub(super) fn new(vmm: &Vmm, limit: Option<MemoryLimit>, number: u64) -> Self {
        Self {
            control: vmm.control(),
            pages: vmm.page_map(),
            contained: limit.is_some() || vmm.unenforced().iter().all(|(part, _)| *part != Part::Namespaces),
            limit,
            number: AtomicU64::new(number),
            stand: Mutex::new(Stand::Starting),
            answers: Mutex::default(),
            turn: Mutex::default(),
            ended: AtomicBool::new(false),
            passing: Mutex::default(),
            passed: Condvar::new(),
        }
    }

    /// The number of the epoch.
    pub(super) fn number(&self) -> u64 {
        self.number.load(Ordering::Relaxed)
    }

    /// The number of the next one, which is now this one's.
    fn next(&self) -> u64 {
        self.number.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }

    /// Asks the VMM for something whose answer comes elsewhere.
    pub(super) fn send(&self, request: &Request) -> Result<(), ControlError> {
        self.control.send(request, &[])
    }

    /// The guest has booted, or goes on.
    pub(super) fn runs(&self, agent: Agent) {
        *locked(&self.stand) = Stand::Running(agent);
    }

    /// The agent of a guest that runs.
    pub(super) fn agent(&self) -> Result<Agent, NotNow> {
        let passing = self.passed.wait_timeout_while(locked(&self.passing), PASSING_PATIENCE, |passing| *passing);
        drop(passing);
        self.running()
    }

    fn running(&self) -> Result<Agent, NotNow> {
        match &*locked(&self.stand) {
            Stand::Starting => Err(NotNow::Starting),
            Stand::Running(agent) => Ok(agent.clone()),
            Stand::Paused(_) => Err(NotNow::Paused),
        }
    }

    /// Whether the machine stands still.
    pub(super) fn is_paused(&self) -> bool {
        self.frozen().is_some()
    }

    /// The machine is about to stand still, and to go on when what comes back is dropped.
    pub(super) fn pass(&self) -> Passing<'_> {
        *locked(&self.passing) = true;
        Passing(self)
    }

    /// Whether someone is pausing, resuming or saving it.
    pub(super) fn is_busy(&self) -> bool {
        matches!(self.turn.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Whether the machine is known to have ended.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn frozen(&self) -> Option<Arc<Frozen>> {
        match &*locked(&self.stand) {
            Stand::Paused(frozen) => Some(Arc::clone(frozen)),
            Stand::Starting | Stand::Running(_) => None,
        }
    }

    /// Passes on what the VMM says.
    pub(super) fn answer(&self, event: Event) {
        if let Some(who) = &*locked(&self.answers) {
            // Someone who has stopped waiting is no loss.
            let _ = who.try_send(event);
        }
    }

    /// The machine has ended: nobody answers any more.
    pub(super) fn ended(&self) {
        self.ended.store(true, Ordering::Release);
        *locked(&self.answers) = None;
    }

    /// Starts the machine alone, for its end. Whether it ran is seen in its events.
    pub(super) fn let_machine_run(&self) {
        let _ = self.control.send(&Request::Resume, &[]);
    }

    pub(super) fn turn(&self) -> Result<MutexGuard<'_, ()>, String> {
        match self.turn.try_lock() {
            Ok(turn) => Ok(turn),
            Err(TryLockError::Poisoned(turn)) => Ok(turn.into_inner()),
            Err(TryLockError::WouldBlock) => Err("it is being paused, resumed or saved already".to_owned()),
        }
    }

    /// Asks the VMM for something, and waits for the answer that `of` takes something from.
    pub(super) fn ask<T>(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
        patience: Duration,
        of: impl Fn(Event) -> Option<T>,
    ) -> Result<T, String> {
        self.begin_to_ask(request, descriptors)?.wait(patience, of)
    }

    /// Asks the VMM for something that has several answers.
    pub(super) fn begin_to_ask(&self, request: &Request, descriptors: &[BorrowedFd<'_>]) -> Result<Asked<'_>, String> {
        let (sender, answers) = sync_channel(4);
        *locked(&self.answers) = Some(sender);
        let asked = Asked { epochs: self, answers };
        if self.has_ended() {
            // Nobody would answer, and nobody would tell that.
            return Err("its machine has ended".to_owned());
        }
        let sent = self.control.send(request, descriptors);
        sent.map_err(|error| format!("its VMM: {}", printable(&error.to_string())))?;
        Ok(asked)
    }
}

/// Something that the VMM was asked for. Until it is dropped, the VMM's answers come here.
pub(super) struct Asked<'a> {
    epochs: &'a Epochs,
    answers: Receiver<Event>,
}

impl Asked<'_> {
    /// Waits for the answer that `of` takes something from.
    fn wait<T>(&self, patience: Duration, of: impl Fn(Event) -> Option<T>) -> Result<T, String> {
        let end = Instant::now().checked_add(patience);
        let left = || end.map_or(patience, |end| end.saturating_duration_since(Instant::now()));
        loop {
            match self.answers.recv_timeout(left()).map(&of) {
                Ok(Some(answer)) => return Ok(answer),
                // To what was asked before, and not waited for any longer.
                Ok(None) => {}
                Err(RecvTimeoutError::Disconnected) => return Err("its machine ended meanwhile".to_owned()),
                Err(RecvTimeoutError::Timeout) => return Err(format!("its VMM did not answer within {patience:?}")),
            }
        }
    }

    /// Waits for the answer to a save, for as long as the machine lives: whoever gave up would not know which layer the disk goes on
    /// in, and would take a late answer for the next save's. `meanwhile` is called now and then.
    pub(super) fn wait_for_save<T>(&self, meanwhile: impl Fn(), of: impl Fn(Event) -> Option<T>) -> Result<T, String> {
        loop {
            match self.answers.recv_timeout(LOOK).map(&of) {
                Ok(Some(answer)) => return Ok(answer),
                Ok(None) => {}
                Err(RecvTimeoutError::Disconnected) => return Err("its machine ended meanwhile".to_owned()),
                Err(RecvTimeoutError::Timeout) => meanwhile(),
            }
        }
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        *locked(&self.epochs.answers) = None;
    }
}

impl Shared {
    /// Stops the workload, then the machine. What it was doing goes on at [`Shared::resume`].
    pub(super) fn pause(&self) -> Result<(), String> {
        let _turn = self.epochs.turn()?;
        self.stop_machine()?;
        self.events.add("run.paused", json!({}));
        self.tell_main(|done| Happening::Paused { done })
    }

    /// Lets a paused run go on.
    pub(super) fn resume(&self) -> Result<(), String> {
        let _turn = self.epochs.turn()?;
        self.epochs.frozen().ok_or("it is not paused")?;
        let epoch = self.epochs.next();
        self.start_machine(epoch)?;
        self.events.add("run.resumed", json!({ "epoch": epoch }));
        self.tell_main(|done| Happening::Resumed { epoch, done })
    }

    /// Leaves the machine stopped, with its workload, or as it was.
    pub(super) fn stop_machine(&self) -> Result<(), String> {
        let agent = self.epochs.running().map_err(|why| match why {
            NotNow::Starting => "it is still starting; try again in a moment".to_owned(),
            NotNow::Paused => "it is paused already".to_owned(),
        })?;
        let frozen = match agent.freeze(FREEZE_PATIENCE) {
            Ok(frozen) => frozen,
            Err(error @ AgentError::Late(_)) => {
                // It may have stopped all the same, or may yet: an epoch begins on top of that.
                let thawed = Frozen::of(&agent).thaw(&self.welcome(self.epochs.number())?, THAW_PATIENCE);
                return Err(match thawed {
                    Ok(_) => format!("its workload was not stopped: {error}"),
                    Err(again) => {
                        format!("its workload was not stopped: {error}; whether it runs is not known: {again}")
                    }
                });
            }
            Err(error) => return Err(format!("its workload was not stopped: {}", printable(&error.to_string()))),
        };
        // From here on nobody else uses the agent.
        *locked(&self.epochs.stand) = Stand::Paused(Arc::new(frozen));
        let paused = |event| matches!(event, Event::Paused).then_some(());
        self.epochs.ask(&Request::Pause, &[], VMM_PATIENCE, paused).map_err(|why| self.go_on_after(why))
    }

    /// What was tried failed, and the machine goes on in the same epoch, if it can.
    pub(super) fn go_on_after(&self, why: String) -> String {
        match self.start_machine(self.epochs.number()) {
            Ok(()) => why,
            Err(again) => format!("{why}; and it could not go on: {again}"),
        }
    }

    /// Starts the machine, then its workload.
    pub(super) fn start_machine(&self, epoch: u64) -> Result<(), String> {
        self.epochs.frozen().ok_or("it is not paused")?;
        let resumed = |event| matches!(event, Event::Resumed).then_some(());
        self.epochs.ask(&Request::Resume, &[], VMM_PATIENCE, resumed)?;
        self.thaw(epoch)
    }

    /// Starts the workload of a machine that runs.
    pub(super) fn thaw(&self, epoch: u64) -> Result<(), String> {
        let frozen = self.epochs.frozen().ok_or("it is not paused")?;
        let thawed = frozen.thaw(&self.welcome(epoch)?, THAW_PATIENCE);
        let agent =
            thawed.map_err(|error| format!("its workload is still stopped: {}", printable(&error.to_string())))?;
        self.epochs.runs(agent);
        Ok(())
    }

    fn welcome(&self, epoch: u64) -> Result<Welcome, String> {
        Ok(Welcome {
            epoch,
            renew_identity: false,
            entropy: entropy().map_err(|error| format!("getrandom: {error}"))?,
            hostname: self.spec.hostname().to_owned(),
        })
    }

    /// Has the main thread write down where the run stands, and waits until it has.
    pub(super) fn tell_main(&self, what: impl FnOnce(SyncSender<()>) -> Happening) -> Result<(), String> {
        let (done, written) = sync_channel(1);
        let told = self.main().send(what(done)).is_ok() && written.recv().is_ok();
        if told { Ok(()) } else { Err("it ended meanwhile".to_owned()) }
    }
}
