//! A machine with its agent, without supervisor: for streams, exits and disks.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use guest::host::{Agent, Dial, Welcome};
use guest::message::{ExecSpec, ExitRecord};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use snapshot::disk::create_layer;
use vmm_control::{Config, Disk, Net, Stats};

use crate::host::{self, open};
use crate::vmm::Vmm;

/// A booted machine with a writable disk over the busybox image.
#[derive(Debug)]
pub(crate) struct Guest {
    /// The VMM.
    pub(crate) vmm: Arc<Vmm>,
    /// Its agent.
    pub(crate) agent: Agent,
    /// The host's ends of all connections that were ever made, so that a test can cut them.
    pub(crate) connections: Arc<Mutex<Vec<UnixStream>>>,
    /// Where the layers are: `data` and `map`, then with a number.
    pub(crate) files: tempfile::TempDir,
    recipe: Recipe,
    dialer: Arc<Dialer>,
    /// Of its network.
    _other_end: OwnedFd,
}

/// What a save left in the directory of its machine: `state-N`, `memory-N`, and the layers up to N - 1. Layer N is the one that the
/// machine went on in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Snapshot {
    /// Its number, from 1.
    pub(crate) number: usize,
    /// What the VMM said of it.
    pub(crate) saved: vmm_control::Saved,
}

/// What a guest is made of.
#[derive(Debug, Clone)]
pub(crate) struct Recipe {
    /// Number of vCPUs.
    pub(crate) vcpus: u8,
    /// Memory in bytes.
    pub(crate) memory: u64,
    /// Size of the disk.
    pub(crate) disk: u64,
    /// Disk queues.
    pub(crate) queues: u8,
    /// Raw images that it sees as read-only disks, from `vdb` on.
    pub(crate) more: Vec<PathBuf>,
}

impl Default for Recipe {
    fn default() -> Self {
        Self { vcpus: 1, memory: 256 << 20, disk: 1 << 30, queues: 1, more: Vec::new() }
    }
}

#[derive(Debug)]
struct Dialer {
    /// The VMM that the machine is in now.
    vmm: Mutex<Arc<Vmm>>,
    connections: Arc<Mutex<Vec<UnixStream>>>,
}

impl Dial for Dialer {
    fn dial(&self, port: u32) -> io::Result<UnixStream> {
        let vmm = self.vmm.lock().unwrap().clone();
        let stream = vmm.connect(port).map_err(|error| io::Error::new(io::ErrorKind::ConnectionAborted, error))?;
        self.connections.lock().unwrap().push(stream.try_clone()?);
        Ok(stream)
    }
}

impl Guest {
    /// Boots one with an empty live layer.
    pub(crate) fn start(recipe: &Recipe) -> Self {
        let files = host::directory();
        let file = |name| new_file(&files.path().join(name));
        create_layer(&file("data"), &file("map"), recipe.disk).unwrap();
        Self::over(recipe, files)
    }

    /// Boots one with the live layer that is in `files`.
    pub(crate) fn over(recipe: &Recipe, files: tempfile::TempDir) -> Self {
        let kernel = host::newest_kernel();
        let boot = [kernel.join("vmlinux"), kernel.join("modules.cpio"), host::program("lib/bulkhead/agent.cpio")];
        let mut parts: Vec<File> = boot.iter().map(|path| open(path)).collect();
        let (rest, other_end) = machine_parts(recipe, files.path(), 1);
        parts.extend(rest);
        let vmm = Arc::new(Vmm::start(machine_config(recipe, 1), &parts.iter().collect::<Vec<_>>()).unwrap());
        let connections = Arc::default();
        let dialer = Arc::new(Dialer { vmm: Mutex::new(vmm.clone()), connections: Arc::clone(&connections) });
        let welcome = Welcome { epoch: 1, renew_identity: false, entropy: vec![7; 32], hostname: "test".into() };
        let agent = Agent::connect(dialer.clone(), &welcome, Instant::now() + Duration::from_secs(120)).unwrap();
        Self { vmm, agent, connections, files, recipe: recipe.clone(), dialer, _other_end: other_end }
    }

    /// Has the machine stand still and writes it out, as snapshot `number` of it. It goes on in layer `number`, once it is told to.
    pub(crate) fn save(&self, number: usize) -> Snapshot {
        self.vmm.pause().unwrap();
        let parts = self.save_parts(number);
        let saved = self.vmm.save(&parts.iter().collect::<Vec<_>>()).unwrap();
        Snapshot { number, saved }
    }

    /// New files for a save.
    pub(crate) fn save_parts(&self, number: usize) -> Vec<File> {
        let file = |name: &str| new_file(&self.files.path().join(format!("{name}-{number}")));
        let parts = ["state", "memory", "data", "map"].map(file);
        create_layer(&parts[2], &parts[3], self.recipe.disk).unwrap();
        parts.into()
    }

    /// The request and the files to go on from a snapshot, in the layer that came with it. The last is the other end of the
    /// machine's network.
    pub(crate) fn restore_parts(&self, number: usize) -> (Config, Vec<File>, OwnedFd) {
        let path = |name: &str| self.files.path().join(format!("{name}-{number}"));
        let mut parts = vec![open(&path("state")), open(&path("memory"))];
        let (rest, other_end) = machine_parts(&self.recipe, self.files.path(), number + 1);
        parts.extend(rest);
        (machine_config(&self.recipe, number + 1), parts, other_end)
    }

