//! Commands about snapshots, and the machines that they are about, killed at any moment: what was reported as saved is there, nothing
//! half-made is taken for whole, and the next command works.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::cli::Bulkhead;
use crate::command::{Running, until};
use crate::live::{goes_on, sweeps};
use crate::processes::{self, Process};
use crate::{Test, host};

pub(crate) const TESTS: &[Test] = &[("deaths::at_any_moment_they_lose_nothing", at_any_moment_they_lose_nothing)];

/// What is under way when somebody dies. Those that begin with "snapshot" and have no run in them are the client's work alone.
const COMMANDS: [&[&str]; 9] = [
    &["snapshot", "create", "box"],
    &["snapshot", "create", "--stop", "box"],
    &["pause", "--save", "box"],
    &["pause", "box"],
    &["fork", "-q", "--name", "other", "box"],
    &["snapshot", "export", "base", "FILE"],
    &["snapshot", "import", "ARCHIVE"],
    &["snapshot", "flatten", "base"],
    &["snapshot", "rm", "spare"],
];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Victim {
    Client,
    Supervisor,
    Vmm,
    /// What writes the machine's memory, where there is such a process; else its VMM.
    Writer,
}

struct Random(u64);

impl Random {
    /// Below this.
    fn below(&mut self, end: usize) -> usize {
        // A linear congruential generator (Knuth's constants); its upper bits are the better ones.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

fn list(bulkhead: &Bulkhead) -> Vec<(String, String)> {
    let all: Value =
        serde_json::from_str(&bulkhead.output(&["snapshot", "list", "--format", "json"]).expect(0)).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    all.as_array().unwrap().iter().map(|one| (text(&one["id"]), text(&one["state"]))).collect()
}

/// Goes on from it, in a copy.
fn works(bulkhead: &Bulkhead, snapshot: &str) {
    let mut copy = bulkhead.start(&["fork", "-q", "--name", "check", snapshot]);
    copy.until_printed("\n");
    goes_on(&mut copy);
    bulkhead.output(&["rm", "-f", "check"]).expect(0);
    sweeps(&copy.finish().stdout);
}

fn at_any_moment_they_lose_nothing() {
    let (rounds, seed) =
        (if host::soak() { 200 } else { 2 }, std::env::var("SEED").map_or(1, |seed| seed.parse().unwrap()));
    let mut random = Random(seed);
    let bulkhead = Bulkhead::new();
    let archive = bulkhead.home().join("archive");
    let input = format!("{}:/", host::program("test/payload").display());
    let arguments = ["run", "--name", "box", "-m", "128M", "--input", &input, "busybox", "/payload", "stamp", "4"];
    let mut run = bulkhead.start(&arguments);
    run.until_printed("\n3\n");
    bulkhead.shell("box", "sync").expect(0);
    bulkhead.output(&["snapshot", "create", "--name", "base", "box"]).expect(0);
    bulkhead.output(&["rm", "-f", "box"]).expect(0);
    sweeps(&run.finish().stdout);
    bulkhead.output(&["snapshot", "export", "-q", "base", archive.to_str().unwrap()]).done();
    let base = list(&bulkhead)[0].0.clone();
    // How long each takes, as far as is known.
    let mut usual = [Duration::from_secs(4); COMMANDS.len()];
    for round in 1..=rounds {
        let which = random.below(COMMANDS.len());
        let alone = which >= 5;
        let victims = [Victim::Client, Victim::Supervisor, Victim::Vmm, Victim::Writer];
        let victim = if alone { Victim::Client } else { victims[random.below(victims.len())] };
        let delay = usual[which].mul_f64(random.below(1000) as f64 / 800.0);
        println!("round {round}: {:?}, {victim:?} killed after {delay:?}", COMMANDS[which]);
        one(&bulkhead, &archive, which, alone, victim, delay, &mut usual[which]);
        // Nothing of it is left running, and of what is listed all is whole, whether it was reported or not.
        bulkhead.output(&["rm", "-f", "box"]);
        bulkhead.output(&["rm", "-f", "other"]);
        processes::none_left(&bulkhead);
        assert!(bulkhead.runs().is_empty(), "{:?}", bulkhead.runs());
        for (id, state) in list(&bulkhead).into_iter().filter(|(id, _)| *id != base) {
            println!("  {id} is {state}");
            bulkhead.output(&["snapshot", "verify", "-q", &id]).done();
            bulkhead.output(&["snapshot", "rm", "-q", &id]).done();
        }
    }
    bulkhead.output(&["snapshot", "verify", "-q", "base"]).done();
    works(&bulkhead, "base");
    bulkhead.output(&["snapshot", "rm", "-q", "base"]).done();
    let left: Vec<_> =
        std::fs::read_dir(bulkhead.home().join("snapshots")).unwrap().map(|one| one.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name.to_str().unwrap().starts_with('.') || name == "names"), "{left:?}");
}

fn one(
    bulkhead: &Bulkhead,
    archive: &Path,
    which: usize,
    alone: bool,
    victim: Victim,
    delay: Duration,
    usual: &mut Duration,
) {
    let before = list(bulkhead);
    let mut run = (!alone).then(|| {
        let mut run = bulkhead.start(&["fork", "-q", "--name", "box", "base"]);
        run.until_printed("\n");
        run
    });
    if COMMANDS[which].contains(&"spare") {
        bulkhead.output(&["snapshot", "flatten", "-q", "base"]).done();
    }
    let spare = list(bulkhead).into_iter().find(|one| !before.contains(one)).map_or(String::new(), |(id, _)| id);
    let file = bulkhead.home().join("exported");
    let _ = std::fs::remove_file(&file);
    let words = COMMANDS[which].iter().map(|word| match *word {
        "FILE" => file.to_str().unwrap(),
        "ARCHIVE" => archive.to_str().unwrap(),
        "spare" => &spare,
        word => word,
    });
    let words: Vec<&str> = words.collect();
    let (supervisor, vmm) = match &run {
        Some(_) => (Some(processes::supervisor(bulkhead)), Some(processes::vmm(bulkhead))),
        None => (None, None),
    };

    let began = Instant::now();
    let mut command = bulkhead.start(&words);
    let is_fork = words[0] == "fork";
    let mut took = None;
    while began.elapsed() < delay && took.is_none() {
        std::thread::sleep(Duration::from_millis(5));
        let done = if is_fork { command.printed().contains('\n') } else { command.has_ended() };
        took = done.then(|| began.elapsed());
    }
    *usual = took.unwrap_or(usual.mul_f64(1.1));
    let doomed = match victim {
        Victim::Client => None,
        Victim::Supervisor => supervisor,
        Victim::Vmm => vmm.clone(),
        Victim::Writer => vmm.clone().map(writer),
    };
    match &doomed {
        Some(process) => process.kill(),
        None if command.has_ended() => {}
        None => command.signal(Signal::KILL),
    }
    // A copy goes on for as long as its client: what becomes of its run is not what this is about.
    if is_fork && !command.has_ended() {
        until("the copy", || command.has_ended() || command.printed().contains('\n'));
        bulkhead.output(&["rm", "-f", "other"]);
    }
    let ended = command.finish();

    // What was reported is there, and works.
    let said = format!("{}{}", ended.stdout, ended.stderr);
    let reported = said
        .split(|c: char| !c.is_ascii_hexdigit())
        .find(|word| list(bulkhead).iter().any(|(id, _)| id == word) && !before.iter().any(|(id, _)| id == word));
    let makes =
        ended.code == 0 && matches!(words[..2], ["snapshot", "create" | "flatten" | "import"] | ["pause", "--save"]);
    assert!(!makes || reported.is_some(), "{ended:?}");
    for (id, state) in list(bulkhead) {
        let known = before.iter().find(|(known, _)| *known == id).map(|(_, state)| state);
        assert!(known.is_none_or(|known| *known == state), "{id} is {state}");
    }
    if let (Some(id), true) = (reported, makes) {
        works(bulkhead, id);
    }
    if words[1] == "export" && ended.code == 0 {
        bulkhead.output(&["snapshot", "import", "-q", file.to_str().unwrap()]).done();
    } else if words[1] == "export" {
        // What has its name is whole.
        assert!(!file.exists() || bulkhead.output(&["snapshot", "import", "-q", file.to_str().unwrap()]).code == 0);
    }
    if words[1] == "rm" && ended.code == 0 {
        assert!(!list(bulkhead).iter().any(|(id, _)| *id == spare));
    }
    if let Some(run) = run.take() {
        // The machine outlives what writes it, and whoever asks for that.
        let survives =
            doomed.is_none_or(|process| victim == Victim::Writer && Some(process.pid) != vmm.map(|vmm| vmm.pid));
        aftermath(bulkhead, run, words[0] == "pause", survives);
    }
}

/// The run goes on, or can.
fn aftermath(bulkhead: &Bulkhead, mut run: Running, pauses: bool, survives: bool) {
    if survives {
        // One that may be paused, or about to be, is removed as it is.
        if !pauses {
            goes_on(&mut run);
        }
        return;
    }
    // Saved and gone before, or killed.
    let ended = run.finish();
    assert_ne!(ended.code, 0, "{ended:?}");
    sweeps(&ended.stdout);
    let inspected: Value = serde_json::from_str(&bulkhead.output(&["inspect", "box"]).expect(0)).unwrap();
    let saved = inspected[0]["saved"].is_string();
    let arguments: &[&str] = if saved { &["resume", "-q", "box"] } else { &["resume", "-q", "--cold", "box"] };
    let mut next = bulkhead.start(arguments);
    next.until_printed("\n");
    goes_on(&mut next);
    bulkhead.output(&["rm", "-f", "box"]).expect(0);
    sweeps(&next.finish().stdout);
}

fn writer(mut vmm: Process) -> Process {
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", vmm.pid)).unwrap_or_default();
    let pid = children.split_whitespace().next().and_then(|pid| pid.parse().ok());
    vmm.pid = pid.unwrap_or(vmm.pid);
    vmm
}
