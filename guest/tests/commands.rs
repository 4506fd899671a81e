//! What commands see, and what comes back from them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use common::{Machine, run, sh};
use guest::{
    host::AgentError,
    message::{ExecKind, ExecSpec, ExitRecord, RefusalKind, Resource, Rlimit, StartFailure, Terminal},
};
use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

const OK: ExitRecord = ExitRecord::Exited { code: 0 };

#[test]
fn a_command_runs_in_its_place() {
    let machine = Machine::start();
    let agent = machine.agent();
    assert_eq!(agent.about().version, 1);
    assert!(agent.about().memory > 0);

    let ran = run(&agent, sh("a", "echo out; echo err >&2; exit 7"), b"");
    assert_eq!((ran.text(), ran.stderr.as_str()), ("out\n", "err\n"));
    assert_eq!(ran.record, ExitRecord::Exited { code: 7 });

    let spec = ExecSpec { env: vec!["X=1=2".into()], cwd: Some("/new/dir".into()), ..sh("b", "pwd; env | sort; cat") };
    let ran = run(&agent, spec, b"");
    let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    // PWD and SHLVL are the shell's own.
    assert_eq!(ran.text(), format!("/new/dir\nHOME=/root\nHOSTNAME=box\n{path}\nPWD=/new/dir\nSHLVL=1\nX=1=2\n"));

    let spec = ExecSpec { user: Some("app".into()), ..sh("c", "id; echo $HOME; umask; hostname") };
    let ran = run(&agent, spec, b"");
    assert_eq!(ran.text(), "uid=1000(app) gid=1000(app) groups=10(wheel)\n/home/app\n0022\nbox\n");
    let ran = run(&agent, ExecSpec { user: Some("5:6".into()), ..sh("d", "id") }, b"");
    assert_eq!(ran.text(), "uid=5 gid=6\n");

    let limit = Rlimit { resource: Resource::Nofile, soft: Some(99), hard: Some(100) };
    let ran =
        run(&agent, ExecSpec { rlimits: vec![limit], ..sh("e", "ulimit -n; ulimit -Hn; ls -l /proc/self/fd") }, b"");
    let lines: Vec<_> = ran.text().lines().collect();
    assert_eq!(lines[..2], ["99", "100"]);
    assert_eq!(lines.len(), 2 + 1 + 4, "no descriptor but 0 to 2 and that of the listing: {}", ran.text());
}

#[test]
fn a_connection_is_joined_with_a_server() {
    let machine = Machine::start();
    let agent = machine.agent();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    let connect = |id: &str, port| ExecSpec {
        id: id.into(),
        kind: ExecKind::Connect { port },
        stdin: true,
        ..ExecSpec::default()
    };
    let echo = thread::spawn(move || {
        // One that answers all that it got, and one that says something and hangs up.
        let (stream, _) = server.accept().unwrap();
        std::io::copy(&mut &stream, &mut &stream).unwrap();
        drop(stream);
        server.accept().unwrap().0.write_all(b"busy").unwrap();
    });
    let input = vec![7; 3_000_001];
    let ran = run(&agent, connect("a", port), &input);
    assert_eq!((ran.record, ran.stdout == input), (OK, true));
    assert_eq!(run(&agent, connect("b", port), b"").text(), "busy");
    echo.join().unwrap();
    // Nobody listens there any more.
    let ran = run(&agent, connect("c", port), b"x");
    assert_eq!(ran.record, ExitRecord::Exited { code: 1 });
    assert!(ran.stderr.contains("refused"), "{}", ran.stderr);
}

#[test]
fn the_agent_is_out_of_sight_and_containers_can_be_made() {
    let machine = Machine::start();
    let agent = machine.agent();
    let ran = run(&agent, sh("a", "cat /proc/1/comm; ls / | sort | tr '\\n' ' '; ls -d /proc/[0-9]* | wc -l"), b"");
    let lines: Vec<_> = ran.text().lines().collect();
    assert_eq!(lines[0], "bulkhead-init");
    let (names, processes) = lines[1].rsplit_once(' ').unwrap();
    assert_eq!(names, "bin dev etc proc root sys tmp");
    // PID 1, the shell, and what of its pipeline runs already.
    assert!((2..=4).contains(&processes.parse::<usize>().unwrap()), "{processes}");

    let script =
        "mount -t tmpfs none /tmp && unshare -U -r -m -p -f sh -c 'mount -t proc proc /proc && id -u && echo $$'";
    let ran = run(&agent, ExecSpec { user: Some("0".into()), ..sh("b", script) }, b"");
    assert_eq!((ran.text(), ran.stderr.as_str()), ("0\n1\n", ""));
    let script = "unshare -U -r -m sh -c 'mount -t tmpfs none /tmp && id -u'";
    let ran = run(&agent, ExecSpec { user: Some("app".into()), ..sh("c", script) }, b"");
    assert_eq!((ran.text(), ran.stderr.as_str()), ("0\n", ""));
    // One exec sees what another mounted, and its processes.
    let ran = run(&agent, sh("d", "grep -c ' /tmp ' /proc/mounts; cat /proc/self/cgroup"), b"");
    assert_eq!(ran.text().lines().next(), Some("1"));
    assert_eq!(ran.text().lines().last(), Some("0::/exec-d"), "its cgroup namespace begins at the workload's");
    let ran = run(&agent, sh("e", "(sleep 0.2 & ) ; sleep 0.5; ps -o stat,comm | grep -c Z"), b"");
    assert_eq!(ran.text(), "0\n", "orphans are reaped");
}

