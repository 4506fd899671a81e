//! The network of a run: its filter's process, what that is told, and what it reports.
//!
//! What comes from the filter is hostile: a guest may have taken it over. It is bounded, in number and in bytes, and nobody
//! waits for it without an end. A filter that ends takes the network along and nothing else.

use std::fs::File;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use guest::message::printable;
use jailer::{Jailed, Part};
use netfilter_control::{Config, ControlError, ControlSocket, Counters, Event, MAX_POLICY, Policy, Request, plan};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socket_with, socketpair, sockopt};

use super::jail::{self, Confined, Confining, Ground};
use super::journal::Journal;
use super::machine::{create, open_plainly, reap};
use super::resolvers::Resolvers;
use crate::events::Events;
use crate::home::HomeError;
use crate::spec::{self, SetPolicy};
use crate::store::{FILTER_JAIL, write_jail};

/// How long a filter may take to say that it serves. It is a matter of milliseconds; a host that thrashes is given time.
const START_PATIENCE: Duration = Duration::from_secs(30);
/// How long it may take to answer, to take an order, and to end.
const PATIENCE: Duration = Duration::from_secs(5);
const END_PATIENCE: Duration = Duration::from_secs(1);
/// Buffer of the frames' sockets. The host may give less.
const FRAME_BUFFER: usize = 2 << 20;
/// What is said of a network that is no more.
const ENDED: &str = "the network of the run has ended";
/// Why a filter was ended that may have put a policy in force, or not.
const NO_ANSWER: &str = "it did not say whether a new policy is in force, and was ended";
/// Why the kernel killed one.
const OUT_OF_MEMORY: &str = "out-of-memory: it reached the memory limit of its cgroup, and the kernel killed it";

