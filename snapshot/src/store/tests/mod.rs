//! Snapshots of made-up files.

mod sudden;
mod transfer;
mod trial;

use std::os::unix::fs::FileExt;

use super::*;

const SIZE: u64 = 16 << 20;

fn home() -> (tempfile::TempDir, Snapshots) {
    let home = tempfile::tempdir().unwrap();
    let snapshots = Snapshots::open(home.path()).unwrap();
    (home, snapshots)
}

fn meta(layers: &[&str]) -> Meta {
    Meta {
        created: "2026-12-01T00:00:00.000Z".into(),
        kind: Kind::Full,
        origin: "8fc20000".into(),
        epoch: 1,
        image: "busybox".into(),
        layers: layers.iter().map(|id| (*id).to_owned()).collect(),
        disk_bytes: SIZE,
        memory_bytes: SIZE,
        vcpus: 1,
    }
}

/// A snapshot with a memory of holes and two pieces.
fn make(snapshots: &Snapshots, name: Option<&str>, layers: &[&str]) -> Snapshot {
    let pending = snapshots.begin(name).unwrap();
    let memory = pending.create("memory").unwrap();
    memory.set_len(SIZE).unwrap();
    memory.write_all_at(b"first", 4096).unwrap();
    memory.write_all_at(b"second", SIZE - 4096).unwrap();
    for file in ["state", "disk.data", "disk.map", "net.json", "spec.json", "streams.json"] {
        pending.write(file, file.as_bytes()).unwrap();
    }
    pending.publish(meta(layers)).unwrap()
}

fn never(_: u64) {}

fn write(snapshot: &Snapshot, file: &str, bytes: &[u8], at: u64) {
    OpenOptions::new().write(true).open(snapshot.path(file)).unwrap().write_all_at(bytes, at).unwrap();
}

#[test]
fn a_snapshot_is_there_when_it_was_published_and_not_before() {
    let (_home, snapshots) = home();
    let pending = snapshots.begin(Some("one")).unwrap();
    pending.write("state", b"x").unwrap();
    assert!(snapshots.list().unwrap().is_empty());
    drop(pending);
    assert_eq!(names(&snapshots.directory).unwrap(), Vec::<String>::new());

    let made = make(&snapshots, Some("one"), &[]);
    assert_eq!(made.status(), Status::Sealing);
    for given in [made.id(), &made.id()[..6], "one"] {
        assert_eq!(snapshots.find(given).unwrap().id(), made.id());
    }
    assert!(matches!(snapshots.begin(Some("one")), Err(StoreError::NameTaken { .. })));
    assert!(matches!(snapshots.find("two"), Err(StoreError::Unknown(_))));
    made.seal(&mut never).unwrap();
    assert_eq!(snapshots.find("one").unwrap().status(), Status::Sealed);
}

#[test]
fn each_file_is_hashed_once_and_again_when_it_changed() {
    let (_home, snapshots) = home();
    let made = make(&snapshots, None, &[]);
    let mut read = 0;
    made.seal(&mut |bytes| read += bytes).unwrap();
    assert!(read > 0 && read < SIZE, "holes are not read: {read}");
    let sealed = snapshots.find(made.id()).unwrap();
    let hashed = |depth| {
        let mut read = 0;
        sealed.verify(depth, &mut |bytes| read += bytes).map(|()| read)
    };
    assert_eq!(hashed(Depth::IfNeeded).unwrap(), 0);
    assert_eq!(hashed(Depth::Always).unwrap(), read);
    // The same bytes, written again, are another file as far as one can see.
    write(&sealed, "memory", b"first", 4096);
    assert_eq!(hashed(Depth::IfNeeded).unwrap(), 2 * hash::CHUNK, "it alone, without its holes");
    assert_eq!(hashed(Depth::IfNeeded).unwrap(), 0);
    // Zeros where there was a hole are the same content.
    write(&sealed, "memory", &[0; 8192], 1 << 20);
    hashed(Depth::IfNeeded).unwrap();
    write(&sealed, "memory", b"x", 5 << 20);
    let error = hashed(Depth::IfNeeded).unwrap_err().to_string();
    assert!(error.contains("memory: what lies in the 4194304 bytes from 4194304"), "{error}");
    write(&sealed, "memory", &[0], 5 << 20);
    write(&sealed, "memory", b"F", 4096);
    let error = hashed(Depth::Always).unwrap_err().to_string();
    assert!(error.contains("from 0 is not what was saved"), "{error}");
}