#[test]
fn what_cannot_start_says_why() {
    let machine = Machine::start();
    let agent = machine.agent();
    fs::write(machine.root.join("etc/plain"), "text").unwrap();
    fs::write(machine.root.join("etc/orphan"), "#!/no/such/interpreter\n").unwrap();
    fs::set_permissions(machine.root.join("etc/orphan"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(machine.root.join("etc/noexec"), [0u8; 100]).unwrap();
    fs::set_permissions(machine.root.join("etc/noexec"), fs::Permissions::from_mode(0o755)).unwrap();
    let command = |program: &str| ExecSpec::command("x", vec![program.into()]);
    let user = |user: &str| ExecSpec { user: Some(user.into()), ..command("true") };
    let cwd = |cwd: &str| ExecSpec { cwd: Some(cwd.into()), ..command("true") };
    let cases = [
        (command("nosuch"), StartFailure::NotFound, "nosuch", 127),
        (command("/no/such"), StartFailure::NotFound, "/no/such", 127),
        (command("/etc/orphan"), StartFailure::NotFound, "interpreter", 127),
        (command("/etc/plain"), StartFailure::NotExecutable, "ermission", 126),
        (command("/etc"), StartFailure::NotExecutable, "/etc", 126),
        (command("/etc/noexec"), StartFailure::NotExecutable, "format", 126),
        (user("nobody"), StartFailure::NoSuchUser, "nobody", 125),
        (user("app:none"), StartFailure::NoSuchGroup, "none", 125),
        (cwd("/etc/plain"), StartFailure::BadCwd, "/etc/plain", 125),
        (cwd("/etc/plain/below"), StartFailure::BadCwd, "/etc/plain", 125),
        (ExecSpec { user: Some("app".into()), ..cwd("/root/private") }, StartFailure::BadCwd, "private", 125),
    ];
    fs::set_permissions(machine.root.join("root"), fs::Permissions::from_mode(0o700)).unwrap();
    for (number, (spec, kind, part, status)) in cases.into_iter().enumerate() {
        let ran = run(&agent, ExecSpec { id: format!("x{number}"), stdin: number % 2 == 0, ..spec.clone() }, b"input");
        let ExitRecord::FailedToStart { kind: got, message } = &ran.record else { panic!("{spec:?}: {ran:?}") };
        assert_eq!(*got, kind, "{spec:?}: {message}");
        assert!(message.contains(part), "{message}");
        assert_eq!(ran.record.status(), status);
        assert!(ran.stdout.is_empty() && ran.stderr.is_empty());
    }
}

#[test]
fn signals_end_a_command_or_its_whole_cgroup() {
    let machine = Machine::start();
    let agent = machine.agent();
    let exec = agent.exec(ExecSpec::command("a", vec!["sleep".into(), "100".into()])).unwrap();
    exec.signal(15, false).unwrap();
    assert_eq!(exec.wait().unwrap(), ExitRecord::Signaled { signal: 15, core: false });
    exec.signal(15, false).expect("a signal to a command that has ended is no error");

    // Children that have left their session die with the whole cgroup, and those that are born meanwhile.
    let script = "setsid sh -c 'while :; do sleep 77 & sleep 0.01; done' & setsid sleep 78 & echo ready; wait";
    let exec = agent.exec(sh("b", script)).unwrap();
    let mut first = First(Vec::new());
    assert!(matches!(exec.copy_stdout(&mut first), Err(AgentError::Sink(_))));
    exec.signal(9, true).unwrap();
    assert_eq!(exec.wait().unwrap(), ExitRecord::Signaled { signal: 9, core: false });
    // They have all been sent the signal; dying takes each its time.
    let script = "for i in $(seq 100); do ps -o args | grep -q 'slee[p] 7' || exit 0; sleep 0.05; done; exit 1";
    assert_eq!(run(&agent, sh("c", script), b"").record, OK);

    assert!(matches!(exec.signal(99, false), Err(AgentError::Refused { kind: RefusalKind::Malformed, .. })));
    assert!(matches!(exec.resize(1, 1), Err(AgentError::Refused { kind: RefusalKind::NoSuchStream, .. })));
}

/// Takes one write and refuses the next.
struct First(Vec<u8>);

impl Write for First {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Other.into())
    }
}

