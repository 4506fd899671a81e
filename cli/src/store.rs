//! The directories of runs.
//!
//! `runs/<id>` holds one run. A run is alive while the lock on its `lock` file is held: the client that
//! creates the run takes it, and its supervisor inherits it, so there is no instant at which a run that
//! starts looks dead. What is half made or half removed has another name (`.tmp-…`) and means nothing.
//! (`.gone-…` is what remains of a removed run: anyone may take it away at any time.)
//! `runs/.lock` is held while a run is made and while leftovers are renamed, never while they are removed.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, RenameFlags, renameat_with};
use serde::Serialize;
use snapshot::store::{Chain, ChainLayer, Snapshot};

use crate::events::Events;
use crate::home::{Home, HomeError, all_entries, at, make_directory, read_json, unusable};
use crate::spec::{Jailed, Phase, SetPolicy, Spec, State};
use crate::supervisor::begin::{STREAMS, Streams};
use crate::supervisor::layers;

/// In a run's directory: how its VMM is confined.
pub(crate) const VMM_JAIL: &str = "jail.json";
/// In a run's directory: how its network filter is confined.
pub(crate) const FILTER_JAIL: &str = "jail-net.json";
/// The policy that was set while the run lived, if one was.
const POLICY: &str = "policy.json";
/// The proxy that its connections go through, if one was set when its network was made.
const PROXY: &str = "proxy.json";
/// In a run's directory: what says that it goes when the run ends.
const EPHEMERAL: &str = "ephemeral";
/// In a run's directory: how it is.
const STATE: &str = "state.json";
/// As large as a state, to take its place when there is no room for another.
const SPARE: &str = "state.json.spare";
/// Begins the names of what is half made.
const TEMPORARY: &str = ".tmp-";
/// Begins the names of what is half removed.
const GONE: &str = ".gone-";

/// What can be wrong with runs.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// A file or directory.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// A name that is taken.
    #[error("name {name:?}: run {id} has it already; choose another --name, or remove that run (bulkhead rm {name})")]
    NameTaken {
        /// The name.
        name: String,
        /// Who has it.
        id: String,
    },
    /// What its disk is made of.
    #[error(transparent)]
    Disk(#[from] snapshot::store::StoreError),
    /// No such run.
    #[error("run {0:?}: there is none with this id or name; bulkhead list -a shows all")]
    Unknown(String),
    /// More than one run.
    #[error("run {given:?}: {} ids begin so: {}", ids.len(), ids.join(", "))]
    Ambiguous {
        /// What was given.
        given: String,
        /// The candidates.
        ids: Vec<String>,
    },
    /// A run without a supervisor.
    #[error("run {id}: not running; its state is {phase}")]
    NotRunning {
        /// Which.
        id: String,
        /// How it is.
        phase: Phase,
    },
}

/// All runs of a state directory.
#[derive(Debug)]
pub(crate) struct Store {
    runs: PathBuf,
}

/// One run's directory, and the state directory that it belongs to.
#[derive(Debug, Clone)]
pub(crate) struct RunDirectory(PathBuf, PathBuf);

/// A run as it is now.
#[derive(Debug)]
pub(crate) struct Listed {
    /// Its spec.
    pub(crate) spec: Spec,
    /// Its state: as written, or failed if its supervisor died.
    pub(crate) state: State,
    /// Where it is.
    pub(crate) directory: RunDirectory,
}

impl Store {
    /// The runs of a state directory.
    pub(crate) fn open(home: &Home) -> Result<Self, HomeError> {
        let runs = home.path().join("runs");
        make_directory(&runs)?;
        Ok(Self { runs })
    }