#[test]
fn every_file_counts_and_so_do_those_below() {
    for file in manifest::FULL {
        for (how, damage) in [
            ("removed", (|path: &Path| std::fs::remove_file(path).unwrap()) as fn(&Path)),
            ("cut", |path| OpenOptions::new().write(true).open(path).unwrap().set_len(1).unwrap()),
            ("a link", |path| {
                std::fs::rename(path, path.with_extension("moved")).unwrap();
                std::os::unix::fs::symlink(path.with_extension("moved"), path).unwrap();
            }),
            ("a directory", |path| {
                std::fs::remove_file(path).unwrap();
                std::fs::create_dir(path).unwrap();
            }),
        ] {
            let (_home, snapshots) = home();
            let below = make(&snapshots, None, &[]);
            below.seal(&mut never).unwrap();
            let above = make(&snapshots, None, &[below.id()]);
            above.seal(&mut never).unwrap();
            let above = snapshots.find(above.id()).unwrap();
            above.verify(Depth::IfNeeded, &mut never).unwrap();
            damage(&below.path(file));
            // Of what it stands on, the disk counts.
            match above.verify(Depth::IfNeeded, &mut never) {
                Ok(()) => assert!(!file.starts_with("disk"), "{file} {how}"),
                Err(error) => {
                    let error = error.to_string();
                    assert!(error.contains(below.id()) && error.contains(file), "{file} {how}: {error}");
                }
            }
            damage(&above.path(file));
            let error = above.verify(Depth::IfNeeded, &mut never).unwrap_err().to_string();
            let of = if file.starts_with("disk") { below.id() } else { above.id() };
            assert!(error.contains(of) && error.contains(file), "{file} {how}: {error}");
        }
    }
}

#[test]
fn what_others_stand_on_is_not_removed() {
    let (home, snapshots) = home();
    let below = make(&snapshots, None, &[]);
    let above = make(&snapshots, None, &[below.id()]);
    let run = home.path().join("runs/8fc20000");
    std::fs::create_dir_all(run.join("disk")).unwrap();
    let chain = Chain { layers: vec![ChainLayer::Snapshot(above.id().to_owned()), ChainLayer::Own("1".into())] };
    chain.write(&run.join(Chain::PLACE)).unwrap();
    assert_eq!(Chain::read(&run.join(Chain::PLACE)).unwrap(), chain);
    assert_eq!(snapshots.dependents(below.id()).unwrap(), [Dependent::Snapshot(above.id().to_owned())]);
    assert_eq!(snapshots.dependents(above.id()).unwrap(), [Dependent::Run("8fc20000".into())]);
    for id in [below.id(), above.id()] {
        assert!(matches!(snapshots.remove(id), Err(StoreError::InUse { .. })));
    }
    // A run whose chain cannot be read may stand on anything.
    std::fs::write(run.join(Chain::PLACE), "{").unwrap();
    assert!(matches!(snapshots.remove(above.id()), Err(StoreError::Chain { .. })));
    std::fs::remove_dir_all(home.path().join("runs")).unwrap();
    snapshots.remove(above.id()).unwrap();
    snapshots.remove(below.id()).unwrap();
    assert!(matches!(snapshots.remove(below.id()), Err(StoreError::Unknown(_))));
    assert!(names(&snapshots.directory).unwrap().is_empty());
}

#[test]
fn what_died_in_the_middle_goes_and_nothing_else() {
    let (_home, snapshots) = home();
    let made = make(&snapshots, None, &[]);
    let pending = snapshots.begin(None).unwrap();
    for leftover in [".tmp-0123456789abcdef", ".gone-0123456789abcdef"] {
        std::fs::create_dir(snapshots.directory.join(leftover)).unwrap();
    }
    snapshots.sweep().unwrap();
    let mut left = names(&snapshots.directory).unwrap();
    left.sort();
    assert_eq!(left, [format!(".tmp-{}", pending.id()), made.id().to_owned()]);
}

