use super::testing::{archive, directory, file, header, link, member, pax, sealed, symlink};
use super::*;
use proptest::prelude::*;
use std::process::Command;

/// All members and their content.
fn read(mut bytes: &[u8]) -> Result<Vec<(Member, Vec<u8>)>, ArchiveError> {
    let mut parser = Parser::new();
    let mut members = Vec::new();
    loop {
        let (block, rest) = bytes.split_at_checked(parser.wants()).ok_or(ArchiveError::Cut)?;
        bytes = rest;
        match parser.push(block)? {
            Pushed::More => {}
            Pushed::End => return Ok(members),
            Pushed::Member(member) => {
                let stored = usize::try_from(member.stored).map_err(|_| ArchiveError::Cut)?;
                let padded = usize::try_from(padded(member.stored)).map_err(|_| ArchiveError::Cut)?;
                let (data, rest) = bytes.split_at_checked(padded).ok_or(ArchiveError::Cut)?;
                members.push((*member, data[..stored].to_vec()));
                bytes = rest;
            }
        }
    }
}

/// The content of a member, holes filled.
fn content(member: &Member, data: &[u8]) -> Vec<u8> {
    let mut data = data;
    let pieces = match &member.layout {
        Layout::Whole => return data.to_vec(),
        Layout::Pieces(pieces) => pieces.clone(),
        Layout::MapFirst => {
            let mut map = MapReader::default();
            loop {
                let (block, rest) = data.split_first_chunk().unwrap();
                data = rest;
                if let Some(pieces) = map.push(block, member.size, member.stored).unwrap() {
                    break pieces;
                }
            }
        }
    };
    let mut content = vec![0; usize::try_from(member.size).unwrap()];
    for (offset, length) in pieces {
        let (offset, length) = (usize::try_from(offset).unwrap(), usize::try_from(length).unwrap());
        content[offset..offset + length].copy_from_slice(&data[..length]);
        data = &data[length..];
    }
    content
}

#[test]
fn every_kind_and_field() {
    let bytes = archive(&[
        directory("d/"),
        file("d/f", "hello"),
        symlink("d/s", "f"),
        link("d/h", "d/f"),
        header("d/c", b'3', 0o600, 0, ""),
        header("d/b", b'4', 0o600, 99, ""),
        header("d/p", b'6', 0o4755, 0, ""),
        member("old/", 0, 0o700, b""),
        member("contiguous", b'7', 0o644, b"x"),
        member("label", b'V', 0, b""),
    ]);
    let members = read(&bytes).unwrap();
    let kinds: Vec<Kind> = members.iter().map(|(member, _)| member.kind).collect();
    use Kind::{Block, Character, Directory, Fifo, File, HardLink, Label, Symlink};
    assert_eq!(kinds, [Directory, File, Symlink, HardLink, Character, Block, Fifo, Directory, File, Label]);
    let (file, data) = &members[1];
    assert_eq!((file.path.as_slice(), data.as_slice(), file.mode, file.size), (&b"d/f"[..], &b"hello"[..], 0o644, 5));
    assert_eq!(file.mtime, Time { seconds: 1_000_000_000, nanoseconds: 0 });
    assert_eq!((members[2].0.target.as_slice(), members[3].0.target.as_slice()), (&b"f"[..], &b"d/f"[..]));
    // A device has no content, whatever its length says.
    assert_eq!((members[5].0.device, members[5].0.stored, members[6].0.mode), ((1, 3), 0, 0o4755));
}

#[test]
fn pax_records_replace_fields_of_one_member() {
    let long = "n/".repeat(300) + "end";
    let bytes = archive(&[
        member("global", b'g', 0o644, b"12 uid=1234\n19 path=everywhere\n"),
        pax(&[
            ("path", long.as_bytes()),
            ("linkpath", b"to"),
            ("uid", b"4000000000"),
            ("mtime", b"-1.25"),
            ("SCHILY.xattr.user.binary", b"a\n=\0b"),
            ("SCHILY.acl.access", b"user::rwx"),
            ("comment", b"nothing"),
        ]),
        symlink("short", "x"),
        file("next", ""),
        pax(&[("path", b"old"), ("path", b"")]),
        file("fallback", ""),
    ]);
    let members = read(&bytes).unwrap();
    let first = &members[0].0;
    assert_eq!(
        (first.path.as_slice(), first.target.as_slice(), first.uid),
        (long.as_bytes(), &b"to"[..], 4_000_000_000)
    );
    assert_eq!(first.mtime, Time { seconds: -2, nanoseconds: 750_000_000 });
    assert_eq!(first.xattrs, [(b"user.binary".to_vec(), b"a\n=\0b".to_vec())]);
    assert!(first.has_acl);
    let next = &members[1].0;
    assert_eq!((next.path.as_slice(), next.uid, next.has_acl, next.xattrs.len()), (&b"next"[..], 1234, false, 0));
    assert_eq!(members[2].0.path, b"fallback");
}

