//! PID 1 of the guests that test the machine. The kernel's command line says what to do: `payload=WHAT`.
//!
//! It is hostile on purpose: it has every right that a guest's root has, and uses it. Started with arguments, it is a
//! command of a guest whose PID 1 is the agent.
#![allow(clippy::panic, clippy::expect_used, clippy::cast_possible_truncation, clippy::multiple_unsafe_ops_per_block)]

mod ports;
mod queues;
mod stamp;
mod tree;
mod wayout;

use std::io::Write;

use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, reboot};

/// Written to the mark port as the very first act.
const STARTED: u8 = 1;

fn main() {
    // As a command of a guest that has an agent.
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, what, length] = &arguments[..]
        && what == "pattern"
    {
        return pattern(length.parse().unwrap_or(0));
    }
    let number = |text: &String| text.parse().unwrap_or(0);
    match &arguments[..] {
        [_, what, mib] if what == "stamp" => return stamp::stamp(number(mib)),
        [_, what, mib, part] if what == "touch" => return stamp::touch(number(mib), number(part)),
        _ => {}
    }
    if let [_, what, root] = &arguments[..]
        && what == "tree"
    {
        return tree::print(root.as_ref());
    }
    if let [_, what, word] = &arguments[..]
        && what == "wayout"
    {
        return wayout::look(word);
    }
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
        Some("garbage") => garbage(word("payload.seed").and_then(|seed| seed.parse().ok()).unwrap_or(1)),
        _ => ports::mark(255),
    }
    let _ = reboot(RebootCommand::PowerOff);
}

/// Everything that a guest's root can do to the machine: to its ports and registers, then to its devices by their
/// rules, then against them, then all of it from every CPU at once.
fn garbage(seed: u64) {
    use queues::Manners;
    ports::garbage(seed);
    let Some(machine) = queues::Machine::open() else { return ports::mark(252) };
    ports::mark(30 + machine.devices().len() as u8);
    queues::misuse(&machine, seed, Manners::Good, 4);
    queues::misuse(&machine, seed, Manners::Bad, 40);
    ports::mark(23);
    from_every_cpu(seed, |seed| queues::misuse(&machine, seed, Manners::Crowded, 10));
    ports::mark(24);
    // The devices still work.
    queues::misuse(&machine, seed, Manners::Good, 1);
    ports::mark(25);
}

/// Does it in more threads than there are CPUs, each with a seed of its own.
fn from_every_cpu(seed: u64, what: impl Fn(u64) + Sync) {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64) + 1;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let what = &what;
            scope.spawn(move || what(seed.wrapping_mul(1000).wrapping_add(thread)));
        }
    });
}

/// Prints so many bytes of the sequence 0, 1, 2, … in 64-bit little-endian numbers.
fn pattern(mut left: usize) {
    let mut output = std::io::stdout().lock();
    for block in 0u64.. {
        let bytes: Vec<u8> = (block * 8192..(block + 1) * 8192).flat_map(u64::to_le_bytes).collect();
        let length = left.min(bytes.len());
        if length == 0 || output.write_all(bytes.get(..length).unwrap_or_default()).is_err() {
            break;
        }
        left -= length;
    }
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
