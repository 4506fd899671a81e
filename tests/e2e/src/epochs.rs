//! Runs that stand still, are saved, go on, and are copied: with the commands that people use.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use serde_json::Value;

use crate::cli::Bulkhead;
use crate::command::until;
use crate::{Test, host};

pub(crate) const TESTS: &[Test] = &[
    ("epochs::a_paused_run_stands_still_and_goes_on", a_paused_run_stands_still_and_goes_on),
    ("epochs::a_saved_run_goes_on_exactly_where_it_was", a_saved_run_goes_on_exactly_where_it_was),
    ("epochs::what_is_damaged_is_named_and_what_is_good_goes_on", what_is_damaged_is_named_and_what_is_good_goes_on),
    ("epochs::copies_differ_in_all_that_must_not_be_twice", copies_differ_in_all_that_must_not_be_twice),
];

/// Counts on standard output, so that a byte that is lost or doubled shows; and has state in memory, in a file that is open,
/// on a disk and in a timer.
const COUNTER: &str = "exec 5>/open; echo disk >/file; echo memory >/dev/shm/file; i=0; \
                       while :; do i=$((i+1)); echo $i; echo $i >&5; sleep 0.1; done";

fn state(bulkhead: &Bulkhead, name: &str) -> Value {
    let inspected: Value = serde_json::from_str(&bulkhead.output(&["inspect", name]).expect(0)).unwrap();
    inspected[0].clone()
}

/// Whether these are all numbers from 1 on.
fn complete(printed: &str) -> Result<u64, String> {
    let mut last = 0;
    // The last line may be cut.
    let whole = printed.rfind('\n').map_or("", |end| &printed[..end]);
    for line in whole.lines() {
        if line.parse() != Ok(last + 1) {
            return Err(format!("{line:?} follows {last}"));
        }
        last += 1;
    }
    Ok(last)
}

fn a_paused_run_stands_still_and_goes_on() {
    let bulkhead = Bulkhead::new();
    let mut run = bulkhead.start(&["run", "--name", "box", "-m", "256M", "busybox", "sh", "-c", COUNTER]);
    run.until_printed("3\n");
    // Paused, it does nothing, and says so.
    assert!(bulkhead.output(&["pause", "box"]).done().stderr.contains(": paused"));
    assert_eq!(state(&bulkhead, "box")["state"], "paused");
    let before = run.printed();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(run.printed(), before);
    let refused = bulkhead.shell("box", "true").refused(125);
    assert!(refused.contains("it is paused; bulkhead resume"), "{refused}");
    assert!(bulkhead.output(&["pause", "box"]).refused(125).contains("it is paused already"));

    // It goes on, in another epoch, with a clock that is right.
    assert!(bulkhead.output(&["resume", "box"]).done().stderr.contains(": running"));
    let after = complete(&before).unwrap() + 3;
    run.until_printed(&format!("\n{after}\n"));
    let said = bulkhead.shell("box", "cat /dev/bulkhead/epoch; date +%s").expect(0);
    let (epoch, clock) = said.trim_end().split_once('\n').unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    assert!(epoch == "2" && now.abs_diff(clock.parse().unwrap()) <= 1, "{said} at {now}");
    assert!(bulkhead.output(&["resume", "box"]).refused(125).contains("it is not paused"));

    // A process that waits in the kernel cannot be stopped: it is named, and the run goes on.
    bulkhead.shell("box", "fsfreeze --freeze / && { touch /new & } ; sleep 1").expect(0);
    let refused = bulkhead.output(&["pause", "box"]).refused(125);
    assert!(refused.contains("process ") && refused.contains(" does not stop; it waits in the kernel"), "{refused}");
    bulkhead.shell("box", "fsfreeze --unfreeze /").expect(0);
    assert_eq!(state(&bulkhead, "box")["state"], "running");

    // Removed while it stands still, nothing is left.
    bulkhead.output(&["pause", "box"]).done();
    bulkhead.output(&["rm", "-f", "box"]).expect(0);
    run.finish();
    assert!(bulkhead.runs().is_empty());
}

