use super::*;
use crate::image::digest::Digest;
use crate::image::record::{Kind, Origin};

struct Place {
    home: tempfile::TempDir,
    images: Images,
}

impl Place {
    fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        let images = Images::open(&Home::at(home.path().to_owned())).unwrap();
        Self { home, images }
    }

    /// Puts an image there as an import does; gives its id.
    fn put(&self, of: &str) -> String {
        let id = Kind::Tar.image_id(&Digest::of(of.as_bytes()), 8192);
        let Begun::Here(workplace) = self.images.begin(&id, || panic!("nobody else is here")).unwrap() else {
            return id;
        };
        self.commit(workplace, &id);
        id
    }

    fn commit(&self, workplace: Workplace, id: &str) {
        let root = workplace.path().join("made");
        std::fs::write(&root, [7; 8192]).unwrap();
        self.images.commit(workplace, &root, &record(id)).unwrap();
    }

    fn leftovers(&self) -> Vec<String> {
        let mut names = all_entries(&self.images.0).unwrap();
        names.retain(|name| name.starts_with(TEMPORARY));
        names
    }
}

fn record(id: &str) -> Record {
    let source = Origin { kind: Kind::Tar, digest: "sha256:x".to_owned(), reference: None };
    let config = Config { cmd: vec!["sh".to_owned()], ..Config::default() };
    let (imported, root) = (crate::clock::now(), "sha256:y".to_owned());
    Record { version: VERSION, id: id.to_owned(), source, builder: 1, imported, size: 8192, used: 8192, root, config }
}

fn nobody(_: &Path) -> Option<Dependent> {
    None
}

#[test]
fn an_image_is_found_by_name_id_and_beginning() {
    let place = Place::new();
    let (one, other) = (place.put("one"), place.put("other"));
    place.images.give_name("debian:latest", &one).unwrap();
    place.images.give_name("a/b:1", &other).unwrap();
    let id = |given: &str| place.images.find(given).map(|image| image.record.unwrap().id);
    for given in ["debian", "debian:latest", &one, &one[..12], &one[..1], &format!("sha256:{one}")] {
        assert_eq!(id(given).unwrap(), one, "{given}");
    }
    assert_eq!(id("a/b:1").unwrap(), other);
    assert_ne!(one[..1], other[..1], "or the beginning above is none");
    // A name moves, and what it named stays.
    place.images.give_name("debian:latest", &other).unwrap();
    assert_eq!(id("debian").unwrap(), other);
    assert_eq!(place.images.find(&one).unwrap().config.cmd, ["sh"]);
    let unknown = place.images.find("debain").unwrap_err().to_string();
    assert!(unknown.starts_with("image \"debain\": not found in") && unknown.contains("debian"), "{unknown}");
}

#[test]
fn a_beginning_of_several_ids_is_none() {
    let place = Place::new();
    let mut ids: Vec<String> = (0..17).map(|n| place.put(&n.to_string())).collect();
    ids.sort();
    let pair = ids.windows(2).find(|pair| pair[0][..1] == pair[1][..1]).unwrap();
    let error = place.images.find(&pair[0][..1]).unwrap_err();
    assert!(matches!(error, StoreError::Ambiguous { .. }), "{error}");
}

#[test]
fn a_name_cannot_leave_the_directory() {
    let place = Place::new();
    std::fs::create_dir_all(place.home.path().join("kernels")).unwrap();
    for name in ["..", ".", "", "../kernels", "/etc", "a/../b", "a\0b", "names", ".lock"] {
        let error = place.images.find(name).unwrap_err();
        assert!(matches!(error, StoreError::Home(HomeError::Unknown { .. })), "{name}: {error}");
    }
    // Nor can what lies there under a name.
    std::fs::create_dir_all(place.images.0.join("names")).unwrap();
    symlink("../../kernels", place.images.0.join("names/evil")).unwrap();
    assert!(place.images.find("evil").is_err());
}

#[test]
fn what_is_half_made_is_no_image_and_is_swept_once_its_maker_is_gone() {
    let place = Place::new();
    let id = Kind::Tar.image_id(&Digest::of(b"x"), 8192);
    let Begun::Here(workplace) = place.images.begin(&id, || ()).unwrap() else { panic!() };
    std::fs::write(workplace.path().join("root.img"), "half").unwrap();
    place.images.sweep().unwrap();
    assert_eq!(place.leftovers().len(), 1, "its maker is alive");
    assert!(place.images.find(&id).is_err() && place.images.ids().unwrap().is_empty());
    // As if killed: the lock goes, the directory stays.
    let Workplace { .. } = &workplace;
    let path = workplace.path().to_owned();
    drop(workplace);
    std::fs::create_dir_all(path.join("image")).unwrap();
    std::fs::write(path.join("lock"), "").unwrap();
    place.images.sweep().unwrap();
    assert!(place.leftovers().is_empty());
    // And an import of the same begins anew over what a dead one left.
    std::fs::create_dir_all(path.join("image")).unwrap();
    assert!(matches!(place.images.begin(&id, || ()).unwrap(), Begun::Here(_)));
    assert!(place.leftovers().is_empty());
}

