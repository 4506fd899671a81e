//! What makes a machine itself, in a copy of it: its machine-id and its SSH host keys are made anew.
//!
//! A child of the agent does it in the workload's mount namespace, while the workload is frozen, and reads back what it
//! wrote. What an image does not have is not made.

use super::workload::Workload;
use crate::sys;
use rustix::{
    fs::{Mode, OFlags, open},
    pipe::{PipeFlags, pipe_with},
    process::{WaitId, WaitIdOptions, waitid},
    rand::{GetRandomFlags, getrandom},
    thread::{ThreadNameSpaceType, move_into_thread_name_spaces},
};
use std::{
    ffi::CString,
    fs,
    io::{self, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
};

/// Where systemd and D-Bus keep it. The second is mostly a link to the first, and then left alone.
const MACHINE_IDS: [&str; 2] = ["/etc/machine-id", "/var/lib/dbus/machine-id"];
const SSH: &str = "/etc/ssh";
const SSH_KEYGEN: &str = "/usr/bin/ssh-keygen";
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A renewal under way.
#[derive(Debug)]
pub(super) struct Renewal {
    child: OwnedFd,
    /// Why it failed; ends without a word when it did not.
    report: OwnedFd,
}

/// Begins to renew the identity of the workload's file system.
pub(super) fn renew(workload: &Workload) -> io::Result<Renewal> {
    let (report, status) = pipe_with(PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&report, true)?;
    let Some(child) = sys::fork(None)? else {
        let entered = move_into_thread_name_spaces(workload.namespaces(), ThreadNameSpaceType::MOUNT);
        if let Err(error) = entered.map_err(io::Error::from).and_then(|()| renew_all(Path::new("/"))) {
            let _ = rustix::io::write(&status, error.to_string().as_bytes());
        }
        sys::exit_now(0);
    };
    Ok(Renewal { child, report })
}

impl Renewal {
    pub(super) fn report(&self) -> BorrowedFd<'_> {
        self.report.as_fd()
    }

    /// How it ended, once it has.
    pub(super) fn outcome(&self) -> Option<Result<(), String>> {
        let mut text = [0; 1024];
        let outcome = match rustix::io::read(&self.report, &mut text) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return None,
            Ok(0) => Ok(()),
            Ok(count) => Err(String::from_utf8_lossy(text.get(..count).unwrap_or_default()).into_owned()),
            Err(error) => Err(error.to_string()),
        };
        let ended = waitid(WaitId::PidFd(self.child.as_fd()), WaitIdOptions::EXITED);
        let well = ended.ok().flatten().and_then(|status| status.exit_status()) == Some(0);
        Some(outcome.and_then(|()| if well { Ok(()) } else { Err("it was killed".to_owned()) }))
            .map(|outcome| outcome.map_err(|why| format!("renew the identity: {why}")))
    }
}

fn renew_all(root: &Path) -> io::Result<()> {
    let mut bytes = [0; 16];
    let got = getrandom(&mut bytes, GetRandomFlags::empty())?;
    if got != bytes.len() {
        return Err(io::Error::other("too few random bytes"));
    }
    for path in MACHINE_IDS {
        renew_machine_id(&below(root, path), bytes).map_err(named(path))?;
    }
    renew_host_keys(root)
}