#[test]
fn a_child_left_behind_does_not_hold_the_stream_open() {
    let machine = Machine::start();
    let agent = machine.agent();
    let before = Instant::now();
    let ran = run(&agent, sh("a", "(while :; do echo noise; sleep 0.001; done) & echo done"), b"");
    assert!(before.elapsed() < Duration::from_secs(5));
    assert_eq!(ran.record, OK);
    assert!(ran.text().contains("done\n"));
    // It lives on until it is told otherwise.
    let ran = run(&agent, sh("b", "ps -o args | grep -c 'nois[e]'"), b"");
    assert_ne!(ran.text(), "0\n");
}

#[test]
fn a_terminal_is_one() {
    let machine = Machine::start();
    let agent = machine.agent();
    let terminal = Some(Terminal { rows: 33, cols: 101, term: "vt100".into() });
    let script =
        "tty; stty size; echo $TERM; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo yes; echo e >&2; echo x > /dev/tty";
    let ran = run(&agent, ExecSpec { terminal: terminal.clone(), ..sh("a", script) }, b"");
    assert_eq!(ran.text(), "/dev/pts/0\r\n33 101\r\nvt100\r\nyes\r\ne\r\nx\r\n");
    assert_eq!(ran.record, OK);

    // Input, its end, and a new size.
    let spec = ExecSpec {
        terminal: terminal.clone(),
        stdin: true,
        user: Some("app".into()),
        ..sh("b", "echo >/dev/tty; cat; stty size")
    };
    let exec = agent.exec(spec).unwrap();
    exec.resize(5, 6).unwrap();
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| exec.copy_stdin(&mut theirs).unwrap());
        let mut out = Vec::new();
        ours.write_all(b"line\n").unwrap();
        ours.shutdown(std::net::Shutdown::Write).unwrap();
        exec.copy_stdout(&mut out).unwrap();
        assert_eq!(
            String::from_utf8_lossy(&out).replace("line\r\n", "L"),
            "\r\nLL5 6\r\n".replace("\r\nLL", &order(&out))
        );
    });
    assert_eq!(exec.wait().unwrap(), OK);

    // The interrupt key, and everything that was printed before the end.
    let ran = run(&agent, ExecSpec { terminal, ..sh("c", "seq 1 20000; kill -INT $$") }, b"");
    assert_eq!(ran.text().lines().count(), 20_000);
    assert!(ran.text().ends_with("20000\r\n"));
    assert_eq!(ran.record, ExitRecord::Signaled { signal: 2, core: false });
}

/// The terminal's echo and the program's output come in either order.
fn order(out: &[u8]) -> String {
    let text = String::from_utf8_lossy(out).replace("line\r\n", "L");
    text.strip_suffix("5 6\r\n").unwrap_or_default().to_owned()
}

#[test]
fn files_go_in_and_out() {
    let machine = Machine::start();
    let agent = machine.agent();
    let source = tempfile::tempdir().unwrap();
    let blob = common::noise(3_000_000);
    fs::create_dir_all(source.path().join("in/sub")).unwrap();
    fs::write(source.path().join("in/sub/blob"), &blob).unwrap();
    let mut archive = tar::Builder::new(Vec::new());
    archive.append_dir_all("in", source.path().join("in")).unwrap();
    let archive = archive.into_inner().unwrap();

    let ran = run(&agent, ExecSpec { user: Some("app".into()), ..ExecSpec::tar_extract("a", "/tmp/x") }, &archive);
    assert_eq!(ran.record, ExitRecord::Exited { code: 1 }, "the user may not write there");
    assert!(ran.stderr.contains("/tmp/x"), "{}", ran.stderr);
    let ran = run(&agent, ExecSpec::tar_extract("b", "/tmp/x"), &archive);
    assert_eq!((ran.record, ran.stderr.as_str(), ran.accepted), (OK, "", archive.len() as u64));
    assert!(fs::read(machine.root.join("tmp/x/in/sub/blob")).unwrap_or_default() == blob);

    let ran = run(&agent, ExecSpec::tar_create("c", "/tmp/x/in"), b"");
    assert_eq!((ran.record, ran.stderr.as_str()), (OK, ""));
    let mut found = 0;
    for entry in tar::Archive::new(&ran.stdout[..]).entries().unwrap() {
        let mut entry = entry.unwrap();
        if entry.path().unwrap().to_str() == Some("in/sub/blob") {
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            assert!(bytes == blob);
            found += 1;
        }
    }
    assert_eq!(found, 1);
    let ran = run(&agent, ExecSpec::tar_create("d", "/nonexistent"), b"");
    assert_eq!(ran.record, ExitRecord::Exited { code: 1 });
    assert!(ran.stderr.contains("/nonexistent"));
}

