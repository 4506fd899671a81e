//! `bulkhead image`: what the usual tools make comes in as it is, what is hostile or broken does not.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use guest::message::ExecSpec;
use rustix::process::Signal;

use crate::Test;
use crate::cli::Bulkhead;
use crate::command::{Output, output, output_written, until};
use crate::guest::{Guest, Recipe};
use crate::{host, hostile, processes};

pub(crate) const TESTS: &[Test] = &[
    ("image::trees_are_as_their_makers_had_them", trees_are_as_their_makers_had_them),
    ("image::two_imports_of_one_source_make_one_image", two_imports_of_one_source_make_one_image),
    ("image::what_is_broken_or_hostile_leaves_nothing", what_is_broken_or_hostile_leaves_nothing),
    ("image::archives_without_end_have_one", archives_without_end_have_one),
    ("image::a_full_host_leaves_nothing", a_full_host_leaves_nothing),
];

/// Images that nobody here made: each with the tool that made it.
const SOURCES: [&str; 5] = ["buildah.tar", "umoci", "docker.tar", "mmdebstrap.tar.zst", "debootstrap.tar.gz"];
/// How many of them are imported where time is short: under emulation each takes a minute.
const FEW: usize = 2;

impl Bulkhead {
    /// Imports an image: its id.
    fn import(&self, source: &Path, options: &[&str]) -> String {
        let source = source.to_str().unwrap();
        let id = self.output(&[&["image", "import", "-q"], options, &[source]].concat()).expect(0);
        id.trim_end().to_owned()
    }

    /// What an import says that must fail, and that it leaves nothing.
    fn refused_import(&self, source: &Path, options: &[&str]) -> String {
        let source = source.to_str().unwrap();
        let said = self.output(&[&["image", "import"], options, &[source]].concat()).refused(125);
        assert_eq!(self.images(), Vec::<String>::new(), "{said}");
        said
    }

    /// What comes of an import of what this writes for as long as it is read.
    fn import_written(
        &self,
        options: &[&str],
        write: impl FnOnce(&mut dyn Write) -> io::Result<()> + Send + 'static,
    ) -> Output {
        output_written(&mut self.command(&[&["image", "import", "-q"], options, &["-"]].concat()), write)
    }

    /// What there is in the directory of images, but for its lock and its names.
    fn images(&self) -> Vec<String> {
        let entries = fs::read_dir(self.home().join("images")).into_iter().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name != ".lock" && name != "names");
        names
    }

    fn root_of(&self, id: &str) -> PathBuf {
        self.home().join("images").join(id).join("root.img")
    }
}