fn below(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

fn named(what: &str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Writes another machine-id where there is one. An empty file is filled by the image's own first boot, and
/// "uninitialized" is what says that it is to come.
fn renew_machine_id(path: &Path, bytes: [u8; 16]) -> io::Result<()> {
    let there = fs::symlink_metadata(path).is_ok_and(|found| found.is_file());
    if !there || !fs::read_to_string(path)?.trim_end().chars().all(|digit| digit.is_ascii_hexdigit()) {
        return Ok(());
    }
    if fs::metadata(path)?.len() == 0 {
        return Ok(());
    }
    // A version 4 UUID, as machine-id(5) asks for.
    let number = u128::from_be_bytes(bytes) & !(0xf << 76 | 0x3 << 62) | 0x4 << 76 | 0x2 << 62;
    let text = format!("{number:032x}\n");
    let new = path.with_extension("bulkhead-new");
    let _ = fs::remove_file(&new);
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o444).open(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    if fs::read_to_string(path)? != text {
        return Err(io::Error::other("what was written is not what is there"));
    }
    Ok(())
}

/// Takes away the host keys that are there, and has the image's own program make others.
fn renew_host_keys(root: &Path) -> io::Result<()> {
    let directory = below(root, SSH);
    let mut old = Vec::new();
    for entry in fs::read_dir(&directory).into_iter().flatten() {
        let path = entry.map_err(named(SSH))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("ssh_host_") && (name.ends_with("_key") || name.ends_with("_key.pub")) {
            old.push((fs::read(&path).map_err(named(&path.to_string_lossy()))?, path.clone()));
        }
    }
    if old.is_empty() {
        return Ok(());
    }
    for (_, path) in &old {
        fs::remove_file(path).map_err(named(&path.to_string_lossy()))?;
    }
    if below(root, SSH_KEYGEN).exists() {
        run([SSH_KEYGEN, "-q", "-A"]).map_err(named(SSH_KEYGEN))?;
    }
    for (content, path) in old {
        if fs::read(&path).is_ok_and(|now| now == content) {
            return Err(io::Error::other(format!("{}: it is the old key still", path.display())));
        }
    }
    Ok(())
}

fn run<const N: usize>(command: [&str; N]) -> io::Result<()> {
    let text = |word: &str| CString::new(word).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    let args = command.into_iter().map(text).collect::<io::Result<Vec<_>>>()?;
    let program = args.first().cloned().unwrap_or_default();
    let Some(child) = sys::fork(None)? else {
        // The program's words are for nobody. The agent's descriptors are none of its business.
        if let Ok(null) = open("/dev/null", OFlags::RDWR, Mode::empty()) {
            let _ = rustix::stdio::dup2_stdin(&null);
            let _ = rustix::stdio::dup2_stdout(&null);
            let _ = rustix::stdio::dup2_stderr(&null);
        }
        sys::close_all_but(&[]);
        let error = text(PATH).map(|path| sys::execute(&program, &args, &[path]));
        drop(error);
        sys::exit_now(127);
    };
    let ended = waitid(WaitId::PidFd(child.as_fd()), WaitIdOptions::EXITED)?;
    match ended.and_then(|status| status.exit_status()) {
        Some(0) => Ok(()),
        Some(status) => Err(io::Error::other(format!("it ended with {status}"))),
        None => Err(io::Error::other("it was killed")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_renewed_and_nothing_else_is_made() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| below(root.path(), path);
        renew_all(root.path()).unwrap();
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0, "nothing was there, and nothing is");

        fs::create_dir_all(at(SSH)).unwrap();
        fs::create_dir_all(at("/var/lib/dbus")).unwrap();
        let old = "0123456789abcdef0123456789abcdef\n";
        fs::write(at("/etc/machine-id"), old).unwrap();
        std::os::unix::fs::symlink("/etc/machine-id", at("/var/lib/dbus/machine-id")).unwrap();
        for name in ["ssh_host_rsa_key", "ssh_host_rsa_key.pub", "sshd_config"] {
            fs::write(at(SSH).join(name), name).unwrap();
        }
        renew_all(root.path()).unwrap();
        let new = fs::read_to_string(at("/etc/machine-id")).unwrap();
        assert_ne!(new, old);
        assert_eq!(new.trim_end().len(), 32);
        assert_eq!(new.as_bytes()[12], b'4', "a version 4 UUID: {new}");
        assert!(fs::symlink_metadata(at("/var/lib/dbus/machine-id")).unwrap().is_symlink());
        let left: Vec<_> = fs::read_dir(at(SSH)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["sshd_config"], "without a program that makes keys there are none");

        for untouched in ["", "uninitialized\n"] {
            fs::remove_file(at("/etc/machine-id")).unwrap();
            fs::write(at("/etc/machine-id"), untouched).unwrap();
            renew_all(root.path()).unwrap();
            assert_eq!(fs::read_to_string(at("/etc/machine-id")).unwrap(), untouched);
        }
    }
}
