//! Snapshots of machines that go on while their memory is written.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::mount::{MountFlags, mount};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use snapshot::disk::create_layer;
use vmm_control::{Event, Request};

use crate::cli::Bulkhead;
use crate::command::{Running, until};
use crate::guest::{Guest, Recipe};
use crate::machine::{check_file_system, flatten};
use crate::processes::{self, stopped_writer};
use crate::pty::Session;
use crate::refusals::private_mounts;
use crate::{Test, host};

pub(crate) const TESTS: &[Test] = &[
    ("live::a_snapshot_is_of_one_moment_while_its_run_goes_on", a_snapshot_is_of_one_moment_while_its_run_goes_on),
    ("live::a_snapshot_whose_writer_is_killed_fails_alone", a_snapshot_whose_writer_is_killed_fails_alone),
    ("live::a_machine_is_saved_while_it_goes_on", a_machine_is_saved_while_it_goes_on),
];

/// Starts a run that stamps memory and disk (tests/payload/src/stamp.rs): each number that it prints is one more than the one
/// before, and it ends if what it stamped last is not what it finds.
fn stamping(bulkhead: &Bulkhead) -> Running {
    let payload = host::program("test/payload");
    let input = format!("{}:/", payload.display());
    let arguments = ["run", "--name", "box", "-m", "256M", "--input", &input, "busybox", "/payload", "stamp", "16"];
    let mut run = bulkhead.start(&arguments);
    run.until_printed("\n3\n");
    // So that it can be run from what is on the disk.
    bulkhead.shell("box", "sync").expect(0);
    run
}

/// The numbers that it has printed.
pub(crate) fn sweeps(printed: &str) -> Vec<u64> {
    let whole = printed.rfind('\n').map_or("", |end| &printed[..end]);
    let sweeps: Vec<u64> = whole.lines().map(|line| line.parse().unwrap_or_else(|_| panic!("{line}"))).collect();
    assert!(sweeps.windows(2).all(|two| two[0] + 1 == two[1]), "{sweeps:?}");
    sweeps
}

/// Waits until it has got on.
pub(crate) fn goes_on(run: &mut Running) {
    let now = *sweeps(&run.printed()).last().unwrap();
    run.until_printed(&format!("\n{}\n", now + 2));
}

fn events(bulkhead: &Bulkhead) -> Vec<Value> {
    let log = bulkhead.runs()[0].join("events.jsonl");
    fs::read_to_string(log).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn find<'a>(events: &'a [Value], name: &str) -> Option<(usize, &'a Value)> {
    events.iter().enumerate().find(|(_, event)| event["event"] == name)
}

fn cgroup(bulkhead: &Bulkhead) -> PathBuf {
    let jail: Value = serde_json::from_slice(&fs::read(bulkhead.runs()[0].join("jail.json")).unwrap()).unwrap();
    jail["cgroup"].as_str().unwrap().into()
}

fn read(path: &Path, name: &str) -> String {
    fs::read_to_string(path.join(name)).unwrap().trim().to_owned()
}

