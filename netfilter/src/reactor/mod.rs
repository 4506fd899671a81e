//! The process: one thread, one epoll instance, descriptors that the supervisor handed over.

mod routes;
mod sockets;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use netfilter_control::{
    Config, ControlError, ControlSocket, Event, MAX_POLICY, MAX_RESOLVERS, MAX_RULES, MAX_SAVED, Policy, Request,
    Target,
};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::engine::{Engine, Saved};
use crate::host::Token;
use crate::plan::MAX_FRAME;
use routes::Routes;
use sockets::Sockets;

const CONTROL: u64 = 0;
const FRAMES: u64 = 1;
const FIRST_SOCKET: u64 = 2;
/// Frames that are read before others get their turn.
const FRAMES_A_TURN: usize = 64;
/// Least time to sleep: what was due has just been done.
const LEAST_SLEEP: Duration = Duration::from_millis(1);

/// Why the process ends.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The control socket failed, or the supervisor is gone.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// A call to the host's kernel failed.
    #[error("{0}: {1}")]
    Kernel(&'static str, io::Error),
    /// The first message was not the one that starts.
    #[error("control socket: the first message is not a start request")]
    NotStarted,
    /// A later message was.
    #[error("control socket: a second start request")]
    StartedTwice,
}

/// Waits for the start request, and serves the guest until told to stop.
pub fn serve(control: ControlSocket) -> Result<(), ServeError> {
    let first = loop {
        match control.receive()? {
            Some(message) => break message,
            None => wait_readable(&control)?,
        }
    };
    let (Request::Start(config), descriptors) = first else { return Err(ServeError::NotStarted) };
    match Reactor::start(config, descriptors, control) {
        Ok(reactor) => reactor.run(),
        Err((control, error)) => {
            control.send(&Event::Refused { error }, &[])?;
            Ok(())
        }
    }
}

fn wait_readable(control: &ControlSocket) -> Result<(), ServeError> {
    match poll(&mut [PollFd::new(control, PollFlags::IN)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(ServeError::Kernel("poll", error.into())),
    }
}

#[derive(Debug)]
struct Reactor {
    control: ControlSocket,
    frames: OwnedFd,
    /// Whether the frame socket has no room.
    blocked: bool,
    /// What is said to the supervisor before any record.
    answers: Vec<Event>,
    engine: Engine,
    sockets: Sockets,
    began: Instant,
    /// Whether records wait for room on the control socket.
    behind: bool,
    ending: Ending,
}

/// The way to the end: no more work, all records, the last word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    NotYet,
    Stopping,
    Said,
}

impl Reactor {
    fn start(
        config: Config,
        descriptors: Vec<OwnedFd>,
        control: ControlSocket,
    ) -> Result<Self, (ControlSocket, String)> {
        match Self::prepare(config, descriptors, &control) {
            Ok((frames, engine, sockets)) => Ok(Self {
                control,
                frames,
                blocked: false,
                answers: vec![Event::Running],
                engine,
                sockets,
                began: Instant::now(),
                behind: false,
                ending: Ending::NotYet,
            }),
            Err(error) => Err((control, error)),
        }
    }

    fn prepare(
        config: Config,
        descriptors: Vec<OwnedFd>,
        control: &ControlSocket,
    ) -> Result<(OwnedFd, Engine, Sockets), String> {
        let mut descriptors = descriptors.into_iter();
        let mut next = |what: &str| descriptors.next().ok_or(format!("start: no descriptor for {what}"));
        let (frames, routes, policy) = (next("frames")?, next("routes")?, next("the policy")?);
        let saved = config.restored.then(|| next("the saved network")).transpose()?;
        if descriptors.next().is_some() {
            return Err("start: more descriptors than were announced".to_owned());
        }
        let policy = read_policy(policy, config.proxy.is_some())?;
        check_resolvers(&config.resolvers)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| format!("epoll_create: {error}"))?;
        let mut sockets = Sockets::new(epoll, Routes::new(routes), FIRST_SOCKET);
        for (fd, token) in [(control.as_fd(), CONTROL), (frames.as_fd(), FRAMES)] {
            epoll::add(sockets.epoll(), fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
                .map_err(|error| format!("epoll_ctl: {error}"))?;
        }
        let mut engine = Engine::new(sockets::random());
        engine.set_resolvers(config.resolvers);
        engine.set_proxy(config.proxy);
        if let Some(saved) = saved {
            let bytes = read_file(saved, MAX_SAVED).map_err(|error| format!("the saved network: {error}"))?;
            let saved: Saved = serde_json::from_slice(&bytes).map_err(|error| format!("the saved network: {error}"))?;
            engine.restore(saved).map_err(|error| format!("the saved network: {error}"))?;
        }
        engine.set_policy(policy, config.generation, &mut sockets, Duration::ZERO);
        Ok((frames, engine, sockets))
    }