#[test]
fn two_imports_of_one_source_make_one_image() {
    let place = Place::new();
    let id = Kind::Tar.image_id(&Digest::of(b"x"), 8192);
    let Begun::Here(first) = place.images.begin(&id, || ()).unwrap() else { panic!() };
    let (told, waits) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| place.images.begin(&id, || told.send(()).unwrap()).unwrap());
        waits.recv().unwrap();
        place.commit(first, &id);
        assert!(matches!(second.join().unwrap(), Begun::There));
    });
    // From pipes both are made, and one stays.
    let (a, b) = (place.images.begin_unknown().unwrap(), place.images.begin_unknown().unwrap());
    let other = Kind::Tar.image_id(&Digest::of(b"y"), 8192);
    place.commit(a, &other);
    place.commit(b, &other);
    assert_eq!(place.images.ids().unwrap().len(), 2);
    assert!(place.leftovers().is_empty());
}

#[test]
fn removing_takes_a_name_and_with_the_last_the_image() {
    let place = Place::new();
    let id = place.put("x");
    place.images.give_name("one", &id).unwrap();
    place.images.give_name("two", &id).unwrap();
    place.images.remove("one", nobody).unwrap();
    assert!(place.images.find("one").is_err());
    let in_use = place.images.remove("two", |_| Some(Dependent::Run("8fc20000".to_owned()))).unwrap_err().to_string();
    assert!(in_use.contains("run 8fc20000 is made of it"), "{in_use}");
    assert!(place.images.find("two").is_ok());
    place.images.remove("two", nobody).unwrap();
    assert!(
        place.images.find(&id).is_err() && place.images.names().unwrap().is_empty() && place.leftovers().is_empty()
    );
    // By id, all names go.
    let id = place.put("x");
    place.images.give_name("one", &id).unwrap();
    place.images.give_name("two", &id).unwrap();
    place.images.remove(&id[..8], nobody).unwrap();
    assert!(place.images.names().unwrap().is_empty() && place.images.ids().unwrap().is_empty());
    assert!(matches!(place.images.remove("one", nobody), Err(StoreError::Home(HomeError::Unknown { .. }))));
}

#[test]
fn what_is_damaged_is_told_and_can_be_removed() {
    let place = Place::new();
    let id = place.put("x");
    let own = place.images.0.join(&id);
    let damaged = |why: &str| {
        let error = place.images.find(&id[..8]).unwrap_err();
        assert!(matches!(error, StoreError::Damaged { .. }) && error.to_string().contains(why), "{error}");
    };
    let whole = std::fs::read(own.join(RECORD)).unwrap();
    std::fs::write(own.join(ROOT), "short").unwrap();
    damaged("its file has 5 bytes, not 8192");
    for (text, why) in [("{", "not valid"), (r#"{"version":1,"extra":2}"#, "unknown field")] {
        std::fs::write(own.join(RECORD), text).unwrap();
        damaged(why);
    }
    let other = String::from_utf8(whole).unwrap().replace(&id, &"0".repeat(64));
    std::fs::write(own.join(RECORD), other).unwrap();
    damaged("for id 000");
    place.images.remove(&id[..8], nobody).unwrap();
    assert!(place.images.ids().unwrap().is_empty());
}

#[test]
fn an_image_put_there_by_hand_is_one_without_an_id() {
    let place = Place::new();
    let own = place.images.0.join("busybox");
    std::fs::create_dir_all(&own).unwrap();
    std::fs::write(own.join(ROOT), [0; 8192]).unwrap();
    let json = r#"{"name":"busybox","config":{"env":["A=1"],"cmd":["/bin/sh"],"workdir":"/","user":"0"}}"#;
    std::fs::write(own.join(RECORD), json).unwrap();
    let image = place.images.find("busybox").unwrap();
    assert_eq!((image.size, image.config.cmd, image.record), (8192, vec!["/bin/sh".to_owned()], None));
    assert!(matches!(place.images.remove("busybox", nobody), Err(StoreError::ByHand(_))));
    std::fs::write(own.join(RECORD), "{").unwrap();
    assert!(matches!(place.images.find("busybox"), Err(StoreError::Home(HomeError::Json { .. }))));
}

#[test]
fn a_file_is_hashed_before_its_first_use_and_when_it_changed() {
    let place = Place::new();
    let id = place.put("x");
    let own = place.images.0.join(&id);
    let made = File::open(own.join(ROOT)).unwrap();
    let mut record = record(&id);
    record.root = crate::image::disk::hash(&made, |_| ()).unwrap().hash.to_string();
    let put = |record: &Record| std::fs::write(own.join(RECORD), serde_json::to_vec(record).unwrap()).unwrap();
    put(&record);
    let verify = || place.images.find(&id).unwrap().verify(true);
    let stamp = own.join("verified.json");
    verify().unwrap();
    assert!(stamp.exists());
    // It is believed: of another hash nothing is noticed while the file is the same.
    let right = std::mem::replace(&mut record.root, "sha256:other".to_owned());
    put(&record);
    verify().unwrap();
    // After another start of the host it is not.
    let text = std::fs::read_to_string(&stamp).unwrap();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    std::fs::write(&stamp, text.replace(boot.trim(), "another")).unwrap();
    let error = verify().unwrap_err().to_string();
    assert!(error.contains("the hash of") && error.contains("not sha256:other"), "{error}");
    // Nor when the file was written to, even to the same length.
    record.root = right;
    put(&record);
    verify().unwrap();
    std::fs::write(own.join(ROOT), [8; 8192]).unwrap();
    assert!(matches!(verify(), Err(StoreError::Damaged { .. })));
}