fn a_snapshot_is_of_one_moment_while_its_run_goes_on() {
    let bulkhead = Bulkhead::new();
    let mut run = stamping(&bulkhead);
    let usual = read(&cgroup(&bulkhead), "memory.max");

    // While its memory is being written, and that cannot get on, the run does.
    let mut create = bulkhead.start(&["snapshot", "create", "--name", "first", "box"]);
    let writer = stopped_writer(&bulkhead);
    until("the guest's going on", || find(&events(&bulkhead), "snapshot.taken").is_some());
    goes_on(&mut run);
    assert_eq!(bulkhead.shell("box", "echo alive").expect(0), "alive\n");
    // What writes has nothing but three files, and the kernel kills it first.
    let process = |pid: i32| PathBuf::from(format!("/proc/{pid}"));
    let mut files = Vec::new();
    until("the end of its other descriptors", || {
        // It may have been caught before it did anything.
        writer.send(Signal::CONT);
        std::thread::sleep(Duration::from_millis(1));
        writer.send(Signal::STOP);
        let open = fs::read_dir(process(writer.pid).join("fd")).unwrap();
        files = open.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok()).collect();
        files.len() <= 3
    });
    let is = |name: &str| files.iter().any(|file| file.ends_with(name));
    assert!(is("state") && is("memory") && is("pagemap"), "{files:?}");
    let vmm = processes::vmm(&bulkhead).pid;
    assert_eq!([writer.pid, vmm].map(|pid| read(&process(pid), "oom_score_adj")), ["1000", "0"]);
    assert_eq!(read(&process(writer.pid), "cgroup"), read(&process(vmm), "cgroup"));
    let raised: u64 = read(&cgroup(&bulkhead), "memory.max").parse().unwrap();
    assert!(raised >= usual.parse::<u64>().unwrap() + (256 << 20), "{raised} {usual}");
    // There is no snapshot yet, and no second one at the same time.
    assert_eq!(bulkhead.output(&["snapshot", "list", "-q"]).expect(0), "");
    let refused = bulkhead.output(&["snapshot", "create", "box"]).refused(125);
    assert!(refused.contains("it is being paused, resumed or saved already"), "{refused}");
    assert!(!create.has_ended());

    writer.send(Signal::CONT);
    let id = create.finish().expect(0).trim_end().to_owned();
    let at = *sweeps(&run.printed()).last().unwrap();
    assert_eq!(read(&cgroup(&bulkhead), "memory.max"), usual);
    assert_eq!(read(&cgroup(&bulkhead), "memory.high"), "max");
    let log = events(&bulkhead);
    let (taken, published) = (find(&log, "snapshot.taken").unwrap(), find(&log, "snapshot.published").unwrap());
    println!("{}", taken.1["data"]);
    assert!(taken.0 < published.0 && taken.1["data"]["guest_stop_ns"]["fork"].as_u64().unwrap() > 0);
    goes_on(&mut run);

    // A copy of it goes on from that moment, with memory, disk and all else as they were: nothing of what came later is there.
    let mut copy = bulkhead.start(&["fork", "-q", "--name", "copy", "first"]);
    copy.until_printed("\n");
    let first = sweeps(&copy.printed())[0];
    assert!(first < at, "{first} {at}");
    goes_on(&mut copy);
    goes_on(&mut run);
    bulkhead.output(&["rm", "-f", "box"]).expect(0);
    sweeps(&run.finish().stdout);

    // A machine that goes on from an image is saved so as well: what it has not touched comes from there.
    let second = bulkhead.output(&["snapshot", "create", "copy"]).expect(0).trim_end().to_owned();
    // Standing still, it is saved with the same.
    let third = bulkhead.output(&["snapshot", "create", "--stop", "copy"]).expect(0).trim_end().to_owned();
    goes_on(&mut copy);
    bulkhead.output(&["rm", "-f", "copy"]).expect(0);
    sweeps(&copy.finish().stdout);
    for snapshot in [&second, &third] {
        let mut copy = bulkhead.start(&["fork", "-q", "--name", "next", snapshot]);
        copy.until_printed("\n");
        goes_on(&mut copy);
        bulkhead.output(&["rm", "-f", "next"]).expect(0);
        sweeps(&copy.finish().stdout);
    }
    bulkhead.output(&["snapshot", "verify", "-q", &id, &second, &third]).done();
}

fn a_snapshot_whose_writer_is_killed_fails_alone() {
    let bulkhead = Bulkhead::new();
    let mut run = stamping(&bulkhead);
    let usual = read(&cgroup(&bulkhead), "memory.max");
    for _ in 0..2 {
        let create = bulkhead.start(&["snapshot", "create", "box"]);
        let writer = stopped_writer(&bulkhead);
        goes_on(&mut run);
        writer.kill();
        let refused = create.finish().refused(125);
        assert!(refused.contains("the process that wrote the memory was killed by signal 9"), "{refused}");
        goes_on(&mut run);
        assert_eq!(read(&cgroup(&bulkhead), "memory.max"), usual);
    }
    // What there is, is whole: of the second, what the first had frozen of the disk.
    let list = |kind: &str| {
        let all: Value =
            serde_json::from_str(&bulkhead.output(&["snapshot", "list", "--format", "json"]).expect(0)).unwrap();
        let all = all.as_array().unwrap();
        assert!(all.iter().all(|one| one["state"] == "saved"), "{all:?}");
        all.iter().filter(|one| one["manifest"]["kind"] == kind).count()
    };
    assert_eq!((list("full"), list("disk")), (0, 1));
    let left = || fs::read_dir(bulkhead.home().join("snapshots")).unwrap().count();
    let before = left();

    // The next one works, and goes on.
    let mut create = Session::start(&mut bulkhead.command(&["snapshot", "create", "--name", "good", "box"]));
    let writer = stopped_writer(&bulkhead);
    create.until("saving memory: ");
    writer.send(Signal::CONT);
    assert_eq!(create.finish(), 0);
    assert_eq!((list("full"), list("disk"), left()), (1, 2, before + 2));
    goes_on(&mut run);
    let mut copy = bulkhead.start(&["fork", "-q", "--name", "copy", "good"]);
    copy.until_printed("\n");
    goes_on(&mut copy);

    // One whose VMM dies meanwhile leaves no process, and no snapshot.
    bulkhead.output(&["rm", "-f", "box"]).expect(0);
    sweeps(&run.finish().stdout);
    let create = bulkhead.start(&["snapshot", "create", "copy"]);
    let writer = stopped_writer(&bulkhead);
    processes::vmm(&bulkhead).kill();
    let refused = create.finish().refused(125);
    assert!(refused.contains("its machine ended meanwhile"), "{refused}");
    until("the end of what wrote", || !Path::new(&format!("/proc/{}", writer.pid)).exists());
    assert_eq!(copy.finish().code, 125);
    assert_eq!((list("full"), list("disk")), (1, 2));
    // On the disk that it left, it boots.
    let mut cold = bulkhead.start(&["resume", "-q", "--cold", "copy"]);
    cold.until_printed("\n2\n");
    bulkhead.output(&["rm", "-f", "copy"]).expect(0);
    sweeps(&cold.finish().stdout);
}

