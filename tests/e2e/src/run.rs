//! `bulkhead run`, `exec` and `list` as people use them.

use std::process::Stdio;

use rustix::process::Signal;

use crate::Test;
use crate::cli::Bulkhead;
use crate::command::{Running, code, output, until};
use crate::processes;

pub(crate) const TESTS: &[Test] = &[
    ("run::a_command_runs_and_its_status_comes_back", a_command_runs_and_its_status_comes_back),
    ("run::piped_input_ends", piped_input_ends),
    ("run::commands_share_a_running_run", commands_share_a_running_run),
    ("run::a_command_gets_what_was_asked_for", a_command_gets_what_was_asked_for),
    ("run::the_machine_is_as_large_as_asked", the_machine_is_as_large_as_asked),
    ("run::streams_stay_apart_and_complete", streams_stay_apart_and_complete),
    ("run::a_timeout_ends_the_run", a_timeout_ends_the_run),
    ("run::signals_reach_the_command", signals_reach_the_command),
    ("run::twenty_machines_run_at_once", twenty_machines_run_at_once),
];

/// The table of docs/cli.md: what a command comes to is the client's exit status, by `run` and by `exec` alike.
fn a_command_runs_and_its_status_comes_back() {
    let bulkhead = Bulkhead::new();
    let _resident = bulkhead.reside("box", &[]);
    fn sh(script: &str) -> Vec<&str> {
        vec!["sh", "-c", script]
    }
    for (command, code, said) in [
        (sh("exit 0"), 0, ""),
        (sh("exit 7"), 7, ""),
        (sh("exit 255"), 255, ""),
        (sh("kill -1 $$"), 129, ""),
        (sh("kill -9 $$"), 137, ""),
        (sh("kill -15 $$"), 143, ""),
        (sh("kill -11 $$"), 139, ""),
        (vec!["no-such-command"], 127, "bulkhead: \"no-such-command\": not found in the image\n"),
        (vec!["/no/such"], 127, "bulkhead: \"/no/such\": not found in the image\n"),
        (vec!["/etc/passwd"], 126, "bulkhead: \"/etc/passwd\": cannot be executed: "),
        (vec!["/etc"], 126, "bulkhead: \"/etc\": cannot be executed: "),
        // A kernel that has found itself at fault ends, where it would else leave a run that hangs.
        (sh("exit $(cat /proc/sys/kernel/panic_on_oops)"), 1, ""),
    ] {
        let output = bulkhead.output(&[&["exec", "box"], &command[..]].concat());
        assert_eq!((output.code, output.stdout.as_str()), (code, ""), "{command:?}: {output:?}");
        assert!(
            output.stderr.starts_with(said) && output.stderr.is_empty() == said.is_empty(),
            "{command:?}: {output:?}"
        );
    }
    for (options, command, code, said) in [
        (&[][..], vec!["echo", "hello"], 0, ""),
        (&[], sh("exit 7"), 7, ""),
        (&[], sh("kill -9 $$"), 137, ""),
        (&[], vec!["no-such-command"], 127, "bulkhead: \"no-such-command\": not found in the image\n"),
        (&["--timeout", "500ms"], sh("exit $(sleep 1000)"), 124, ": ended after 500ms (--timeout)\n"),
        (
            &["-m", "96M"],
            vec!["tail", "/dev/zero"],
            137,
            "bulkhead: \"tail\": killed: out of memory in the guest; give the run more with -m\n",
        ),
        (&["--kernel", "none"], vec!["true"], 125, "bulkhead: cannot start run: kernel \"none\": not found"),
    ] {
        let output = bulkhead.output(&[&["run"], options, &["busybox"], &command[..]].concat());
        assert_eq!((output.code, output.stdout == "hello\n"), (code, code == 0), "{command:?}: {output:?}");
        assert!(output.stderr.contains(said) && output.stderr.is_empty() == said.is_empty(), "{command:?}: {output:?}");
    }
    assert_eq!(bulkhead.runs().len(), 1, "a run without a name leaves nothing");
}

fn piped_input_ends() {
    let bulkhead = Bulkhead::new();
    let resident = bulkhead.reside("box", &[]);
    assert_eq!(bulkhead.with_input(&["exec", "-i", "box", "cat"], b"one\ntwo").expect(0), "one\ntwo");
    drop(resident);
    let large: Vec<u8> = (0..300_000).flat_map(|n| format!("{n}\n").into_bytes()).collect();
    let sum = bulkhead.with_input(&["run", "-i", "busybox", "md5sum"], &large).expect(0);
    let own = output(&mut std::process::Command::new("md5sum"), &large).expect(0);
    assert_eq!(sum, own);
}

