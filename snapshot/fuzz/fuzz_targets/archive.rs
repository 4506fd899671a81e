//! Archives: whatever one holds, a refusal leaves nothing, and what is taken in is what its manifest says.
#![no_main]

use std::fs;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use snapshot::store::{Depth, Kind, Meta, Snapshots};

static HOME: LazyLock<(tempfile::TempDir, Snapshots)> = LazyLock::new(|| {
    let home = tempfile::tempdir().unwrap();
    let snapshots = Snapshots::open(home.path()).unwrap();
    (home, snapshots)
});

/// The head of an archive of one snapshot and of two, with small files.
static HEADS: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| {
    let home = tempfile::tempdir().unwrap();
    let snapshots = Snapshots::open(home.path()).unwrap();
    let make = |layers: Vec<String>| {
        let pending = snapshots.begin(None).unwrap();
        for (file, length) in [("disk.data", 200_000), ("disk.map", 70_000), ("spec.json", 5)] {
            pending.write(file, &vec![0; length]).unwrap();
        }
        let meta = Meta {
            created: "2026-12-01T00:00:00.000Z".into(),
            kind: Kind::Disk,
            origin: "8fc20000".into(),
            epoch: 1,
            image: "busybox".into(),
            layers,
            disk_bytes: 200_000,
            memory_bytes: 0,
            vcpus: 1,
        };
        let made = pending.publish(meta).unwrap();
        made.seal(&mut |_| ()).unwrap();
        let made = snapshots.find(made.id()).unwrap();
        (made.id().to_owned(), serde_json::to_vec(made.manifest()).unwrap())
    };
    let (id, one) = make(vec![]);
    let (_, two) = make(vec![id]);
    let head = |manifests: &[&Vec<u8>]| {
        let mut head = b"BHKSNAPS\x01\0\0\0".to_vec();
        head.push(u8::try_from(manifests.len()).unwrap());
        for manifest in manifests {
            head.extend(u32::try_from(manifest.len()).unwrap().to_le_bytes());
            head.extend(*manifest);
        }
        head
    };
    [head(&[&one]), head(&[&one, &two])]
});

fuzz_target!(|bytes: &[u8]| {
    let Some((how, rest)) = bytes.split_first() else { return };
    let mut archive = match how % 4 {
        0 => Vec::new(),
        1 | 2 => HEADS[0].clone(),
        _ => HEADS[1].clone(),
    };
    archive.extend(rest);
    if how % 8 < 4 {
        let sum = blake3::hash(&archive);
        archive.extend(sum.as_bytes());
    }
    let (home, snapshots) = &*HOME;
    if snapshots.import(archive.as_slice(), &mut |_| ()).is_ok() {
        let mut all = snapshots.list().unwrap();
        all.sort_by_key(|one| std::cmp::Reverse(one.manifest().layers.len()));
        for one in all {
            one.verify(Depth::Always, &mut |_| ()).unwrap();
            snapshots.remove(one.id()).unwrap();
        }
    }
    let left: Vec<_> =
        fs::read_dir(home.path().join("snapshots")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, [".lock"]);
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 1);
});