#[test]
fn a_manifest_is_not_believed() {
    let (_home, snapshots) = home();
    let made = make(&snapshots, None, &[]);
    made.seal(&mut never).unwrap();
    let path = made.path(Snapshot::MANIFEST);
    let good = std::fs::read_to_string(&path).unwrap();
    let other = "0123456789abcdef";
    for (what, bad) in [
        ("another id", good.replace(made.id(), other)),
        ("another version", good.replace("\"version\": 1", "\"version\": 2")),
        ("a path", good.replace("\"name\": \"state\"", "\"name\": \"../state\"")),
        ("a missing file", good.replacen("\"name\": \"memory\"", "\"name\": \"state\"", 1)),
        ("a layer that is a path", good.replace("\"layers\": []", "\"layers\": [\"../../etc\"]")),
        ("a memory of another size", good.replace("\"memory_bytes\": 16777216", "\"memory_bytes\": 1")),
        ("an unknown field", good.replacen('{', "{\"more\": 1,", 1)),
        ("too much", format!("{good}{}", " ".repeat(70_000))),
        ("nothing", String::new()),
    ] {
        // As it would be by accident, and with a hash that belongs to it.
        let summed = serde_json::from_str::<Manifest>(&bad)
            .ok()
            .filter(|_| what != "too much")
            .map(|manifest| manifest.summed().unwrap());
        let summed = summed.map(|manifest| serde_json::to_string(&manifest).unwrap());
        for bad in [Some(bad), summed].into_iter().flatten() {
            std::fs::write(&path, bad).unwrap();
            let error = snapshots.find(made.id()).unwrap_err().to_string();
            assert!(error.contains(made.id()) && error.contains("manifest.json"), "{what}: {error}");
        }
    }
    // From before it was sealed, in this life of the host and in an earlier one.
    let now = made.manifest().clone();
    let earlier = Manifest { boot: "another".into(), ..now.clone() };
    for (manifest, status) in [(now, Status::Sealing), (earlier, Status::NeverSealed)] {
        std::fs::write(&path, serde_json::to_vec(&manifest.summed().unwrap()).unwrap()).unwrap();
        let found = snapshots.find(made.id()).unwrap();
        assert_eq!(found.status(), status);
        let error = found.verify(Depth::IfNeeded, &mut never).unwrap_err().to_string();
        assert!(error.contains("from before the snapshot was sealed"), "{error}");
    }
    std::fs::remove_file(made.path("verified.json")).unwrap();
    let found = snapshots.find(made.id()).unwrap();
    assert!(matches!(found.verify(Depth::IfNeeded, &mut never), Err(StoreError::NeverSealed { .. })));
}

#[test]
fn what_is_damaged_is_named_and_can_be_removed() {
    let (_home, snapshots) = home();
    let (one, two, good) =
        (make(&snapshots, Some("one"), &[]), make(&snapshots, None, &[]), make(&snapshots, None, &[]));
    std::fs::write(one.path(Snapshot::MANIFEST), "{").unwrap();
    std::fs::remove_file(two.path(Snapshot::MANIFEST)).unwrap();
    let mut broken: Vec<String> = snapshots.broken().unwrap().into_iter().map(|(id, _)| id).collect();
    broken.sort();
    let mut expected = [one.id().to_owned(), two.id().to_owned()];
    expected.sort();
    assert_eq!(broken, expected);
    // Either may stand on it.
    assert!(matches!(snapshots.remove(good.id()), Err(StoreError::Damaged { .. })));
    for id in expected {
        assert_eq!(snapshots.id_of(&id[..10]).unwrap(), id);
        snapshots.remove(&id).unwrap();
    }
    snapshots.remove(good.id()).unwrap();
}

/// A layer of 64 blocks, with a stamp in each of some of them.
fn write_layer(pending: &Pending, blocks: &[(u64, u8)]) -> Result<(), StoreError> {
    use crate::disk::{BLOCK, Bytes, Disk, LayerFiles, create_layer};
    let failed = |error: &dyn std::fmt::Display| at(Path::new("disk"))(io::Error::other(error.to_string()));
    let (data, map) = (pending.create("disk.data")?, pending.create("disk.map")?);
    create_layer(&data, &map, 64 * BLOCK).map_err(|error| failed(&error))?;
    let disk = Disk::open(vec![LayerFiles { data, map: Some(map) }], false).map_err(|error| failed(&error))?;
    for (block, stamp) in blocks {
        // A full host says so, and waits for room.
        disk.write(block * BLOCK, &Bytes::new(vec![*stamp; 4096]))
            .map_err(|_| failed(&"No space left for the layer"))?;
    }
    disk.flush().map_err(|_| failed(&"No space left for the layer"))
}

/// A snapshot whose disk is one.
fn make_whole(snapshots: &Snapshots, layers: &[&str], stamp: u8) -> Snapshot {
    let pending = snapshots.begin(None).unwrap();
    let memory = pending.create("memory").unwrap();
    memory.set_len(SIZE).unwrap();
    for at in [0, 5 << 20, SIZE - 4096] {
        memory.write_all_at(&[stamp; 4096], at).unwrap();
    }
    // What lineages share.
    memory.write_all_at(&[99; 128 << 10], 1 << 20).unwrap();
    write_layer(&pending, &[(u64::from(stamp), stamp), (60, stamp)]).unwrap();
    for file in ["state", "net.json", "spec.json", "streams.json"] {
        pending.write(file, format!("{file} {stamp}").as_bytes()).unwrap();
    }
    let made = pending.publish(meta(layers)).unwrap();
    made.seal(&mut never).unwrap();
    snapshots.find(made.id()).unwrap()
}

