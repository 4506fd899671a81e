//! Files in and out of runs: `cp`, `--input`, `--artifact`.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use crate::Test;
use crate::cli::Bulkhead;
use crate::command::{output, until};
use crate::host;
use crate::processes;

pub(crate) const TESTS: &[Test] = &[
    ("files::copies_go_both_ways", copies_go_both_ways),
    ("files::a_large_file_goes_in_and_out", a_large_file_goes_in_and_out),
    ("files::input_goes_in_and_artifacts_come_out", input_goes_in_and_artifacts_come_out),
];

/// A directory with a file in it, another below, and a link.
fn make_tree(at: &Path) {
    fs::create_dir_all(at.join("deep")).unwrap();
    fs::write(at.join("one"), "1").unwrap();
    fs::write(at.join("deep/two"), "2").unwrap();
    fs::set_permissions(at.join("deep/two"), fs::Permissions::from_mode(0o751)).unwrap();
    symlink("deep/two", at.join("link")).unwrap();
}

/// What is below a directory here, by name, sorted.
fn listed(at: &Path) -> String {
    let script = "cd \"$1\" && find . -mindepth 1 | sort | tr '\\n' ' '";
    output(std::process::Command::new("/bin/sh").args(["-c", script, "sh"]).arg(at), b"").expect(0)
}

/// Given a running run, copies go where docker's would, in both directions. (All rules: `cli/tests/native_copies.rs`.) What a
/// guest may have and the host must not get is left out; a full disk and an interruption leave nothing half done.
fn copies_go_both_ways() {
    let bulkhead = Bulkhead::new();
    let _resident = bulkhead.reside("box", &[]);
    let here = host::directory();
    let at = |path: &str| here.path().join(path).to_str().unwrap().to_owned();
    make_tree(&here.path().join("src"));
    let cp = |source: &str, destination: &str| bulkhead.output(&["cp", source, destination]);
    let inside = |script: &str| bulkhead.shell("box", script).expect(0);

    cp(&at("src/deep/two"), "box:new").expect(0);
    cp(&format!("{}/.", at("src")), "box:/w").expect(0);
    let shown = inside("cat /new; stat -c ' %a %u:%g' /new; cd /w && find . | sort | tr '\\n' ' '; readlink link");
    assert_eq!(shown, "2 751 0:0\n. ./deep ./deep/two ./link ./one deep/two\n");
    cp("box:/w", &at("copy")).expect(0);
    assert_eq!(listed(&here.path().join("copy")), "./deep ./deep/two ./link ./one ");
    assert_eq!(fs::read_to_string(at("copy/link")).unwrap(), "2");
    let archive = bulkhead.command(&["cp", "box:/w", "-"]).output().unwrap();
    assert!(archive.status.success() && archive.stderr.is_empty());
    assert_eq!(bulkhead.with_input(&["cp", "-", "box:/tmp"], &archive.stdout).expect(0), "");

    // The name of the pipe is one that no terminal should be given.
    let script = "find /tmp/w -type f | sort | tr '\\n' ' '; mkdir /evil && cd /evil && ln -s /etc/passwd abs && ln -s ../../x up && \
                  mknod zero c 1 5 && mkfifo \"$(printf 'a\\033[2Jb\\nc')\" && echo x > suid && chmod 6777 suid && ln suid hard";
    assert_eq!(inside(script), "/tmp/w/deep/two /tmp/w/one ");
    let evil = cp("box:/evil", &at("evil"));
    assert_eq!((evil.code, evil.stdout.as_str(), evil.stderr.contains('\x1b')), (0, "", false), "{evil:?}");
    let left_out = |line: &str| line.starts_with("bulkhead: cp: ") && line.contains(": left out: it is ");
    assert_eq!((evil.stderr.lines().count(), evil.stderr.lines().all(left_out)), (4, true), "{evil:?}");
    assert_eq!(listed(&here.path().join("evil")), "./hard ./suid ");
    assert_eq!(fs::metadata(at("evil/suid")).unwrap().mode() & 0o7022, 0);

    // A disk in the guest that is full.
    let mut big = fs::File::create(at("big")).unwrap();
    (0..40).for_each(|_| big.write_all(&[7; 1 << 20]).unwrap());
    inside("fallocate -l $(($(df -k / | tail -1 | awk '{ print $4 }') - 20000))k /filler");
    let refused = cp(&at("big"), "box:/big").refused(125);
    assert!(refused.contains("No space left on device") && refused.lines().count() == 1, "{refused}");
    // A copy that is interrupted.
    inside("rm -f /big /filler; truncate -s 200M /sparse");
    let copying = bulkhead.start(&["cp", "box:/sparse", &at("sparse")]);
    until("a file on its way", || listed(here.path()).contains("./.bulkhead-"));
    copying.signal(rustix::process::Signal::INT);
    assert_eq!(copying.finish().expect(130), "");
    assert!(!listed(here.path()).contains("sparse") && !listed(here.path()).contains(".bulkhead-"));
}