    /// Makes a run's directory from its spec, whose id is chosen here. The lock that comes back is held.
    ///
    /// `chain` is what its disk is made of; `epoch` the one that it goes on after, 0 if it goes on after none.
    pub(crate) fn create(
        &self,
        spec: &mut Spec,
        chain: &Chain,
        epoch: u64,
    ) -> Result<(RunDirectory, File), StoreError> {
        let _guard = self.guard()?;
        if let Some(name) = &spec.name
            && let Some(other) = self.all()?.into_iter().find(|other| other.spec.name.as_ref() == Some(name))
        {
            return Err(StoreError::NameTaken { name: name.clone(), id: other.spec.id });
        }
        let (path, temporary) = loop {
            let id = fresh_id().map_err(at(&self.runs))?;
            let path = self.runs.join(&id);
            if !path.exists() {
                let temporary = self.runs.join(format!("{TEMPORARY}{id}"));
                spec.take_id(id);
                break (path, temporary);
            }
        };
        make_directory(&temporary.join("disk"))?;
        let lock = temporary.join("lock");
        let lock = open_lock(&lock).map_err(at(&lock))?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|error| at(&temporary)(error.into()))?;
        let made = RunDirectory::at(temporary);
        if spec.ephemeral {
            File::create(made.0.join(EPHEMERAL)).map_err(at(&made.0))?;
        }
        // A run that goes with its supervisor need not outlive a crash of the host.
        let durable = !spec.ephemeral;
        write_json(&made.0, "spec.json", spec, durable)?;
        chain.write(&made.chain())?;
        let state = State::new(epoch);
        write_json(&made.0, SPARE, &state, durable)?;
        made.write_state(&state, durable)?;
        let events = Events::open(&made.0, durable).map_err(at(&made.0))?;
        events.add("run.created", serde_json::json!({ "id": spec.id, "name": spec.name, "image": spec.machine.image }));
        std::fs::rename(&made.0, &path).map_err(at(&path))?;
        if durable {
            sync_directory(&self.runs)?;
        }
        Ok((RunDirectory::at(path), lock))
    }

    /// Removes what died in the middle: half-made and half-removed directories, and ephemeral runs whose
    /// supervisor is gone. Leaves everything else.
    pub(crate) fn sweep(&self) -> Result<(), HomeError> {
        let guard = self.guard()?;
        let mut gone = Vec::new();
        for name in self.names()? {
            let path = self.runs.join(&name);
            let dead = || path.join(EPHEMERAL).exists() && !is_locked(&path.join("lock"));
            if name.starts_with(GONE) {
                gone.push(path);
            } else if name.starts_with(TEMPORARY) || dead() {
                // What cannot be removed, such as a leftover of another user's run, is in nobody's way.
                gone.extend(set_aside(&path).ok().flatten());
            }
        }
        drop(guard);
        // Large directories take their time; nobody waits for it.
        for path in gone {
            let _ = remove_all(&path);
        }
        Ok(())
    }

    /// All runs, by id. What is damaged is none; what we may not look at might be one.
    pub(crate) fn all(&self) -> Result<Vec<Listed>, HomeError> {
        let (runs, closed) = self.readable()?;
        closed.map_or(Ok(runs), Err)
    }

    /// All runs that can be read, by id, and why one cannot, if there is one.
    pub(crate) fn readable(&self) -> Result<(Vec<Listed>, Option<HomeError>), HomeError> {
        let (mut runs, mut closed) = (Vec::new(), None);
        for name in self.names()?.into_iter().filter(|name| is_id(name)) {
            match RunDirectory::at(self.runs.join(name)).read() {
                Ok(run) => runs.push(run),
                Err(HomeError::Io { path, error }) if error.kind() == io::ErrorKind::PermissionDenied => {
                    closed = closed.or(Some(unusable(&path)(error)));
                }
                // A run may end, and its directory go, while we read: it is then no run any more.
                Err(_) => {}
            }
        }
        Ok((runs, closed))
    }

    /// The run with this id, name or unique beginning of an id.
    pub(crate) fn find(&self, given: &str) -> Result<Listed, StoreError> {
        let (mut all, closed) = self.readable()?;
        let names: Vec<(&str, Option<&str>)> =
            all.iter().map(|run| (run.spec.id.as_str(), run.spec.name.as_deref())).collect();
        match (choose(given, &names), closed) {
            (Ok(index), _) => Ok(all.swap_remove(index)),
            // It might be that one.
            (Err(StoreError::Unknown(_)), Some(closed)) => Err(closed.into()),
            (Err(error), _) => Err(error),
        }
    }

    /// The directory of a run by its whole id, whatever is in it.
    pub(crate) fn directory(&self, id: &str) -> Option<RunDirectory> {
        let path = self.runs.join(id);
        (is_id(id) && path.is_dir()).then(|| RunDirectory::at(path))
    }

    fn guard(&self) -> Result<File, HomeError> {
        let path = self.runs.join(".lock");
        let file = open_lock(&path).map_err(unusable(&path))?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive).map_err(|error| at(&path)(error.into()))?;
        Ok(file)
    }

    fn names(&self) -> Result<Vec<String>, HomeError> {
        let mut names = all_entries(&self.runs)?;
        names.retain(|name| name != ".lock");
        Ok(names)
    }
}

