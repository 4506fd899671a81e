//! An ordinary user's cgroup under systemd: a scope that their service manager makes on request.
//!
//! Only a process in a cgroup that is its user's can divide it, and at a login it is in none. The supervisor is then started
//! by `systemd-run`, which has it moved into a fresh scope, and becomes it: same process, same descriptors.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use jailer::cgroup::Place;

use crate::spec::Machine;

/// What `systemd-run` needs of the environment, to find the manager.
const VARIABLES: [&str; 2] = ["XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS"];
const OPTIONS: [&str; 6] = ["--user", "--scope", "--quiet", "--collect", "--property=Delegate=yes", "--"];

/// How a supervisor is started.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Start {
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<OsString>,
    pub(super) environment: Vec<(OsString, OsString)>,
}

/// Directly, or where a cgroup is needed and ours is not to be divided, in a scope of its own, if there is a manager.
pub(super) fn supervisor(own: &Path, directory: &Path, machine: &Machine) -> Start {
    let root = rustix::process::geteuid().is_root();
    let needs = machine.jail.require_cgroup || machine.jail.cpu.is_some() || machine.jail.io_max.is_some();
    let manager =
        if !root && needs && !Place::is_ours_to_divide() { Manager::find(|name| std::env::var_os(name)) } else { None };
    start(own, directory, manager)
}

/// Whether there is a service manager that makes scopes for this user.
pub(super) fn has_manager() -> bool {
    Manager::find(|name| std::env::var_os(name)).is_some()
}

fn start(own: &Path, directory: &Path, manager: Option<Manager>) -> Start {
    let arguments = [OsString::from("supervise"), directory.into()];
    match manager {
        None => Start { program: own.to_owned(), arguments: arguments.into(), environment: Vec::new() },
        Some(Manager { program, environment }) => {
            let options = OPTIONS.iter().map(OsString::from);
            let arguments = options.chain([own.into()]).chain(arguments).collect();
            Start { program, arguments, environment }
        }
    }
}

/// The user's service manager, and the program that speaks with it.
#[derive(Debug)]
struct Manager {
    program: PathBuf,
    environment: Vec<(OsString, OsString)>,
}

impl Manager {
    fn find(variable: impl Fn(&str) -> Option<OsString>) -> Option<Self> {
        let runtime = variable("XDG_RUNTIME_DIR")?;
        if !Path::new(&runtime).join("systemd/private").exists() {
            return None;
        }
        let path = variable("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
        let program =
            std::env::split_paths(&path).map(|place| place.join("systemd-run")).find(|file| file.is_file())?;
        let set = |name: &&str| Some((OsString::from(*name), variable(name)?));
        Some(Self { program, environment: VARIABLES.iter().filter_map(set).collect() })
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn a_manager_is_found_by_its_socket_and_asked_by_its_program() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path();
        let variable = |name: &str| match name {
            "XDG_RUNTIME_DIR" | "PATH" => Some(place.as_os_str().to_owned()),
            _ => None,
        };
        assert!(Manager::find(variable).is_none());
        std::fs::write(place.join("systemd-run"), "").unwrap();
        assert!(Manager::find(variable).is_none());
        std::fs::create_dir(place.join("systemd")).unwrap();
        std::fs::write(place.join("systemd/private"), "").unwrap();
        let start = start(Path::new("/b"), Path::new("/r"), Manager::find(variable));
        assert_eq!(start.program, place.join("systemd-run"));
        let words: Vec<&OsStr> = start.arguments.iter().map(OsString::as_os_str).collect();
        assert_eq!(words[words.len() - 4..], ["--", "/b", "supervise", "/r"]);
        assert_eq!(start.environment, [("XDG_RUNTIME_DIR".into(), place.into())]);
    }

    #[test]
    fn without_one_it_is_started_as_it_is() {
        let start = start(Path::new("/b"), Path::new("/r"), None);
        assert_eq!((start.program, start.arguments), ("/b".into(), vec!["supervise".into(), "/r".into()]));
    }
}
