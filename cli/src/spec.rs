//! What a run is (its spec, frozen at creation) and how it is (its state).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use netfilter_control::Policy;
use serde::{Deserialize, Serialize};

/// Everything that was asked for, resolved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Spec {
    /// The format's version: 1.
    pub(crate) version: u32,
    /// Eight hexadecimal digits.
    pub(crate) id: String,
    /// The user's name for it.
    pub(crate) name: Option<String>,
    /// When it was created, in RFC 3339.
    pub(crate) created: String,
    /// What the user wrote on it.
    pub(crate) labels: BTreeMap<String, String>,
    /// Whether its directory goes when it ends.
    pub(crate) ephemeral: bool,
    /// The snapshot that it begins with, if it does.
    #[serde(default)]
    pub(crate) from: Option<String>,
    /// Whether the command is one that does not run there yet.
    #[serde(default)]
    pub(crate) another_command: bool,
    /// The machine.
    pub(crate) machine: Machine,
    /// The network.
    pub(crate) network: Network,
    /// Ports of the guest that are offered here.
    pub(crate) ports: Vec<Port>,
    /// The command.
    pub(crate) process: Process,
    /// Milliseconds that the guest has to boot.
    pub(crate) start_timeout_ms: u64,
    /// Milliseconds that the command may run.
    pub(crate) timeout_ms: Option<u64>,
    /// Milliseconds between two snapshots that are taken unasked.
    #[serde(default)]
    pub(crate) snapshot_every_ms: Option<u64>,
    /// What is copied in before the command starts.
    pub(crate) inputs: Vec<Input>,
    /// What is copied out when the run ends.
    pub(crate) artifacts: Option<Artifacts>,
}

impl Spec {
    /// What the workload finds as its host name.
    pub(crate) fn hostname(&self) -> &str {
        self.name.as_deref().unwrap_or(&self.id)
    }

    /// Takes an id, once, and what is named after it.
    pub(crate) fn take_id(&mut self, id: String) {
        if let Some(artifacts) = self.artifacts.as_mut().filter(|artifacts| artifacts.own) {
            artifacts.directory.push(format!("artifacts-{id}"));
        }
        self.id = id;
    }
}

/// A file or directory that is copied in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Input {
    /// On the host.
    pub(crate) source: PathBuf,
    /// In the guest, as it was written.
    pub(crate) destination: String,
}

/// What is copied out, however the run ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Artifacts {
    /// Absolute patterns of paths in the guest.
    pub(crate) patterns: Vec<String>,
    /// The directory on the host.
    pub(crate) directory: PathBuf,
    /// Whether it is the run's own: `artifacts-ID`, made for it, and removed if it stays empty.
    pub(crate) own: bool,
    /// Most bytes, all together.
    pub(crate) limit: u64,
}

/// The machine of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Machine {
    /// The image's name.
    pub(crate) image: String,
    /// Its raw file.
    pub(crate) image_file: PathBuf,
    /// The kernel's name.
    pub(crate) kernel: String,
    /// Its ELF file.
    pub(crate) kernel_file: PathBuf,
    /// The initramfs archives, in order.
    pub(crate) initrds: Vec<PathBuf>,
    /// The file system of all the kernel's modules, if the guest gets it.
    #[serde(default)]
    pub(crate) modules: Option<PathBuf>,
    /// The VMM's program file.
    pub(crate) vmm: PathBuf,
    /// How the run's processes are confined.
    pub(crate) jail: Jail,
    /// Number of vCPUs.
    pub(crate) cpus: u8,
    /// Guest memory in bytes.
    pub(crate) memory: u64,
    /// Disk size in bytes.
    pub(crate) disk: u64,
    /// Number of disk layers above the image.
    pub(crate) disk_layers: u8,
    /// Whether the serial console is recorded.
    pub(crate) console: bool,
    /// More words for the kernel's command line.
    pub(crate) cmdline_extra: String,
}

/// The network of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Network {
    /// The network filter's program file.
    pub(crate) netfilter: PathBuf,
    /// What may be reached.
    pub(crate) policy: Policy,
}

/// A port of the guest that is offered on the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Port {
    /// The host's address.
    pub(crate) address: IpAddr,
    /// The host's port.
    pub(crate) host: u16,
    /// The guest's.
    pub(crate) guest: u16,
}

/// A policy that was set while a run lived, as `policy.json` in its directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SetPolicy {
    /// Its number. The spec's is 1.
    pub(crate) generation: u64,
    /// What may be reached.
    pub(crate) policy: Policy,
}

