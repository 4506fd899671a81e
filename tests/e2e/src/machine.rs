//! The machine with its agent: exits, streams, disks.

use std::io::{self, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use guest::message::{ExecSpec, ExitRecord};
use snapshot::disk::{Bytes, Disk, LayerFiles};
use vmm_control::ExitCounts;

use crate::command::until;
use crate::guest::{Guest, Recipe};
use crate::{Test, host};

pub(crate) const TESTS: &[Test] = &[
    ("machine::exits_to_the_first_output_are_exact", exits_to_the_first_output_are_exact),
    ("machine::block_requests_cause_no_exit", block_requests_cause_no_exit),
    ("machine::vsock_traffic_causes_no_exit", vsock_traffic_causes_no_exit),
    ("machine::output_survives_cut_connections", output_survives_cut_connections),
    ("machine::what_was_synced_survives_a_killed_vmm", what_was_synced_survives_a_killed_vmm),
    ("machine::discarded_space_returns_to_the_host", discarded_space_returns_to_the_host),
    ("machine::several_queues_and_cpus_share_a_disk", several_queues_and_cpus_share_a_disk),
];

/// Exits that the guest caused: not those of a signal of ours or of KVM's own timing.
fn caused(exits: ExitCounts) -> u64 {
    exits.total - exits.interrupted
}

/// From the agent's first instruction to the first byte of a command's output: the probing of five devices, 29 of them for the
/// network interface.
fn exits_to_the_first_output_are_exact() {
    let guest = Guest::start(&Recipe::default());
    assert_eq!(guest.shell("first", "echo hello"), "hello\n");
    let stats = guest.stats();
    let before = stats.marks.iter().find(|at| at.mark == 1).unwrap().exits;
    assert!(before.total <= 25, "{stats:?}");
    assert_eq!(caused(stats.exits) - caused(before), 109, "{stats:?}");
}

fn block_requests_cause_no_exit() {
    let guest = Guest::start(&Recipe::default());
    // The first pass probes, grows files and fills caches; the second is what a thousand requests cost.
    let script = "dd if=/dev/vda of=/dev/null bs=4k count=1000 iflag=direct 2>&1 && \
                  dd if=/dev/zero of=/file bs=4k count=1000 oflag=direct 2>&1 && sync";
    guest.shell("warm", script);
    let before = guest.stats();
    guest.shell("measured", script);
    let after = guest.stats();
    let requests = after.blocks[0].requests - before.blocks[0].requests;
    assert!(requests >= 2000, "{requests}");
    assert_eq!(caused(after.exits) - caused(before.exits), 0, "{before:?} {after:?}");
}

fn vsock_traffic_causes_no_exit() {
    let guest = Guest::start(&Recipe::default());
    guest.shell("warm", "head -c 1000000 /dev/zero");
    let before = guest.stats();
    assert_eq!(guest.shell("measured", "head -c 8000000 /dev/zero").len(), 8_000_000);
    assert_eq!(caused(guest.stats().exits) - caused(before.exits), 0);
}

/// Checks that what is written to it is the payload's pattern, and dawdles.
struct SlowReader<'a> {
    at: u64,
    received: &'a AtomicU64,
}

impl Write for SlowReader<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for (index, byte) in bytes.iter().enumerate() {
            let at = self.at + index as u64;
            let expected = (at / 8).to_le_bytes()[(at % 8) as usize];
            assert_eq!(*byte, expected, "byte {at}");
        }
        self.at += bytes.len() as u64;
        self.received.store(self.at, Ordering::Relaxed);
        std::thread::sleep(Duration::from_micros(200));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// 200 MB of numbers, a slow reader, and somebody who cuts every connection there is, again and again.
fn output_survives_cut_connections() {
    const TOTAL: u64 = 200_000_000;
    let guest = Guest::start(&Recipe::default());
    guest.put_payload();
    let args = ["/tmp/payload", "pattern", &TOTAL.to_string()].map(String::from).to_vec();
    let exec = guest.agent.exec(ExecSpec::command("pattern", args)).unwrap();
    let (done, received) = (AtomicBool::new(false), AtomicU64::new(0));
    let cuts = std::thread::scope(|scope| {
        let cutter = scope.spawn(|| {
            let (mut cuts, mut next) = (0, 1_000_000);
            while !done.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
                if received.load(Ordering::Relaxed) < next {
                    continue;
                }
                // An uneven stride, so that cuts fall anywhere in a stream and its acknowledgements.
                next += 1_000_003 + (cuts * 7_919_993) % 9_000_000;
                cuts += 1;
                for connection in guest.connections.lock().unwrap().drain(..) {
                    let _ = connection.shutdown(Shutdown::Both);
                }
            }
            cuts
        });
        let length = exec.copy_stdout(&mut SlowReader { at: 0, received: &received }).unwrap();
        done.store(true, Ordering::Relaxed);
        assert_eq!(length, TOTAL);
        cutter.join().unwrap()
    });
    assert!(cuts >= 20, "{cuts} cuts");
    assert_eq!(exec.wait().unwrap(), ExitRecord::Exited { code: 0 });
}

