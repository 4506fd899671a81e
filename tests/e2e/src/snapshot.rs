//! Machines that stand still, are saved, and go on in another VMM.

use std::io::Write;
use std::time::{Duration, Instant};

use guest::message::{ExecSpec, ExitRecord};

use crate::Test;
use crate::guest::{Guest, Recipe};

pub(crate) const TESTS: &[Test] =
    &[("snapshot::a_machine_that_stood_still_goes_on", a_machine_that_stood_still_goes_on)];

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

/// Seconds that the guest's monotonic clock shows.
fn uptime(guest: &Guest, id: &str) -> f64 {
    guest.shell(id, "cut -d' ' -f1 /proc/uptime").trim().parse().unwrap()
}

/// Under load on processors, disk and sockets, many times; then for seconds, of which the guest's clock sees nothing.
fn a_machine_that_stood_still_goes_on() {
    const TOTAL: u64 = 20_000_000;
    let guest = Guest::start(&Recipe { vcpus: 4, queues: 2, ..Recipe::default() });
    guest.put_payload();
    let args = ["/tmp/payload", "pattern", &TOTAL.to_string()].map(String::from).to_vec();
    let stream = guest.agent.exec(ExecSpec::command("pattern", args)).unwrap();
    let load = "for i in $(seq 20); do dd if=/dev/zero of=/file$i bs=64k count=16 oflag=direct 2>/dev/null && sync; done; \
                cat /file* | md5sum; i=0; while [ $i -lt 20000 ]; do i=$((i + 1)); done; echo $i";
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
        // 20 MiB of zeros.
        let expected = "8f4e33f3dc3e414ff94e5fb6905cba8c  -\n20000\n".to_owned();
        assert_eq!(load.join().unwrap(), (expected, ExitRecord::Exited { code: 0 }));
    });

    println!("clock: {}", guest.shell("clock", "cat /sys/devices/system/clocksource/clocksource0/current_clocksource"));
    let (before, began) = (uptime(&guest, "before"), Instant::now());
    guest.vmm.pause().unwrap();
    std::thread::sleep(Duration::from_secs(5));
    guest.vmm.resume().unwrap();
    let (after, took) = (uptime(&guest, "after"), began.elapsed().as_secs_f64());
    println!("{took} s here, {} s there", after - before);
    assert!(after >= before && after - before < took - 4.5, "{before} {after} {took}");
    // A pause that is called off before it came about.
    guest.vmm.send(&vmm_control::Request::Pause).unwrap();
    guest.vmm.resume().unwrap();
    assert_eq!(guest.shell("alive", "echo alive; dmesg | grep -ci 'lockup\\|stall' || true"), "alive\n0\n");
}