    fn run(mut self) -> Result<(), ServeError> {
        let mut events = Vec::with_capacity(256);
        let mut buffer = vec![0; MAX_FRAME.saturating_add(1)];
        loop {
            self.work()?;
            if self.ending == Ending::Said {
                return Ok(());
            }
            let timeout = self.timeout();
            events.clear();
            match epoll::wait(self.sockets.epoll(), rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(ServeError::Kernel("epoll_wait", error.into())),
            }
            for event in events.drain(..) {
                let epoll::Event { data, flags } = event;
                match data.u64() {
                    CONTROL => self.control(flags)?,
                    FRAMES => {
                        if flags.contains(epoll::EventFlags::OUT) {
                            self.blocked = false;
                        }
                        if !self.read_frames(&mut buffer)? {
                            epoll::delete(self.sockets.epoll(), &self.frames)
                                .map_err(|error| ServeError::Kernel("epoll_ctl", error.into()))?;
                            self.stop();
                        }
                    }
                    token => self.engine.ready(Token(token), &mut self.sockets, self.began.elapsed()),
                }
            }
        }
    }

    /// The run ends: what was only counted is written down, and then there is a last word.
    fn stop(&mut self) {
        if self.ending == Ending::NotYet {
            self.engine.log().summarise(self.began.elapsed(), true);
            self.ending = Ending::Stopping;
        }
    }

    /// Does what can be done, and sends what came of it.
    fn work(&mut self) -> Result<(), ServeError> {
        let was_blocked = self.blocked;
        loop {
            let all = self.engine.run(&mut self.sockets, self.began.elapsed());
            self.send_frames()?;
            if all || self.blocked {
                break;
            }
        }
        if self.blocked != was_blocked {
            self.watch(FRAMES, self.blocked)?;
        }
        self.sockets.tune();
        let behind = !self.send_records()?;
        if behind != self.behind {
            self.behind = behind;
            self.watch(CONTROL, behind)?;
        }
        Ok(())
    }

    /// Watches for room as well, or no more.
    fn watch(&self, token: u64, room: bool) -> Result<(), ServeError> {
        let fd = if token == FRAMES { self.frames.as_fd() } else { self.control.as_fd() };
        let out = if room { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
        epoll::modify(self.sockets.epoll(), fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN | out)
            .map_err(|error| ServeError::Kernel("epoll_ctl", error.into()))
    }

    fn timeout(&mut self) -> Option<Timespec> {
        let now = self.began.elapsed();
        let due = self.engine.due(now)?;
        let sleep = due.saturating_sub(now).max(LEAST_SLEEP);
        Timespec::try_from(sleep).ok()
    }

    fn send_frames(&mut self) -> Result<(), ServeError> {
        while let Some(frame) = self.engine.front().filter(|_| !self.blocked) {
            match send(&self.frames, frame, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(_) => self.engine.sent(),
                Err(Errno::AGAIN | Errno::NOBUFS) => self.blocked = true,
                Err(Errno::INTR) => {}
                // The VMM ended; the read side says so too.
                Err(Errno::PIPE | Errno::CONNRESET | Errno::CONNREFUSED | Errno::NOTCONN) => self.engine.sent(),
                Err(error) => return Err(ServeError::Kernel("sending a frame", error.into())),
            }
        }
        Ok(())
    }

    /// `false` when the guest's end of the link is gone.
    fn read_frames(&mut self, buffer: &mut [u8]) -> Result<bool, ServeError> {
        for _ in 0..FRAMES_A_TURN {
            match recv(&self.frames, &mut *buffer, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Ok(false),
                Ok((_, count)) => {
                    let frame = buffer.get(..count).unwrap_or_default();
                    self.engine.frame(frame, &mut self.sockets, self.began.elapsed());
                }
                Err(Errno::AGAIN) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(false),
                Err(error) => return Err(ServeError::Kernel("reading a frame", error.into())),
            }
        }
        Ok(true)
    }

    /// Sends answers and records as far as there is room, and says whether that was far enough.
    fn send_records(&mut self) -> Result<bool, ServeError> {
        while let Some(answer) = self.answers.first() {
            if !self.control.send(answer, &[])? {
                return Ok(false);
            }
            self.answers.remove(0);
        }
        while let Some(record) = self.engine.log().front().cloned() {
            if !self.control.send(&Event::Record { record }, &[])? {
                return Ok(false);
            }
            self.engine.log().sent();
        }
        if self.ending == Ending::Stopping {
            let counters = self.engine.log().counters.clone();
            if !self.control.send(&Event::Stopped(counters), &[])? {
                return Ok(false);
            }
            self.ending = Ending::Said;
        }
        Ok(true)
    }

    fn control(&mut self, flags: epoll::EventFlags) -> Result<(), ServeError> {
        if !flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
            return Ok(());
        }
        while let Some((request, descriptors)) = self.control.receive()? {
            self.request(request, descriptors)?;
        }
        Ok(())
    }