/// Given images of five tools, when they are imported, then each has the tree that its tool unpacks, with the same
/// content, owners, modes, times, links, devices and attributes; and runs as its configuration says.
fn trees_are_as_their_makers_had_them() {
    let bulkhead = Bulkhead::without_images();
    let tricks = bulkhead.home().join("tricks.tar.xz");
    fs::write(&tricks, compressed("xz", &tricky())).unwrap();
    let names = if host::soak() { &SOURCES[..] } else { &SOURCES[..FEW] };
    let sources: Vec<PathBuf> = names.iter().map(|name| host::source(name)).chain([tricks]).collect();
    let import = |source: &PathBuf| {
        let start = std::time::Instant::now();
        let id = bulkhead.import(source, &[]);
        println!("{}: imported in {:.1} s", source.display(), start.elapsed().as_secs_f32());
        id
    };
    let ids: Vec<String> = sources.iter().map(import).collect();

    // The same again is recognised, by its content, and needs no machine.
    let copy = bulkhead.home().join("another.name");
    fs::copy(&sources[0], &copy).unwrap();
    let again = bulkhead.output(&["image", "import", copy.to_str().unwrap()]);
    assert_eq!((again.code, again.stdout.trim_end()), (0, ids[0].as_str()));
    assert!(again.stderr.starts_with("bulkhead: this image is there already as example.org/test:1"), "{again:?}");

    let roots = ids.iter().map(|id| bulkhead.root_of(id)).collect();
    let guest = Guest::start(&Recipe { more: roots, memory: 512 << 20, ..Recipe::default() });
    guest.put_payload();
    for (n, source) in sources.iter().enumerate() {
        let disk = char::from(b'b' + n as u8);
        let script = format!("mount -t ext4 -o ro /dev/vd{disk} /mnt && /tmp/payload tree /mnt && umount /mnt");
        let command = ["sh", "-c", &format!("mkdir -p /mnt; {script}")].map(str::to_owned).to_vec();
        let (record, found) = guest.command(ExecSpec::command(format!("tree-{n}"), command));
        assert_eq!(record.status(), 0, "{}: {found}", source.display());
        let name = source.file_name().unwrap().to_str().unwrap().split('.').next().unwrap();
        if name == "tricks" {
            check_tricks(&found);
        } else {
            compare(name, &found, &fs::read_to_string(host::source(&format!("{name}.tree"))).unwrap());
        }
    }
    drop(guest);

    // Its entry point, command, variable, user and directory. The image goes by the name that it calls itself.
    assert_eq!(bulkhead.output(&["run", "example.org/test:1"]).expect(0), "hello from /srv/work as 1234:1235, said\n");
    let listed = bulkhead.output(&["image", "ls"]).expect(0);
    let names: Vec<&str> = listed.lines().skip(1).map(|line| line.split(' ').next().unwrap()).collect();
    // One of the two that call themselves the same has lost its name to the other.
    let all = ["debootstrap", "example.org/test:1", "mmdebstrap", "tricks", "umoci", "-"];
    let few = ["example.org/test:1", "tricks", "umoci"];
    assert_eq!(names, if host::soak() { &all[..] } else { &few[..] }, "{listed}");
    let inspected = bulkhead.output(&["image", "inspect", "--verify", "example.org/test:1"]).expect(0);
    assert!(inspected.contains("\"org.example.origin\": \"buildah\""), "{inspected}");
    for id in &ids {
        bulkhead.output(&["image", "rm", &id[..16]]).expect(0);
    }
    assert!(bulkhead.images().is_empty());
}

/// Compares two lists of trees, and shows where they differ.
fn compare(name: &str, found: &str, wanted: &str) {
    let lines = |text: &str| -> BTreeMap<String, String> {
        text.lines()
            .filter_map(|line| line.split_once(' '))
            .map(|(path, rest)| (path.to_owned(), rest.to_owned()))
            .collect()
    };
    let (mut found, wanted) = (lines(found), lines(wanted));
    if !wanted.contains_key("/") {
        found.remove("/");
    }
    assert!(wanted.len() > 50, "{name}: {} lines", wanted.len());
    let paths: std::collections::BTreeSet<&String> = found.keys().chain(wanted.keys()).collect();
    let differing: Vec<String> = paths
        .into_iter()
        .filter(|path| found.get(*path) != wanted.get(*path))
        .map(|path| format!("{path}\n  found  {:?}\n  wanted {:?}", found.get(path), wanted.get(path)))
        .collect();
    assert!(
        differing.is_empty(),
        "{name}: {} of {} differ\n{}",
        differing.len(),
        wanted.len(),
        differing[..differing.len().min(20)].join("\n")
    );
}

/// What tries to lead out of a tree, and leads only around in it.
fn tricky() -> Vec<u8> {
    tar(&[
        ("etc", b'5', "", ""),
        ("etc/passwd", b'0', "inside", ""),
        ("out", b'2', "", "/"),
        ("out/etc/through-a-link", b'0', "here", ""),
        ("up", b'2', "", "../../../../etc"),
        ("up/over-the-top", b'0', "here", ""),
        ("/absolute", b'0', "here", ""),
        ("early", b'1', "", "late"),
        ("late", b'0', "linked", ""),
        ("dev/null", b'3', "", ""),
        ("dev/null", b'0', "no device", ""),
        ("passwd-link", b'2', "", "/etc/passwd"),
        ("passwd-link", b'0', "a file of its own", ""),
    ])
}

