//! What the agent does with each frame that a host sends.

use super::{
    cgroup,
    connection::{Connection, Role, refusal},
    exec::{Exec, Input, State},
    gate::Asked,
    server::{Job, Server},
};
use crate::{
    frame::{Body, parse},
    message::{
        About, Action, CAPABILITIES, ExecSpec, FromAgent, MAX_EXECS, Opening, Refusal, RefusalKind, Request, Stream,
        VERSIONS,
    },
    sys,
};
use rustix::{fd::OwnedFd, process::Signal};
use std::time::{Duration, Instant};

/// Longest grace of a power-off.
const MAX_GRACE: Duration = Duration::from_secs(3600);

impl Server {
    pub(super) fn open(&mut self, id: u64, connection: &mut Connection, opening: Opening) {
        match opening {
            Opening::Control { versions } => {
                let Some(version) = VERSIONS.iter().find(|version| versions.contains(version)) else {
                    let message = format!("the agent speaks versions {VERSIONS:?}, the host {versions:?}");
                    return connection.refuse(RefusalKind::Version, message);
                };
                connection.role = Role::Control;
                connection.send(&FromAgent::Hello(about(*version)));
                for (id, exec) in &self.execs {
                    if let State::Ended(record) = &exec.state {
                        connection.send(&FromAgent::Exited { exec: id.clone(), record: record.clone() });
                    }
                }
                if connection.flush() && self.marks.enabled && !self.marks.greeted {
                    self.marks.greeted = true;
                    sys::mark(2);
                }
            }
            Opening::Stream { version, .. } if !VERSIONS.contains(&version) => {
                let message = format!("the agent speaks versions {VERSIONS:?}, the host {version}");
                connection.refuse(RefusalKind::Version, message);
            }
            Opening::Stream { exec: name, stream, have, .. } => {
                let Some(exec) = self.execs.get_mut(&name) else {
                    return connection.refuse(RefusalKind::UnknownExec, format!("no exec {name:?}"));
                };
                let attached = match stream {
                    Stream::Stdin => exec.stdin.as_mut().map(|input| Ok(input.open(id, connection, name))),
                    Stream::Stdout => Some(exec.stdout.open(id, connection, name, stream, have)),
                    Stream::Stderr => Some(exec.stderr.open(id, connection, name, stream, have)),
                };
                match attached {
                    None => connection.refuse(RefusalKind::NoSuchStream, "the exec has no stdin"),
                    Some(Err(error)) => connection.refuse(RefusalKind::BadOffset, error.to_string()),
                    // One reader, one writer: whoever comes last.
                    Some(Ok(before)) => {
                        if let Some(before) = before.and_then(|id| self.connections.get_mut(&id)) {
                            before.dead = true;
                        }
                    }
                }
            }
        }
    }

    pub(super) fn obey(&mut self, id: u64, connection: &mut Connection, received: Received) {
        let sound = match (&mut connection.role, received) {
            (Role::Control, Received::Request(request)) => {
                let request = *request;
                match self.act(id, request.id, request.action) {
                    Answer::Later => {}
                    Answer::Now(refused) => connection.send(&FromAgent::Reply { id: request.id, refused }),
                }
                true
            }
            (Role::Output { exec, stream, .. }, Received::Ack(offset)) => {
                let exec = self.execs.get_mut(exec.as_str());
                exec.is_none_or(|exec| exec.output(*stream).sender.acknowledge(offset).is_ok())
            }
            (Role::Input { exec, .. }, Received::Data(offset, bytes)) => {
                self.input(exec).is_none_or(|input| input.take(offset, &bytes).then(|| input.push()).is_some())
            }
            (Role::Input { exec, .. }, Received::End(total)) => {
                self.input(exec).is_none_or(|input| input.end(total).then(|| input.push()).is_some())
            }
            _ => false,
        };
        if !sound {
            connection.refuse(RefusalKind::Malformed, "this frame is not for this connection, or its offset is wrong");
        }
    }

    fn input(&mut self, exec: &str) -> Option<&mut Input> {
        self.execs.get_mut(exec).and_then(|exec| exec.stdin.as_mut())
    }

