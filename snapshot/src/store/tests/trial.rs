//! Files at rest are damaged in every way at random: it is found and named, or nothing that counts has changed.

use std::collections::BTreeMap;

use super::*;

/// What a chain is: its snapshots' manifests and all that their files read as.
type Content = Vec<(Manifest, BTreeMap<String, Vec<u8>>)>;

fn content(top: &Snapshot) -> Content {
    let mut all = top.below().unwrap();
    all.push(top.clone());
    let files = |one: &Snapshot| {
        let read = |name: &str| (name.to_owned(), std::fs::read(one.path(name)).unwrap());
        one.manifest().files.iter().map(|file| read(&file.name)).collect()
    };
    all.iter().map(|one| (one.manifest().clone(), files(one))).collect()
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let name = entry.unwrap().file_name();
        std::fs::copy(from.join(&name), to.join(&name)).unwrap();
    }
}

fn flip(path: &Path, random: &mut Random) {
    let mut bytes = std::fs::read(path).unwrap();
    for _ in 0..1 + random.below(3) {
        let at = random.below(bytes.len());
        bytes[at] ^= 1 << random.below(8);
    }
    // In place, so that it is the same file.
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(&bytes, 0).unwrap();
}

/// Damages the snapshots in these directories; says how, and which of them.
fn damage(at: &[PathBuf], unsealed: &[Vec<u8>], random: &mut Random) -> (String, Vec<usize>) {
    let (one, other) = (random.below(at.len()), random.below(at.len()));
    let name = manifest::FULL[random.below(manifest::FULL.len())];
    let second = manifest::FULL[random.below(manifest::FULL.len())];
    let path = at[one].join(name);
    let length = std::fs::metadata(&path).unwrap().len();
    let open = || OpenOptions::new().write(true).open(&path).unwrap();
    let within = |random: &mut Random| random.next() % length;
    match random.below(14) {
        0 | 1 => flip(&path, random),
        2 => flip(&at[one].join(Snapshot::MANIFEST), random),
        3 => open().set_len(within(random)).unwrap(),
        4 => open().set_len(length + 1 + random.next() % 9000).unwrap(),
        5 => {
            // As some do that hide it.
            let times = std::fs::metadata(&path).unwrap();
            flip(&path, random);
            let times = std::fs::FileTimes::new().set_modified(times.modified().unwrap());
            open().set_times(times).unwrap();
        }
        6 => {
            let start = within(random) / 4096 * 4096;
            let zeros = usize::try_from((length - start).min(4096)).unwrap();
            open().write_all_at(&vec![0; zeros], start).unwrap();
        }
        7 => {
            std::fs::remove_file(&path).unwrap();
            match random.below(3) {
                0 => std::fs::create_dir(&path).unwrap(),
                1 => std::os::unix::fs::symlink(at[other].join(second), &path).unwrap(),
                _ => {}
            }
        }
        8 => swap(&path, &at[one].join(second)),
        9 => {
            swap(&path, &at[other].join(name));
            return (format!("{name} of {one} and {other} changed places"), vec![one, other]);
        }
        10 => {
            swap(&at[one], &at[other]);
            return (format!("{one} and {other} changed places"), vec![one, other]);
        }
        11 => {
            // The manifest of another snapshot, or of its own past, with or without what says that it was hashed.
            let manifest = if one == other {
                unsealed[one].clone()
            } else {
                std::fs::read(at[other].join(Snapshot::MANIFEST)).unwrap()
            };
            std::fs::write(at[one].join(Snapshot::MANIFEST), manifest).unwrap();
        }
        12 => {
            let stamp = at[one].join("verified.json");
            match random.below(3) {
                0 => std::fs::write(&stamp, std::fs::read(at[other].join("verified.json")).unwrap()).unwrap(),
                1 => flip(&stamp, random),
                _ => std::fs::write(&stamp, random.next().to_string()).unwrap(),
            }
            if random.below(2) == 0 {
                flip(&path, random);
            }
        }
        _ => {
            flip(&at[one].join("chunks"), random);
            if random.below(2) == 0 {
                flip(&path, random);
            }
        }
    }
    (format!("{name} ({second}) of {one}"), vec![one])
}

fn swap(one: &Path, other: &Path) {
    if one != other {
        let (here, flags) = (rustix::fs::CWD, rustix::fs::RenameFlags::EXCHANGE);
        rustix::fs::renameat_with(here, one, here, other, flags).unwrap();
    }
}

#[test]
fn damage_at_rest_is_found_and_named_or_harmless() {
    let (_home, snapshots) = home();
    let one = make_whole(&snapshots, &[], 1);
    let two = make_whole(&snapshots, &[one.id()], 2);
    let top = make_whole(&snapshots, &[one.id(), two.id()], 3);
    let all = [&one, &two, &top];
    let unsealed = |one: &&Snapshot| {
        let mut manifest = one.manifest().clone();
        manifest.files.iter_mut().for_each(|file| file.hash = None);
        manifest.boot = "an earlier one".to_owned();
        serde_json::to_vec(&manifest.summed().unwrap()).unwrap()
    };
    let unsealed: Vec<Vec<u8>> = all.iter().map(unsealed).collect();
    let expected = content(&top);
    let aside = tempfile::tempdir().unwrap();
    let places: Vec<PathBuf> = all.iter().map(|one| snapshots.directory.join(one.id())).collect();
    let good = |index: usize| aside.path().join(index.to_string());
    places.iter().enumerate().for_each(|(index, place)| copy(place, &good(index)));

    let (mut random, tries) = tries(200, 1000);
    let (mut found, mut harmless) = (0, 0);
    for number in 0..tries {
        let (what, which) = damage(&places, &unsealed, &mut random);
        let depth = if random.below(2) == 0 { Depth::IfNeeded } else { Depth::Always };
        // Of what another stands on the disk counts, and the rest is verified for itself.
        let verify = |one: &&Snapshot| snapshots.find(one.id())?.verify(depth, &mut never);
        let verified = all.iter().rev().try_for_each(verify).and_then(|()| snapshots.find(top.id()));
        match verified {
            Ok(there) => {
                harmless += 1;
                assert!(content(&there) == expected, "try {number}: {what} went unnoticed");
            }
            Err(error) => {
                found += 1;
                let error = error.to_string();
                assert!(which.iter().any(|index| error.contains(all[*index].id())), "try {number}: {what}: {error}");
            }
        }
        for index in which {
            std::fs::remove_dir_all(&places[index]).unwrap();
            copy(&good(index), &places[index]);
        }
        snapshots.find(top.id()).unwrap().verify(Depth::IfNeeded, &mut never).unwrap();
    }
    println!("{found} of {tries} found and named, {harmless} harmless");
    assert!(found > tries / 2 && harmless > 0);
}
