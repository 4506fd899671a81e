//! Archives: there and back, and every wrong one.

use std::os::unix::fs::MetadataExt;

use super::super::archive::PIECE;
use super::*;

fn chain(snapshots: &Snapshots) -> [Snapshot; 3] {
    let one = make_whole(snapshots, &[], 1);
    let two = make_whole(snapshots, &[one.id()], 2);
    let three = make_whole(snapshots, &[one.id(), two.id()], 3);
    [one, two, three]
}

fn exported(snapshots: &Snapshots, snapshot: &Snapshot) -> Vec<u8> {
    let mut archive = Vec::new();
    snapshots.export(snapshot, &mut archive, &mut never).unwrap();
    archive
}

/// That nothing is there that was not before.
fn assert_only(snapshots: &Snapshots, expected: &[&str]) {
    let mut found = names(&snapshots.directory).unwrap();
    found.sort();
    let mut expected = expected.to_vec();
    expected.sort_unstable();
    assert_eq!(found, expected);
}

#[test]
fn what_was_exported_is_imported_with_all_that_it_stands_on() {
    let (_home, snapshots) = home();
    let all = chain(&snapshots);
    let archive = exported(&snapshots, &all[2]);
    // Three memories share 128 KiB, and little else is no zeros: it is packed, and held once.
    assert!(archive.len() < 24 << 10, "{} bytes", archive.len());
    let (_home, there) = home();
    let imported = there.import(archive.as_slice(), &mut never).unwrap();
    assert_eq!(imported, Imported { id: all[2].id().into(), image: "busybox".into(), unnamed: vec![] });
    for one in &all {
        let other = there.find(one.id()).unwrap();
        assert_eq!((other.manifest(), other.status()), (one.manifest(), Status::Sealed));
        for file in &one.manifest().files {
            assert!(std::fs::read(one.path(&file.name)).unwrap() == std::fs::read(other.path(&file.name)).unwrap());
        }
        let taken = std::fs::metadata(other.path("memory")).unwrap().blocks() * 512;
        assert!(taken < 1 << 20, "holes stay holes: {taken}");
        other.verify(Depth::Always, &mut never).unwrap();
    }
    assert!(disk_of(&there.find(all[2].id()).unwrap()) == disk_of(&all[2]));
    assert_only(&there, &all.each_ref().map(Snapshot::id));
    // Again changes nothing; and of a part that is here already the rest comes.
    there.import(archive.as_slice(), &mut never).unwrap();
    there.remove(all[2].id()).unwrap();
    there.import(archive.as_slice(), &mut never).unwrap();
    assert_only(&there, &all.each_ref().map(Snapshot::id));
    // Damage after an import is found where it is, as with those that were made here.
    write(&there.find(all[1].id()).unwrap(), "memory", b"x", 5 << 20);
    let [damaged, top] = [&all[1], &all[2]].map(|one| there.find(one.id()).unwrap());
    let error = damaged.verify(Depth::IfNeeded, &mut never).unwrap_err().to_string();
    assert!(error.contains(damaged.id()) && error.contains("bytes from 4194304"), "{error}");
    // What stands on it is right, but cannot be exported with it; what is made flat can.
    top.verify(Depth::IfNeeded, &mut never).unwrap();
    let error = there.export(&top, Vec::new(), &mut never).unwrap_err().to_string();
    assert!(error.contains(damaged.id()) && error.contains("memory"), "{error}");
    let flat = there.flatten(&top, top.manifest().created.clone(), &mut never).unwrap();
    let archive = exported(&there, &flat);
    let (_home, third) = self::home();
    third.import(archive.as_slice(), &mut never).unwrap();
    assert!(disk_of(&third.find(flat.id()).unwrap()) == disk_of(&all[2]));
}