/// Given a running run, other commands run in it, find it by id, by a beginning of its id and by name, and see each
/// other; when it has ended, they are told so.
fn commands_share_a_running_run() {
    let bulkhead = Bulkhead::new();
    let resident = bulkhead.reside("box", &[]);

    // One machine: the same processes, the same files.
    assert_eq!(bulkhead.shell("box", "echo shared > /tmp/file").expect(0), "");
    assert_eq!(bulkhead.shell("box", "cat /tmp/file; hostname").expect(0), "shared\nbox\n");
    let mut other = bulkhead.start(&["exec", "box", "sh", "-c", "echo here; exec sleep 100001"]);
    other.until_printed("here");
    let seen = bulkhead.shell("box", "ps").expect(0);
    assert!(seen.contains("sleep 100000") && seen.contains("sleep 100001"), "{seen}");
    // The workload's own PID 1 is a copy of the agent, and says so; the agent itself is out of sight.
    assert_eq!((seen.matches("/init").count(), seen.matches("{bulkhead-init} /init").count()), (1, 1), "{seen}");

    let id = bulkhead.output(&["list", "-q"]).expect(0).trim().to_owned();
    assert_eq!(id.len(), 8, "{id:?}");
    for run in [&id, &id[..4], "box"] {
        assert_eq!(bulkhead.output(&["exec", run, "cat", "/tmp/file"]).expect(0), "shared\n");
    }
    let table = bulkhead.output(&["list"]).expect(0);
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["ID", "NAME", "IMAGE", "STATE", "AGE", "CPU", "MEM"]);
    assert_eq!((&lines[1][..4], &lines[1][5..]), (&[&id, "box", "busybox", "running"][..], &["1", "1.0", "GiB"][..]));
    let all: serde_json::Value =
        serde_json::from_str(&bulkhead.output(&["list", "--format", "json"]).expect(0)).unwrap();
    assert_eq!((&all[0]["id"], &all[0]["state"]), (&id.as_str().into(), &"running".into()), "{all}");
    let taken = bulkhead.output(&["run", "--name", "box", "busybox", "true"]).refused(125);
    assert!(taken.contains("name \"box\"") && taken.contains(&id), "{taken}");

    // A client that goes away takes its own command along, and no other.
    drop(other);
    until("the end of the other command", || !bulkhead.shell("box", "ps").stdout.contains("sleep 100001"));

    resident.signal(Signal::TERM);
    assert_eq!(resident.finish().code, 143);
    let refused = bulkhead.output(&["exec", "box", "true"]).refused(125);
    assert_eq!(refused, format!("bulkhead: run {id}: not running; its state is stopped\n"));
    let refused = bulkhead.output(&["exec", "bx", "true"]).refused(125);
    assert_eq!(refused, "bulkhead: run \"bx\": there is none with this id or name; bulkhead list -a shows all\n");
    assert_eq!(bulkhead.output(&["list", "-q"]).expect(0), "");
    let all = bulkhead.output(&["list", "-a"]).expect(0);
    assert!(all.lines().nth(1).unwrap().contains("box   busybox  stopped (killed by signal 15)  "), "{all}");
}

/// Environment, directory and user: by `run`, then changed by `exec`, then wrong ones.
fn a_command_gets_what_was_asked_for() {
    let bulkhead = Bulkhead::new();
    let show = "echo $(pwd) $(id -u):$(id -g); exec env";
    let asked = ["-e", "A=1", "-e", "B=x y=z", "-w", "/made/for/it", "-u", "user", "--name", "box"];
    let script = format!("({show}); exec sleep 100000");
    let mut command = bulkhead.command(&[&["run"], &asked[..], &["busybox", "sh", "-c", &script]].concat());
    // What is set here and not asked for stays here.
    let mut resident = Running::start(command.env("SECRET", "of the host").env("TERM", "vt100"));
    const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let lines = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        // What the shell itself adds.
        lines.retain(|line| !["SHLVL=", "PWD=", "OLDPWD=", "_="].iter().any(|own| line.starts_with(own)));
        lines[1..].sort();
        lines
    };
    resident.until_printed("HOSTNAME=");
    until("all variables", || resident.printed().lines().count() >= 7);
    let shown = lines(&resident.printed());
    assert_eq!(shown, ["/made/for/it 1000:1000", "A=1", "B=x y=z", "HOME=/home/user", "HOSTNAME=box", PATH]);

    // Another command has the same, but for what it asks for; -e NAME passes ours on, and is nothing if there is none.
    let asked = ["-e", "A=2", "-e", "HERE", "-e", "ABSENT", "-w", "/", "-u", "0:1000"];
    let mut command = bulkhead.command(&[&["exec"], &asked[..], &["box", "sh", "-c", show]].concat());
    let shown = output(command.env("HERE", "passed on"), b"").expect(0);
    assert_eq!(lines(&shown), ["/ 0:1000", "A=2", "B=x y=z", "HERE=passed on", "HOME=/root", "HOSTNAME=box", PATH]);
    let by_number = bulkhead.output(&["exec", "-u", "4242:77", "box", "sh", "-c", "id -u; id -g; echo $HOME"]);
    assert_eq!(by_number.expect(0), "4242\n77\n/\n");

    for (option, value, why) in [
        ("-u", "nobody-of-this-name", "user \"nobody-of-this-name\": not in the image's /etc/passwd"),
        ("-u", "user:no-group", "group \"no-group\": not in the image's /etc/group"),
        ("-w", "/etc/passwd/x", "working directory \"/etc/passwd/x\": "),
    ] {
        let refused = bulkhead.output(&["exec", option, value, "box", "true"]).refused(125);
        assert!(refused.starts_with("bulkhead: \"true\": cannot be started: "), "{refused}");
        assert!(refused.contains(why) && refused.lines().count() == 1, "{refused}");
    }
}

