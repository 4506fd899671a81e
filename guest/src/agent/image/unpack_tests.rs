#![allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use super::*;
use crate::archive::testing::{archive, directory, file, header, link, member, pax, symlink};
use proptest::prelude::*;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

/// Lays layers over each other in a fresh directory, and lists what came of it.
fn layers(layers: &[Vec<u8>]) -> Result<(tempfile::TempDir, Vec<String>), BuildError> {
    unpack(layers, true)
}

fn unpack(layers: &[Vec<u8>], layered: bool) -> Result<(tempfile::TempDir, Vec<String>), BuildError> {
    let root = tempfile::tempdir().unwrap();
    let mut unpacker = Unpacker::new(Tree::new(root.path()), layered, 1 << 30);
    for layer in layers {
        unpacker.layer(&mut layer.as_slice())?;
    }
    unpacker.finish()?;
    let list = list(root.path());
    Ok((root, list))
}

fn list(root: &std::path::Path) -> Vec<String> {
    fn walk(root: &std::path::Path, below: &std::path::Path, list: &mut Vec<String>) {
        for entry in std::fs::read_dir(root.join(below)).unwrap() {
            let path = below.join(entry.unwrap().file_name());
            let found = root.join(&path).symlink_metadata().unwrap();
            let name = path.to_str().unwrap();
            if found.is_dir() {
                list.push(format!("{name}/"));
                walk(root, &path, list);
            } else if found.is_symlink() {
                list.push(format!("{name} -> {}", std::fs::read_link(root.join(&path)).unwrap().display()));
            } else if !found.is_file() {
                list.push(format!("{name}|"));
            } else {
                list.push(format!("{name}={}", std::fs::read_to_string(root.join(&path)).unwrap()));
            }
        }
    }
    let mut found = Vec::new();
    walk(root, "".as_ref(), &mut found);
    found.sort();
    found
}

fn why(layers: &[Vec<u8>]) -> String {
    self::layers(layers).unwrap_err().to_string()
}

#[test]
fn whiteouts_take_away_what_lies_below_and_nothing_else() {
    let lower = archive(&[
        directory("keep"),
        file("keep/old", "1"),
        file("gone", "1"),
        directory("tree"),
        file("tree/a", "1"),
        file("opaque/old", "1"),
        file("opaque/sub/old", "1"),
        file("both/old", "1"),
    ]);
    let upper = archive(&[
        file(".wh.gone", ""),
        // As a hard link to another whiteout, which some writers make.
        link(".wh.tree", ".wh.gone"),
        // The order within a layer does not count.
        file("opaque/new", "2"),
        file("opaque/sub/new", "2"),
        file("opaque/.wh..wh..opq", ""),
        file("both/new", "2"),
        file(".wh.both", ""),
        file("replaced", "2"),
        file(".wh.replaced", ""),
        file(".wh..wh.plnk/123", ""),
        file(".wh.never-there", ""),
        file("nowhere/.wh.never-there", ""),
    ]);
    let (_root, list) = layers(&[lower, upper]).unwrap();
    assert_eq!(
        list,
        [
            "both/",
            "both/new=2",
            "keep/",
            "keep/old=1",
            "opaque/",
            "opaque/new=2",
            "opaque/sub/",
            "opaque/sub/new=2",
            "replaced=2"
        ]
    );
}

#[test]
fn an_archive_that_is_no_layer_has_files_of_any_name() {
    let (_root, list) = unpack(&[archive(&[file("a", ""), file(".wh.a", "x")])], false).unwrap();
    assert_eq!(list, [".wh.a=x", "a="]);
}

#[test]
fn upper_layers_replace_what_is_of_another_kind() {
    let lower = archive(&[
        file("file", "1"),
        directory("dir"),
        file("dir/inner", "1"),
        symlink("link", "dir"),
        directory("merged"),
        file("merged/old", "1"),
    ]);
    let upper = archive(&[
        directory("file"),
        file("file/inner", "2"),
        file("dir", "2"),
        directory("link"),
        file("link/inner", "2"),
        directory("merged"),
        file("merged/new", "2"),
    ]);
    let (_root, list) = layers(&[lower, upper]).unwrap();
    let want = ["dir=2", "file/", "file/inner=2", "link/", "link/inner=2", "merged/", "merged/new=2", "merged/old=1"];
    assert_eq!(list, want);
}