fn refs(files: &[File]) -> Vec<&File> {
    files.iter().collect()
}

/// What it writes to cannot take it, or what writes is killed: the machine goes on, and the next save is whole.
fn a_machine_is_saved_while_it_goes_on() {
    private_mounts();
    let recipe = Recipe { vcpus: 4, queues: 2, ..Recipe::default() };
    let mut guest = Guest::start(&recipe);
    let vmm = guest.vmm.clone();
    let refused = vmm.save_live(&refs(&guest.save_parts(1))).unwrap_err();
    assert!(refused.contains("the machine is not paused"), "{refused}");
    let mut number = 0;
    // It goes on in the new layer, whatever comes of what is written meanwhile; that is held up for so long, if it is to be.
    let mut take = |hold_up: bool, change: &dyn Fn(&mut Vec<File>)| {
        number += 1;
        vmm.pause().unwrap();
        let mut parts = guest.save_parts(number);
        change(&mut parts);
        println!("{:?}", vmm.save_live(&refs(&parts)).unwrap());
        let writer: Option<Pid> = hold_up.then(|| vmm.writer().expect("a copy of the VMM at work"));
        if let Some(writer) = writer {
            kill_process(writer, Signal::STOP).unwrap();
        }
        let script = format!("cat /here 2>/dev/null; echo {number} >> /here; sync; echo 3 > /proc/sys/vm/drop_caches");
        let expected: String = (1..number).map(|earlier| format!("{earlier}\n")).collect();
        assert_eq!(guest.shell(&format!("goes-on-{number}"), &script), expected);
        writer
    };

    // While one is being written, there is no other.
    let writer = take(true, &|_| ()).unwrap();
    vmm.pause().unwrap();
    for request in [Request::Save, Request::SaveLive] {
        vmm.send_save(&request, &refs(&guest.save_parts(20))).unwrap();
        let event = vmm.event().unwrap();
        let Event::SaveFailed { error } = event else { panic!("{event:?}") };
        assert!(error.contains("another save of the machine is still being written"), "{error}");
    }
    vmm.resume().unwrap();
    kill_process(writer, Signal::CONT).unwrap();
    println!("{:?}", vmm.saved().unwrap());

    let writer = take(true, &|_| ()).unwrap();
    let pid = writer.as_raw_nonzero().to_string();
    assert!(Command::new("prlimit").args(["--pid", &pid, "--fsize=2000000"]).status().unwrap().success());
    kill_process(writer, Signal::CONT).unwrap();
    let error = vmm.saved().unwrap_err();
    assert!(error.contains("memory file: File too large"), "{error}");

    let small = guest.files.path().join("small");
    fs::create_dir(&small).unwrap();
    mount("small", &small, "tmpfs", MountFlags::empty(), Some(c"size=2m")).unwrap();
    take(false, &|parts| {
        let options = File::options().read(true).write(true).create(true).truncate(true).clone();
        parts[1] = options.open(small.join("memory")).unwrap();
    });
    let error = vmm.saved().unwrap_err();
    assert!(error.contains("memory file: No space left on device"), "{error}");

    kill_process(take(true, &|_| ()).unwrap(), Signal::KILL).unwrap();
    let error = vmm.saved().unwrap_err();
    assert!(error.contains("was killed by signal 9"), "{error}");

    take(false, &|_| ());
    let saved = vmm.saved().unwrap();
    vmm.pause().unwrap();
    drop(vmm);
    // Of this moment, in a fresh layer: what the machine wrote afterwards is not there, and all that it wrote before is.
    let [data, map] = ["data-5", "map-5"]
        .map(|name| File::options().read(true).write(true).truncate(true).open(guest.files.path().join(name)).unwrap());
    create_layer(&data, &map, recipe.disk).unwrap();
    guest.restore(crate::guest::Snapshot { number: 5, saved }).kill();
    assert_eq!(guest.shell("there", "cat /here"), "1\n2\n3\n4\n");
    let files = guest.power_off();
    check_file_system(&flatten(files.path(), recipe.disk, 6));
}
