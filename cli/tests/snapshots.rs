//! Snapshots as files, up to where a host with KVM would be needed.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use snapshot::store::{Kind, Meta, Snapshots};

fn bulkhead(home: &Path, arguments: &[&str], input: &[u8]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
    command.args(arguments).env("BULKHEAD_HOME", home);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

fn errors(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A snapshot of a disk, with this spec.
fn make(home: &Path, spec: &str) -> String {
    let snapshots = Snapshots::open(home).unwrap();
    let pending = snapshots.begin(Some("saved")).unwrap();
    let (data, map) = (pending.create("disk.data").unwrap(), pending.create("disk.map").unwrap());
    snapshot::disk::create_layer(&data, &map, 1 << 20).unwrap();
    pending.write("spec.json", spec.as_bytes()).unwrap();
    let meta = Meta {
        created: "2026-12-01T00:00:00.000Z".into(),
        kind: Kind::Disk,
        origin: "8fc20000".into(),
        epoch: 1,
        image: "busybox:latest".into(),
        layers: vec![],
        disk_bytes: 1 << 20,
        memory_bytes: 0,
        vcpus: 1,
    };
    let made = pending.publish(meta).unwrap();
    made.seal(&mut |_| ()).unwrap();
    made.id().to_owned()
}

/// A spec as somebody would write it who wants to read this host's files.
fn hostile_spec() -> String {
    serde_json::json!({
        "version": 1, "id": "8fc20000", "name": null, "created": "2026-12-01T00:00:00.000Z", "labels": {}, "ephemeral": true,
        "machine": {
            "image": "busybox:latest", "image_file": "/etc/passwd", "kernel": "6.12", "kernel_file": "/etc/shadow",
            "initrds": ["/etc/shadow"], "modules": "/etc/shadow", "vmm": "/bin/sh", "cpus": 1, "memory": 268_435_456u64,
            "jail": { "jailer": "/bin/sh", "users": "0-0", "require_cgroup": false, "cpu": null, "io_max": null,
                      "allow_unenforced": ["namespaces", "landlock", "cgroup"] },
            "disk": 1 << 20, "disk_layers": 1, "console": false, "cmdline_extra": "",
        },
        "network": { "netfilter": "/bin/sh", "policy": netfilter_control::Policy::default() },
        "ports": [], "inputs": [], "artifacts": null, "start_timeout_ms": 60_000, "timeout_ms": null,
        "process": { "command": ["true"], "env": [], "workdir": null, "user": null, "stdin": false, "tty": false, "term": "" },
    })
    .to_string()
}

#[test]
fn a_snapshot_goes_through_a_file_and_through_a_pipe() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let id = make(here.path(), &hostile_spec());
    let file = here.path().join("archive");
    let name = file.to_str().unwrap();
    let output = bulkhead(here.path(), &["snapshot", "export", "saved", name], b"");
    assert!(output.status.success(), "{}", errors(&output));
    let archive = fs::read(&file).unwrap();
    let output = bulkhead(here.path(), &["snapshot", "export", "saved", "-"], b"");
    assert!(output.status.success() && output.stdout == archive, "{}", errors(&output));

    // A file that is there stays, and half of one goes.
    let output = bulkhead(here.path(), &["snapshot", "export", "saved", name], b"");
    assert_eq!(output.status.code(), Some(125));
    assert!(errors(&output).contains("File exists"), "{}", errors(&output));
    assert_eq!(fs::read(&file).unwrap(), archive);
    let spec = here.path().join("snapshots").join(&id).join("spec.json");
    let good = fs::read(&spec).unwrap();
    fs::write(&spec, vec![b'x'; good.len()]).unwrap();
    let half = here.path().join("half");
    let output = bulkhead(here.path(), &["snapshot", "export", &id, half.to_str().unwrap()], b"");
    assert!(errors(&output).contains("spec.json") && !half.exists(), "{}", errors(&output));

    let output = bulkhead(there.path(), &["snapshot", "import", name], b"");
    assert_eq!(String::from_utf8(output.stdout.clone()).unwrap(), format!("{id}\n"), "{}", errors(&output));
    assert!(errors(&output).contains("needs the image \"busybox:latest\""), "{}", errors(&output));
    let output = bulkhead(there.path(), &["snapshot", "rm", "saved"], b"");
    assert!(output.status.success(), "{}", errors(&output));
    let output = bulkhead(there.path(), &["snapshot", "import", "-"], &archive);
    assert!(output.status.success(), "{}", errors(&output));
    let output = bulkhead(there.path(), &["snapshot", "verify", "saved"], b"");
    assert!(output.status.success(), "{}", errors(&output));

    let mut bad = archive;
    let end = bad.len() - 40;
    bad.truncate(end);
    let output = bulkhead(there.path(), &["snapshot", "import", "-"], &bad);
    assert_eq!(output.status.code(), Some(125));
    assert!(errors(&output).contains("ends in the middle"), "{}", errors(&output));
    let left = fs::read_dir(there.path().join("snapshots")).unwrap().count();
    assert_eq!(left, 2, "the snapshot, and the lock");
}

#[test]
fn a_snapshot_opens_no_file_of_its_own_choice() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let id = make(here.path(), &hostile_spec());
    let archive = bulkhead(here.path(), &["snapshot", "export", &id, "-"], b"").stdout;
    bulkhead(there.path(), &["snapshot", "import", "-"], &archive);
    for home in [here.path(), there.path()] {
        let output = bulkhead(home, &["fork", &id], b"");
        assert_eq!(output.status.code(), Some(125));
        assert!(errors(&output).contains("it needs the image \"busybox:latest\""), "{}", errors(&output));
        // As if its directories were an image and a kernel that somebody put there by hand.
        for file in ["images/etc/root.ext4", "kernels/etc/vmlinux", "kernels/etc/modules.cpio"] {
            fs::create_dir_all(home.join(file).parent().unwrap()).unwrap();
            fs::write(home.join(file), "x").unwrap();
        }
        let output = bulkhead(home, &["run", "--from", &id, "--dry-run", "--", "true"], b"");
        let said = format!("{}{}", errors(&output), String::from_utf8(output.stdout).unwrap());
        assert!(!said.contains("shadow") && !said.contains("/bin/sh"), "{said}");
    }
}