#[test]
fn links_may_come_before_what_they_lead_to() {
    let (root, list) = layers(&[archive(&[
        link("second", "first"),
        link("first", "target"),
        file("target", "x"),
        file("over", "old"),
        link("over", "target"),
        link("self", "self"),
    ])])
    .unwrap();
    assert_eq!(list, ["first=x", "over=x", "second=x", "target=x"]);
    let inode = |name: &str| root.path().join(name).metadata().unwrap().ino();
    assert!(["first", "second", "over"].iter().all(|name| inode(name) == inode("target")));
    assert!(why(&[archive(&[link("a", "b"), link("b", "a")])]).contains("a hard link to"));
    assert!(why(&[archive(&[directory("d"), link("a", "d")])]).contains("hard link to a directory"));
    // One file under two names, because a directory is a link.
    let twice = archive(&[directory("usr"), symlink("alias", "usr"), file("usr/f", "x"), link("alias/f", "usr/f")]);
    assert_eq!(layers(&[twice]).unwrap().1, ["alias -> usr", "usr/", "usr/f=x"]);
}

#[test]
fn everything_about_a_file_is_kept() {
    let (root, _) = layers(&[archive(&[
        pax(&[("mtime", b"1234567890.987654321"), ("SCHILY.xattr.user.note", b"a\0b")]),
        member("set", b'0', 0o6755, b"x"),
        member("d", b'5', 0o1777, b""),
        file("d/late", ""),
        header("pipe", b'6', 0o640, 0, ""),
        pax(&[("GNU.sparse.map", b"4096,2,100000,1"), ("GNU.sparse.size", b"200000"), ("GNU.sparse.name", b"holes")]),
        file("made-up", "abc"),
        symlink("s", "elsewhere"),
    ])])
    .unwrap();
    let found = |name| root.path().join(name).symlink_metadata().unwrap();
    let set = found("set");
    assert_eq!((set.mode() & 0o7777, set.mtime(), set.mtime_nsec()), (0o6755, 1_234_567_890, 987_654_321));
    let mut value = [0; 10];
    let length = rustix::fs::lgetxattr(root.path().join("set"), "user.note", &mut value).unwrap();
    assert_eq!(&value[..length], b"a\0b");
    // A directory's time is its own, though something was put into it later.
    let directory = found("d");
    assert_eq!((directory.mode() & 0o7777, directory.mtime()), (0o1777, 1_000_000_000));
    assert_eq!((found("pipe").mode() & 0o7777, found("s").mtime()), (0o640, 1_000_000_000));
    let holes = std::fs::read(root.path().join("holes")).unwrap();
    assert_eq!((holes.len(), &holes[4096..4098], holes[100_000]), (200_000, &b"ab"[..], b'c'));
    assert!(found("holes").blocks() * 512 < 100_000);
    assert_eq!(root.path().join("d").metadata().unwrap().permissions().mode() & 0o777, 0o777);
}

#[test]
fn missing_parents_are_made_also_behind_links() {
    let (_root, list) =
        layers(&[archive(&[file("a/b/c", "x"), symlink("lib", "usr/lib"), file("lib/f", "y")])]).unwrap();
    assert_eq!(list, ["a/", "a/b/", "a/b/c=x", "lib -> usr/lib", "usr/", "usr/lib/", "usr/lib/f=y"]);
    assert!(why(&[archive(&[symlink("loop", "loop"), file("loop/x", "")])]).contains("loop"));
    assert!(why(&[archive(&[file("f", ""), file("f/x", "")])]).contains("f is not a directory"));
}