#[test]
fn what_is_wrong_is_said() {
    let error = |bytes: &[u8]| read(bytes).unwrap_err();
    assert_eq!(error(&[1; 512]), ArchiveError::Checksum);
    assert_eq!(error(&file("a", "b")), ArchiveError::Cut);
    assert_eq!(error(&header("x", b'?', 0, 0, "")), ArchiveError::Type('?'));
    assert_eq!(error(&header("x", b'M', 0, 0, "")), ArchiveError::Volumes);
    assert_eq!(error(&file("", "")), ArchiveError::NoName);
    assert_eq!(error(&header("x", b'x', 0, 2 << 20, "")), ArchiveError::LongExtension(2 << 20));
    assert_eq!(error(&pax(&[("comment", b"")]).repeat(17)), ArchiveError::ManyExtensions);
    assert!(matches!(error(&member("x", b'x', 0, b"9 a=b\n")), ArchiveError::Pax(_)));
    assert!(matches!(error(&member("x", b'x', 0, b"99999999999999999999 a=b\n")), ArchiveError::Pax(_)));
    assert!(matches!(error(&[pax(&[("path", b"a\0b")]), file("x", "")].concat()), ArchiveError::Pax(_)));
    let negative = [pax(&[("uid", b"4294967295")]), file("x", "")].concat();
    assert!(matches!(error(&negative), ArchiveError::Range { .. }));
    let sparse = |map: &[u8]| {
        let records: [(&str, &[u8]); 2] = [("GNU.sparse.map", map), ("GNU.sparse.size", b"100")];
        error(&archive(&[pax(&records), file("x", "abc")]))
    };
    for map in ["0,1,1,3", "5,1,4,2", "98,3", "0,2", "0", "a,b", "18446744073709551615,3"] {
        assert!(matches!(sparse(map.as_bytes()), ArchiveError::Sparse(_)), "{map}");
    }
}

/// What GNU tar writes in each of its formats, for a tree with everything in it, against the tree.
#[test]
fn what_gnu_tar_writes() {
    let dir = tempfile::tempdir().unwrap();
    let long = "l".repeat(120);
    let deep = format!("{}/{}", "d".repeat(90), "e".repeat(90));
    std::fs::create_dir_all(dir.path().join(&deep)).unwrap();
    std::fs::write(dir.path().join(&deep).join("f"), "deep").unwrap();
    std::fs::write(dir.path().join(&long), "long").unwrap();
    std::os::unix::fs::symlink("t".repeat(150), dir.path().join("link")).unwrap();
    let mut holes = vec![0; 400_000];
    for at in (0..40).map(|n| n * 10_000) {
        holes[at..at + 10].copy_from_slice(b"0123456789");
    }
    for format in ["v7", "ustar", "oldgnu", "gnu", "posix", "sparse-0.0", "sparse-0.1", "sparse-1.0"] {
        let sparse = format.strip_prefix("sparse-");
        let holey = sparse.is_some() || format.ends_with("gnu");
        let make = |name: &str, bytes: &[u8]| {
            use std::os::unix::fs::FileExt;
            let file = std::fs::File::create(dir.path().join(name)).unwrap();
            for at in (0..bytes.len()).step_by(4096).filter(|at| bytes[*at..].iter().take(4096).any(|b| *b != 0)) {
                file.write_all_at(&bytes[at..bytes.len().min(at + 4096)], at as u64).unwrap();
            }
            file.set_len(bytes.len() as u64).unwrap();
        };
        make("holes", &holes);
        make("empty", &[0; 70_000]);
        let mut tar = Command::new("tar");
        tar.arg("-C").arg(dir.path()).arg(format!("--format={}", sparse.map_or(format, |_| "posix"))).arg("-cf-");
        if let Some(version) = sparse {
            tar.arg(format!("--sparse-version={version}"));
        }
        if holey {
            tar.arg("--sparse");
        }
        let names: &[&str] = if matches!(format, "v7" | "ustar") { &["holes", "empty"] } else { &["."] };
        let output = tar.args(names).output().unwrap();
        assert!(output.status.success(), "{format}: {}", String::from_utf8_lossy(&output.stderr));
        let members = read(&output.stdout).unwrap_or_else(|error| panic!("{format}: {error}"));
        let find = |name: &str| {
            let wanted = name.as_bytes();
            let found = members.iter().find(|(m, _)| m.path.strip_prefix(b"./").unwrap_or(&m.path) == wanted);
            found.unwrap_or_else(|| panic!("{format}: {name}"))
        };
        for (name, bytes) in [("holes", holes.as_slice()), ("empty", &[0; 70_000])] {
            let (member, data) = find(name);
            assert_eq!(content(member, data), bytes, "{format}: {name}");
            assert_eq!(data.len() < bytes.len(), holey, "{format}: {name} stored in {}", data.len());
        }
        if names.len() == 1 {
            assert_eq!(find(&format!("{deep}/f")).1, b"deep", "{format}");
            assert_eq!(find(&long).1, b"long", "{format}");
            assert_eq!(find("link").0.target, "t".repeat(150).as_bytes(), "{format}");
        }
    }
}

