//! PID 1 of the guests that test the machine. The kernel's command line says what to do: `payload=WHAT`.
//!
//! It is hostile on purpose: it has every right that a guest's root has, and uses it.
#![allow(clippy::panic)]

mod ports;

use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, reboot};

/// Written to the mark port as the very first act.
const STARTED: u8 = 1;

fn main() {
    ports::open();
    ports::mark(STARTED);
    for (source, target, kind) in [("proc", "/proc", "proc"), ("sys", "/sys", "sysfs"), ("dev", "/dev", "devtmpfs")] {
        let _ = std::fs::create_dir(target);
        let _ = mount(source, target, kind, MountFlags::empty(), None);
    }
    let cmdline = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let word = |name: &str| cmdline.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    match word("payload") {
        Some("off") => {}
        Some("count") => count(word("payload.cpus")),
        Some("reboot") => {
            let _ = reboot(RebootCommand::Restart);
        }
        Some("panic") => return,
        Some("hang") => loop {
            std::hint::spin_loop();
        },
        Some("garbage") => ports::garbage(word("payload.seed").and_then(|seed| seed.parse().ok()).unwrap_or(1)),
        _ => ports::mark(255),
    }
    let _ = reboot(RebootCommand::PowerOff);
}

/// Marks what the kernel found: 10 + CPUs online, and 100 + memory in units of 256 MiB, rounded up.
fn count(expected: Option<&str>) {
    let online = std::thread::available_parallelism().map_or(0, |n| n.get());
    let _ = expected;
    ports::mark(u8::try_from(10 + online).unwrap_or(0));
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = info.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse().ok());
    let units = kib.map_or(0, |kib: u64| kib.div_ceil(256 << 10));
    ports::mark(u8::try_from(100 + units).unwrap_or(0));
}