/// Its hash is the same on all three ways.
fn a_large_file_goes_in_and_out() {
    let bulkhead = Bulkhead::new();
    let soak = host::soak();
    let size: usize = if soak { 1 << 30 } else { 16 << 20 };
    let _resident = bulkhead.reside("box", &["--disk", "3G"]);
    let here = host::directory();
    let (there, back) = (here.path().join("there"), here.path().join("back"));
    let mut file = fs::File::create(&there).unwrap();
    let mut block: Vec<u8> = (0..1_u32 << 18).flat_map(|n| (n.wrapping_mul(2_654_435_761)).to_le_bytes()).collect();
    for n in 0..size >> 20 {
        block[..8].copy_from_slice(&n.to_le_bytes());
        file.write_all(&block).unwrap();
    }
    drop(file);
    let sum = |path: &Path| output(std::process::Command::new("md5sum").arg(path), b"").expect(0)[..32].to_owned();
    let start = std::time::Instant::now();
    bulkhead.output(&["cp", there.to_str().unwrap(), "box:/large"]).expect(0);
    let inwards = start.elapsed();
    bulkhead.output(&["cp", "box:/large", back.to_str().unwrap()]).expect(0);
    println!("{} MiB in {inwards:?} in, {:?} out", size >> 20, start.elapsed() - inwards);
    assert_eq!(sum(&there), sum(&back));
    assert_eq!(sum(&there), bulkhead.shell("box", "md5sum < /large").expect(0)[..32]);
}

/// Given a task bundle, the command finds it, as its user's; what it leaves comes out, whether it ends well, badly, or is
/// ended.
fn input_goes_in_and_artifacts_come_out() {
    let bulkhead = Bulkhead::new();
    let here = host::directory();
    make_tree(&here.path().join("task"));
    fs::write(here.path().join("notes.txt"), "notes").unwrap();
    let run = |options: &[&str], script: &str| {
        let mut command = bulkhead.command(&[&["run"], options, &["busybox", "sh", "-c", script]].concat());
        output(command.current_dir(here.path()), b"")
    };
    // Into the working directory, or where it says; in the name of the command's user.
    let options = ["--input", "task", "--input", "notes.txt:/made/for/it/n.txt", "-u", "user", "-w", "/work"];
    let script = "pwd; find . | sort | tr '\\n' ' '; cat /made/for/it/n.txt; stat -c ' %U %a' task/deep/two; echo x >> task/one && mkdir -p out/sub && cp task/one out/ && \
                  echo deep > out/sub/d.log && ln -s /etc/passwd out/evil && echo secret > /work/not-asked-for";
    let artifacts = [
        "--artifact",
        "out/*",
        "--artifact",
        "/made/for/it/n.txt",
        "--artifact",
        "/none/*",
        "--artifact-dir",
        "results",
    ];
    let ran = run(&[&options[..], &artifacts].concat(), script);
    assert_eq!(
        (ran.code, ran.stdout.as_str()),
        (0, "/work\n. ./task ./task/deep ./task/deep/two ./task/link ./task/one notes user 751\n"),
        "{ran:?}"
    );
    let mut said: Vec<&str> = ran.stderr.lines().collect();
    said.sort_unstable();
    assert_eq!(said.len(), 2, "{ran:?}");
    assert_eq!(said[0], "bulkhead: artifact \"/none/*\": nothing in the guest matches it");
    assert_eq!(said[1], "bulkhead: artifact evil: left out: it is a link to /etc/passwd, outside of what is copied");
    let results = here.path().join("results");
    assert_eq!(listed(&results), "./n.txt ./one ./sub ./sub/d.log ");
    assert_eq!(fs::read_to_string(results.join("one")).unwrap(), "1x\n");

    // However it ends. A directory of the run's own, with a result that a program can read.
    for (options, script, code, reason) in [
        (&["--format", "json"][..], "echo left > /a.txt; exit 3", 3, "exited"),
        (
            &["--format", "json", "--timeout", "1s", "--name", "kept"],
            "echo left > /a.txt; (while :; do echo more >> /a.txt; sleep 0.1; done) & sleep 1000",
            124,
            "timeout after 1s",
        ),
        (&["--format", "json", "-m", "96M"], "echo left > /a.txt; exec tail /dev/zero", 137, "out of memory"),
    ] {
        let ran = run(&[&["--artifact", "/*.txt"], options].concat(), script);
        assert_eq!(ran.code, code, "{ran:?}");
        let result: serde_json::Value = serde_json::from_str(ran.stderr.lines().last().unwrap()).unwrap();
        assert_eq!((&result["exit_code"], &result["reason"]), (&code.into(), &reason.into()), "{ran:?}");
        let own = here.path().join(format!("artifacts-{}", result["id"].as_str().unwrap()));
        assert!(fs::read_to_string(own.join("a.txt")).unwrap().starts_with("left\n"), "{ran:?}");
    }
    // What does not come out whole spoils a success, and says so; a directory that stays empty goes.
    let before = listed(here.path());
    let ran =
        run(&["--artifact", "/big", "--artifact-limit", "1M"], "dd if=/dev/zero of=/big bs=1M count=2 2>/dev/null");
    assert_eq!(
        (ran.code, ran.stderr.contains(": artifacts: \"/big\": the guest sends more than 1.0 MiB\n")),
        (125, true),
        "{ran:?}"
    );
    assert_eq!(listed(here.path()), before);
    // An input that does not arrive keeps the command from starting.
    let ran = run(&["--input", "task:/etc/passwd/x"], "echo started");
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.lines().count()), (125, "", 1), "{ran:?}");
    assert!(ran.stderr.contains("--input: /etc/passwd/x in the run: "), "{ran:?}");
    // Its supervisor may still be at it when the client has gone.
    until("the end of the run that never started", || bulkhead.runs().len() == 1);
    assert_eq!(bulkhead.output(&["rm", "kept"]).expect(0), "kept\n");
    processes::none_left(&bulkhead);
}