impl RunDirectory {
    /// Takes a directory as a run's.
    pub(crate) fn at(path: PathBuf) -> Self {
        let home = path.ancestors().nth(2).unwrap_or(Path::new("/")).to_owned();
        Self(path, home)
    }

    /// The same without links on the way to either. Where the runs lie elsewhere, they still belong to this state directory.
    pub(crate) fn resolved(&self) -> io::Result<Self> {
        Ok(Self(self.0.canonicalize()?, self.1.canonicalize()?))
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// The state directory.
    pub(crate) fn home(&self) -> &Path {
        &self.1
    }

    /// Reads the spec.
    pub(crate) fn spec(&self) -> Result<Spec, HomeError> {
        read_json(&self.0.join("spec.json"))
    }

    /// What its disk is made of.
    pub(crate) fn chain(&self) -> PathBuf {
        self.0.join("disk/chain.json")
    }

    /// Its state as it was last written.
    pub(crate) fn state(&self) -> Result<State, HomeError> {
        read_json(&self.0.join(STATE))
    }

    /// Writes down what its client has of its output.
    pub(crate) fn write_streams(&self, streams: &Streams) -> Result<(), HomeError> {
        write_json(&self.0, STREAMS, streams, true)
    }

    /// Takes its lock: nobody else is its supervisor from here on.
    pub(crate) fn take(&self) -> Result<File, HomeError> {
        let path = self.0.join("lock");
        let lock = open_lock(&path).map_err(at(&path))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(lock),
            Err(rustix::io::Errno::WOULDBLOCK) => {
                Err(at(&path)(io::Error::other("another command has just started its supervisor")))
            }
            Err(error) => Err(at(&path)(error.into())),
        }
    }

    /// Has its disk and its machine be those of a snapshot, from the next start on. Its lock is held.
    pub(crate) fn go_back_to(&self, snapshot: &Snapshot, disk: u64) -> Result<(), StoreError> {
        let chain = Chain::read(&self.chain())?;
        let own = |layer: &ChainLayer| match layer {
            ChainLayer::Own(stem) => stem.parse::<u64>().ok(),
            ChainLayer::Snapshot(_) => None,
        };
        let last = chain.layers.iter().filter_map(own).max().unwrap_or(0);
        let stem = last.saturating_add(1).to_string();
        let live = layers::own(self.path(), &stem);
        layers::make(&live, disk, true).map_err(|error| at(&live)(io::Error::other(error.to_string())))?;
        let below = snapshot.manifest().layers.iter().map(String::as_str).chain([snapshot.id()]);
        let mut all: Vec<_> = below.map(|id| ChainLayer::Snapshot(id.to_owned())).collect();
        all.push(ChainLayer::Own(stem));
        let mut state = self.state()?;
        state.saved = Some(snapshot.id().to_owned());
        Chain { layers: all }.write(&self.chain())?;
        Ok(self.write_state(&state, true)?)
    }