#[test]
fn pieces_that_cannot_be_packed_come_through() {
    let (_home, snapshots) = home();
    let mut random = Random(7);
    let pending = snapshots.begin(Some("noise")).unwrap();
    let noise: Vec<u8> = std::iter::repeat_with(|| random.next().to_le_bytes()).take(40 << 10).flatten().collect();
    pending.create("memory").unwrap().write_all_at(&noise, SIZE - noise.len() as u64).unwrap();
    // A file that ends in the middle of a piece, and one that is empty.
    pending.write("state", &noise[..PIECE + 17]).unwrap();
    pending.write("net.json", b"").unwrap();
    for file in ["disk.data", "disk.map", "spec.json", "streams.json"] {
        pending.write(file, file.as_bytes()).unwrap();
    }
    let made = pending.publish(meta(&[])).unwrap();
    assert!(matches!(snapshots.export(&made, Vec::new(), &mut never), Err(StoreError::Unfit { .. })));
    made.seal(&mut never).unwrap();
    let made = snapshots.find("noise").unwrap();
    let archive = exported(&snapshots, &made);
    let (_home, there) = home();
    there.import(archive.as_slice(), &mut never).unwrap();
    for file in ["memory", "state", "net.json"] {
        let there = there.find("noise").unwrap();
        assert!(std::fs::read(made.path(file)).unwrap() == std::fs::read(there.path(file)).unwrap(), "{file}");
    }
    // Where the name is taken, it comes without one.
    let (_home, third) = home();
    let other = make(&third, Some("noise"), &[]);
    let imported = third.import(archive.as_slice(), &mut never).unwrap();
    assert_eq!(imported.unnamed, [(made.id().to_owned(), "noise".to_owned())]);
    assert_eq!(third.find("noise").unwrap().id(), other.id());
    third.find(made.id()).unwrap().verify(Depth::Always, &mut never).unwrap();
    third.import(archive.as_slice(), &mut never).unwrap();
}

#[test]
fn another_snapshot_of_the_same_id_is_kept() {
    let (_home, snapshots) = home();
    let [one, _, three] = chain(&snapshots);
    let archive = exported(&snapshots, &three);
    let (_home, there) = home();
    there.import(archive.as_slice(), &mut never).unwrap();
    there.remove(three.id()).unwrap();
    let path = there.find(one.id()).unwrap().path(Snapshot::MANIFEST);
    let mut other = one.manifest().clone();
    other.epoch += 1;
    std::fs::write(&path, serde_json::to_vec(&other.summed().unwrap()).unwrap()).unwrap();
    let error = there.import(archive.as_slice(), &mut never).unwrap_err();
    assert!(matches!(&error, StoreError::Exists { id } if id == one.id()), "{error}");
    assert!(there.find(three.id()).is_err());
}

/// An archive with these manifests and pieces, its hash right.
fn forged(manifests: &[Manifest], body: &[u8]) -> Vec<u8> {
    let mut archive = b"BHKSNAPS\x01\0\0\0".to_vec();
    archive.push(u8::try_from(manifests.len()).unwrap());
    for manifest in manifests {
        let text = serde_json::to_vec(&manifest.clone().summed().unwrap()).unwrap();
        archive.extend(u32::try_from(text.len()).unwrap().to_le_bytes());
        archive.extend(text);
    }
    archive.extend(body);
    let sum = blake3::hash(&archive);
    archive.extend(sum.as_bytes());
    archive
}