fn disk_of(snapshot: &Snapshot) -> Vec<u8> {
    use crate::disk::{Bytes, Disk, LayerFiles};
    let mut all = snapshot.below().unwrap();
    all.push(snapshot.clone());
    let open = |one: &Snapshot, name| File::open(one.path(name)).unwrap();
    let layers =
        all.iter().map(|one| LayerFiles { data: open(one, "disk.data"), map: Some(open(one, "disk.map")) }).collect();
    let disk = Disk::open(layers, true).unwrap();
    let buffer = Bytes::new(vec![0xa5; usize::try_from(disk.size()).unwrap()]);
    disk.read(0, &buffer).unwrap();
    buffer.into_inner()
}

#[test]
fn a_flat_snapshot_stands_on_nothing_and_is_the_same() {
    let (_home, snapshots) = home();
    let one = make_whole(&snapshots, &[], 1);
    let two = make_whole(&snapshots, &[one.id()], 2);
    let three = make_whole(&snapshots, &[one.id(), two.id()], 3);
    let flat = snapshots.flatten(&three, "2026-12-02T00:00:00.000Z".into(), &mut never).unwrap();
    assert_eq!((flat.status(), flat.manifest().layers.len()), (Status::Sealed, 0));
    assert!(disk_of(&flat) == disk_of(&three));
    for id in [three.id(), two.id(), one.id()] {
        snapshots.remove(id).unwrap();
    }
    flat.verify(Depth::Always, &mut never).unwrap();
    assert_eq!(std::fs::read(flat.path("state")).unwrap(), b"state 3");
}

/// SplitMix64: the same seed, the same test.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n as u64).unwrap()
    }
}

/// The seed to begin with, and how many times to try: a slice, or all with `BULKHEAD_SOAK=1`.
fn tries(slice: usize, all: usize) -> (Random, usize) {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let soak = std::env::var("BULKHEAD_SOAK").is_ok_and(|soak| soak == "1");
    (Random(seed), if soak { all } else { slice })
}

#[test]
fn a_damaged_snapshot_is_named_and_can_be_removed() {
    let (_home, snapshots) = home();
    let base = make(&snapshots, Some("base"), &[]);
    let above = make(&snapshots, Some("above"), &[base.id()]);
    std::fs::write(above.path("manifest.json"), "{").unwrap();
    let wrong: Vec<String> = snapshots.broken().unwrap().iter().map(|(_, error)| error.to_string()).collect();
    assert!(wrong.len() == 1 && wrong[0].contains(above.id()) && wrong[0].contains("manifest.json"), "{wrong:?}");
    // Nobody knows what it stands on, so that nothing below it goes before it.
    assert!(matches!(snapshots.remove(base.id()), Err(StoreError::Damaged { .. })));
    assert!(matches!(snapshots.id_of("above"), Err(StoreError::Unknown(_))));
    snapshots.remove(&snapshots.id_of(above.id()).unwrap()).unwrap();
    snapshots.remove(&snapshots.id_of("base").unwrap()).unwrap();
    assert_eq!(names(&snapshots.directory).unwrap(), Vec::<String>::new());
}

#[test]
fn a_pipe_or_a_link_in_place_of_a_manifest_is_not_read() {
    let (home, snapshots) = home();
    let made = make(&snapshots, None, &[]);
    let manifest = made.path("manifest.json");
    let pipe = || rustix::fs::mknodat(rustix::fs::CWD, &manifest, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
    let link = || std::os::unix::fs::symlink("/dev/zero", &manifest).unwrap();
    let long = || std::fs::write(&manifest, vec![b' '; 1 << 20]).unwrap();
    for (put, why) in
        [(&pipe as &dyn Fn(), "no plain file"), (&link, "symbolic link"), (&long, "more than 65536 bytes")]
    {
        std::fs::remove_file(&manifest).unwrap();
        put();
        let told = snapshots.find(made.id()).unwrap_err().to_string();
        assert!(told.contains(why), "{told}");
    }
    let chain = home.path().join("chain.json");
    std::os::unix::fs::symlink("/dev/zero", &chain).unwrap();
    assert!(Chain::read(&chain).unwrap_err().to_string().contains("symbolic link"));
}

#[test]
fn those_that_begin_at_once_do_not_sweep_each_other_away() {
    let (_home, snapshots) = home();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..100 {
                    let pending = snapshots.begin(None).unwrap();
                    pending.write("state", b"x").unwrap();
                }
            });
        }
    });
    assert_eq!(names(&snapshots.directory).unwrap(), Vec::<String>::new());
}

#[test]
fn snapshots_may_lie_elsewhere() {
    let (home, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::os::unix::fs::symlink(elsewhere.path(), home.path().join("snapshots")).unwrap();
    let made = make(&Snapshots::open(home.path()).unwrap(), None, &[]);
    // Whoever opens what it holds follows no links.
    assert!(made.layer().starts_with(elsewhere.path().canonicalize().unwrap()));
}