    /// It is kept from now on, however it was made: what need not have outlived a crash of the host is on the medium then.
    pub(crate) fn keep(&self) -> Result<(), HomeError> {
        for name in ["spec.json", POLICY] {
            let path = self.0.join(name);
            match File::open(&path).and_then(|file| file.sync_all()) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(&path)(error)),
                _ => {}
            }
        }
        sync_directory(self.0.parent().unwrap_or(&self.0))?;
        let path = self.0.join(EPHEMERAL);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(&path)(error)),
            _ => sync_directory(&self.0),
        }
    }

    /// Reads the run as it is now.
    fn read(self) -> Result<Listed, HomeError> {
        let spec = self.spec()?;
        // The lock first: a supervisor writes the last state before it lets go.
        let alive = is_locked(&self.0.join("lock"));
        let mut state = self.state()?;
        if state.is_live() && !alive {
            state.state = Phase::Failed;
            state.reason = Some("its supervisor was killed".to_owned());
        }
        Ok(Listed { spec, state, directory: self })
    }

    /// How one of its processes is confined, if it has come so far.
    pub(crate) fn jail(&self, which: &str) -> Result<Jailed, HomeError> {
        read_json(&self.0.join(which))
    }

    /// The policy that was set while the run lived, if one was.
    pub(crate) fn policy(&self) -> Result<Option<SetPolicy>, HomeError> {
        match read_json(&self.0.join(POLICY)) {
            Err(HomeError::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        }
    }

    /// Writes down that another policy is in force.
    pub(crate) fn write_policy(&self, policy: &SetPolicy, durable: bool) -> Result<(), HomeError> {
        write_json(&self.0, POLICY, policy, durable)
    }

    /// The proxy that its connections go through, or went.
    pub(crate) fn proxy(&self) -> Result<Option<SocketAddr>, HomeError> {
        match read_json(&self.0.join(PROXY)) {
            Err(HomeError::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        }
    }

    /// Writes down which proxy its connections go through from now on, if through any.
    pub(crate) fn write_proxy(&self, proxy: Option<SocketAddr>) -> Result<(), HomeError> {
        let path = self.0.join(PROXY);
        match proxy {
            Some(proxy) => write_json(&self.0, PROXY, &proxy, false),
            None => match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(&path)(error)),
                _ => Ok(()),
            },
        }
    }

    /// Writes the state: whole or not at all, and on the medium if `durable`. Also where the host's file system is
    /// full, since that is a state: then a file that has its room already is written over and put in its place.
    pub(crate) fn write_state(&self, state: &State, durable: bool) -> Result<(), HomeError> {
        match write_json(&self.0, STATE, state, durable) {
            Err(HomeError::Io { error, .. })
                if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) =>
            {
                let path = self.0.join(SPARE);
                write_file(OpenOptions::new().write(true), &path, state, durable)?;
                renameat_with(CWD, &path, CWD, self.0.join(STATE), RenameFlags::EXCHANGE)
                    .map_err(|error| at(&path)(error.into()))?;
                if durable { sync_directory(&self.0) } else { Ok(()) }
            }
            other => other,
        }
    }

    /// Writes the last state, and takes the socket away: nobody answers there any more.
    pub(crate) fn end(&self, state: &State) -> Result<(), HomeError> {
        let _ = std::fs::remove_file(self.0.join("ctl.sock"));
        self.write_state(state, true)
    }

    /// Whether its supervisor lives, or might.
    pub(crate) fn is_alive(&self) -> bool {
        is_locked(&self.0.join("lock"))
    }

    /// Removes the directory. It is no run from the first step on.
    pub(crate) fn remove(&self) -> Result<(), HomeError> {
        match set_aside(&self.0).map_err(at(&self.0))? {
            Some(gone) => remove_all(&gone).map_err(at(&gone)),
            None => Ok(()),
        }
    }

    /// Listens on the run's socket.
    pub(crate) fn listen(&self) -> Result<UnixListener, HomeError> {
        let (_directory, short) = self.short_socket_path()?;
        // One that a supervisor left which was killed.
        let _ = std::fs::remove_file(&short);
        UnixListener::bind(&short).map_err(at(&self.0.join("ctl.sock")))
    }

    /// Connects to the run's supervisor.
    pub(crate) fn dial(&self) -> Result<UnixStream, HomeError> {
        let (_directory, short) = self.short_socket_path()?;
        UnixStream::connect(&short).map_err(at(&self.0.join("ctl.sock")))
    }

    /// A path of the socket that does not depend on how long the directory's is: an address holds 107
    /// bytes. It is valid while the file lives.
    fn short_socket_path(&self) -> Result<(File, PathBuf), HomeError> {
        let directory = File::open(&self.0).map_err(at(&self.0))?;
        let short = PathBuf::from(format!("/proc/self/fd/{}/ctl.sock", directory.as_raw_fd()));
        Ok((directory, short))
    }
}

/// Which of `runs` (id and name) is meant: a whole id, then a name, then a beginning of one id alone.
fn choose(given: &str, runs: &[(&str, Option<&str>)]) -> Result<usize, StoreError> {
    let exact = runs.iter().position(|(id, _)| *id == given);
    if let Some(index) = exact.or_else(|| runs.iter().position(|(_, name)| *name == Some(given))) {
        return Ok(index);
    }
    let begins = |id: &str| !given.is_empty() && id.starts_with(given);
    let found: Vec<usize> = runs.iter().enumerate().filter(|(_, (id, _))| begins(id)).map(|(index, _)| index).collect();
    match found.as_slice() {
        [] => Err(StoreError::Unknown(given.to_owned())),
        [index] => Ok(*index),
        many => {
            let ids = many.iter().filter_map(|index| runs.get(*index)).map(|(id, _)| (*id).to_owned()).collect();
            Err(StoreError::Ambiguous { given: given.to_owned(), ids })
        }
    }
}

/// A random id.
pub(crate) fn fresh_id() -> io::Result<String> {
    let mut bytes = [0; 4];
    let n = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    if n != bytes.len() {
        return Err(io::Error::other("getrandom gave too few bytes"));
    }
    Ok(format!("{:08x}", u32::from_le_bytes(bytes)))
}

