//! Archives of a guest that is the enemy, put into a directory that others write in too.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;
use tar::{EntryType, Header};

use super::archive::Budget;
use super::extract::{Destination, ExtractError, Rules, Shape, Summary};

/// A directory to copy to, and beside it what must not be touched.
struct Place {
    all: tempfile::TempDir,
}

const RULES: Rules = Rules { umask: 0o022, owners: false };

impl Place {
    fn new() -> Self {
        let all = tempfile::tempdir().unwrap();
        fs::create_dir(all.path().join("to")).unwrap();
        fs::create_dir(all.path().join("outside")).unwrap();
        fs::write(all.path().join("outside/secret"), "secret").unwrap();
        Self { all }
    }

    fn to(&self) -> PathBuf {
        self.all.path().join("to")
    }

    fn outside(&self) -> PathBuf {
        self.all.path().join("outside")
    }

    fn put(&self, archive: &[u8], shape: &Shape) -> Result<Summary, ExtractError> {
        let root = fs::File::open(self.to()).unwrap();
        let mut destination = Destination::new(root.as_fd(), RULES, false);
        let extracted = destination.extract(&mut &archive[..], shape, &mut Budget::new(1 << 20));
        let finished = destination.finish();
        extracted.and_then(|summary| finished.map(|()| summary))
    }

    fn tree(&self, archive: &[u8]) -> Result<Summary, ExtractError> {
        self.put(archive, &Shape::Tree)
    }