    fn act(&mut self, connection: u64, request: u64, action: Action) -> Answer {
        let unknown = |exec: &str| Err(refusal(RefusalKind::UnknownExec, format!("no exec {exec:?}")));
        let outcome = match action {
            Action::Welcome(epoch) | Action::Thaw(epoch) => return self.begin(Asked { connection, request }, &epoch),
            Action::Freeze { patience_ms } => {
                return self.freeze(Asked { connection, request }, Duration::from_millis(patience_ms));
            }
            Action::Exec(spec) => self.exec(*spec),
            Action::Signal { exec, signal, whole } => match (self.execs.get_mut(&exec), sys::signal(signal)) {
                (None, _) => unknown(&exec),
                (_, None) => Err(refusal(RefusalKind::Malformed, format!("signal {signal}: unknown"))),
                (Some(exec), Some(signal)) => {
                    exec.signal(signal, whole).map_err(|error| refusal(RefusalKind::Failed, format!("signal: {error}")))
                }
            },
            Action::Resize { exec, rows, cols } => match self.execs.get(&exec) {
                None => unknown(&exec),
                Some(exec) if exec.resize(rows, cols) => Ok(()),
                Some(_) => Err(refusal(RefusalKind::NoSuchStream, "the exec has no terminal")),
            },
            Action::Recall { exec } => match self.execs.get_mut(&exec) {
                None => unknown(&exec),
                Some(exec) => {
                    exec.announced = false;
                    Ok(())
                }
            },
            Action::Release { exec } => match self.execs.get_mut(&exec) {
                // Repeated, perhaps.
                None => Ok(()),
                Some(exec) => {
                    exec.release();
                    Ok(())
                }
            },
            Action::Sync => match start_sync() {
                Ok(pidfd) => {
                    self.jobs.push(Job { pidfd, connection, request });
                    return Answer::Later;
                }
                Err(error) => Err(refusal(RefusalKind::Failed, format!("sync: {error}"))),
            },
            Action::Poweroff { grace_ms } => {
                self.begin_stop(Duration::from_millis(grace_ms).min(MAX_GRACE));
                Ok(())
            }
        };
        Answer::Now(outcome.err())
    }

    fn exec(&mut self, spec: ExecSpec) -> Result<(), Refusal> {
        spec.check().map_err(|error| refusal(RefusalKind::Malformed, error.to_string()))?;
        if let Some(there) = self.execs.get(&spec.id) {
            let message = format!("exec {:?} exists, for another spec", spec.id);
            return if there.spec == spec { Ok(()) } else { Err(refusal(RefusalKind::IdInUse, message)) };
        }
        if self.stopping.is_some() {
            return Err(refusal(RefusalKind::Stopping, "the machine is powering off"));
        }
        if self.gate.is_closed() {
            return Err(refusal(RefusalKind::Frozen, "the workload is stopped; it goes on in another epoch"));
        }
        if self.execs.len() >= MAX_EXECS {
            return Err(refusal(RefusalKind::TooMany, format!("{MAX_EXECS} execs exist; release some")));
        }
        let id = spec.id.clone();
        let mut exec = Exec::new(spec);
        exec.start(&self.workload);
        self.execs.insert(id, exec);
        Ok(())
    }

    fn begin_stop(&mut self, grace: Duration) {
        // Nothing of a workload that is stopped runs again, not even to hear that it is to end.
        let grace = if self.gate.is_closed() { Duration::ZERO } else { grace };
        let at = Instant::now().checked_add(grace).unwrap_or_else(Instant::now);
        if self.stopping.is_none() && !grace.is_zero() {
            match &self.workload.cgroup {
                Some(cgroup) => cgroup.signal_all(Signal::TERM),
                None => self.execs.values_mut().for_each(|exec| _ = exec.signal(Signal::TERM, false)),
            }
        }
        self.stopping = Some(self.stopping.map_or(at, |before| before.min(at)));
    }
}

pub(super) enum Answer {
    Now(Option<Refusal>),
    Later,
}

/// A frame of a connection that is open, owned.
pub(super) enum Received {
    Request(Box<Request>),
    Data(u64, Vec<u8>),
    Ack(u64),
    End(u64),
}

impl Received {
    pub(super) fn next(connection: &mut Connection) -> Result<Option<Received>, String> {
        Ok(match connection.decoder.next_frame().map_err(|e| e.to_string())? {
            None => None,
            Some(Body::Json(json)) => Some(Received::Request(parse(json).map_err(|e| e.to_string())?)),
            Some(Body::Data { offset, bytes }) => Some(Received::Data(offset, bytes.to_vec())),
            Some(Body::Ack(offset)) => Some(Received::Ack(offset)),
            Some(Body::End(total)) => Some(Received::End(total)),
        })
    }
}

fn start_sync() -> std::io::Result<OwnedFd> {
    let Some(pidfd) = sys::fork(None)? else {
        sys::close_all_but(&[]);
        rustix::fs::sync();
        sys::exit_now(0);
    };
    Ok(pidfd)
}

fn about(version: u32) -> About {
    About {
        version,
        agent: env!("CARGO_PKG_VERSION").to_owned(),
        capabilities: CAPABILITIES.iter().map(|name| (*name).to_owned()).collect(),
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        memory: cgroup::total_memory(),
    }
}
