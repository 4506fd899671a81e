//! Where a cgroup can be made.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, CWD, Mode, OFlags, ResolveFlags, access, openat2};
use rustix::io::Errno;

/// Where cgroups are mounted.
const MOUNT: &str = "/sys/fs/cgroup";
/// `CGROUP2_SUPER_MAGIC`
const CGROUP2: u64 = 0x6367_7270;
/// Root's cgroups lie in one of this name.
const OWN: &str = "bulkhead";
/// Where a supervisor goes that was alone in the cgroup that it has to divide.
const LEAF: &str = "supervisor";

/// What counts and bounds a kind of resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Controller {
    /// Memory.
    Memory,
    /// Processes and threads.
    Pids,
    /// CPU time.
    Cpu,
    /// Disk bandwidth.
    Io,
}

impl Controller {
    /// As the kernel calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Cpu => "cpu",
            Self::Io => "io",
        }
    }
}

/// Why there is no place for a cgroup, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    /// The old interface.
    #[error(
        "cgroup: this host has cgroups {0} at {MOUNT}, and limits need v2; boot it with \
         systemd.unified_cgroup_hierarchy=1 on the kernel's command line"
    )]
    Version(&'static str),
    /// Nothing there.
    #[error("cgroup: {MOUNT}: {0}; mount -t cgroup2 none {MOUNT}")]
    NotMounted(io::Error),
    /// Not ours to divide.
    #[error(
        "cgroup: {path} is not delegated to this user; start under systemd-run --user --scope -p Delegate=yes, or as root \
         give it away (chown USER {path} {path}/cgroup.procs {path}/cgroup.subtree_control)",
        path = path.display()
    )]
    NotDelegated {
        /// The cgroup that this process is in.
        path: PathBuf,
    },
    /// A controller that is not handed down.
    #[error("cgroup: the {controller} controller is not available in {path}: {error}; {step}", path = path.display())]
    Controller {
        /// Which.
        controller: &'static str,
        /// Where.
        path: PathBuf,
        /// Why.
        error: io::Error,
        /// What to do.
        step: String,
    },
    /// Something of the file system.
    #[error("cgroup: {path}: {error}", path = path.display())]
    File {
        /// Where.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}

/// A cgroup in which others can be made, with the controllers that they need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place(PathBuf);

impl Place {
    /// Finds a place, and has it hand down `controllers`: for root a cgroup of our own at the top, for others the nearest
    /// cgroup above this process that is delegated to them.
    pub fn find(root: bool, controllers: &[Controller]) -> Result<Self, Unavailable> {
        check_version()?;
        let mount = Path::new(MOUNT);
        if root {
            hand_down(mount, controllers)?;
            let own = mount.join(OWN);
            match std::fs::create_dir(&own) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(Unavailable::File { path: own, error });
                }
                _ => {}
            }
            hand_down(&own, controllers)?;
            return Ok(Self(own));
        }
        let own = own()?;
        let mut problem = Unavailable::NotDelegated { path: own.clone() };
        for place in own.ancestors().take_while(|place| place.starts_with(mount) && may_divide(place)) {
            let failed = match hand_down(place, controllers) {
                Ok(()) => return Ok(Self(place.to_owned())),
                // A cgroup with processes of its own hands nothing down. If we are the only one, we step aside.
                Err(_) if place == own && is_alone(place) && step_aside(place).is_ok() => hand_down(place, controllers),
                Err(error) => Err(error),
            };
            match failed {
                Ok(()) => return Ok(Self(place.to_owned())),
                Err(error) => problem = error,
            }
        }
        Err(problem)
    }

    /// Whether the cgroup that this process is in is its user's to divide. Changes nothing.
    pub fn is_ours_to_divide() -> bool {
        own().is_ok_and(|own| may_divide(&own))
    }

    /// Where [`Self::find`] would look first, and the controllers that can be handed down from there. Changes nothing.
    pub fn first(root: bool) -> Result<(PathBuf, String), Unavailable> {
        check_version()?;
        let path = if root { PathBuf::from(MOUNT) } else { own()? };
        if !may_divide(&path) {
            return Err(Unavailable::NotDelegated { path });
        }
        let file = path.join("cgroup.controllers");
        match std::fs::read_to_string(&file) {
            Ok(controllers) => Ok((path, controllers)),
            Err(error) => Err(Unavailable::File { path: file, error }),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn open(&self) -> Result<OwnedFd, Errno> {
        let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        openat2(CWD, &self.0, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty(), resolve)
    }
}

/// Whether cgroups are there, and v2 alone.
fn check_version() -> Result<(), Unavailable> {
    let is_v2 = |path: &str| -> Result<bool, Errno> {
        let kind = rustix::fs::statfs(path)?.f_type;
        Ok(u64::try_from(kind) == Ok(CGROUP2))
    };
    match is_v2(MOUNT) {
        Err(error) => Err(Unavailable::NotMounted(error.into())),
        Ok(true) => Ok(()),
        Ok(false) if is_v2("/sys/fs/cgroup/unified") == Ok(true) => {
            Err(Unavailable::Version("v1 and v2 side by side (hybrid)"))
        }
        Ok(false) if Path::new("/sys/fs/cgroup/memory").is_dir() => Err(Unavailable::Version("v1")),
        Ok(false) => Err(Unavailable::NotMounted(io::Error::other("no cgroup file system"))),
    }
}

/// The directory of the cgroup that this process is in.
fn own() -> Result<PathBuf, Unavailable> {
    let path = Path::new("/proc/self/cgroup");
    let text = std::fs::read_to_string(path).map_err(|error| Unavailable::File { path: path.into(), error })?;
    Ok(Path::new(MOUNT).join(own_cgroup(&text).unwrap_or_default()))
}

/// The path of this process's cgroup, from the line of the only v2 hierarchy: `0::/path` (`cgroups(7)`).
fn own_cgroup(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::/"))
}

/// The directory of a cgroup, from a process's `cgroup` file.
pub(super) fn of_text(text: &str) -> Option<PathBuf> {
    check_version().ok()?;
    own_cgroup(text).map(|own| Path::new(MOUNT).join(own))
}

fn may_divide(place: &Path) -> bool {
    ["", "cgroup.procs", "cgroup.subtree_control"].iter().all(|file| access(place.join(file), Access::WRITE_OK).is_ok())
}

/// Has a cgroup hand controllers down to those in it, unless it does already.
fn hand_down(place: &Path, controllers: &[Controller]) -> Result<(), Unavailable> {
    let file = place.join("cgroup.subtree_control");
    let read =
        |path: &Path| std::fs::read_to_string(path).map_err(|error| Unavailable::File { path: path.to_owned(), error });
    let has = |list: &str, controller: Controller| list.split_ascii_whitespace().any(|name| name == controller.name());
    let handed = read(&file)?;
    for &controller in controllers.iter().filter(|controller| !has(&handed, **controller)) {
        std::fs::write(&file, format!("+{}", controller.name())).map_err(|error| {
            let available = read(&place.join("cgroup.controllers")).is_ok_and(|list| has(&list, controller));
            let name = controller.name();
            let step = if available {
                "it has processes of its own: start from a cgroup inside of it that has none".to_owned()
            } else {
                format!(
                    "hand it down from above: systemctl edit user@.service, and there [Service] Delegate=cpu memory pids {name}"
                )
            };
            Unavailable::Controller { controller: name, path: place.to_owned(), error, step }
        })?;
    }
    Ok(())
}

fn is_alone(place: &Path) -> bool {
    let own = std::process::id().to_string();
    std::fs::read_to_string(place.join("cgroup.procs")).is_ok_and(|text| text.lines().all(|pid| pid == own))
}

fn step_aside(place: &Path) -> io::Result<()> {
    let leaf = place.join(LEAF);
    match std::fs::create_dir(&leaf) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    std::fs::write(leaf.join("cgroup.procs"), "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_cgroup_is_that_of_the_v2_hierarchy() {
        assert_eq!(own_cgroup("0::/user.slice/a.scope\n"), Some("user.slice/a.scope"));
        assert_eq!(own_cgroup("4:memory:/x\n0::/\n"), Some(""));
        assert_eq!(own_cgroup("4:memory:/x\n"), None);
    }

    #[test]
    fn what_cannot_be_had_says_what_to_do() {
        let error = Unavailable::Version("v1").to_string();
        assert!(error.contains("systemd.unified_cgroup_hierarchy=1"), "{error}");
        let error = Unavailable::NotDelegated { path: "/sys/fs/cgroup/a".into() }.to_string();
        assert!(
            error.contains("systemd-run --user --scope") && error.contains("chown USER /sys/fs/cgroup/a "),
            "{error}"
        );
    }
}
