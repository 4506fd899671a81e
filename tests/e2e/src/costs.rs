//! What it costs to go on from a snapshot, counted.

use std::collections::BTreeMap;

use vmm_control::Event;

use crate::Test;
use crate::guest::{Guest, Recipe};
use crate::vmm::Vmm;

pub(crate) const TESTS: &[Test] =
    &[("costs::a_restore_takes_few_calls_and_reads_little", a_restore_takes_few_calls_and_reads_little)];

/// Calls that return how many bytes they read.
const READS: [&str; 6] = ["read", "pread64", "preadv", "preadv2", "readv", "recvmsg"];

#[derive(Debug, Default)]
struct Counted {
    calls: u64,
    ioctls: u64,
    bytes: u64,
    names: BTreeMap<String, u64>,
}

impl Counted {
    fn add(&mut self, name: &str, result: u64) {
        self.calls += 1;
        self.ioctls += u64::from(name == "ioctl");
        self.bytes += if READS.contains(&name) { result } else { 0 };
        *self.names.entry(name.to_owned()).or_default() += 1;
    }
}

/// From the start of the VMM's program until it says that the guest runs.
fn a_restore_takes_few_calls_and_reads_little() {
    let mut guest = Guest::start(&Recipe::default());
    guest.put_payload();
    let snapshot = guest.save(1);
    let log = guest.files.path().join("calls");
    let (config, parts, _other_end) = guest.restore_parts(1);
    let vmm = Vmm::restore_traced(config, &parts.iter().collect::<Vec<_>>(), &log).unwrap();
    assert_eq!(vmm.event().unwrap(), Event::Running);
    vmm.send(&vmm_control::Request::Stop).unwrap();
    vmm.stopped().unwrap();
    assert!(vmm.ended_well());
    let text = std::fs::read_to_string(&log).unwrap();
    let main = text.split_whitespace().next().unwrap();
    let mut counted = Counted::default();
    for line in text.lines() {
        let Some((thread, call)) = line.split_once(char::is_whitespace) else { continue };
        let result = call.rsplit("= ").next().and_then(|result| result.split_whitespace().next()?.parse().ok());
        match call.trim_start().split_once('(') {
            Some((name, _)) if thread == main && !name.contains(' ') => counted.add(name, result.unwrap_or(0)),
            _ => {}
        }
        if line.contains(r#"{\"event\":\"running\"}"#) {
            break;
        }
    }
    println!("{counted:?}");
    assert!(counted.names.contains_key("sendmsg"), "{text}");
    // 10 KiB of state and the request; the maps of two layers; of the memory's image nothing.
    let Counted { calls, ioctls, bytes, .. } = counted;
    assert!(calls <= 300 && ioctls <= 60 && bytes <= 64 << 10, "{counted:?}");
    guest.restore(snapshot).kill();
}