/// Whether a name is an id.
fn is_id(name: &str) -> bool {
    name.len() == 8 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Whether someone holds a run's lock. Tried with a shared lock, so that two who look at once do not see
/// each other. A lock that cannot be looked at may be held: only one that is not there is held by nobody.
fn is_locked(path: &Path) -> bool {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) => return error.kind() != io::ErrorKind::NotFound,
    };
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_err()
}

/// Writes down how a process is confined.
pub(crate) fn write_jail(directory: &Path, which: &str, jailed: &Jailed) -> Result<(), HomeError> {
    write_json(directory, which, jailed, false)
}

/// Writes a JSON file whole or not at all.
fn write_json(directory: &Path, name: &str, value: &impl Serialize, durable: bool) -> Result<(), HomeError> {
    let path = directory.join(name);
    let temporary = directory.join(format!("{name}.tmp"));
    write_file(OpenOptions::new().write(true).create(true).mode(0o600), &temporary, value, durable)?;
    std::fs::rename(&temporary, &path).map_err(at(&path))?;
    if durable { sync_directory(directory) } else { Ok(()) }
}

/// Writes JSON over a file.
fn write_file(open: &OpenOptions, path: &Path, value: &impl Serialize, durable: bool) -> Result<(), HomeError> {
    let mut bytes =
        serde_json::to_vec_pretty(value).map_err(|error| HomeError::Json { path: path.to_owned(), error })?;
    bytes.push(b'\n');
    let mut file = open.open(path).map_err(at(path))?;
    // Cut afterwards: what it has already need not be found anew.
    file.write_all(&bytes).map_err(at(path))?;
    file.set_len(u64::try_from(bytes.len()).unwrap_or(u64::MAX)).map_err(at(path))?;
    if durable {
        file.sync_all().map_err(at(path))?;
    }
    Ok(())
}

pub(crate) fn sync_directory(path: &Path) -> Result<(), HomeError> {
    let directory = File::open(path).map_err(at(path))?;
    rustix::fs::fsync(directory.as_fd()).map_err(|error| at(path)(error.into()))
}

/// Gives a directory a name that means nothing; none if it is gone already.
fn set_aside(path: &Path) -> io::Result<Option<PathBuf>> {
    // A name of its own: what is left of an earlier one of the same id may still be there.
    let gone = path.with_file_name(format!("{GONE}{}{}", fresh_id()?, fresh_id()?));
    match std::fs::rename(path, &gone) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(|()| Some(gone)),
    }
}

