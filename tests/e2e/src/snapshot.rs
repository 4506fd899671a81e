//! Machines that stand still, are saved, and go on in another VMM.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, Instant};

use guest::message::{ExecSpec, ExitRecord};
use vmm_control::Event;

use crate::guest::{Guest, Recipe};
use crate::machine::{check_file_system, flatten};
use crate::vmm::Vmm;
use crate::{Test, host};

pub(crate) const TESTS: &[Test] = &[
    ("snapshot::a_machine_that_stood_still_goes_on", a_machine_that_stood_still_goes_on),
    ("snapshot::a_saved_machine_goes_on_in_another_vmm", a_saved_machine_goes_on_in_another_vmm),
    ("snapshot::more_than_three_gib_are_saved", more_than_three_gib_are_saved),
    ("snapshot::what_cannot_go_on_is_refused", what_cannot_go_on_is_refused),
];

/// Checks that what is written to it is the payload's pattern.
#[derive(Default)]
struct Pattern(u64);

impl Write for Pattern {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        for (index, byte) in bytes.iter().enumerate() {
            let at = self.0 + index as u64;
            assert_eq!(*byte, (at / 8).to_le_bytes()[(at % 8) as usize], "byte {at}");
        }
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Where a guest's kernel says what it reads its clock from.
const CLOCK_SOURCE: &str = "/sys/devices/system/clocksource/clocksource0";

/// Seconds that the guest's monotonic clock shows.
fn uptime(guest: &Guest, id: &str) -> f64 {
    guest.shell(id, "cut -d' ' -f1 /proc/uptime").trim().parse().unwrap()
}

/// Under load on processors, disk and sockets, many times; then for seconds, of which the guest's clock sees nothing.
fn a_machine_that_stood_still_goes_on() {
    const TOTAL: u64 = 6_000_000;
    let guest = Guest::start(&Recipe { vcpus: 4, queues: 2, ..Recipe::default() });
    guest.put_payload();
    let args = ["/tmp/payload", "pattern", &TOTAL.to_string()].map(String::from).to_vec();
    let stream = guest.agent.exec(ExecSpec::command("pattern", args)).unwrap();
    let load = "for i in $(seq 8); do dd if=/dev/zero of=/file$i bs=64k count=16 oflag=direct 2>/dev/null && sync; done; \
                cat /file* | md5sum; i=0; while [ $i -lt 5000 ]; do i=$((i + 1)); done; echo $i";
    let load = guest.agent.exec(ExecSpec::command("load", vec!["sh".into(), "-c".into(), load.into()])).unwrap();
    std::thread::scope(|scope| {
        let stream = scope.spawn(|| (stream.copy_stdout(&mut Pattern::default()).unwrap(), stream.wait().unwrap()));
        let load = scope.spawn(|| {
            let mut output = Vec::new();
            load.copy_stdout(&mut output).unwrap();
            (String::from_utf8(output).unwrap(), load.wait().unwrap())
        });
        let mut pauses = 0;
        while !(stream.is_finished() && load.is_finished()) || pauses < 10 {
            guest.vmm.pause().unwrap();
            let before = guest.stats().exits;
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(guest.stats().exits, before, "nothing runs");
            guest.vmm.resume().unwrap();
            std::thread::sleep(Duration::from_millis(30));
            pauses += 1;
        }
        println!("{pauses} pauses");
        assert_eq!(stream.join().unwrap(), (TOTAL, ExitRecord::Exited { code: 0 }));
        // 8 MiB of zeros.
        let expected = "96995b58d4cbf6aaa9041b4f00c7f6ae  -\n5000\n".to_owned();
        assert_eq!(load.join().unwrap(), (expected, ExitRecord::Exited { code: 0 }));
    });

    // Whatever the guest reads its clock from.
    for source in guest.shell("clocks", &format!("cat {CLOCK_SOURCE}/available_clocksource")).split_whitespace() {
        guest.shell(&format!("use-{source}"), &format!("echo {source} > {CLOCK_SOURCE}/current_clocksource"));
        let (before, began) = (uptime(&guest, &format!("before-{source}")), Instant::now());
        guest.vmm.pause().unwrap();
        // The agent's handle connects anew meanwhile, which is held until the guest can answer.
        guest.cut_connections();
        std::thread::sleep(Duration::from_secs(3));
        guest.vmm.resume().unwrap();
        let (after, took) = (uptime(&guest, &format!("after-{source}")), began.elapsed().as_secs_f64());
        println!("{source}: {took} s here, {} s there", after - before);
        assert!(after >= before && after - before < took - 2.8, "{source}: {before} {after} {took}");
    }
    // A pause that is called off before it came about.
    guest.vmm.send(&vmm_control::Request::Pause).unwrap();
    guest.vmm.resume().unwrap();
    assert_eq!(guest.shell("alive", "echo alive; dmesg | grep -i 'lockup\\|rcu.*stall\\|unstable' || true"), "alive\n");
    // One that comes about while the machine ends.
    guest.vmm.send(&vmm_control::Request::Pause).unwrap();
    guest.vmm.send(&vmm_control::Request::Stop).unwrap();
    assert_eq!(guest.vmm.stopped().unwrap().0, vmm_control::StopReason::Asked);
    assert!(guest.vmm.ended_well());
}

/// Five generations, each saved and gone on from under load on processors, disk and sockets; then one machine becomes two.
fn a_saved_machine_goes_on_in_another_vmm() {
    const TOTAL: u64 = 8_000_000;
    let recipe = Recipe { vcpus: 4, queues: 2, ..Recipe::default() };
    let mut guest = Guest::start(&recipe);
    guest.put_payload();
    let hashes = "md5sum /disk /dev/shm/memory | cut -d' ' -f1";
    let made = guest.shell(
        "make",
        &format!(
            "mkdir -p /dev/shm && mount -t tmpfs none /dev/shm; head -c 1500000 /dev/urandom > /disk; \
             head -c 1500000 /dev/urandom > /dev/shm/memory; sync; {hashes}"
        ),
    );
    let start = |id: &str, script: &str| {
        let spec = ExecSpec::command(id, vec!["sh".into(), "-c".into(), script.into()]);
        guest.agent.exec(spec).unwrap()
    };
    let (uptime_before, began) = (uptime(&guest, "uptime-before"), Instant::now());
    let args = ["/tmp/payload", "pattern", &TOTAL.to_string()].map(String::from).to_vec();
    let stream = guest.agent.exec(ExecSpec::command("pattern", args)).unwrap();
    // Each file is written, read back and compared with what the one before it had.
    let load = start(
        "load",
        "for i in $(seq 12); do head -c 300000 /dev/zero | tr '\\0' x > /file$i; sync /file$i; \
         echo 3 > /proc/sys/vm/drop_caches; cmp /file$i /file1 || exit 1; done; echo equal",
    );
    let timer = start("timer", "a=$(cut -d. -f1 /proc/uptime); sleep 10; echo $(($(cut -d. -f1 /proc/uptime) - a))");
    let text = |exec: guest::host::Exec| {
        let mut output = Vec::new();
        exec.copy_stdout(&mut output).unwrap();
        (String::from_utf8(output).unwrap(), exec.wait().unwrap())
    };
    let done = ExitRecord::Exited { code: 0 };
    std::thread::scope(|scope| {
        let stream = scope.spawn(|| (stream.copy_stdout(&mut Pattern::default()).unwrap(), stream.wait().unwrap()));
        let (load, timer) = (scope.spawn(|| text(load)), scope.spawn(|| text(timer)));
        for number in 1..=5 {
            std::thread::sleep(Duration::from_millis(300));
            let snapshot = guest.save(number);
            let before = guest.restore(snapshot);
            before.kill();
            println!("{snapshot:?}; under way: {} {}", !stream.is_finished(), !load.is_finished());
            assert!(number > 1 || !(stream.is_finished() || load.is_finished()), "the first is saved under load");
            assert_eq!(guest.shell(&format!("hash{number}"), hashes), made);
        }
        assert_eq!(stream.join().unwrap(), (TOTAL, done.clone()));
        assert_eq!(load.join().unwrap(), ("equal\n".to_owned(), done.clone()));
        // It ended, and not before its time. How long a busy guest takes to say so is another matter.
        let (slept, record) = timer.join().unwrap();
        let slept: u64 = slept.trim().parse().unwrap();
        assert!((9..90).contains(&slept) && record == done, "{slept}");
    });
    // The guest's clock never ran while it stood still, so it is behind by all saves and restores.
    let (passed, took) = (uptime(&guest, "uptime-after") - uptime_before, began.elapsed().as_secs_f64());
    println!("{took} s here, {passed} s there");
    assert!(passed > 0.0 && passed < took, "{passed} {took}");
    assert_eq!(guest.shell("reseeded", "dmesg | grep -c 'crng reseeded due to virtual machine fork'"), "5\n");
    let complaints = "dmesg | grep -i 'lockup\\|rcu.*stall\\|i/o error\\|ext4.*error\\|unstable' || true";
    assert_eq!(guest.shell("complaints", complaints), "");

    // Two machines from one: each goes on in a layer of its own, and draws its own numbers.
    let snapshot = guest.save(6);
    let draw = "head -c 16 /dev/urandom | md5sum; echo here > /which";
    let parent = {
        guest.vmm.resume().unwrap();
        guest.shell("parent", draw)
    };
    // The parent wrote to layer 6, so the clone gets a fresh one.
    drop(guest.save_parts(8));
    for name in ["data", "map"] {
        let path = |number: u8| guest.files.path().join(format!("{name}-{number}"));
        std::fs::rename(path(6), path(9)).unwrap();
        std::fs::rename(path(8), path(6)).unwrap();
    }
    let parents = guest.restore(snapshot);
    assert_eq!(guest.shell("exists", "test -e /which && echo there || echo no"), "no\n");
    assert_ne!(guest.shell("clone", draw), parent);
    parents.send(&vmm_control::Request::Stop).unwrap();
    parents.stopped().unwrap();
    let files = guest.power_off();
    check_file_system(&flatten(files.path(), recipe.disk, 7));
}

fn more_than_three_gib_are_saved() {
    let recipe = Recipe { memory: 4 << 30, ..Recipe::default() };
    let mut guest = Guest::start(&recipe);
    let hash = "md5sum < /dev/shm/memory; cat /dev/shm/counter";
    let made = guest.shell(
        "make",
        &format!(
            "mkdir -p /dev/shm && mount -t tmpfs none /dev/shm; head -c 8000000 /dev/urandom > /dev/shm/memory; \
             echo 4711 > /dev/shm/counter; {hash}"
        ),
    );
    // Here the clock comes from the processor's counter.
    guest.shell("use-tsc", &format!("echo tsc > {CLOCK_SOURCE}/current_clocksource"));
    let (before, began) = (uptime(&guest, "before"), Instant::now());
    let snapshot = guest.save(1);
    std::thread::sleep(Duration::from_secs(3));
    let memory = std::fs::metadata(guest.files.path().join("memory-1")).unwrap();
    println!("{snapshot:?}, {} bytes on the disk", memory.blocks() * 512);
    assert_eq!(memory.len(), 4 << 30);
    assert!((8_000_000..300 << 20).contains(&snapshot.saved.memory_bytes), "{snapshot:?}");
    assert!(memory.blocks() * 512 <= snapshot.saved.memory_bytes + (8 << 20));
    guest.restore(snapshot).kill();
    let (after, took) = (uptime(&guest, "after"), began.elapsed().as_secs_f64());
    println!("{took} s here, {} s there", after - before);
    assert!(after >= before && after - before < took - 2.8, "{before} {after} {took}");
    assert_eq!(guest.shell("hash", hash), made);
    // What goes on is saved whole as well, though most of it was never touched since.
    let again = guest.save(2);
    assert!(again.saved.memory_bytes + (4 << 20) > snapshot.saved.memory_bytes, "{snapshot:?} {again:?}");
    guest.restore(again).kill();
    assert_eq!(guest.shell("again", hash), made);
}

/// SplitMix64: the same seed, the same offsets.
fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*seed ^ (*seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn what_cannot_go_on_is_refused() {
    let mut guest = Guest::start(&Recipe::default());
    // A save that fails leaves the machine whole.
    let running = guest.vmm.save(&[]).unwrap_err();
    assert!(running.contains("the machine is not paused"), "{running}");
    guest.vmm.pause().unwrap();
    let few = guest.vmm.save(&[]).unwrap_err();
    assert!(few.contains("1 descriptors, where this machine's takes 5"), "{few}");
    let parts = guest.save_parts(1);
    parts[3].set_len(100).unwrap();
    let broken = guest.vmm.save(&parts.iter().collect::<Vec<_>>()).unwrap_err();
    assert!(broken.contains("disk 0: layer 2"), "{broken}");
    let parts = guest.save_parts(1);
    guest.vmm.limit_files("1000000");
    let large = guest.vmm.save(&parts.iter().collect::<Vec<_>>()).unwrap_err();
    assert!(large.contains("memory file: File too large"), "{large}");
    guest.vmm.limit_files("unlimited");
    guest.vmm.resume().unwrap();
    assert_eq!(guest.shell("whole", "echo whole > /whole; sync; cat /whole"), "whole\n");

    let snapshot = guest.save(1);
    let path = |name: &str| guest.files.path().join(name);
    let bytes = std::fs::read(path("state-1")).unwrap();
    println!("{} bytes of state", bytes.len());
    let try_with = |change: &dyn Fn(&mut vmm_control::Config, &mut Vec<File>)| {
        let (mut config, mut parts, _other_end) = guest.restore_parts(1);
        change(&mut config, &mut parts);
        let vmm = Vmm::restore(config, &parts.iter().collect::<Vec<_>>()).unwrap();
        let event = vmm.event().unwrap_or_else(|error| panic!("neither running nor refused: {error}"));
        if event == Event::Running {
            // Whatever the guest does now, the VMM ends in good order.
            std::thread::sleep(Duration::from_millis(30));
            let _ = vmm.send(&vmm_control::Request::Stop);
            vmm.stopped().unwrap();
        }
        assert!(vmm.ended_well(), "{event:?}");
        event
    };
    let refused = |change: &dyn Fn(&mut vmm_control::Config, &mut Vec<File>)| match try_with(change) {
        Event::Refused { error } => error,
        other => panic!("not refused: {other:?}"),
    };
    let file = |bytes: &[u8]| {
        let file = tempfile::tempfile_in(host::scratch()).unwrap();
        file.write_all_at(bytes, 0).unwrap();
        file
    };
    let expect = |error: String, what: &str| assert!(error.contains(what), "{error}");
    expect(refused(&|config, _| config.vcpus = 2), "saved with cpus 1, and asked for is 2");
    expect(refused(&|config, _| config.memory = 512 << 20), "memory: the image has 268435456 bytes");
    expect(refused(&|config, _| config.net = None), "more descriptors than parts");
    expect(refused(&|_, parts| parts[0] = file(&bytes[..bytes.len() / 2])), "state file: it has");
    expect(refused(&|_, parts| parts[0] = file(&[])), "state file: it is no machine state");
    expect(refused(&|_, parts| parts[0] = file(&vec![0; 2 << 20])), "the largest has 1048576");
    let short = |parts: &mut Vec<File>| {
        parts[1] = file(&[1; 4096]);
        parts[1].set_len((256 << 20) - 4096).unwrap();
    };
    expect(refused(&|_, parts| short(parts)), "memory: the image has 268431360 bytes, and the machine 268435456");
    // A processor with what no host offers its guests: the monitor instruction, in leaf 1.
    let vendor = [b"AuthcAMDenti", b"GenuntelineI"];
    let at = bytes.windows(12).position(|window| vendor.iter().any(|vendor| window == *vendor)).unwrap() - 16 + 40;
    let mut monitor = bytes.clone();
    assert_eq!(monitor[at..at + 4], 1u32.to_le_bytes());
    monitor[at + 20] |= 1 << 3;
    expect(
        refused(&|_, parts| parts[0] = file(&monitor)),
        "features 0x00000008 of CPUID leaf 0x1.0 ecx, which this host lacks",
    );

    let (mut seed, mut went_on) = (1, 0);
    for _ in 0..100 {
        let mut flipped = bytes.clone();
        let (offset, bit) = (random(&mut seed) as usize % bytes.len(), random(&mut seed) % 8);
        flipped[offset] ^= 1 << bit;
        match try_with(&|_, parts| parts[0] = file(&flipped)) {
            Event::Running => went_on += 1,
            Event::Refused { .. } => {}
            other => panic!("byte {offset}, bit {bit}: {other:?}"),
        }
    }
    println!("{went_on} of 100 changed states went on");
    guest.restore(snapshot).kill();
    assert_eq!(guest.shell("goes-on", "cat /whole"), "whole\n");
}