#[test]
fn numbers_in_both_forms() {
    for (field, value) in [
        (&b"0000755\0"[..], Some(0o755)),
        (b"    755 ", Some(0o755)),
        (b"\0\0\0\0", Some(0)),
        (b"7777", Some(0o7777)),
        (b"12a", None),
        (b"-1", None),
        (b"\x80\0\0\0\0\0\0\x10\0", Some(0x1000)),
        (b"\xff\xff\xff\xff\xff\xff\xff\xfe", Some(-2)),
        (b"\xff", Some(-1)),
    ] {
        assert_eq!(header::number(field), value, "{field:?}");
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
        let _ = read(&bytes);
    }

    /// Headers whose checksum is right and whose fields are anything.
    #[test]
    fn arbitrary_fields_are_survived(
        fields in prop::collection::vec((prop::array::uniform32(any::<u8>()), 0usize..480), 0..6),
        kind in prop::sample::select(b"0123456789xgLKSVMDX\0".to_vec()),
        body in prop::collection::vec(any::<u8>(), 0..600),
        size in 0usize..700,
    ) {
        let mut block: [u8; 512] = header("name", kind, 0o644, size, "t").try_into().unwrap();
        for (bytes, at) in fields {
            block[at..at + 32].copy_from_slice(&bytes);
        }
        let mut bytes = sealed(block);
        bytes.extend(body);
        bytes.resize(bytes.len().next_multiple_of(512) + 2048, 0);
        let _ = read(&bytes);
    }

    #[test]
    fn arbitrary_records_are_survived(records in prop::collection::vec((
        prop::sample::select(vec![
            "path", "size", "uid", "mtime", "GNU.sparse.map", "GNU.sparse.major", "GNU.sparse.offset",
            "GNU.sparse.numbytes", "GNU.sparse.realsize", "GNU.sparse.name", "SCHILY.xattr.a", "SCHILY.acl.b",
        ]),
        prop::collection::vec(prop::sample::select(b"0123456789,.-\0\nab ".to_vec()), 0..20),
    ), 0..8)) {
        let records: Vec<(&str, &[u8])> = records.iter().map(|(key, value)| (*key, value.as_slice())).collect();
        let _ = read(&archive(&[pax(&records), file("x", "abc")]));
    }

    #[test]
    fn arbitrary_maps_are_survived(
        text in prop::collection::vec(prop::sample::select(b"0123456789\n\n\n".to_vec()), 0..1500),
        size in any::<u64>(), stored in any::<u64>(),
    ) {
        let mut map = MapReader::default();
        let mut text = text;
        text.resize(text.len().next_multiple_of(512), 0);
        for block in text.as_chunks::<512>().0 {
            if !matches!(map.push(block, size, stored), Ok(None)) {
                break;
            }
        }
    }
}