fn check_tricks(found: &str) {
    let paths: Vec<&str> = found.lines().map(|line| line.split(' ').next().unwrap()).collect();
    let want = [
        "/",
        "/absolute",
        "/dev",
        "/dev/null",
        "/early",
        "/etc",
        "/etc/over-the-top",
        "/etc/passwd",
        "/etc/through-a-link",
        "/late",
        "/out",
        "/passwd-link",
        "/up",
    ];
    assert_eq!(paths, want, "{found}");
    let line = |path: &str| found.lines().find(|line| line.starts_with(&format!("{path} "))).unwrap();
    assert!(line("/late").ends_with("is /early"), "{found}");
    assert!(line("/dev/null").contains("file 9 ") && line("/passwd-link").contains("file 17 "), "{found}");
    assert!(line("/etc/passwd").contains("file 6 "), "{found}");
}

/// A tar archive of these: path, type, content, target.
fn tar(members: &[(&str, u8, &str, &str)]) -> Vec<u8> {
    let mut archive = Vec::new();
    for (path, kind, content, target) in members {
        archive.extend(header(path, *kind, content.len(), target));
        archive.extend(content.as_bytes());
        archive.resize(archive.len().next_multiple_of(512), 0);
    }
    archive.resize(archive.len() + 1024, 0);
    archive
}

fn header(path: &str, kind: u8, length: usize, target: &str) -> [u8; 512] {
    let mut header = [0u8; 512];
    let mut put = |at: usize, text: &[u8]| header[at..at + text.len()].copy_from_slice(text);
    put(0, path.as_bytes());
    put(100, if kind == b'5' { b"0000755\0" } else { b"0000644\0" });
    put(124, format!("{length:011o}\0").as_bytes());
    put(136, b"07346545000\0");
    put(156, &[kind]);
    put(157, target.as_bytes());
    put(257, b"ustar\x0000");
    put(329, b"0000001\0");
    put(337, b"0000003\0");
    put(148, b"        ");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

/// What a program makes of these bytes.
fn compressed(program: &str, bytes: &[u8]) -> Vec<u8> {
    let mut child = Command::new(program).arg("-1").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut stdin, bytes) = (child.stdin.take().unwrap(), bytes.to_vec());
    let writer = std::thread::spawn(move || stdin.write_all(&bytes));
    let output = child.wait_with_output().unwrap().stdout;
    writer.join().unwrap().unwrap();
    output
}

fn two_imports_of_one_source_make_one_image() {
    let bulkhead = Bulkhead::without_images();
    let source = bulkhead.home().join("small.tar");
    fs::write(&source, tar(&[("a", b'0', "a", "")])).unwrap();
    let source = source.to_str().unwrap();
    let both = [(); 2].map(|()| bulkhead.start(&["image", "import", source]));
    let both = both.map(crate::command::Running::finish);
    let waited = both.iter().filter(|one| one.stderr.contains("waiting: another import makes this image")).count();
    assert_eq!((both[0].code, both[1].code, waited), (0, 0, 1), "{both:?}");
    assert_eq!(both[0].stdout, both[1].stdout);
    assert_eq!(bulkhead.images(), [both[0].stdout.trim_end()]);
    if !host::soak() {
        return;
    }
    // From a pipe its source is known only at the end, and it is the same image.
    let piped = bulkhead.with_input(&["image", "import", "-q", "-"], &fs::read(source).unwrap()).expect(0);
    assert_eq!(piped, both[0].stdout);
    assert_eq!(bulkhead.images().len(), 1);
}