/// Removes a directory that someone else may be removing too.
fn remove_all(path: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use snapshot::store::ChainLayer;

    fn chain() -> Chain {
        Chain { layers: vec![ChainLayer::Own("1".into())] }
    }
    use crate::spec::test::spec as any;

    fn spec(name: Option<&str>, ephemeral: bool) -> Spec {
        Spec { name: name.map(str::to_owned), ephemeral, ..any() }
    }

    fn store() -> (tempfile::TempDir, Store) {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&Home::at(directory.path().to_owned())).unwrap();
        (directory, store)
    }

    #[test]
    fn a_run_is_alive_while_its_lock_is_held() {
        let (_directory, store) = store();
        let mut wanted = spec(Some("mine"), false);
        let (_, lock) = store.create(&mut wanted, &chain(), 0).unwrap();
        assert_eq!(store.find("mine").unwrap().state.state, Phase::Starting);
        assert_eq!(store.find("mine").unwrap().spec, wanted);
        drop(lock);
        let dead = store.find(&wanted.id).unwrap();
        assert_eq!(dead.state.state, Phase::Failed);
        assert!(dead.state.reason.unwrap().contains("killed"));
    }

    #[test]
    fn the_sweep_takes_dead_ephemeral_runs_and_nothing_else() {
        let (directory, store) = store();
        let (kept, lock) = store.create(&mut spec(None, false), &chain(), 0).unwrap();
        drop(lock);
        let (alive, _lock) = store.create(&mut spec(None, true), &chain(), 0).unwrap();
        let (dead, lock) = store.create(&mut spec(None, true), &chain(), 0).unwrap();
        drop(lock);
        std::fs::create_dir_all(directory.path().join("runs/.tmp-12345678/disk")).unwrap();
        store.sweep().unwrap();
        assert!(kept.path().exists() && alive.path().exists() && !dead.path().exists());
        let names: Vec<_> = std::fs::read_dir(directory.path().join("runs")).unwrap().collect();
        assert_eq!(names.len(), 3, "the lock and two runs: {names:?}");
        store.sweep().unwrap();
        assert_eq!(store.all().unwrap().len(), 2);
    }

    #[test]
    fn a_run_whose_lock_cannot_be_looked_at_is_left_alone() {
        let (_directory, store) = store();
        let (run, _lock) = store.create(&mut spec(None, true), &chain(), 0).unwrap();
        // As if descriptors had run out: an error that says nothing of the lock.
        let lock = run.path().join("lock");
        std::fs::remove_file(&lock).unwrap();
        std::os::unix::fs::symlink("lock", &lock).unwrap();
        store.sweep().unwrap();
        assert!(run.path().exists());
        std::fs::remove_file(&lock).unwrap();
        store.sweep().unwrap();
        assert!(!run.path().exists());
    }

    #[test]
    fn a_name_belongs_to_one_run() {
        let (_directory, store) = store();
        let (run, _lock) = store.create(&mut spec(Some("a"), false), &chain(), 0).unwrap();
        let error = store.create(&mut spec(Some("a"), false), &chain(), 0).unwrap_err();
        assert!(matches!(error, StoreError::NameTaken { .. }), "{error}");
        run.remove().unwrap();
        run.remove().unwrap();
        store.create(&mut spec(Some("a"), false), &chain(), 0).unwrap();
    }

    #[test]
    fn a_beginning_is_enough_when_it_is_unique() {
        let runs = [("8fc20000", None), ("8fd00000", Some("dead")), ("dead0000", None)];
        assert_eq!(choose("8fc", &runs).unwrap(), 0);
        assert_eq!(choose("dead", &runs).unwrap(), 1, "a name comes before a beginning");
        assert_eq!(choose("dead0", &runs).unwrap(), 2);
        assert!(matches!(choose("8f", &runs), Err(StoreError::Ambiguous { ids, .. }) if ids.len() == 2));
        assert!(matches!(choose("", &runs), Err(StoreError::Unknown(_))));
        assert!(matches!(choose("x", &runs), Err(StoreError::Unknown(_))));
    }

    #[test]
    fn a_policy_that_cannot_be_read_is_not_taken_for_none() {
        let (_directory, store) = store();
        let (run, _lock) = store.create(&mut spec(None, false), &chain(), 0).unwrap();
        assert_eq!(run.policy().unwrap(), None);
        let set = SetPolicy { generation: 2, policy: netfilter_control::Policy::default() };
        run.write_policy(&set, false).unwrap();
        assert_eq!(run.policy().unwrap(), Some(set));
        std::fs::write(run.path().join(POLICY), "{").unwrap();
        let error = run.policy().unwrap_err().to_string();
        assert!(error.contains("policy.json"), "{error}");
    }

    #[test]
    fn a_long_directory_does_not_break_the_socket() {
        let directory = tempfile::tempdir().unwrap();
        let long = directory.path().join("x".repeat(120)).join("y".repeat(120));
        std::fs::create_dir_all(&long).unwrap();
        let run = RunDirectory::at(long);
        let listener = run.listen().unwrap();
        let client = run.dial().unwrap();
        let (_server, _) = listener.accept().unwrap();
        drop(client);
    }

    #[test]
    fn runs_that_lie_elsewhere_belong_to_their_state_directory() {
        let (home, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::os::unix::fs::symlink(elsewhere.path(), home.path().join("runs")).unwrap();
        let store = Store::open(&Home::at(home.path().to_owned())).unwrap();
        let (run, _lock) = store.create(&mut spec(None, false), &chain(), 0).unwrap();
        let run = run.resolved().unwrap();
        assert_eq!(run.home(), home.path().canonicalize().unwrap());
        assert!(run.path().starts_with(elsewhere.path().canonicalize().unwrap()));
    }

    #[test]
    fn a_state_is_written_whole() {
        let (_directory, store) = store();
        let (run, _lock) = store.create(&mut spec(None, false), &chain(), 0).unwrap();
        let state = State { state: Phase::Stopped, reason: Some("exited".into()), exit_code: Some(3), ..State::new(0) };
        run.write_state(&state, true).unwrap();
        assert_eq!(store.all().unwrap().pop().unwrap().state, state);
        assert!(!run.path().join("state.json.tmp").exists());
        // What is cut short is no run; it is not taken for one, nor removed.
        std::fs::write(run.path().join("state.json"), "{").unwrap();
        assert!(store.all().unwrap().is_empty());
        store.sweep().unwrap();
        assert!(run.path().exists());
    }
}