fn the_machine_is_as_large_as_asked() {
    let bulkhead = Bulkhead::new();
    let script = "nproc; grep MemTotal /proc/meminfo; cat /sys/block/vda/size; df -k / | tail -1";
    let asked = ["run", "--cpus", "3", "-m", "400M", "--disk", "1G", "busybox", "sh", "-c", script];
    let shown = bulkhead.output(&asked).expect(0);
    let numbers: Vec<u64> = shown.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [cpus, memory, sectors, file_system, ..] = numbers[..] else { panic!("{shown}") };
    assert_eq!((cpus, sectors), (3, (1 << 30) / 512), "{shown}");
    // The kernel keeps some of the memory for itself, and the file system some of the disk.
    assert!((330 << 10..400 << 10).contains(&memory), "{shown}");
    assert!((900 << 10..1 << 20).contains(&file_system), "the file system grows to the disk's size: {shown}");
}

fn streams_stay_apart_and_complete() {
    let bulkhead = Bulkhead::new();
    let _resident = bulkhead.reside("box", &[]);

    let script = "for n in $(seq 5000); do echo out $n; echo err $n >&2; done";
    let both = bulkhead.shell("box", script);
    let expected = |word: &str| (1..=5_000).map(|n| format!("{word} {n}\n")).collect::<String>();
    assert!(both.stdout == expected("out"), "standard output: {} bytes", both.stdout.len());
    assert!(both.stderr == expected("err"), "standard error: {} bytes", both.stderr.len());
    // Bytes are bytes.
    let sum = bulkhead
        .shell("box", "i=0; while [ $i -lt 256 ]; do printf \"\\\\$(printf %o $i)\"; i=$((i+1)); done | md5sum");
    assert_eq!(sum.expect(0), "e2c865db4162bed963bfaa9ef6ac18f0  -\n");

    // Without -i nothing of the input is read, by the command or by the client.
    assert_eq!(bulkhead.with_input(&["exec", "box", "cat"], b"not for it").expect(0), "");

    // A child that is left behind with the output open holds nobody up.
    assert_eq!(bulkhead.shell("box", "sleep 100002 & echo done").expect(0), "done\n");

    // A reader that has gone is no error, and ends the command.
    let mut child = bulkhead
        .command(&["exec", "box", "sh", "-c", "exec yes this-is-for-nobody"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 5];
    std::io::Read::read_exact(&mut child.stdout.take().unwrap(), &mut first).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!((code(ended.status), &first, ended.stderr.as_slice()), (141, b"this-", &b""[..]));
    until("the end of its command", || !bulkhead.shell("box", "ps").stdout.contains("this-is-for-nobody"));
}

/// The time counts from the command's start, however long the boot took, and what was printed until then arrives.
fn a_timeout_ends_the_run() {
    let bulkhead = Bulkhead::new();
    let asked = ["run", "--timeout", "1s500ms", "--name", "box", "busybox", "sh", "-c", "echo started; sleep 100000"];
    let ended = bulkhead.output(&asked);
    let id = bulkhead.runs()[0].file_name().unwrap().to_string_lossy().into_owned();
    assert_eq!((ended.code, ended.stdout.as_str()), (124, "started\n"), "{ended:?}");
    assert_eq!(ended.stderr, format!("bulkhead: run {id}: ended after 1s500ms (--timeout)\n"));
    let all = bulkhead.output(&["list", "-a"]).expect(0);
    assert!(all.contains("stopped (timeout after 1s500ms)"), "{all}");
    processes::none_left(&bulkhead);
}

fn signals_reach_the_command() {
    let bulkhead = Bulkhead::new();
    let script = "trap 'echo got INT' INT; trap 'echo got TERM; exit 5' TERM; echo ready; while :; do sleep 0.1; done";
    let mut running = bulkhead.start(&["run", "busybox", "sh", "-c", script]);
    running.until_printed("ready\n");
    running.signal(Signal::INT);
    running.until_printed("got INT\n");
    running.signal(Signal::TERM);
    assert_eq!(running.finish().expect(5), "ready\ngot INT\ngot TERM\n");
}

fn twenty_machines_run_at_once() {
    let bulkhead = Bulkhead::new();
    let runs: Vec<_> = (0..20)
        .map(|n| {
            let script = format!("echo machine {n}; head -c 100000 /dev/zero | md5sum; exit {n}");
            bulkhead.start(&["run", "-m", "128M", "busybox", "sh", "-c", &script])
        })
        .collect();
    for (n, run) in runs.into_iter().enumerate() {
        let code = i32::try_from(n).unwrap();
        assert_eq!(run.finish().expect(code), format!("machine {n}\n0019d23bef56a136a1891211d7007f6f  -\n"));
    }
    assert!(bulkhead.runs().is_empty());
    processes::none_left(&bulkhead);
}