    /// Goes on from a snapshot in a new VMM, in the layer that came with it; the agent's handle is of that machine from now on.
    /// The VMM before is killed, unless it is returned.
    pub(crate) fn restore(&mut self, snapshot: Snapshot) -> Arc<Vmm> {
        let (config, parts, other_end) = self.restore_parts(snapshot.number);
        let vmm = Arc::new(Vmm::restore(config, &parts.iter().collect::<Vec<_>>()).unwrap());
        assert_eq!(vmm.event().unwrap(), vmm_control::Event::Running);
        *self.dialer.vmm.lock().unwrap() = vmm.clone();
        let before = std::mem::replace(&mut self.vmm, vmm);
        self.cut_connections();
        self._other_end = other_end;
        before
    }

    /// Ends all connections at the host's side.
    pub(crate) fn cut_connections(&self) {
        for connection in self.connections.lock().unwrap().drain(..) {
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Runs a shell script to its end: its standard output. It must succeed.
    pub(crate) fn shell(&self, id: &str, script: &str) -> String {
        let (record, output) = self.command(ExecSpec::command(id, vec!["sh".into(), "-c".into(), script.into()]));
        assert_eq!(record, ExitRecord::Exited { code: 0 }, "{script}: {output}");
        output
    }

    /// Runs something to its end: how it ended, and its standard output and error.
    pub(crate) fn command(&self, spec: ExecSpec) -> (ExitRecord, String) {
        let exec = self.agent.exec(spec).unwrap_or_else(|error| panic!("{error}; {:?}", self.vmm.stopped()));
        let (mut output, mut error) = (Vec::new(), Vec::new());
        std::thread::scope(|scope| {
            scope.spawn(|| exec.copy_stderr(&mut error).unwrap());
            if let Err(error) = exec.copy_stdout(&mut output) {
                panic!("{error}; {:?}", self.vmm.stopped());
            }
        });
        output.extend(error);
        (exec.wait().unwrap(), String::from_utf8_lossy(&output).into_owned())
    }

    /// Puts the test's payload into the guest as `/tmp/payload`.
    pub(crate) fn put_payload(&self) {
        let mut archive = tar_of(&host::program("test/payload"), "payload");
        let exec = self.agent.exec(ExecSpec::tar_extract("put-payload", "/tmp")).unwrap();
        exec.copy_stdin(&mut archive.as_slice()).unwrap();
        assert_eq!(exec.wait().unwrap(), ExitRecord::Exited { code: 0 });
        archive.clear();
    }

    /// The VMM's counters.
    pub(crate) fn stats(&self) -> Stats {
        self.vmm.stats().unwrap()
    }

    /// Powers off in good order and returns the layer's files.
    pub(crate) fn power_off(self) -> tempfile::TempDir {
        self.agent.poweroff(Duration::from_secs(1)).unwrap();
        let (reason, _) = self.vmm.stopped().unwrap();
        assert_eq!(reason, vmm_control::StopReason::PowerOff);
        self.files
    }
}

fn new_file(path: &Path) -> File {
    File::options().read(true).write(true).create(true).truncate(true).open(path).unwrap()
}

/// A machine whose disk has so many layers over its image.
fn machine_config(recipe: &Recipe, layers: usize) -> Config {
    let layers = u8::try_from(layers + 1).unwrap();
    let disk = Disk { serial: "root".into(), read_only: false, raw_base: true, layers, queues: recipe.queues };
    let more = recipe.more.iter().enumerate().map(|(n, _)| Disk {
        serial: format!("more{n}"),
        read_only: true,
        raw_base: true,
        layers: 1,
        queues: 1,
    });
    let disks = std::iter::once(disk).chain(more).collect();
    let net = Some(Net { mac: [2, 0, 0, 0, 0, 2] });
    Config { disks, net, ..host::config(recipe.vcpus, recipe.memory, 2) }
}

/// The disks and the network of a machine: an interface as every run has one, at the other end of which nobody says anything.
fn machine_parts(recipe: &Recipe, files: &Path, layers: usize) -> (Vec<File>, OwnedFd) {
    let mut parts = vec![open(&host::image("busybox"))];
    for layer in 0..layers {
        for name in ["data", "map"] {
            let name = if layer == 0 { name.to_owned() } else { format!("{name}-{layer}") };
            parts.push(File::options().read(true).write(true).open(files.join(name)).unwrap());
        }
    }
    parts.extend(recipe.more.iter().map(|path| open(path)));
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (frames, other_end) = pair.unwrap();
    parts.push(frames.into());
    (parts, other_end)
}

/// A tar archive of one executable file.
fn tar_of(path: &Path, name: &str) -> Vec<u8> {
    let content = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut header = [0u8; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..108].copy_from_slice(b"0000755\0");
    header[108..116].copy_from_slice(b"0000000\0");
    header[116..124].copy_from_slice(b"0000000\0");
    header[124..136].copy_from_slice(format!("{:011o}\0", content.len()).as_bytes());
    header[136..148].copy_from_slice(b"00000000000\0");
    header[148..156].fill(b' ');
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut archive = header.to_vec();
    archive.extend(&content);
    archive.resize(archive.len().next_multiple_of(512) + 1024, 0);
    archive
}
