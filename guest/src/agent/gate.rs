//! Stopping the workload, and letting it go on in another epoch: the guest's end of every pause and continuation.
//!
//! Between the two the workload's cgroup is frozen, so that nothing of it runs before the machine has a clock, a random
//! pool and, in a copy of another machine, an identity of its own. A step that fails leaves it frozen.

use super::{
    connection::refusal,
    identity::{self, Renewal},
    machine,
    requests::Answer,
    server::Server,
    workload,
};
use crate::message::{Epoch, FromAgent, RefusalKind};
use std::time::{Duration, Instant};

/// Longest time that a workload may take to stop.
const MAX_PATIENCE: Duration = Duration::from_secs(600);

/// Who waits for an answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub(super) connection: u64,
    pub(super) request: u64,
}

/// Where the workload stands.
#[derive(Debug, Default)]
pub(super) struct Gate {
    /// It is stopped, or being stopped.
    closed: bool,
    /// It has until then to stop.
    freezing: Option<(Asked, Instant)>,
    /// Its identity is being renewed; before its file system is there, that has not begun.
    renewing: Option<(Asked, Option<Renewal>)>,
}

impl Gate {
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    pub(super) fn is_freezing(&self) -> bool {
        self.freezing.is_some()
    }

    pub(super) fn renewal(&self) -> Option<&Renewal> {
        self.renewing.as_ref().and_then(|(_, renewal)| renewal.as_ref())
    }
}

impl Server {
    /// Begins to stop the workload. Asked again, the time begins anew.
    pub(super) fn freeze(&mut self, asked: Asked, patience: Duration) -> Answer {
        let Some(cgroup) = &self.workload.cgroup else {
            return refuse("the workload has no cgroup that could be frozen");
        };
        if !matches!(self.workload.state, workload::State::Ready) {
            return refuse("the workload's file system is not there yet");
        }
        if self.stopping.is_some() {
            return Answer::Now(Some(refusal(RefusalKind::Stopping, "the machine is powering off")));
        }
        if let Err(error) = cgroup.freeze(true) {
            return refuse(&format!("freeze the workload: {error}"));
        }
        let deadline = Instant::now().checked_add(patience.min(MAX_PATIENCE)).unwrap_or_else(Instant::now);
        self.gate.closed = true;
        self.gate.freezing = Some((asked, deadline));
        Answer::Later
    }

    /// Takes on an epoch, and lets the workload go on in it.
    pub(super) fn begin(&mut self, asked: Asked, epoch: &Epoch) -> Answer {
        if let Err(why) = machine::begin(self.marks.enabled, epoch) {
            return refuse(&why);
        }
        if epoch.renew_identity {
            self.gate.renewing = Some((asked, None));
            return Answer::Later;
        }
        match self.open_gate() {
            Ok(()) => Answer::Now(None),
            Err(why) => refuse(&why),
        }
    }

    fn open_gate(&mut self) -> Result<(), String> {
        self.gate.freezing = None;
        if let Some(cgroup) = self.workload.cgroup.as_ref().filter(|_| self.gate.closed) {
            cgroup.freeze(false).map_err(|error| format!("thaw the workload: {error}"))?;
        }
        self.gate.closed = false;
        Ok(())
    }

    /// Answers what has come about.
    pub(super) fn settle_gate(&mut self) {
        if let Some((asked, outcome)) = self.frozen() {
            if outcome.is_err() {
                // As it was before: what could not be stopped is not held half stopped.
                let _ = self.open_gate();
            }
            self.gate.freezing = None;
            self.reply(asked, outcome.err());
        }
        if let Some((asked, outcome)) = self.renewed() {
            self.gate.renewing = None;
            let outcome = outcome.and_then(|()| self.open_gate());
            self.reply(asked, outcome.err());
        }
    }

    /// Whether the workload has stopped, or will not.
    fn frozen(&self) -> Option<(Asked, Result<(), String>)> {
        let (asked, deadline) = self.gate.freezing?;
        let cgroup = self.workload.cgroup.as_ref()?;
        if cgroup.is_frozen() {
            return Some((asked, Ok(())));
        }
        let late = Instant::now() >= deadline;
        late.then(|| {
            let who = cgroup.busy().unwrap_or_else(|| "a process".to_owned());
            (asked, Err(format!("freeze the workload: {who} does not stop; it waits in the kernel")))
        })
    }

    /// Whether the identity was renewed, or could not be. Begins when the file system is there.
    fn renewed(&mut self) -> Option<(Asked, Result<(), String>)> {
        let (asked, renewal) = self.gate.renewing.as_mut()?;
        let asked = *asked;
        match (renewal, &self.workload.state) {
            (Some(renewal), _) => renewal.outcome().map(|outcome| (asked, outcome)),
            (None, workload::State::Preparing(_)) => None,
            (None, workload::State::Failed(why)) => Some((asked, Err(format!("the workload's file system: {why}")))),
            (slot @ None, workload::State::Ready) => match identity::renew(&self.workload) {
                Ok(begun) => {
                    *slot = Some(begun);
                    None
                }
                Err(error) => Some((asked, Err(format!("renew the identity: {error}")))),
            },
        }
    }

    fn reply(&mut self, asked: Asked, why: Option<String>) {
        let refused = why.map(|why| refusal(RefusalKind::Failed, why));
        if let Some(connection) = self.connections.get_mut(&asked.connection) {
            connection.send(&FromAgent::Reply { id: asked.request, refused });
        }
    }
}

fn refuse(why: &str) -> Answer {
    Answer::Now(Some(refusal(RefusalKind::Failed, why)))
}
