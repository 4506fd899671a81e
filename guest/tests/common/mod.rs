//! The real agent, run natively: its own binary on a Unix socket, a directory with busybox as the workload's root.
//! Needs root (namespaces and mounts) and busybox-static.

#![allow(
    dead_code,
    missing_docs,
    missing_debug_implementations,
    clippy::needless_pass_by_value,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    unreachable_pub
)]

use guest::{
    host::{Agent, AgentError, Dial, Welcome},
    message::{ExecSpec, ExitRecord},
};
use std::{
    fs, io,
    io::{Read, Write},
    net::Shutdown,
    os::unix::{fs::symlink, net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

pub struct Machine {
    pub child: Child,
    pub dial: Arc<Line>,
    pub root: PathBuf,
    _directory: tempfile::TempDir,
    cgroup: Option<PathBuf>,
}

impl Machine {
    pub fn start() -> Machine {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("root");
        make_root(&root);
        let socket = directory.path().join("agent.sock");
        let cgroup = make_cgroup(directory.path());
        let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead-guest"));
        command.arg("--serve").arg(&socket).arg(&root);
        if let Some(cgroup) = &cgroup {
            command.arg(cgroup);
        }
        let child = command.spawn().expect("start the agent");
        let dial = Arc::new(Line::to(socket));
        Machine { child, dial, root, _directory: directory, cgroup }
    }

    pub fn agent(&self) -> Agent {
        self.agent_of(&self.dial)
    }

    /// Another way to the agent, which can go by itself.
    pub fn line(&self) -> Arc<Line> {
        Arc::new(Line::to(self.dial.socket.clone()))
    }

    pub fn agent_of(&self, line: &Arc<Line>) -> Agent {
        let dial: Arc<dyn Dial> = Arc::clone(line) as _;
        let welcome = Welcome { epoch: 1, renew_identity: false, entropy: vec![7; 32], hostname: "box".into() };
        Agent::connect(dial, &welcome, Instant::now() + Duration::from_secs(20)).expect("connect to the agent")
    }

    /// From now on connections are cut after a random number of bytes around this.
    pub fn cut_every(&self, bytes: u64) {
        self.dial.cut.store(bytes, Ordering::Relaxed);
    }

    pub fn cuts(&self) -> u64 {
        self.dial.cuts.load(Ordering::Relaxed)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.dial.gone.store(true, Ordering::Relaxed);
        let _ = self.child.kill();
        let _ = self.child.wait();
        let Some(cgroup) = &self.cgroup else { return };
        let _ = fs::write(cgroup.join("cgroup.kill"), "1");
        for _ in 0..100 {
            remove_cgroups(cgroup);
            if !cgroup.exists() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn remove_cgroups(at: &Path) {
    for entry in fs::read_dir(at).into_iter().flatten().flatten().filter(|e| e.path().is_dir()) {
        remove_cgroups(&entry.path());
    }
    let _ = fs::remove_dir(at);
}

fn make_root(root: &Path) {
    let busybox = Path::new("/bin/busybox");
    assert!(busybox.exists(), "these tests need /bin/busybox: apt-get install busybox-static");
    for directory in ["bin", "etc", "tmp", "root"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    fs::copy(busybox, root.join("bin/busybox")).unwrap();
    let applets = Command::new(busybox).arg("--list").output().unwrap();
    for applet in String::from_utf8(applets.stdout).unwrap().lines().filter(|name| *name != "busybox") {
        symlink("busybox", root.join("bin").join(applet)).unwrap();
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n").unwrap();
    fs::write(root.join("etc/group"), "root:x:0:\napp:x:1000:\nwheel:x:10:app\n").unwrap();
}

/// A cgroup of our own below wherever this machine has cgroup2.
fn make_cgroup(unique: &Path) -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"))?;
    let at = Path::new(line.split(' ').nth(1)?);
    let path = at.join(format!("bulkhead-test{}", unique.file_name()?.to_string_lossy()));
    fs::create_dir(&path).ok()?;
    Some(path)
}

/// Connections to the agent, through a relay that can cut them.
pub struct Line {
    socket: PathBuf,
    pub gone: AtomicBool,
    cut: AtomicU64,
    cuts: AtomicU64,
}

impl Line {
    fn to(socket: PathBuf) -> Self {
        Self { socket, gone: AtomicBool::new(false), cut: AtomicU64::new(0), cuts: AtomicU64::new(0) }
    }
}

impl Dial for Line {
    fn dial(&self, _port: u32) -> io::Result<UnixStream> {
        if self.gone.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let there = UnixStream::connect(&self.socket)?;
        let every = self.cut.load(Ordering::Relaxed);
        if every == 0 {
            return Ok(there);
        }
        self.cuts.fetch_add(1, Ordering::Relaxed);
        let (ours, here) = UnixStream::pair()?;
        for (from, to) in [(&here, &there), (&there, &here)] {
            let (from, to) = (from.try_clone()?, to.try_clone()?);
            let budget = random() % (2 * every);
            thread::spawn(move || relay(from, to, budget));
        }
        Ok(ours)
    }
}

/// Carries bytes until the budget is used up; then both directions break, with what is on its way.
fn relay(mut from: UnixStream, mut to: UnixStream, mut budget: u64) {
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let pass = usize::try_from(budget).unwrap().min(count);
        budget -= pass as u64;
        if to.write_all(&buffer[..pass]).is_err() || budget == 0 {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

pub fn random() -> u64 {
    let mut bytes = [0; 8];
    fs::File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

/// Bytes that do not repeat soon.
pub fn noise(count: usize) -> Vec<u8> {
    let mut state = random() | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes: Vec<u8> = std::iter::repeat_with(|| next().to_le_bytes()).take(count / 8 + 1).flatten().collect();
    bytes.truncate(count);
    bytes
}

pub fn sh(id: &str, script: &str) -> ExecSpec {
    ExecSpec::command(id, vec!["sh".into(), "-c".into(), script.into()])
}

#[derive(Debug)]
pub struct Ran {
    pub stdout: Vec<u8>,
    pub stderr: String,
    pub record: ExitRecord,
    pub accepted: u64,
}

impl Ran {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }
}

/// Runs something to its end, with this as its input.
pub fn run(agent: &Agent, spec: ExecSpec, stdin: &[u8]) -> Ran {
    run_into(agent, spec, stdin, |out| out).unwrap()
}

/// The same through a writer of the caller's.
pub fn run_into<W: Write + Send + Into<Vec<u8>>>(
    agent: &Agent,
    spec: ExecSpec,
    stdin: &[u8],
    wrap: impl FnOnce(Vec<u8>) -> W + Send,
) -> Result<Ran, AgentError> {
    let with_stdin = spec.stdin;
    let exec = agent.exec(spec)?;
    thread::scope(|scope| {
        let output = scope.spawn(|| {
            let mut out = wrap(Vec::new());
            exec.copy_stdout(&mut out).map(|count| (count, out.into()))
        });
        let errors = scope.spawn(|| {
            let mut err = Vec::new();
            exec.copy_stderr(&mut err).map(|_| err)
        });
        let mut stdin = stdin;
        let accepted = if with_stdin { exec.copy_stdin(&mut stdin)? } else { 0 };
        let record = exec.wait()?;
        let (count, stdout) = output.join().unwrap()?;
        assert_eq!(count, stdout.len() as u64);
        let stderr = String::from_utf8_lossy(&errors.join().unwrap()?).into_owned();
        Ok(Ran { stdout, stderr, record, accepted })
    })
}

/// A reader that dawdles.
pub struct Slow(pub Vec<u8>, pub Duration);

impl Write for Slow {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        thread::sleep(self.1);
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl From<Slow> for Vec<u8> {
    fn from(slow: Slow) -> Vec<u8> {
        slow.0
    }
}