/// Reads the whole disk as the next machine would see it, for tools of this machine.
pub(crate) fn flatten(files: &std::path::Path, size: u64, count: usize) -> std::path::PathBuf {
    let mut layers = vec![LayerFiles { data: host::open(&host::image("busybox")), map: None }];
    for layer in 0..count {
        let number = if layer == 0 { String::new() } else { format!("-{layer}") };
        let file = |name: &str| host::open(&files.join(format!("{name}{number}")));
        layers.push(LayerFiles { data: file("data"), map: Some(file("map")) });
    }
    let disk = Disk::open(layers, true).unwrap();
    assert_eq!(disk.size(), size);
    let path = files.join("flat.img");
    let flat = std::fs::File::create(&path).unwrap();
    flat.set_len(size).unwrap();
    let step = 4 << 20;
    for offset in (0..size).step_by(step) {
        let buffer = Bytes::new(vec![0; step.min((size - offset) as usize)]);
        disk.read(offset, &buffer).unwrap();
        let bytes = buffer.into_inner();
        if bytes.iter().any(|byte| *byte != 0) {
            std::os::unix::fs::FileExt::write_all_at(&flat, &bytes, offset).unwrap();
        }
    }
    path
}

pub(crate) fn check_file_system(image: &std::path::Path) {
    let output = std::process::Command::new("e2fsck").arg("-fn").arg(image).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

fn what_was_synced_survives_a_killed_vmm() {
    let recipe = Recipe { disk: 512 << 20, ..Recipe::default() };
    let guest = Guest::start(&recipe);
    let hash = guest.shell(
        "write",
        "mkdir /kept && for i in $(seq 50); do head -c $((i * 3000)) /dev/urandom > /kept/$i; done; \
         sync; cat /kept/* | md5sum",
    );
    // More that nobody synced, under way when the VMM dies.
    let busy = ExecSpec::command("busy", ["sh", "-c", "while :; do cat /kept/* > /lost; done"].map(Into::into).into());
    let _busy = guest.agent.exec(busy).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    guest.vmm.kill();
    let Guest { files, agent, vmm, .. } = guest;
    drop((agent, vmm));

    let again = Guest::over(&recipe, files);
    assert_eq!(again.shell("read", "cat /kept/* | md5sum"), hash);
    let files = again.power_off();
    check_file_system(&flatten(files.path(), recipe.disk, 1));
}

fn discarded_space_returns_to_the_host() {
    use std::os::unix::fs::MetadataExt;
    let guest = Guest::start(&Recipe::default());
    let used = |guest: &Guest| std::fs::metadata(guest.files.path().join("data")).unwrap().blocks() * 512;
    guest.shell("write", "head -c 50000000 /dev/urandom > /big && sync");
    let full = used(&guest);
    assert!(full >= 50_000_000, "{full}");
    guest.shell("remove", "rm /big");
    // The guest's file system frees and discards after its commit, in its own time.
    let mut turn = 0;
    until("the space", || {
        turn += 1;
        guest.shell(&format!("trim-{turn}"), "sync && fstrim /");
        used(&guest) < full - 45_000_000
    });
}

fn several_queues_and_cpus_share_a_disk() {
    let recipe = Recipe { vcpus: 4, queues: 4, disk: 512 << 20, ..Recipe::default() };
    let guest = Guest::start(&recipe);
    assert_eq!(guest.shell("queues", "ls /sys/block/vda/mq | wc -l").trim(), "4");
    let script = "for n in 1 2 3 4 5 6; do (head -c 3000000 /dev/urandom > /f$n; md5sum /f$n > /s$n) & done; wait; \
                  sync; echo 3 > /proc/sys/vm/drop_caches; cat /s1 /s2 /s3 /s4 /s5 /s6 | md5sum -c";
    let output = guest.shell("write", script);
    assert_eq!(output.matches("OK").count(), 6, "{output}");
    let files = guest.power_off();
    check_file_system(&flatten(files.path(), recipe.disk, 1));
}