fn a_saved_run_goes_on_exactly_where_it_was() {
    let bulkhead = Bulkhead::new();
    let mut run = bulkhead.start(&["run", "--name", "box", "-m", "256M", "busybox", "sh", "-c", COUNTER]);
    run.until_printed("3\n");
    let mut whole = String::new();
    let generations = if host::soak() { 10 } else { 2 };
    for generation in 1..=generations {
        // Saved, its processes are gone, and its client says what goes on.
        bulkhead.output(&["pause", "--save", "box"]).done();
        let output = run.finish();
        assert!(output.code == 125 && output.stderr.contains("bulkhead resume"), "{output:?}");
        whole.push_str(&output.stdout);
        let saved = state(&bulkhead, "box");
        assert_eq!(saved["state"], "paused", "{saved}");
        bulkhead.output(&["snapshot", "verify", saved["saved"].as_str().unwrap()]).done();
        // Resumed, not a byte is lost or doubled.
        run = bulkhead.start(&["resume", "-q", "box"]);
        let next = complete(&whole).unwrap_or_else(|error| panic!("generation {generation}: {error}")) + 2;
        run.until_printed(&format!("{next}\n"));
        assert_eq!(bulkhead.shell("box", "cat /file /dev/shm/file").expect(0), "disk\nmemory\n");
    }
    bulkhead.output(&["rm", "-f", "box"]).expect(0);
    whole.push_str(&run.finish().stdout);
    assert!(complete(&whole).unwrap() >= 7, "{whole}");
    for snapshot in bulkhead.output(&["snapshot", "list", "-q"]).expect(0).lines().rev() {
        bulkhead.output(&["snapshot", "rm", snapshot]).done();
    }
    assert!(bulkhead.runs().is_empty());
}

fn copies_differ_in_all_that_must_not_be_twice() {
    let bulkhead = Bulkhead::new();
    // Beside the counter, a process with a random generator of its own, which answers whoever asks.
    let own_generator = "mkfifo /dev/shm/ask /dev/shm/tell; (n=7; while :; do read x </dev/shm/ask; \
                         n=$(((n * 1103515245 + 12345) % 2147483648)); echo $n >/dev/shm/tell; done) & ";
    let script = format!("{own_generator}{COUNTER}");
    let mut run = bulkhead.start(&["run", "--name", "box", "-m", "256M", "busybox", "sh", "-c", &script]);
    run.until_printed("3\n");
    bulkhead.shell("box", "echo 0123456789abcdef0123456789abcdef >/etc/machine-id").expect(0);
    // A snapshot leaves the run running.
    let snapshot = bulkhead.output(&["snapshot", "create", "box"]).expect(0).trim_end().to_owned();
    let at = complete(&run.printed()).unwrap();
    run.until_printed(&format!("\n{}\n", at + 3));
    // Copies of it, all at once.
    let number = if host::soak() { 16 } else { 4 };
    let mut copies = bulkhead.start(&["fork", "-n", &number.to_string(), "--name", "copy", &snapshot]);
    let names: Vec<String> = (1..=number).map(|n| format!("copy-{n}")).collect();
    let runs = |name: &String| state(&bulkhead, name)["state"] == "running";
    until("the copies", || bulkhead.runs().len() > number && names.iter().all(runs));
    for name in &names {
        let (own, rest) = guest_memory(&state(&bulkhead, name));
        println!("{name}: {own} KiB of the guest's memory are its own, {rest} KiB are its VMM's");
        assert!(own <= 4096 && rest <= 6144, "{name}: {own} KiB, {rest} KiB");
    }
    let script = "hostname; cat /etc/machine-id /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | md5sum; date +%s; \
                  cat /dev/bulkhead/epoch; echo >/dev/shm/ask; cat /dev/shm/tell";
    let (mut seen, mut of_their_own) = (BTreeSet::new(), BTreeSet::new());
    for name in &names {
        let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        let asked = now();
        let said = bulkhead.shell(name, script).expect(0);
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!((lines.len(), lines[0]), (7, name.as_str()), "{said}");
        let (clock, answered) = (lines[4].parse::<u64>().unwrap(), now());
        assert!(asked <= clock + 1 && clock <= answered + 1, "{said} between {asked} and {answered}");
        for line in &lines[..4] {
            assert!(seen.insert((*line).to_owned()), "{line} is there twice");
        }
        // What a process drew from the kernel before, it has in each copy, and goes on from: nobody can reseed it. It can
        // see that it is in another epoch.
        assert_eq!(lines[5], "2", "{said}");
        of_their_own.insert(lines[6].to_owned());
        assert_eq!(bulkhead.shell(name, "cat /file /dev/shm/file").expect(0), "disk\nmemory\n");
    }
    assert_eq!(of_their_own.len(), 1, "{of_their_own:?}");
    // What one of them writes, no other sees.
    bulkhead.shell("copy-1", "echo mine >/file").expect(0);
    assert_eq!(bulkhead.shell("copy-2", "cat /file").expect(0), "disk\n");
    // What they stand on is not removed.
    let refused = bulkhead.output(&["snapshot", "rm", &snapshot]).refused(125);
    assert!(refused.contains("run"), "{refused}");
    for name in names.iter().map(String::as_str).chain(["box"]) {
        bulkhead.output(&["rm", "-f", name]).expect(0);
    }
    assert!(!copies.has_ended() || copies.finish().code == 125);
    run.finish();
    bulkhead.output(&["snapshot", "rm", &snapshot]).done();
    let left = fs::read_dir(bulkhead.home().join("snapshots")).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(left.into_iter().all(|name| name.to_string_lossy().starts_with('.')));
}