    /// Whether nothing beside the directory has changed.
    fn assert_outside_untouched(&self) {
        let names: Vec<_> = fs::read_dir(self.all.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names.len(), 2, "{names:?}");
        let outside: Vec<_> = fs::read_dir(self.outside()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(outside, ["secret"]);
        assert_eq!(fs::read(self.outside().join("secret")).unwrap(), b"secret");
        assert_eq!(fs::symlink_metadata(self.outside().join("secret")).unwrap().nlink(), 1);
    }
}

/// An entry as no honest writer would let itself be told to make it.
fn entry(name: &[u8], kind: EntryType, link: &[u8], mode: u32, content: &[u8]) -> Vec<u8> {
    let mut header = Header::new_gnu();
    let raw = header.as_gnu_mut().unwrap();
    raw.name[..name.len()].copy_from_slice(name);
    raw.linkname[..link.len()].copy_from_slice(link);
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_mtime(1_000_000);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(u64::try_from(content.len()).unwrap());
    header.set_cksum();
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend(content);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn file(name: &str, content: &str) -> Vec<u8> {
    entry(name.as_bytes(), EntryType::Regular, b"", 0o644, content.as_bytes())
}

fn directory(name: &str) -> Vec<u8> {
    entry(name.as_bytes(), EntryType::Directory, b"", 0o755, b"")
}

fn link(name: &str, to: &str) -> Vec<u8> {
    entry(name.as_bytes(), EntryType::Symlink, to.as_bytes(), 0o777, b"")
}

#[test]
fn an_honest_tree_arrives_as_it_was() {
    let place = Place::new();
    let read_only = entry(b"d", EntryType::Directory, b"", 0o500, b"");
    let archive =
        [read_only, file("d/a", "one"), link("d/l", "a"), directory("d/e"), link("d/e/up", "../a"), file("b", "")]
            .concat();
    let summary = place.tree(&archive).unwrap();
    assert_eq!((summary.files, summary.directories, summary.bytes), (4, 2, 3));
    assert!(summary.notes().is_empty());
    assert_eq!(fs::read_to_string(place.to().join("d/l")).unwrap(), "one");
    assert_eq!(fs::read_to_string(place.to().join("d/e/up")).unwrap(), "one");
    let metadata = fs::metadata(place.to().join("d")).unwrap();
    assert_eq!((metadata.mode() & 0o7777, metadata.mtime()), (0o500, 1_000_000));
    assert_eq!(fs::metadata(place.to().join("d/a")).unwrap().mtime(), 1_000_000);
    fs::set_permissions(place.to().join("d"), fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn names_that_lead_out_fail_the_copy() {
    for name in ["../outside/secret", "/etc/passwd", "d/../../outside/secret", ".."] {
        let place = Place::new();
        let error = place.tree(&file(name, "evil")).unwrap_err();
        assert!(matches!(error, ExtractError::Archive(_)), "{name}: {error}");
        place.assert_outside_untouched();
        assert_eq!(fs::read_dir(place.to()).unwrap().count(), 0);
    }
}

#[test]
fn links_that_lead_out_are_left_out_and_none_is_followed() {
    for target in ["/etc", "../outside", "../../x", "a/../../outside", "./../outside", "..", "l/../.."] {
        let place = Place::new();
        let archive = [link("l", target), directory("d"), file("d/ok", "ok")].concat();
        let summary = place.tree(&archive).unwrap();
        assert!(summary.notes()[0].contains("it is a link to"), "{target}: {:?}", summary.notes());
        assert!(fs::symlink_metadata(place.to().join("l")).is_err(), "{target}");
        assert!(place.to().join("d/ok").is_file());
        // What comes through the link's name afterwards becomes a directory of its own.
        place.tree(&[link("l", target), file("l/secret", "evil")].concat()).unwrap();
        place.assert_outside_untouched();
    }
    // A link that stays inside is made, and still not walked through.
    let place = Place::new();
    let error = place.tree(&[directory("d"), link("l", "d"), file("l/x", "x")].concat()).unwrap_err();
    assert_eq!(error.to_string(), "l: a symbolic link is in its way here; it is not followed");
    // Links of links cannot add up to one that leads out.
    let place = Place::new();
    let archive =
        [directory("p"), directory("p/q"), link("p/q/s", "../.."), link("t", "p/q/s/../outside/secret")].concat();
    assert_eq!(place.tree(&archive).unwrap().notes().len(), 1);
    assert!(fs::symlink_metadata(place.to().join("t")).is_err());
}

#[test]
fn links_that_are_here_already_are_not_followed() {
    let place = Place::new();
    symlink(place.outside(), place.to().join("d")).unwrap();
    symlink(place.outside().join("secret"), place.to().join("f")).unwrap();
    fs::hard_link(place.outside().join("secret"), place.to().join("h")).unwrap();
    for archive in [file("d/secret", "evil"), directory("d"), [directory("d"), file("d/secret", "evil")].concat()] {
        let error = place.tree(&archive).unwrap_err();
        assert!(error.to_string().contains("symbolic link is in its way here"), "{error}");
    }
    // A file takes the place of a link, and of a hard link; what they led to stays.
    place.tree(&[file("f", "new"), file("h", "new")].concat()).unwrap();
    assert_eq!(fs::read_to_string(place.to().join("f")).unwrap(), "new");
    fs::remove_file(place.to().join("d")).unwrap();
    place.assert_outside_untouched();
}

#[test]
fn only_files_directories_and_links_are_made() {
    let place = Place::new();
    fs::write(place.to().join("victim"), "mine").unwrap();
    let kinds = [
        (EntryType::Link, "a hard link"),
        (EntryType::Char, "a device"),
        (EntryType::Block, "a device"),
        (EntryType::Fifo, "a named pipe"),
    ];
    for (kind, what) in kinds {
        let archive = [entry(b"x", kind, b"victim", 0o644, b""), file("after", "ok")].concat();
        let summary = place.tree(&archive).unwrap();
        assert!(summary.notes()[0].contains(what), "{kind:?}: {:?}", summary.notes());
        assert!(fs::symlink_metadata(place.to().join("x")).is_err());
        assert_eq!(fs::read_to_string(place.to().join("after")).unwrap(), "ok");
    }
    // What is none of them, and what says where another member goes.
    for (kind, why) in
        [(EntryType::new(b'~'), "unknown type"), (EntryType::GNUSparse, "sparse"), (EntryType::XHeader, "leads out")]
    {
        let archive = [entry(b"x", kind, b"", 0o644, b"16 path=../evil\n"), file("then", "ok")].concat();
        let error = place.tree(&archive).unwrap_err();
        assert!(error.to_string().contains(why), "{kind:?}: {error}");
        assert!(fs::symlink_metadata(place.to().join("then")).is_err());
    }
    assert_eq!(fs::metadata(place.to().join("victim")).unwrap().nlink(), 1);
    place.assert_outside_untouched();
}

#[test]
fn what_is_in_the_way_stays() {
    let place = Place::new();
    fs::create_dir(place.to().join("d")).unwrap();
    fs::set_permissions(place.to().join("d"), fs::Permissions::from_mode(0o711)).unwrap();
    fs::write(place.to().join("f"), "mine").unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(place.to().join("s")).unwrap();
    for (archive, why) in [
        (file("d", "x"), "d: a directory is in its place here"),
        (link("d", "f"), "d: a directory is in its place here"),
        (directory("f"), "f: a file is here, where the guest has a directory"),
        (file("f/x", "x"), "f: a file is here, where the guest has a directory"),
        (file("s", "x"), "s: a device, pipe or socket is in its place here"),
    ] {
        assert_eq!(place.tree(&archive).unwrap_err().to_string(), why);
    }
    // A directory that was here keeps its mode; nothing temporary is left.
    place.tree(&[directory("d"), file("d/new", "new")].concat()).unwrap();
    assert_eq!(fs::metadata(place.to().join("d")).unwrap().mode() & 0o7777, 0o711);
    let mut names: Vec<_> = fs::read_dir(place.to()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["d", "f", "s"]);
}

#[test]
fn modes_are_permissions_within_the_umask() {
    let place = Place::new();
    for (mode, made) in [(0o7777, 0o755), (0o4755, 0o755), (0o2666, 0o644), (0o1000, 0), (0o600, 0o600)] {
        place.tree(&entry(b"f", EntryType::Regular, b"", mode, b"")).unwrap();
        assert_eq!(fs::metadata(place.to().join("f")).unwrap().mode() & 0o7777, made, "{mode:o}");
        place.tree(&entry(b"d", EntryType::Directory, b"", mode, b"")).unwrap();
        assert_eq!(fs::metadata(place.to().join("d")).unwrap().mode() & 0o7777, made, "{mode:o}");
        fs::remove_dir(place.to().join("d")).unwrap();
    }
}

#[test]
fn one_file_is_one_file_under_the_name_that_was_asked_for() {
    let place = Place::new();
    let named = Shape::Single("mine".into());
    place.put(&file("yours", "content"), &named).unwrap();
    assert_eq!(fs::read_to_string(place.to().join("mine")).unwrap(), "content");
    for archive in
        [[file("a", "1"), file("Makefile", "evil")].concat(), directory("a"), [file("a", "1"), directory("b")].concat()]
    {
        assert!(matches!(place.put(&archive, &named), Err(ExtractError::Unasked(_))));
    }
    assert_eq!(fs::read_dir(place.to()).unwrap().count(), 1);
    place.assert_outside_untouched();
}

#[test]
fn a_cut_or_endless_file_leaves_nothing_of_it() {
    let place = Place::new();
    let whole = file("f", &"x".repeat(5000));
    assert!(place.tree(&whole[..3000]).is_err());
    assert_eq!(fs::read_dir(place.to()).unwrap().count(), 0);
    let mut huge = file("f", "x");
    huge[124..136].copy_from_slice(b"77777777777\0");
    let sum: u32 =
        huge[..512].iter().enumerate().map(|(n, b)| if (148..156).contains(&n) { 32 } else { u32::from(*b) }).sum();
    huge[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let error = place.tree(&huge).unwrap_err();
    assert_eq!(error.to_string(), "the guest sends more than 1.0 MiB");
}

#[test]
fn of_two_patterns_that_bring_a_file_the_first_counts() {
    let place = Place::new();
    let root = fs::File::open(place.to()).unwrap();
    let mut destination = Destination::new(root.as_fd(), RULES, false).shared();
    let mut budget = Budget::new(4200);
    let put = |destination: &mut Destination<'_>, budget: &mut Budget, archive: &[u8]| {
        destination.extract(&mut &archive[..], &Shape::Tree, budget)
    };
    put(&mut destination, &mut budget, &[directory("d"), file("d/a", "first")].concat()).unwrap();
    let second = [directory("d"), file("d/a", "second"), file("d/b", "b")].concat();
    let summary = put(&mut destination, &mut budget, &second).unwrap();
    assert_eq!(summary.notes(), ["d/a: left out: another pattern brought it already"]);
    assert_eq!(fs::read_to_string(place.to().join("d/a")).unwrap(), "first");
    assert_eq!(fs::read_to_string(place.to().join("d/b")).unwrap(), "b");
    // The budget is for all of them.
    assert!(put(&mut destination, &mut budget, &file("c", &"x".repeat(110))).is_err());
}

/// Who is not root could not write in it a second time.
#[test]
fn patterns_share_a_directory_that_nobody_may_write_in() {
    let place = Place::new();
    let root = fs::File::open(place.to()).unwrap();
    let mut destination = Destination::new(root.as_fd(), RULES, false).shared();
    let mode = || fs::metadata(place.to().join("d")).unwrap().mode() & 0o7777;
    for name in ["d/a", "d/b"] {
        let archive = [entry(b"d", EntryType::Directory, b"", 0o555, b""), file(name, "x")].concat();
        destination.extract(&mut &archive[..], &Shape::Tree, &mut Budget::new(1 << 20)).unwrap();
        assert_eq!(mode(), 0o700, "{name}");
    }
    destination.finish().unwrap();
    assert_eq!((mode(), fs::metadata(place.to().join("d")).unwrap().mtime()), (0o555, 1_000_000));
}

#[test]
fn what_has_taken_the_place_of_a_directory_keeps_its_mode() {
    let place = Place::new();
    let root = fs::File::open(place.to()).unwrap();
    let mut destination = Destination::new(root.as_fd(), RULES, false);
    let archive = entry(b"d", EntryType::Directory, b"", 0o777, b"");
    destination.extract(&mut &archive[..], &Shape::Tree, &mut Budget::new(1 << 20)).unwrap();
    // Somebody who may write here has a directory of the user's elsewhere in its place.
    fs::rename(place.to().join("d"), place.to().join("moved")).unwrap();
    fs::create_dir(place.to().join("d")).unwrap();
    fs::set_permissions(place.to().join("d"), fs::Permissions::from_mode(0o700)).unwrap();
    let error = destination.finish().unwrap_err();
    assert_eq!(error.to_string(), "d: its directory was moved away meanwhile");
    let found = fs::metadata(place.to().join("d")).unwrap();
    assert!(found.mode() & 0o7777 == 0o700 && found.mtime() != 1_000_000);
}

#[test]
fn directories_that_are_only_named_are_counted() {
    let place = Place::new();
    let archive: Vec<u8> = (0..300).flat_map(|n| file(&format!("{n}/a/b/c/d/e/f"), "")).collect();
    let error = place.tree(&archive).unwrap_err();
    assert_eq!(error.to_string(), "the guest sends more than 1.0 MiB");
    let made = fs::read_dir(place.to()).unwrap().count();
    assert!(made <= 256 / 6 + 1, "{made}");
}

/// Another user swaps a directory of the destination for a link to outside, as fast as they can.
#[test]
fn a_race_in_the_destination_is_lost_by_the_racer() {
    let place = Place::new();
    fs::create_dir(place.to().join("d")).unwrap();
    symlink(place.outside(), place.to().join("other")).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let racer = {
        let (to, stop) = (place.to(), Arc::clone(&stop));
        std::thread::spawn(move || {
            let mut swaps = 0_u32;
            while !stop.load(Ordering::Relaxed) {
                let exchange = rustix::fs::RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(rustix::fs::CWD, to.join("d"), rustix::fs::CWD, to.join("other"), exchange)
                    .unwrap();
                swaps += 1;
            }
            swaps
        })
    };
    let archive = [directory("d"), file("d/secret", "evil"), directory("d/e"), file("d/e/secret", "evil")].concat();
    let (mut met, mut missed) = (0, 0);
    for _ in 0..3000 {
        match place.tree(&archive) {
            Ok(_) => missed += 1,
            Err(_) => met += 1,
        }
    }
    stop.store(true, Ordering::Relaxed);
    let swaps = racer.join().unwrap();
    assert!(swaps > 100 && met > 0 && missed > 0, "{swaps} swaps, {met} met the link, {missed} did not");
    place.assert_outside_untouched();
}

/// Every file below a directory by its path, without following links.
fn below(at: &Path, into: &mut BTreeMap<PathBuf, fs::FileType>) {
    for entry in fs::read_dir(at).unwrap().map(Result::unwrap) {
        let kind = entry.file_type().unwrap();
        into.insert(entry.path(), kind);
        if kind.is_dir() {
            below(&entry.path(), into);
        }
    }
}

fn name() -> impl Strategy<Value = String> {
    let part = prop::sample::select(vec!["a", "b", "c", "d", ".", "..", "", "outside", "secret", "l"]);
    (any::<bool>(), prop::collection::vec(part, 1..5)).prop_map(|(absolute, parts)| {
        format!("{}{}", if absolute && parts.len() > 3 { "/" } else { "" }, parts.join("/"))
    })
}

fn any_entry() -> impl Strategy<Value = Vec<u8>> {
    let kind = prop::sample::select(vec![
        b'0', b'0', b'5', b'5', b'2', b'2', b'2', b'1', b'3', b'6', b'L', b'K', b'x', b'S', b'g',
    ]);
    (name(), kind, name(), 0_u32..0o10000, "[a-z/.]{0,20}").prop_map(|(name, kind, link, mode, content)| {
        let content = if matches!(kind, b'5' | b'2') { "" } else { &content };
        entry(name.as_bytes(), EntryType::new(kind), link.as_bytes(), mode | 0o700, content.as_bytes())
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Whatever a guest sends, after whatever it sent before: all that there is lies below the destination, no link in it
    /// leads out, nothing outside has changed.
    #[test]
    fn nothing_leaves_the_destination(archives in prop::collection::vec(prop::collection::vec(any_entry(), 0..12), 1..3)) {
        let place = Place::new();
        // As someone else may have laid it out.
        let trap = place.to().join("l");
        symlink(place.outside(), &trap).unwrap();
        for entries in &archives {
            let _ = place.tree(&entries.concat());
        }
        place.assert_outside_untouched();
        let mut all = BTreeMap::new();
        if fs::read_link(&trap).is_ok_and(|target| target == place.outside()) {
            fs::remove_file(&trap).unwrap();
        }
        below(&place.to(), &mut all);
        for (path, kind) in &all {
            prop_assert!(kind.is_dir() || kind.is_file() || kind.is_symlink(), "{path:?}");
            prop_assert!(!path.file_name().unwrap().to_string_lossy().starts_with(".bulkhead-"), "{path:?} was left");
            if let Ok(real) = path.canonicalize() {
                prop_assert!(real.starts_with(place.to().canonicalize().unwrap()), "{path:?} leads to {real:?}");
            }
            if !kind.is_symlink() {
                prop_assert_eq!(fs::metadata(path).unwrap().mode() & 0o7022, 0, "{:?}", path);
            }
        }
    }

    #[test]
    fn any_bytes_are_put_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
        let place = Place::new();
        let _ = place.tree(&bytes);
        place.assert_outside_untouched();
    }
}