/// How a run's processes are confined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Jail {
    /// The jailer's program file.
    pub(crate) jailer: PathBuf,
    /// For root: the users of which each process becomes one.
    pub(crate) users: String,
    /// Whether there must be a cgroup.
    pub(crate) require_cgroup: bool,
    /// CPU time that the VMM may use, and the network filter as well, in thousandths of a CPU, if that is less than its vCPUs could.
    pub(crate) cpu: Option<u64>,
    /// Limits of the disk's traffic, as `io.max` has them.
    pub(crate) io_max: Option<String>,
    /// Parts that may be missing.
    pub(crate) allow_unenforced: Vec<String>,
}

/// What came of it: the jail of a running process, as `jail.json` (the VMM's) and `jail-net.json` in the run's directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Jailed {
    /// The process's id on the host.
    pub(crate) pid: i32,
    /// When it started, as the kernel counts: another process may get the id later.
    pub(crate) started: u64,
    /// Its cgroup's directory, if it has one.
    pub(crate) cgroup: Option<PathBuf>,
    /// Parts of the jail that this host cannot give, each with the reason.
    pub(crate) unenforced: Vec<(String, String)>,
}

/// The command of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Process {
    /// Command and arguments.
    pub(crate) command: Vec<String>,
    /// The whole environment, but for what the agent adds.
    pub(crate) env: Vec<String>,
    /// Working directory.
    pub(crate) workdir: Option<String>,
    /// User.
    pub(crate) user: Option<String>,
    /// Whether standard input is passed on.
    pub(crate) stdin: bool,
    /// Whether it has a terminal.
    pub(crate) tty: bool,
    /// The terminal's type.
    pub(crate) term: String,
}

/// How a run is, as last written. Whether that still holds is what the lock says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct State {
    /// The state.
    pub(crate) state: Phase,
    /// Why, where there is more to say.
    pub(crate) reason: Option<String>,
    /// The command's exit status, once it has one.
    pub(crate) exit_code: Option<u8>,
    /// When the command started, in RFC 3339.
    pub(crate) started: Option<String>,
    /// When the run ended.
    pub(crate) ended: Option<String>,
    /// The number of the machine's epoch: 1 from its first boot on, one more each time that it goes on.
    #[serde(default)]
    pub(crate) epoch: u64,
    /// The snapshot that a paused machine goes on from, if it was saved.
    #[serde(default)]
    pub(crate) saved: Option<String>,
    /// Milliseconds that its command may run on then, if it has a timeout.
    #[serde(default)]
    pub(crate) left_ms: Option<u64>,
}

impl State {
    /// A run that is only just created, and goes on after an epoch of this number; 0 if it goes on after none.
    pub(crate) fn new(epoch: u64) -> Self {
        let (reason, exit_code, started, ended, saved, left_ms) = (None, None, None, None, None, None);
        Self { state: Phase::Starting, reason, exit_code, started, ended, epoch, saved, left_ms }
    }

    /// Whether a supervisor must be there.
    pub(crate) fn is_live(&self) -> bool {
        match self.state {
            Phase::Starting | Phase::Running => true,
            Phase::Paused => self.saved.is_none(),
            Phase::Stopped | Phase::Failed => false,
        }
    }
}

/// The states of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Phase {
    /// Created; the guest boots.
    Starting,
    /// The command runs.
    Running,
    /// It stands still, and goes on when it is resumed.
    Paused,
    /// It ended as a run should.
    Stopped,
    /// It ended by a fault.
    Failed,
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
        })
    }
}

#[cfg(test)]
pub(crate) mod test {
    use super::*;

    /// A spec of no particular kind.
    pub(crate) fn spec() -> Spec {
        Spec {
            version: 1,
            id: String::new(),
            name: None,
            created: "2026-11-30T15:35:09.007Z".into(),
            labels: BTreeMap::new(),
            ephemeral: true,
            from: None,
            another_command: false,
            machine: Machine {
                image: "busybox".into(),
                image_file: "/i".into(),
                kernel: "k".into(),
                kernel_file: "/k".into(),
                initrds: vec!["/m".into()],
                modules: None,
                vmm: "/v".into(),
                jail: Jail {
                    jailer: "/j".into(),
                    users: "1-2".into(),
                    require_cgroup: false,
                    cpu: None,
                    io_max: None,
                    allow_unenforced: vec![],
                },
                cpus: 1,
                memory: 1 << 30,
                disk: 1 << 28,
                disk_layers: 1,
                console: false,
                cmdline_extra: String::new(),
            },
            network: Network { netfilter: "/n".into(), policy: Policy::default() },
            ports: vec![],
            process: Process {
                command: vec!["true".into()],
                env: vec![],
                workdir: None,
                user: None,
                stdin: false,
                tty: false,
                term: "xterm".into(),
            },
            start_timeout_ms: 60_000,
            timeout_ms: None,
            snapshot_every_ms: None,
            inputs: vec![],
            artifacts: None,
        }
    }
}