    fn request(&mut self, request: Request, descriptors: Vec<OwnedFd>) -> Result<(), ServeError> {
        let now = self.began.elapsed();
        let only = one(descriptors);
        match request {
            Request::Start(_) => return Err(ServeError::StartedTwice),
            Request::SetPolicy { generation } => match only.and_then(|file| read_policy(file, self.engine.has_proxy()))
            {
                Ok(policy) => {
                    let revoked = self.engine.set_policy(policy, generation, &mut self.sockets, now);
                    self.answers.push(Event::PolicySet { generation, revoked });
                }
                Err(error) => self.answers.push(Event::PolicyRefused { generation, error }),
            },
            Request::SetResolvers { resolvers } => match check_resolvers(&resolvers) {
                Ok(()) => self.engine.set_resolvers(resolvers),
                Err(error) => self.answers.push(Event::ResolversRefused { error }),
            },
            Request::Save => {
                let saved = only.and_then(|file| save(&self.engine.save(), file));
                self.answers.push(match saved {
                    Ok(()) => Event::Saved,
                    Err(error) => Event::SaveFailed { error },
                });
            }
            Request::Stats => {
                let counters = self.engine.log().counters.clone();
                self.answers.push(Event::Stats(counters));
            }
            Request::Stop => self.stop(),
        }
        Ok(())
    }
}

fn one(descriptors: Vec<OwnedFd>) -> Result<OwnedFd, String> {
    let count = descriptors.len();
    let mut descriptors = descriptors.into_iter();
    match (descriptors.next(), descriptors.next()) {
        (Some(only), None) => Ok(only),
        _ => Err(format!("{count} descriptors where one was expected")),
    }
}

fn check_resolvers(resolvers: &[std::net::SocketAddr]) -> Result<(), String> {
    if resolvers.len() > MAX_RESOLVERS {
        return Err(format!("{} resolvers; at most {MAX_RESOLVERS}", resolvers.len()));
    }
    Ok(())
}

fn read_policy(file: OwnedFd, through_proxy: bool) -> Result<Policy, String> {
    let bytes = read_file(file, MAX_POLICY).map_err(|error| format!("the policy: {error}"))?;
    let policy: Policy = serde_json::from_slice(&bytes).map_err(|error| format!("the policy: {error}"))?;
    let count = policy.rules.len().saturating_add(policy.denials.len());
    if count > MAX_RULES {
        return Err(format!("the policy: {count} rules; at most {MAX_RULES}"));
    }
    let by_address = policy.denials.iter().find(|denial| matches!(denial.target, Target::Block(_)));
    let by_name = policy.rules.iter().find(|rule| !matches!(rule.target, Target::Block(_)));
    if through_proxy && let (Some(denial), Some(rule)) = (by_address, by_name) {
        return Err(format!(
            "the policy: {}: behind a proxy it would not hold for {}, whose addresses only the proxy knows; have the proxy \
             refuse them, and leave it out here",
            denial.text, rule.text
        ));
    }
    Ok(policy)
}

/// All of a file, from its beginning.
fn read_file(file: OwnedFd, most: usize) -> io::Result<Vec<u8>> {
    let file = File::from(file);
    let mut bytes = vec![0; most.saturating_add(1)];
    let mut filled = 0usize;
    loop {
        let room = bytes.get_mut(filled..).unwrap_or_default();
        let at = u64::try_from(filled).unwrap_or(u64::MAX);
        match file.read_at(room, at) {
            Ok(0) if room.is_empty() => {
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("over {most} bytes")));
            }
            Ok(0) => break,
            Ok(count) => filled = filled.saturating_add(count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

fn save(saved: &Saved, file: OwnedFd) -> Result<(), String> {
    let bytes = serde_json::to_vec(saved).map_err(|error| error.to_string())?;
    let mut file = File::from(file);
    file.write_all(&bytes).map_err(|error| format!("writing the saved network: {error}"))
}
