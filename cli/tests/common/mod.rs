//! The program as it is installed, with a state directory of a test's own: images and kernels that look like some and boot
//! nothing.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses what it needs; one that cannot go on fails")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

#[derive(Debug)]
pub(crate) struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        let place = Self { directory: tempfile::tempdir().unwrap() };
        let mut kernel = [0; 64];
        kernel[..6].copy_from_slice(b"\x7fELF\x02\x01");
        kernel[18] = 62;
        for (path, content) in [
            ("lib/bulkhead/bulkhead-vmm", &b""[..]),
            ("lib/bulkhead/bulkhead-netfilter", b""),
            ("lib/bulkhead/bulkhead-jailer", b""),
            ("lib/bulkhead/agent.cpio", b""),
            ("home/images/busybox/root.img", &[0; 8192]),
            ("home/images/busybox/image.json", br#"{"config":{"cmd":["/bin/sh"],"workdir":"/srv","env":["A=image"]}}"#),
            ("home/images/bare/root.img", &[0; 8192]),
            ("home/images/bare/image.json", b"{}"),
            ("home/images/broken/root.img", &[0; 8192]),
            ("home/images/broken/image.json", b"{"),
            ("home/kernels/6.12/vmlinux", &kernel),
            ("home/kernels/6.12/modules.cpio", b""),
            ("home/kernels/5.bz/vmlinux", b"MZ and what follows"),
            ("home/kernels/5.bz/modules.cpio", b""),
            ("here/file", b"x"),
            ("here/good.env", b"B=file\nC=file\n"),
            ("here/bad.env", b"A=1\n=2\n"),
            ("here/spaced.env", b"A B=1\n"),
            ("here/binary.env", b"\xff"),
        ] {
            let path = place.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        std::fs::create_dir(place.path("bin")).unwrap();
        std::fs::hard_link(env!("CARGO_BIN_EXE_bulkhead"), place.path("bin/bulkhead"))
            .or_else(|_| std::fs::copy(env!("CARGO_BIN_EXE_bulkhead"), place.path("bin/bulkhead")).map(drop))
            .unwrap();
        place
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.directory.path().join(below)
    }

    pub(crate) fn command<S: AsRef<std::ffi::OsStr>>(&self, arguments: &[S]) -> Command {
        let mut command = Command::new(self.path("bin/bulkhead"));
        command.args(arguments).env_clear().env("BULKHEAD_HOME", self.path("home")).current_dir(self.path("here"));
        command.stdin(Stdio::null());
        command
    }

    pub(crate) fn output<S: AsRef<std::ffi::OsStr>>(&self, arguments: &[S]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// A run called `box` that looks alive while the file is open, as the program itself would have made it.
    pub(crate) fn run(&self, id: &str, disk: u64) -> (PathBuf, File) {
        let dry = self.output(&["run", "--dry-run", "--name", "box", "busybox"]);
        let mut spec: Value = serde_json::from_slice(&dry.stdout).unwrap();
        (spec["id"], spec["machine"]["disk"]) = (json!(id), json!(disk));
        let run = self.path("home/runs").join(id);
        std::fs::create_dir_all(&run).unwrap();
        std::fs::write(run.join("spec.json"), spec.to_string()).unwrap();
        let state = json!({"state": "running", "reason": null, "exit_code": null, "started": null, "ended": null});
        std::fs::write(run.join("state.json"), state.to_string()).unwrap();
        let lock = File::create(run.join("lock")).unwrap();
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
        (run, lock)
    }

    /// Everything that there is, but for the locks of a state directory.
    pub(crate) fn listed(&self) -> Vec<PathBuf> {
        let mut all = Vec::new();
        walk(self.directory.path(), &mut all);
        all.retain(|path| ["home/runs", "home/snapshots", ".lock"].iter().all(|own| !path.ends_with(own)));
        all.sort();
        all
    }
}

fn walk(at: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(at).unwrap().map(Result::unwrap) {
        into.push(entry.path());
        if entry.file_type().unwrap().is_dir() {
            walk(&entry.path(), into);
        }
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Writes a frame as docs/formats/supervisor-protocol.md has it; false if nobody reads it.
pub(crate) fn frame(to: &mut UnixStream, kind: u8, payload: &[u8]) -> bool {
    let mut bytes = vec![kind];
    bytes.extend(u32::try_from(payload.len()).unwrap().to_le_bytes());
    bytes.extend(payload);
    to.write_all(&bytes).is_ok()
}

/// Reads one; nothing at the end.
pub(crate) fn read_frame(from: &mut UnixStream) -> Option<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    from.read_exact(&mut head).ok()?;
    let mut payload = vec![0; u32::from_le_bytes(head[1..].try_into().unwrap()).try_into().unwrap()];
    from.read_exact(&mut payload).ok()?;
    Some((head[0], payload))
}