/// Given sources that are cut, damaged, hostile or too large, and an import that is killed, then the error says what is
/// wrong, and neither an image nor anything else is left.
fn what_is_broken_or_hostile_leaves_nothing() {
    let bulkhead = Bulkhead::without_images();
    let put = |name: &str, bytes: &[u8]| {
        let path = bulkhead.home().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let gzip = |bytes: &[u8]| compressed("gzip", bytes);
    if host::soak() {
        let whole = gzip(&tar(&[("file", b'0', &"content".repeat(10_000), "")]));
        let said = bulkhead.refused_import(&put("cut.tar.gz", &whole[..whole.len() - 20]), &[]);
        assert!(said.contains("cut.tar.gz: it cannot be unpacked: it is cut short"), "{said}");
    }
    let said = bulkhead.refused_import(&put("up.tar", &tar(&[("a/../../x", b'0', "", "")])), &[]);
    assert!(said.contains("it cannot be unpacked: a/../../x: a path that leads upwards"), "{said}");
    // 300 MB of zeros, in parts that are the same: it is told by its last one, too, if it fits.
    let header = &tar(&[("zeros", b'0', &"\0".repeat(300 << 20), "")])[..512];
    let bomb = [gzip(header), gzip(&vec![0; 1 << 20]).repeat(300), gzip(&[0; 1024])].concat();
    let said = bulkhead.refused_import(&put("bomb.tar.gz", &bomb), &["--disk", "256M"]);
    assert!(
        said.contains("it does not fit: zeros: no room left") && said.contains("give it more room with --disk"),
        "{said}"
    );

    // A layer that is not what its digest says. Everything but its bytes is as it should be.
    let layout = bulkhead.home().join("layout");
    output(Command::new("cp").args(["-r", host::source("umoci").to_str().unwrap(), layout.to_str().unwrap()]), b"")
        .expect(0);
    let largest = fs::read_dir(layout.join("blobs/sha256"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .max_by_key(|path| path.metadata().unwrap().len());
    let largest = largest.unwrap();
    let mut bytes = fs::read(&largest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::set_permissions(&largest, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    fs::write(&largest, bytes).unwrap();
    let said = bulkhead.refused_import(&layout, &[]);
    assert!(said.contains("its digest is sha256:") || said.contains("cannot be unpacked"), "{said}");

    // One that is killed in the middle leaves what the next command removes, and no machine.
    let mut child = bulkhead.command(&["image", "import", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(&tar(&[("a", b'0', &"x".repeat(100_000), "")])[..50_000]).unwrap();
    until("a disk of the builder's", || {
        bulkhead.images().iter().any(|name| bulkhead.home().join("images").join(name).join("disk/1.data").exists())
    });
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::KILL).unwrap();
    child.wait().unwrap();
    processes::none_left(&bulkhead);
    assert_eq!(bulkhead.images().len(), 1);
    assert_eq!(bulkhead.output(&["image", "ls", "-q"]).expect(0), "");
    assert!(bulkhead.images().is_empty());
}

/// Given archives that a pipe brings for as long as they are read, the import ends by itself.
fn archives_without_end_have_one() {
    let bulkhead = Bulkhead::without_images();
    let refused = |output: Output, why: &str| {
        let said = output.refused(125);
        assert!(said.contains(why), "{said}");
        assert_eq!(bulkhead.images(), Vec::<String>::new());
    };
    let headers = bulkhead.import_written(&[], |to| {
        let name = [&header("long", b'L', 512, "")[..], &[b'a'; 512]].concat();
        loop {
            to.write_all(&name)?;
        }
    });
    refused(headers, "it cannot be unpacked: more than 16 extended headers before one member");
    // What takes minutes under emulation.
    if !host::soak() {
        return;
    }
    let padding = bulkhead.import_written(&[], |to| {
        to.write_all(&tar(&[("file", b'0', "content", "")]))?;
        loop {
            to.write_all(&[0; 1 << 16])?;
        }
    });
    refused(padding, "it cannot be unpacked: it goes on after its end mark");
    let million = |to: &mut dyn Write| {
        for n in 0..1_000_000 {
            to.write_all(&header(&format!("{}/{n}", n / 1000), b'0', 0, ""))?;
        }
        to.write_all(&[0; 1024])
    };
    refused(bulkhead.import_written(&["--disk", "256M"], million), "it does not fit: ");
    let id = bulkhead.import_written(&[], million).expect(0);
    assert_eq!(bulkhead.images(), [id.trim_end()]);
}

fn a_full_host_leaves_nothing() {
    let bulkhead = Bulkhead::without_images();
    hostile::make_small(&bulkhead, "images", 12);
    let source = host::directory();
    let path = source.path().join("large.tar");
    // Not compressible, so that no layer is clever.
    let mut content = Vec::new();
    for n in 0..2_000_000_u64 {
        content.extend(n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes().map(|byte| byte & 0x7f));
    }
    fs::write(&path, tar(&[("large", b'0', &String::from_utf8(content).unwrap(), "")])).unwrap();
    let said = bulkhead.refused_import(&path, &[]);
    assert!(said.contains("the host's file system is full") && said.contains("make room"), "{said}");
    processes::none_left(&bulkhead);
}