#[test]
fn paths_that_lead_upwards_are_refused() {
    for path in ["../x", "a/../../x", "a/..", ".."] {
        assert!(why(&[archive(&[file(path, "")])]).contains("leads upwards"), "{path}");
        assert!(why(&[archive(&[link("a", path)])]).contains("leads upwards"), "{path}");
    }
    assert_eq!(layers(&[archive(&[file("/abs/./x//y", "")])]).unwrap().1, ["abs/", "abs/x/", "abs/x/y="]);
    assert!(why(&[archive(&[file(".", "x")])]).contains("not a directory"));
    assert!(why(&[archive(&[]), archive(&[file(".wh...", "")])]).contains("whiteout of nothing"));
}

#[test]
fn what_is_cut_or_goes_on_is_refused() {
    let whole = archive(&[file("a", "content"), file("b", "content")]);
    for length in [100, 512, 515, 600, 1100, 1536, 1600] {
        assert!(why(&[whole[..length].to_vec()]).contains("cut short"), "{length}");
    }
    // A root file system must be marked as whole; a layer's digest says that it is.
    assert!(unpack(&[whole[..2048].to_vec()], false).unwrap_err().to_string().contains("end mark"));
    assert!(layers(&[whole[..2048].to_vec()]).is_ok());
    // Nor need it have the padding of its last member.
    assert_eq!(layers(&[whole[..1543].to_vec()]).unwrap().1, ["a=content", "b=content"]);
    assert!(why(&[whole[..1542].to_vec()]).contains("cut short"));
    assert!(unpack(&[whole[..1543].to_vec()], false).unwrap_err().to_string().contains("end mark"));
    let mut endless = whole.clone();
    endless.resize(80 << 20, 0);
    assert!(why(&[endless]).contains("goes on"));
}

#[test]
fn an_archive_that_unpacks_without_end_has_one() {
    let root = tempfile::tempdir().unwrap();
    let mut unpacker = Unpacker::new(Tree::new(root.path()), true, 100_000);
    let again = archive(&vec![file("same", &"x".repeat(10_000)); 20]);
    let error = unpacker.layer(&mut again.as_slice()).unwrap_err();
    assert!(matches!(error, BuildError::Full(_)), "{error}");
}

#[test]
fn an_archive_of_an_archive_is_told() {
    assert_eq!(why(&[archive(&[])]), "it holds nothing");
    let layout = archive(&[file("oci-layout", "{}"), directory("blobs"), file("index.json", "{}")]);
    assert!(unpack(&[layout], false).unwrap_err().to_string().contains("import that archive itself"));
}

proptest! {
    /// Whatever members an archive has, nothing appears outside of its root.
    #[test]
    fn nothing_escapes(members in prop::collection::vec((
        prop::sample::select(vec!["a", "a/b", "a/b/c", "b", "b/a", ".wh.a", "a/.wh.b", "a/.wh..wh..opq", "/b", "../a", "."]),
        prop::sample::select(b"012567\0".to_vec()),
        prop::sample::select(vec!["a", "b", "../a", "a/b", "..", ".", "b/a"]),
    ), 0..12), cut in 0usize..12) {
        let outer = tempfile::tempdir().unwrap();
        let root = outer.path().join("root");
        std::fs::create_dir(&root).unwrap();
        let mut unpacker = Unpacker::new(Tree::new(&root), true, 1 << 20);
        let (below, above) = members.split_at(cut.min(members.len()));
        for part in [below, above] {
            let bytes: Vec<Vec<u8>> = part.iter()
                .map(|(path, kind, target)| header(path, *kind, 0o755, 0, target))
                // Without a chroot a symbolic link upwards leads out: that it stays inside is the kernel's part.
                .zip(part).filter(|(_, (_, kind, target))| *kind != b'2' || !target.starts_with(".."))
                .map(|(bytes, _)| bytes).collect();
            if unpacker.layer(&mut archive(&bytes).as_slice()).is_err() {
                break;
            }
        }
        let names: Vec<_> = std::fs::read_dir(outer.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        prop_assert_eq!(names, vec!["root"]);
    }
}
