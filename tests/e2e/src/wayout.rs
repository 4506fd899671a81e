//! Guests that look for a way out which is not the network's: sockets of the machine, the serial console, the disk, the link.

use std::fs;

use serde_json::Value;

use crate::cli::Bulkhead;
use crate::network::World;
use crate::{Test, host, processes};

pub(crate) const TESTS: &[Test] = &[("wayout::no_device_is_a_way_out", no_device_is_a_way_out)];

fn no_device_is_a_way_out() {
    // Given two runs side by side that nothing was allowed, one of them with a console,
    let mut world = World::new(crate::network::RESOLVER);
    let bulkhead = Bulkhead::new();
    let start = |name, more: &[&str]| {
        let command = ["busybox", "sh", "-c", "echo here; exec sleep 100000"];
        bulkhead.start(&[&["run", "--name", name, "-m", "256M"], more, &command].concat())
    };
    let mut runs = [start("one", &["--console"]), start("two", &[])];
    let image = host::image("busybox").metadata().unwrap().modified().unwrap();
    let payload = host::program("test/payload");
    for (run, name) in runs.iter_mut().zip(["one", "two"]) {
        run.until_printed("here\n");
        bulkhead.output(&["cp", payload.to_str().unwrap(), &format!("{name}:/payload")]).expect(0);
        bulkhead.shell(name, &format!("echo {name} >/mark; sync")).expect(0);
    }
    // when both look for one at once, as their guest's root,
    let looking = ["one", "two"].map(|name| bulkhead.start(&["exec", name, "/payload", "wayout", name]));
    for looked in looking.map(crate::command::Running::finish) {
        // then nobody listens to their sockets, answers on the console or is beside them on the link, and no disk is larger
        // than it is.
        let found: Vec<&str> = looked.stdout.lines().filter(|line| !line.ends_with(" is this machine's own")).collect();
        let nothing = [
            "vsock: 0 of 260 reached",
            "serial: 0 bytes came",
            "ports: 0 have something to say",
            "disk: of 1, 0 done: ",
            "link: 0 frames of strangers",
        ];
        assert_eq!((looked.code, found), (0, nothing.to_vec()), "{looked:?}");
        assert!(looked.stderr.contains("84 frames were sent"), "{looked:?}");
    }
    // What they said came to their own ends alone.
    let directory = |name| {
        let inspected: Value = serde_json::from_str(&bulkhead.output(&["inspect", name]).expect(0)).unwrap();
        std::path::PathBuf::from(inspected[0]["directory"].as_str().unwrap())
    };
    let console = fs::read_to_string(directory("one").join("console.log")).unwrap();
    assert!(console.contains("one was here") && !console.contains("two"), "{console}");
    assert!(!directory("two").join("console.log").exists());
    for name in ["one", "two"] {
        let stats: Value = serde_json::from_str(&bulkhead.output(&["stats", name]).expect(0)).unwrap();
        assert!(stats["net"]["frames_out"].as_u64().unwrap() >= 84, "{stats}");
        assert_eq!(bulkhead.shell(name, "cat /mark").expect(0), format!("{name}\n"));
    }
    assert_eq!(host::image("busybox").metadata().unwrap().modified().unwrap(), image);
    bulkhead.output(&["rm", "-f", "one", "two"]).expect(0);
    drop(runs);
    processes::none_left(&bulkhead);
    world.only(&[]);
    assert_eq!(world.internet.names(), [""; 0]);
}