/// Of a run's VMM: KiB of guest memory that only it has, and KiB of everything else that is resident.
fn guest_memory(run: &Value) -> (u64, u64) {
    let vmm = run["processes"].as_array().unwrap().iter().find(|process| process["program"] == "bulkhead-vmm").unwrap();
    let maps = fs::read_to_string(format!("/proc/{}/smaps", vmm["pid"])).unwrap();
    let (mut own, mut rest, mut guest) = (0, 0, false);
    for line in maps.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = || words[1].parse::<u64>().unwrap();
        match words[0] {
            // Its memory is a private mapping of the snapshot's file, and where that has a large hole, of nothing.
            range if range.contains('-') && !range.ends_with(':') => {
                let (from, to) = range.split_once('-').unwrap();
                let size = u64::from_str_radix(to, 16).unwrap() - u64::from_str_radix(from, 16).unwrap();
                guest =
                    words.get(5).is_some_and(|path| path.ends_with("/memory")) || words.len() == 5 && size >= 2 << 20;
            }
            "Private_Dirty:" if guest => own += number(),
            "Rss:" if !guest => rest += number(),
            _ => {}
        }
    }
    (own, rest)
}

fn what_is_damaged_is_named_and_what_is_good_goes_on() {
    let bulkhead = Bulkhead::new();
    let mut run = bulkhead.start(&["run", "--name", "box", "-m", "128M", "busybox", "sh", "-c", COUNTER]);
    run.until_printed("3\n");
    bulkhead.output(&["pause", "--save", "--name", "first", "box"]).done();
    run.finish();

    // A command of its own runs in a copy of the machine.
    let said = bulkhead.output(&["run", "--from", "first", "--rm", "--", "sh", "-c", "cat /dev/shm/file; exit 7"]);
    assert_eq!((said.stdout.as_str(), said.code), ("memory\n", 7), "{said:?}");

    // One byte of the memory is another: nothing starts, and the error names snapshot, file and place.
    let snapshots = bulkhead.home().join("snapshots");
    let saved = state(&bulkhead, "box")["saved"].as_str().unwrap().to_owned();
    let memory = snapshots.join(&saved).join("memory");
    let at = fs::metadata(&memory).unwrap().len() / 2;
    let file = fs::OpenOptions::new().write(true).open(&memory).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"damaged", at).unwrap();
    for command in [&["resume", "box"][..], &["fork", "first"], &["run", "--from", "first"]] {
        let refused = bulkhead.output(command).refused(125);
        assert!(refused.contains(&saved) && refused.contains("memory: what lies in the 4194304 bytes"), "{refused}");
    }
    assert_eq!(state(&bulkhead, "box")["state"], "paused");
    let refused = bulkhead.output(&["resume", "--fallback=parent", "box"]).refused(125);
    assert!(refused.contains("there is no snapshot before it"), "{refused}");
    // What is good goes on: the disk.
    let mut run = bulkhead.start(&["resume", "--fallback=disk", "box"]);
    run.until_printed("3\n");
    assert_eq!(bulkhead.shell("box", "cat /file; ls /dev/shm").expect(0), "disk\nfile\n");
    assert_eq!(bulkhead.shell("box", "cat /dev/bulkhead/epoch").expect(0), "2\n");
    let events = fs::read_to_string(state(&bulkhead, "box")["events"].as_str().unwrap()).unwrap();
    assert!(events.contains("\"event\":\"snapshot.fallback\""), "{events}");

    // Its supervisor killed, it is no run that goes on, but one that boots again.
    bulkhead.output(&["pause", "--save", "box"]).done();
    run.finish();
    let second = state(&bulkhead, "box")["saved"].as_str().unwrap().to_owned();
    fs::remove_file(snapshots.join(&second).join("state")).unwrap();
    let refused = bulkhead.output(&["resume", "box"]).refused(125);
    assert!(refused.contains(&second) && refused.contains("state: it is not there"), "{refused}");
    let mut run = bulkhead.start(&["resume", "--cold", "box"]);
    run.until_printed("3\n");
    bulkhead.output(&["rm", "-f", "box"]).expect(0);
    run.finish();
    assert!(bulkhead.runs().is_empty());
}
