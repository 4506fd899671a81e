//! The machine by itself: kernels, sizes, exits, the ways to stop.

use std::fs::File;
use std::path::Path;

use vmm_control::{Config, Event, ExitCounts, Stats, StopReason};

use crate::Test;
use crate::host::{self, config, open};
use crate::vmm::Vmm;

pub(crate) const TESTS: &[Test] = &[
    ("boot::every_kernel_starts_at_every_size", every_kernel_starts_at_every_size),
    ("boot::exits_before_the_agent_are_few_and_exact", exits_before_the_agent_are_few_and_exact),
    ("boot::the_four_ways_to_stop_are_told_apart", the_four_ways_to_stop_are_told_apart),
];

/// A mark of the test's init: it runs. The agent's first mark is the same.
const STARTED: u8 = 1;

/// The test's init, told by the kernel's command line what to do, as an initramfs.
fn payload() -> File {
    open(&host::program("test/payload.cpio"))
}

fn boot(kernel: &Path, mut config: Config, words: &str) -> (StopReason, Stats) {
    config.cmdline = format!("{} {words}", config.cmdline);
    let vmm = Vmm::start(config, &[&open(&kernel.join("vmlinux")), &payload()]).unwrap();
    vmm.stopped().unwrap()
}

fn exits_at(stats: &Stats, mark: u8) -> ExitCounts {
    stats.marks.iter().find(|at| at.mark == mark).unwrap_or_else(|| panic!("no mark {mark} in {stats:?}")).exits
}

fn every_kernel_starts_at_every_size() {
    let kernels = host::kernels();
    assert!(kernels.iter().any(|(name, _)| name.starts_with("6.1.")), "the stock 6.1 kernel: {kernels:?}");
    assert!(kernels.iter().any(|(name, _)| name.starts_with("6.12.")), "the stock 6.12 kernel: {kernels:?}");
    for (name, kernel) in kernels {
        for (vcpus, memory) in [(1, 128 << 20), (2, 1 << 30), (8, 4 << 30)] {
            let words = format!("payload=count payload.cpus={vcpus}");
            let (reason, stats) = boot(&kernel, config(vcpus, memory, 1), &words);
            assert_eq!(reason, StopReason::PowerOff, "{name} {vcpus} {memory} {stats:?}");
            // The init marks 10 + the number of CPUs online, and 100 + the memory in units of 256 MiB, rounded up.
            let marks: Vec<u8> = stats.marks.iter().map(|at| at.mark).collect();
            assert_eq!(marks, [STARTED, 10 + vcpus, 100 + memory.div_ceil(256 << 20) as u8], "{name}");
        }
    }
}

/// The promise is 25, of any kind. What the guest itself causes was measured, with the CPU that the rig shows it, and stands
/// here exactly, so that each one more is noticed; how often KVM sends a waiting vCPU back while another starts it, timing decides.
fn exits_before_the_agent_are_few_and_exact() {
    let kernel = host::newest_kernel();
    let all = [1, 2, 8].map(|vcpus| {
        let (_, stats) = boot(&kernel, config(vcpus, 256 << 20, 1), "payload=off");
        let exits = exits_at(&stats, STARTED);
        assert!(exits.total <= 25, "{vcpus} vCPUs: {stats:?}");
        exits
    });
    assert_eq!(all.map(|exits| exits.total - exits.interrupted), [2, 2, 2], "{all:?}");
}

fn the_four_ways_to_stop_are_told_apart() {
    let kernel = host::newest_kernel();
    let reset = |by: &str| StopReason::Reset { by: by.into() };
    for (words, expected) in [
        ("payload=off", StopReason::PowerOff),
        ("payload=reboot reboot=a", reset("acpi")),
        ("payload=reboot reboot=k", reset("keyboard")),
        ("payload=reboot reboot=t", reset("triple-fault")),
        ("payload=panic", reset("triple-fault")),
    ] {
        let (reason, _) = boot(&kernel, config(1, 256 << 20, 1), words);
        assert_eq!(reason, expected, "{words}");
    }
    // A guest that does nothing is stopped from outside.
    let config = Config { cmdline: format!("{} payload=hang", host::CMDLINE), ..config(2, 256 << 20, 1) };
    let vmm = Vmm::start(config, &[&open(&kernel.join("vmlinux")), &payload()]).unwrap();
    assert!(matches!(vmm.event(), Ok(Event::Running)));
    vmm.send(&vmm_control::Request::Stop).unwrap();
    assert_eq!(vmm.stopped().unwrap().0, StopReason::Asked);
}