/// Why a run has no network, which it must have.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetworkError {
    /// The jail.
    #[error("network filter: {0}")]
    Jail(#[from] jail::ConfineError),
    /// The run's directory.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The control socket.
    #[error("network filter: {0}")]
    Control(#[from] ControlError),
    /// It does not want to.
    #[error("network filter: {0}")]
    Refused(String),
    /// A system call.
    #[error("network filter: {0}: {1}")]
    System(&'static str, io::Error),
}

/// The guest's end of its network: what a machine needs to have an interface. It is made with a filter at the other end, and a
/// filter with a policy.
#[derive(Debug)]
pub(crate) struct Link(OwnedFd);

impl Link {
    /// For the VMM.
    pub(super) fn frames(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// The interface.
    pub(super) fn interface() -> vmm_control::Net {
        vmm_control::Net { mac: plan::GUEST_MAC }
    }
}

/// A filter that is being started.
#[derive(Debug)]
pub(super) struct Starting {
    confining: Confining,
    control: ControlSocket,
    resolvers: Resolvers,
    generation: u64,
}

/// Starts the filter of a run. Call it on the main thread: the filter is killed when the thread that started it ends.
pub(super) fn start(
    ground: &Ground,
    directory: &Path,
    jail: &spec::Jail,
    netfilter: &Path,
    (policy, proxy): (&SetPolicy, Option<SocketAddr>),
    known: Option<&Path>,
) -> Result<(Starting, Link), NetworkError> {
    let (control, theirs) = ControlSocket::pair()?;
    let errors = create(&directory.join("netfilter.log"))
        .map_err(|error| NetworkError::System("netfilter.log", io::Error::other(error.to_string())))?;
    let confining = jail::start_filter(ground, netfilter, jail, directory, theirs.as_fd(), errors)?;

    // While the jail is built.
    let resolvers = Resolvers::of_the_host();
    let link = begin(&control, policy, (resolvers.known(), proxy), known)?;
    Ok((Starting { confining, control, resolvers, generation: policy.generation }, link))
}

/// Asks a filter to serve the guest at the other end of the link, by these resolvers or through this proxy.
/// `known`: the file of what another filter knew of it.
pub(super) fn begin(
    control: &ControlSocket,
    policy: &SetPolicy,
    (resolvers, proxy): (&[SocketAddr], Option<SocketAddr>),
    known: Option<&Path>,
) -> Result<Link, NetworkError> {
    let system = |what| move |error: Errno| NetworkError::System(what, error.into());
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (frames, link) = pair.map_err(system("socketpair"))?;
    for end in [&frames, &link] {
        // It works with less, only slower. Over the host's limit only root may go.
        if sockopt::set_socket_send_buffer_size_force(end, FRAME_BUFFER).is_err() {
            let _ = sockopt::set_socket_send_buffer_size(end, FRAME_BUFFER);
        }
    }
    let routes = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None);
    let routes = routes.map_err(system("netlink socket"))?;
    let generation = policy.generation;
    let policy = in_memory(&policy.policy)?;
    let config = Config { generation, resolvers: resolvers.to_vec(), proxy, restored: known.is_some() };
    let known = known.map(|path| open_plainly(path, OFlags::RDONLY)).transpose();
    let known = known.map_err(|error| NetworkError::System("the network of the snapshot", error))?;
    let mut files = vec![frames.as_fd(), routes.as_fd(), policy.as_fd()];
    files.extend(known.as_ref().map(AsFd::as_fd));
    send(control, &Request::Start(config), &files)?;
    Ok(Link(link))
}

/// Waits until a filter serves, or until it is known why it does not.
pub(super) fn wait_until_it_serves(control: &ControlSocket, process: &mut Jailed) -> Result<(), NetworkError> {
    match next(control, Instant::now().checked_add(START_PATIENCE)) {
        Ok(Some(Event::Running)) => Ok(()),
        Ok(Some(Event::Refused { error })) => Err(NetworkError::Refused(printable(&error))),
        Ok(Some(_)) => Err(NetworkError::Refused("it does not begin as it should".to_owned())),
        Ok(None) => Err(NetworkError::Refused(format!("no word of it in {START_PATIENCE:?}"))),
        Err(ControlError::Closed) => {
            let how = reap(process, END_PATIENCE);
            Err(NetworkError::Refused(format!("it ended unexpectedly ({how})")))
        }
        Err(error) => Err(error.into()),
    }
}

impl Starting {
    /// Waits until the filter serves the guest, or until it is known why it does not.
    pub(super) fn finish(self, directory: &Path) -> Result<Filter, NetworkError> {
        let Self { confining, control, resolvers, generation } = self;
        let mut process = confining.finish()?;
        let record = process.record().map_err(|error| NetworkError::System("its process", error))?;
        write_jail(directory, FILTER_JAIL, &record)?;
        wait_until_it_serves(&control, &mut process.jailed)?;
        Ok(Filter {
            process,
            orders: Arc::new(Orders::new(control, generation)),
            resolvers: Some(resolvers),
            ended: None,
        })
    }
}

/// A running filter. Dropping it kills and reaps it.
#[derive(Debug)]
pub(super) struct Filter {
    process: Confined,
    orders: Arc<Orders>,
    /// Until it is watched.
    resolvers: Option<Resolvers>,
    /// Gives its counters when all that it had to say was written down.
    ended: Option<Receiver<Option<Counters>>>,
}

impl Filter {
    /// Parts of the jail that are missing, each with the reason.
    pub(super) fn unenforced(&self) -> &[(Part, String)] {
        self.process.unenforced()
    }

    /// Where orders go.
    pub(super) fn orders(&self) -> Arc<Orders> {
        Arc::clone(&self.orders)
    }

    /// Writes its records to the log, on a thread of its own, and calls `then` when it has ended.
    pub(super) fn watch(
        &mut self,
        events: Arc<Events>,
        then: impl FnOnce() + Send + 'static,
    ) -> Result<(), NetworkError> {
        let (sender, ended) = channel();
        let (orders, resolvers) = (self.orders(), self.resolvers.take());
        let mut resolvers = resolvers.unwrap_or_else(Resolvers::of_the_host);
        let watch = move || {
            let mut journal = Journal::new(events);
            let counters = listen(&orders, &mut journal, &mut resolvers);
            orders.answer(None, Err(ENDED.to_owned()));
            journal.end();
            // Nobody listens once the run has ended.
            let _ = sender.send(counters);
            then();
        };
        std::thread::Builder::new()
            .name("network".into())
            .spawn(watch)
            .map_err(|error| NetworkError::System("thread", error))?;
        self.ended = Some(ended);
        Ok(())
    }

    /// How it ended, when it has. It is killed if it takes too long.
    pub(super) fn reap(&mut self) -> String {
        let how = reap(&mut self.process.jailed, END_PATIENCE);
        match self.orders.given_up.get() {
            Some(why) => (*why).to_owned(),
            None if self.process.ran_out_of_memory() => OUT_OF_MEMORY.to_owned(),
            None => how,
        }
    }

    /// Ends it after its guest, and gives its counters, if it still has the word. Its last record is in the log then.
    pub(super) fn end(mut self) -> Option<Counters> {
        let _ = self.orders.control.send(&Request::Stop, &[]);
        let ended = self.ended.take()?;
        let counters = ended.recv_timeout(END_PATIENCE);
        self.reap();
        // Without it, whoever listens comes to an end.
        counters.or_else(|_| ended.recv_timeout(END_PATIENCE)).unwrap_or_default()
    }
}

/// What stands for a save among the numbers of policies, of which none is so high.
const SAVE: u64 = u64::MAX;

/// How many connections a policy ended, or why it is not in force.
type Answer = Result<u64, String>;

/// What other threads want of the filter.
#[derive(Debug)]
pub(super) struct Orders {
    control: ControlSocket,
    /// Of the policy that was sent last. No number is sent twice, so that no answer is taken for another's. Held while a policy
    /// is set.
    generation: Mutex<u64>,
    /// Who waits for the answer to which.
    waiting: Mutex<Option<(u64, Sender<Answer>)>>,
    /// Why we ended the filter, if we did.
    given_up: OnceLock<&'static str>,
}

impl Orders {
    fn new(control: ControlSocket, generation: u64) -> Self {
        Self { control, generation: Mutex::new(generation), waiting: Mutex::default(), given_up: OnceLock::new() }
    }

    /// Puts a policy in force: its number, and how many connections it ended. `record` is called when it is.
    ///
    /// Where it is not known whether it is, the network ends.
    pub(super) fn set_policy(
        &self,
        policy: &Policy,
        record: impl FnOnce(u64) -> Result<(), String>,
    ) -> Result<(u64, u64), String> {
        self.set_policy_within(PATIENCE, policy, record)
    }

    fn set_policy_within(
        &self,
        patience: Duration,
        policy: &Policy,
        record: impl FnOnce(u64) -> Result<(), String>,
    ) -> Result<(u64, u64), String> {
        let file = in_memory(policy).map_err(|error| error.to_string())?;
        let mut generation = self.generation.lock().unwrap_or_else(PoisonError::into_inner);
        *generation = generation.saturating_add(1);
        let (sender, answer) = channel();
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some((*generation, sender));
        send(&self.control, &Request::SetPolicy { generation: *generation }, &[file.as_fd()]).map_err(|error| {
            match error {
                ControlError::Closed => ENDED.to_owned(),
                error => error.to_string(),
            }
        })?;
        let Ok(answer) = answer.recv_timeout(patience) else {
            self.give_up(NO_ANSWER);
            return Err(format!(
                "its network filter does not say whether the policy is in force; {ENDED}, so that nothing is reached \
                 that it denies"
            ));
        };
        let revoked = answer?;
        record(*generation)?;
        Ok((*generation, revoked))
    }

    /// Has the filter write down what a snapshot keeps of the network.
    pub(super) fn save(&self, to: BorrowedFd<'_>) -> Result<(), String> {
        // No policy is put in force meanwhile, whose answer could be taken for this one.
        let _held = self.generation.lock().unwrap_or_else(PoisonError::into_inner);
        let (sender, answer) = channel();
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some((SAVE, sender));
        send(&self.control, &Request::Save, &[to]).map_err(|error| match error {
            ControlError::Closed => ENDED.to_owned(),
            error => error.to_string(),
        })?;
        let answer = answer.recv_timeout(PATIENCE);
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = None;
        answer.map_err(|_| format!("its network filter did not write down its state within {PATIENCE:?}"))?.map(drop)
    }

    /// Ends the filter: it sees its control socket closed, or is killed by who sees that it should have ended.
    fn give_up(&self, why: &'static str) {
        // The first reason is the reason.
        let _ = self.given_up.set(why);
        // It fails if the filter has ended already.
        let _ = shutdown(&self.control, Shutdown::Both);
    }

    /// Gives the answer to this policy, or to whichever is waited for.
    fn answer(&self, generation: Option<u64>, answer: Answer) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |waiting: &mut (u64, _)| generation.is_none_or(|generation| waiting.0 == generation);
        if let Some((_, who)) = waiting.take_if(is_it) {
            // Someone who has stopped waiting is no loss.
            let _ = who.send(answer);
        }
    }
}

/// Listens until the filter has nothing more to say, and gives its last counters.
fn listen(orders: &Orders, journal: &mut Journal, resolvers: &mut Resolvers) -> Option<Counters> {
    loop {
        resolvers.refresh(|found| {
            orders.control.send(&Request::SetResolvers { resolvers: found.to_vec() }, &[]).unwrap_or(false)
        });
        match next(&orders.control, Some(resolvers.due())) {
            Ok(Some(Event::Record { record })) => journal.write(&record),
            Ok(Some(Event::PolicySet { generation, revoked })) => orders.answer(Some(generation), Ok(revoked)),
            Ok(Some(Event::PolicyRefused { generation, error })) => {
                orders.answer(Some(generation), Err(printable(&error)));
            }
            Ok(Some(Event::Saved)) => orders.answer(Some(SAVE), Ok(0)),
            Ok(Some(Event::SaveFailed { error })) => orders.answer(Some(SAVE), Err(printable(&error))),
            Ok(Some(Event::Stopped(counters))) => return Some(counters),
            Ok(_) => {}
            Err(_) => return None,
        }
    }
}

/// The next event; nothing when the deadline passes first.
fn next(control: &ControlSocket, deadline: Option<Instant>) -> Result<Option<Event>, ControlError> {
    loop {
        if let Some((event, _)) = control.receive::<Event>()? {
            return Ok(Some(event));
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(None);
        }
        wait(control, PollFlags::IN, left)?;
    }
}

/// Sends a message, and waits a while for room.
fn send(control: &ControlSocket, request: &Request, descriptors: &[BorrowedFd<'_>]) -> Result<(), ControlError> {
    if control.send(request, descriptors)? {
        return Ok(());
    }
    wait(control, PollFlags::OUT, Some(PATIENCE))?;
    if control.send(request, descriptors)? { Ok(()) } else { Err(io::Error::from(io::ErrorKind::TimedOut).into()) }
}

fn wait(control: &ControlSocket, flags: PollFlags, time: Option<Duration>) -> Result<(), ControlError> {
    let time = time.and_then(|time| Timespec::try_from(time).ok());
    match poll(&mut [PollFd::new(control, flags)], time.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(io::Error::from(error).into()),
    }
}

/// A file in memory that holds a policy.
fn in_memory(policy: &Policy) -> Result<OwnedFd, NetworkError> {
    let bytes = serde_json::to_vec(policy).map_err(ControlError::from)?;
    if bytes.len() > MAX_POLICY {
        return Err(NetworkError::Refused(format!(
            "a policy of {} bytes when compiled, over {MAX_POLICY}",
            bytes.len()
        )));
    }
    let system = |error: io::Error| NetworkError::System("memfd", error);
    let file = rustix::fs::memfd_create("policy", MemfdFlags::CLOEXEC).map_err(|error| system(error.into()))?;
    let mut file = File::from(file);
    file.write_all(&bytes).map_err(system)?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn journal() -> (tempfile::TempDir, Journal) {
        let directory = tempfile::tempdir().unwrap();
        let journal = Journal::new(Arc::new(Events::open(directory.path(), false).unwrap()));
        (directory, journal)
    }

    /// The number of the policy that a filter is given next.
    fn given(control: &ControlSocket) -> u64 {
        loop {
            wait(control, PollFlags::IN, None).unwrap();
            match control.receive::<Request>().unwrap() {
                Some((Request::SetPolicy { generation }, policy)) if policy.len() == 1 => return generation,
                other => assert!(other.is_none(), "{other:?}"),
            }
        }
    }

    #[test]
    fn an_answer_counts_for_its_own_policy_alone() {
        let (ours, theirs) = ControlSocket::pair().unwrap();
        let orders = Arc::new(Orders::new(ours, 1));
        let ((_directory, mut journal), listening) = (journal(), Arc::clone(&orders));
        let listener =
            std::thread::spawn(move || listen(&listening, &mut journal, &mut Resolvers::of_the_host()).is_some());
        let filter = std::thread::spawn(move || {
            let say = |event: Event| assert!(theirs.send(&event, &[]).unwrap());
            assert_eq!(given(&theirs), 2);
            say(Event::PolicyRefused { generation: 2, error: "no".into() });
            assert_eq!(given(&theirs), 3, "a number is never used again");
            say(Event::PolicySet { generation: 2, revoked: 7 });
            say(Event::PolicySet { generation: 3, revoked: 5 });
            say(Event::Stopped(Counters::default()));
        });
        let policy = Policy::default();
        assert_eq!(orders.set_policy(&policy, |_| panic!("refused")), Err("no".into()));
        let mut recorded = 0;
        let record = |generation| {
            recorded = generation;
            Ok(())
        };
        assert_eq!(orders.set_policy(&policy, record), Ok((3, 5)));
        assert_eq!(recorded, 3);
        filter.join().unwrap();
        assert!(listener.join().unwrap());
    }

    #[test]
    fn a_filter_that_does_not_say_what_is_in_force_is_ended() {
        let (ours, theirs) = ControlSocket::pair().unwrap();
        let orders = Orders::new(ours, 1);
        let set = |orders: &Orders| {
            orders.set_policy_within(Duration::from_millis(20), &Policy::default(), |_| panic!("not in force"))
        };
        let error = set(&orders).unwrap_err();
        assert!(error.contains("does not say") && error.contains(ENDED), "{error}");
        assert_eq!(orders.given_up.get(), Some(&NO_ANSWER));
        // It sees the end after what was sent, and who listens to it does.
        assert!(matches!(theirs.receive::<Request>(), Ok(Some((Request::SetPolicy { generation: 2 }, _)))));
        assert!(matches!(theirs.receive::<Request>(), Err(ControlError::Closed)));
        assert_eq!(listen(&orders, &mut journal().1, &mut Resolvers::of_the_host()), None);
        assert_eq!(set(&orders), Err(ENDED.to_owned()));
    }

    #[test]
    fn the_agent_has_the_addresses_that_the_filter_expects() {
        use guest::link::{ADDRESS, GATEWAY, NETMASK};
        assert_eq!((ADDRESS, GATEWAY, NETMASK), (plan::GUEST, plan::GATEWAY, plan::NETMASK));
    }
}