#[test]
fn forged_archives_are_refused_and_leave_nothing() {
    let (_home, snapshots) = home();
    let [one, two, _] = chain(&snapshots).map(|one| one.manifest().clone());
    let changed = |change: fn(&mut Manifest)| {
        let mut manifest = one.clone();
        change(&mut manifest);
        vec![manifest]
    };
    let piece = |tag: u8, number: u64, rest: &[u8]| [&[tag], number.to_le_bytes().as_slice(), rest].concat();
    let same = |number, snapshot, file, from: u64| {
        piece(3, number, &[&[snapshot, file], from.to_le_bytes().as_slice()].concat())
    };
    let only = || vec![one.clone()];
    // The first file, `state`, has 7 bytes.
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("holds 0 snapshots", forged(&[], &[])),
        ("holds 64 snapshots", forged(&vec![one.clone(); 64], &[])),
        ("is no id", forged(&changed(|m| m.id = "../../../../etc".into()), &[])),
        ("does not name the files", forged(&changed(|m| m.files[0].name = "../state".into()), &[])),
        ("has no hashes", forged(&changed(|m| m.files.iter_mut().for_each(|f| f.hash = None)), &[])),
        ("over 17592186044416", forged(&changed(|m| m.files[2].length = u64::MAX), &[])),
        ("over 16777216", forged(&changed(|m| m.files[0].length = 1 << 30), &[])),
        ("not stand on those", forged(&changed(|m| m.layers = vec!["0123456789abcdef".into()]), &[])),
        ("not stand on those", forged(&[two.clone(), one.clone()], &[])),
        ("not stand on those", forged(&[one.clone(), one.clone()], &[])),
        ("another image", forged(&[one.clone(), Manifest { image: "other".into(), ..two.clone() }], &[])),
        ("out of place", forged(&only(), &piece(1, 1, &[0; 7]))),
        ("out of place", forged(&only(), &piece(1, u64::MAX, &[0; 7]))),
        ("out of place", forged(&only(), &[piece(1, 0, &[0; 7]), piece(1, 0, &[0; 7])].concat())),
        ("no packing", forged(&only(), &piece(2, 0, &u32::MAX.to_le_bytes()))),
        ("a packed piece", forged(&only(), &piece(2, 0, &[&[3, 0, 0, 0], [0xff; 3].as_slice()].concat()))),
        ("kind 9", forged(&only(), &piece(9, 0, &[0; 7]))),
        ("no earlier place", forged(&only(), &same(0, 0, 0, 0))),
        ("no earlier place", forged(&only(), &same(0, 7, 7, 7))),
        ("no earlier place", forged(&only(), &[&[0], same(3, 0, 1, 4).as_slice()].concat())),
        ("another length", forged(&only(), &[&[0], same(3, 0, 0, 0).as_slice()].concat())),
        ("state: its hash is not", forged(&only(), &[0; 7])),
        ("no archive", b"BHKSNAP!".repeat(9)),
        ("version 2", b"BHKSNAPS\x02\0\0\0".repeat(9)),
        ("in the middle", b"BHKSNAPS\x01\0\0\0\x01\0\0".to_vec()),
        ("over 65536", b"BHKSNAPS\x01\0\0\0\x01\xff\xff\xff\xff".to_vec()),
    ];
    let (_home, there) = home();
    for (expected, archive) in cases {
        let error = there.import(archive.as_slice(), &mut never).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
        assert_only(&there, &[]);
    }
    let good = snapshots.find(&one.id).unwrap();
    let mut more = exported(&snapshots, &good);
    more.push(0);
    let error = there.import(more.as_slice(), &mut never).unwrap_err().to_string();
    assert!(error.contains("more behind its end"), "{error}");
    assert_only(&there, &[]);
}

/// Changes of a good archive: each is refused, and leaves nothing.
#[test]
fn changed_archives_are_refused() {
    let (home_of, snapshots) = home();
    let all = chain(&snapshots);
    let good = exported(&snapshots, &all[2]);
    let ids = all.each_ref().map(Snapshot::id);
    let (home, there) = home();
    let (mut random, tries) = tries(150, 3000);
    for _ in 0..tries {
        let mut bad = good.clone();
        match random.below(6) {
            0 => bad.truncate(random.below(good.len())),
            1 => {
                let (from, to) = (random.below(bad.len()), random.below(bad.len()));
                let length = 1 + random.below(300);
                let bytes: Vec<u8> = good[from..(from + length).min(good.len())].to_vec();
                let _ = bad.splice(to..(to + random.below(300)).min(good.len()), bytes);
            }
            2 => {
                let at = random.below(bad.len());
                bad.drain(at..(at + 1 + random.below(64)).min(good.len()));
            }
            _ => {
                for _ in 0..1 + random.below(4) {
                    let at = random.below(bad.len());
                    bad[at] ^= 1 << random.below(8);
                }
            }
        }
        // Half of them with a hash that is right, so that what is behind it is tried.
        if random.below(2) == 0 && bad.len() > 32 {
            let end = bad.len() - 32;
            let sum = blake3::hash(&bad[..end]);
            bad[end..].copy_from_slice(sum.as_bytes());
        }
        match there.import(bad.as_slice(), &mut never) {
            // It changed nothing that counts: bytes of a place that is written twice, or none at all.
            Ok(_) => {
                for id in ids {
                    there.find(id).unwrap().verify(Depth::Always, &mut never).unwrap();
                }
                for id in [ids[2], ids[1], ids[0]] {
                    there.remove(id).unwrap();
                }
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        assert_only(&there, &[]);
    }
    let beside: Vec<_> = std::fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(beside, ["snapshots"]);
    drop(home_of);
}