#[test]
fn bounds_are_kept_and_named() {
    let machine = Machine::start();
    let agent = machine.agent();
    let sleep = |number: usize| ExecSpec::command(format!("s{number}"), vec!["sleep".into(), "100".into()]);
    let execs: Vec<_> = (0..64).map(|n| agent.exec(sleep(n)).unwrap()).collect();
    assert!(matches!(agent.exec(sleep(64)), Err(AgentError::Refused { kind: RefusalKind::TooMany, .. })));
    let other = ExecSpec { cwd: Some("/tmp".into()), ..sleep(3) };
    assert!(matches!(agent.exec(other), Err(AgentError::Refused { kind: RefusalKind::IdInUse, .. })));
    let stranger = machine.agent();
    let other = ExecSpec { cwd: Some("/tmp".into()), ..sleep(4) };
    assert!(matches!(stranger.exec(other), Err(AgentError::Refused { kind: RefusalKind::IdInUse, .. })));
    for exec in execs {
        exec.signal(9, true).unwrap();
        assert_eq!(exec.wait().unwrap().status(), 137);
    }
    let ran = run(&agent, sleep(65).clone_as("true"), b"");
    assert_eq!(ran.record, OK);
    let lost = agent.attach("never-was");
    assert!(matches!(lost, Err(AgentError::Refused { kind: RefusalKind::UnknownExec, .. })));
    assert!(matches!(agent.exec(sh("Bad", "true")), Err(AgentError::Spec(_))));
    let long = ExecSpec::command("long", vec!["x".repeat(2_000_000)]);
    assert!(matches!(agent.exec(long), Err(AgentError::TooLong(_))));
    let long = ExecSpec::command("long", vec!["echo".into(), "x".repeat(120_000)]);
    assert_eq!(run(&agent, long, b"").stdout.len(), 120_001);
}

trait CloneAs {
    fn clone_as(&self, program: &str) -> ExecSpec;
}

impl CloneAs for ExecSpec {
    fn clone_as(&self, program: &str) -> ExecSpec {
        ExecSpec::command(self.id.clone(), vec![program.into()])
    }
}

#[test]
fn what_nobody_wants_to_hear_is_dropped_until_it_ends() {
    let machine = Machine::start();
    let agent = machine.agent();
    drop(agent.exec(sh("a", "head -c 5000000 /dev/zero; touch /tmp/ended")).unwrap());
    let deadline = Instant::now() + Duration::from_secs(10);
    while !machine.root.join("tmp/ended").exists() {
        assert!(Instant::now() < deadline, "it is blocked on its output");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_power_off_lets_the_workload_finish() {
    let mut machine = Machine::start();
    let agent = machine.agent();
    agent.sync().unwrap();
    let exec = agent.exec(sh("a", "trap 'echo bye; exit 3' TERM; echo ready; while :; do sleep 0.01; done")).unwrap();
    let stubborn = agent.exec(sh("b", "trap '' TERM; while :; do sleep 0.01; done")).unwrap();
    thread::sleep(Duration::from_millis(300));
    thread::scope(|scope| {
        let output = scope.spawn(|| {
            let mut out = Vec::new();
            exec.copy_stdout(&mut out).unwrap();
            out
        });
        agent.poweroff(Duration::from_secs(2)).unwrap();
        assert!(matches!(agent.exec(sh("c", "true")), Err(AgentError::Refused { kind: RefusalKind::Stopping, .. })));
        assert_eq!(exec.wait().unwrap(), ExitRecord::Exited { code: 3 });
        assert_eq!(output.join().unwrap(), b"ready\nbye\n");
    });
    let before = Instant::now();
    assert!(machine.child.wait().unwrap().success());
    assert!(before.elapsed() < Duration::from_secs(4));
    machine.dial.gone.store(true, Ordering::Relaxed);
    assert!(matches!(stubborn.wait(), Err(AgentError::Gone)), "a record that never came is no success");
}
