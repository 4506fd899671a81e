//! `bulkhead cp` with the real agent, started natively with a directory as its workload's root, behind a supervisor of the
//! test's own: docker's rules, without a machine. Needs root, as the agent's own tests do.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod common;

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Place, frame, read_frame, text};
use guest::host::{Agent, Dial, Exec, Welcome};
use guest::message::ExecSpec;
use serde_json::{Value, json};

static EXECS: AtomicUsize = AtomicUsize::new(0);

struct Socket(PathBuf);

impl Dial for Socket {
    fn dial(&self, _port: u32) -> io::Result<UnixStream> {
        UnixStream::connect(&self.0)
    }
}

struct Native {
    place: Place,
    agent: Child,
    _lock: File,
}

impl Native {
    fn start() -> Self {
        let place = Place::new();
        for directory in ["root/w/dir", "root/etc", "root/dev"] {
            fs::create_dir_all(place.path(directory)).unwrap();
        }
        let (run, lock) = place.run("00000001", 1 << 30);
        let socket = place.path("agent.sock");
        let program = Path::new(env!("CARGO_BIN_EXE_bulkhead")).with_file_name("bulkhead-guest");
        let agent = Command::new(program).arg("--serve").arg(&socket).arg(place.path("root")).spawn();
        let agent =
            agent.unwrap_or_else(|error| panic!("bulkhead-guest: {error}; build it first: cargo build -p guest"));
        let welcome = Welcome { epoch: 1, renew_identity: false, entropy: vec![7; 32], hostname: "box".into() };
        let connected =
            Agent::connect(Arc::new(Socket(socket)), &welcome, Instant::now() + Duration::from_secs(20)).unwrap();
        let listener = UnixListener::bind(run.join("ctl.sock")).unwrap();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let agent = connected.clone();
                std::thread::spawn(move || serve(client.unwrap(), &agent));
            }
        });
        Self { place, agent, _lock: lock }
    }

    fn cp(&self, arguments: &[&str]) -> Output {
        self.place.output(&[&["cp"], arguments].concat())
    }

    fn well(&self, arguments: &[&str]) {
        let output = self.cp(arguments);
        assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""), "{arguments:?}");
    }
}

impl Drop for Native {
    fn drop(&mut self) {
        let _ = self.agent.kill();
        let _ = self.agent.wait();
    }
}

/// Frames of a kind, as a writer.
struct Frames(UnixStream, u8);

impl Write for Frames {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        frame(&mut self.0, self.1, bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The client's input frames, as a reader that gives back credit.
struct Input(UnixStream, Vec<u8>);

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.1.is_empty() {
            match read_frame(&mut self.0) {
                Some((2, bytes)) => self.1 = bytes,
                _ => return Ok(0),
            }
        }
        let n = self.1.len().min(buffer.len());
        buffer[..n].copy_from_slice(&self.1[..n]);
        self.1.drain(..n);
        frame(&mut self.0, 0x84, &u32::try_from(n).unwrap().to_le_bytes());
        Ok(n)
    }
}

fn serve(mut client: UnixStream, agent: &Agent) {
    let Some((1, request)) = read_frame(&mut client) else { return };
    let request: Value = serde_json::from_slice(&request).unwrap();
    let id = format!("copy-{}", EXECS.fetch_add(1, Ordering::Relaxed));
    let word = |name: &str| request[name].as_str().unwrap().to_owned();
    let spec = match request["copy"].as_str().unwrap() {
        "in" => ExecSpec::tar_extract(id, word("directory")),
        "out" => ExecSpec::tar_create(id, word("path")),
        _ => ExecSpec::stat(id, word("path"), request["follow"] == true),
    };
    let stdin = spec.stdin;
    let exec: Arc<Exec> = Arc::new(agent.exec(spec).unwrap());
    if stdin {
        let (exec, mut input) = (Arc::clone(&exec), Input(client.try_clone().unwrap(), Vec::new()));
        std::thread::spawn(move || exec.copy_stdin(&mut input));
    }
    let errors = {
        let (exec, mut to) = (Arc::clone(&exec), Frames(client.try_clone().unwrap(), 0x83));
        std::thread::spawn(move || exec.copy_stderr(&mut to))
    };
    let _ = exec.copy_stdout(&mut Frames(client.try_clone().unwrap(), 0x82));
    let _ = errors.join();
    let code = exec.wait().unwrap().status();
    frame(&mut client, 0x86, json!({"code": code, "error": null, "stats": null}).to_string().as_bytes());
    let _ = client.shutdown(std::net::Shutdown::Both);
}

/// Everything below a directory, by its path in it.
fn listed(at: &Path) -> String {
    let mut all = Vec::new();
    let mut waiting = vec![at.to_owned()];
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
            all.push(entry.path().strip_prefix(at).unwrap().display().to_string());
            if entry.file_type().unwrap().is_dir() {
                waiting.push(entry.path());
            }
        }
    }
    all.sort();
    all.join(" ")
}

fn make_tree(at: &Path) {
    fs::create_dir_all(at.join("deep")).unwrap();
    fs::write(at.join("one"), "1").unwrap();
    fs::write(at.join("deep/two"), "2").unwrap();
    fs::set_permissions(at.join("deep/two"), fs::Permissions::from_mode(0o751)).unwrap();
    symlink("deep/two", at.join("link")).unwrap();
}

const TREE: &str = "deep deep/two link one";

#[test]
fn copies_follow_dockers_rules_both_ways() {
    let native = Native::start();
    let (here, root) = (native.place.path("here"), native.place.path("root"));
    let read = |path: PathBuf| fs::read_to_string(path).unwrap();
    make_tree(&here.join("src"));
    fs::write(root.join("w/old"), "old").unwrap();
    symlink("old", root.join("w/to-old")).unwrap();

    // In. A file: to a new name, over what a link leads to, into a directory.
    native.well(&["src/deep/two", "box:/w/new"]);
    native.well(&["src/one", "box:/w/to-old"]);
    native.well(&["./src/one", "box:w/dir"]);
    assert_eq!(read(root.join("w/new")) + &read(root.join("w/old")) + &read(root.join("w/dir/one")), "211");
    let made = fs::metadata(root.join("w/new")).unwrap();
    assert_eq!((made.mode() & 0o7777, made.uid(), made.gid()), (0o751, 0, 0));
    assert_eq!(fs::read_link(root.join("w/to-old")).unwrap(), Path::new("old"));
    fs::remove_file(root.join("w/dir/one")).unwrap();
    // A directory: to a new name, into one, what is in it alone.
    native.well(&["src", "box:/w/copy"]);
    native.well(&["src", "box:/w/copy2/"]);
    native.well(&["src/", "box:/w/dir"]);
    assert_eq!(listed(&root.join("w/copy")), TREE);
    assert_eq!(listed(&root.join("w/copy2")), TREE);
    assert_eq!(listed(&root.join("w/dir/src")), TREE);
    fs::remove_dir_all(root.join("w/dir/src")).unwrap();
    native.well(&["src/.", "box:/w/dir"]);
    assert_eq!(listed(&root.join("w/dir")), TREE);
    // Links: themselves, or what they lead to.
    native.well(&["src/link", "box:/w/l"]);
    native.well(&["-L", "src/link", "box:/w/followed"]);
    assert_eq!(
        (fs::read_link(root.join("w/l")).unwrap(), read(root.join("w/followed"))),
        ("deep/two".into(), "2".into())
    );
    std::os::unix::fs::chown(here.join("file"), Some(1234), Some(77)).unwrap();
    native.well(&["-a", "file", "box:/w/owned"]);
    let owned = fs::metadata(root.join("w/owned")).unwrap();
    assert_eq!((owned.uid(), owned.gid()), (1234, 77));

    // Out, the same.
    native.well(&["box:/w/new", "new"]);
    native.well(&["box:w/new", "src"]);
    assert_eq!(read(here.join("new")) + &read(here.join("src/new")), "22");
    assert_eq!(fs::metadata(here.join("new")).unwrap().mode() & 0o7777, 0o751);
    fs::remove_file(here.join("src/new")).unwrap();
    native.well(&["box:/w/copy", "copy"]);
    native.well(&["box:/w/copy", "copy2/"]);
    assert_eq!((listed(&here.join("copy")), listed(&here.join("copy2"))), (TREE.into(), TREE.into()));
    fs::create_dir(here.join("dir")).unwrap();
    native.well(&["box:/w/copy", "dir"]);
    assert_eq!(listed(&here.join("dir/copy")), TREE);
    fs::remove_dir_all(here.join("dir/copy")).unwrap();
    native.well(&["box:/w/copy/.", "dir"]);
    assert_eq!(listed(&here.join("dir")), TREE);
    native.well(&["-L", "box:/w/to-old", "followed"]);
    native.well(&["box:/w/to-old", "link"]);
    assert_eq!((read(here.join("followed")), fs::read_link(here.join("link")).unwrap()), ("1".into(), "old".into()));
    native.well(&["-a", "box:/w/owned", "owned"]);
    assert_eq!(fs::metadata(here.join("owned")).unwrap().uid(), 1234);
    symlink("followed", here.join("to-followed")).unwrap();
    native.well(&["box:/w/new", "to-followed"]);
    assert_eq!(read(here.join("followed")), "2");

    // As archives.
    let archive = native.cp(&["box:/w/copy", "-"]);
    assert!(archive.status.success() && archive.stderr.is_empty());
    fs::create_dir(root.join("w/unpacked")).unwrap();
    let file = native.place.path("archive");
    fs::write(&file, &archive.stdout).unwrap();
    let mut command = native.place.command(&["cp", "-", "box:/w/unpacked"]);
    assert!(command.stdin(File::open(&file).unwrap()).status().unwrap().success());
    assert_eq!(listed(&root.join("w/unpacked/copy")), TREE);
    let mut command = native.place.command(&["cp", "-", "box:/w/old"]);
    let refused = command.stdin(File::open(&file).unwrap()).output().unwrap();
    assert!(text(&refused.stderr).contains("an archive needs a directory that is there"));
}

/// What is below a directory: `name=content` for files, `name@target` for links, `name` for directories.
fn described(at: &Path) -> String {
    let one = |name: &str| match fs::read_link(at.join(name)) {
        Ok(target) => format!("{name}@{}", target.display()),
        Err(_) => fs::read_to_string(at.join(name)).map_or_else(|_| name.to_owned(), |text| format!("{name}={text}")),
    };
    listed(at).split(' ').map(one).collect::<Vec<_>>().join(" ")
}

/// What docker's documentation says of every SRC and DST there can be, and what docker does where that is silent: how SRC and
/// DST are written, and what is new or other at the destination afterwards; nothing if the copy is refused with these words.
const RULES: &[(&str, &str, Result<&str, &str>)] = &[
    // A file.
    ("f", "new", Ok("new=f")),
    ("f", "./new", Ok("new=f")),
    ("f", "new/", Err("there is no such directory")),
    ("f", "new/.", Err("there is no such directory")),
    ("f", "new/./", Err("there is no such directory")),
    ("f", "none/new", Err("the directory above it is not there")),
    ("f", "none/..", Err("the directory above it is not there")),
    ("f", "old", Ok("old=f")),
    ("f", "old/", Err("")),
    ("f", "old/.", Err("")),
    ("f", "old/new", Err("")),
    ("f", "dir", Ok("dir/f=f")),
    ("f", "dir/", Ok("dir/f=f")),
    ("f", "dir/.", Ok("dir/f=f")),
    ("f", "dir/..", Ok("f=f")),
    ("f", "dir/new", Ok("dir/new=f")),
    ("f", "to-dir", Ok("dir/f=f")),
    ("f", "to-dir/.", Ok("dir/f=f")),
    ("f", "to-old", Ok("old=f")),
    ("f/", "new", Err("")),
    ("f/.", "new", Err("")),
    ("none", "new", Err("")),
    ("none/.", "dir", Err("")),
    // A directory.
    ("d", "new", Ok("new new/deep new/deep/two=2 new/one=1")),
    ("d/", "new", Ok("new new/deep new/deep/two=2 new/one=1")),
    ("d", "new/", Ok("new new/deep new/deep/two=2 new/one=1")),
    ("d", "new/.", Err("there is no such directory")),
    ("d", "none/new", Err("the directory above it is not there")),
    ("d", "none/new/", Err("the directory above it is not there")),
    ("d", "old", Err("it is a file, and a directory cannot be copied to one")),
    ("d", "to-old", Err("it is a file, and a directory cannot be copied to one")),
    ("d", "old/", Err("")),
    ("d", "dir", Ok("dir/d dir/d/deep dir/d/deep/two=2 dir/d/one=1")),
    ("d/", "dir", Ok("dir/d dir/d/deep dir/d/deep/two=2 dir/d/one=1")),
    ("d", "dir/", Ok("dir/d dir/d/deep dir/d/deep/two=2 dir/d/one=1")),
    ("d", "dir/.", Ok("dir/d dir/d/deep dir/d/deep/two=2 dir/d/one=1")),
    ("d", "to-dir", Ok("dir/d dir/d/deep dir/d/deep/two=2 dir/d/one=1")),
    // What is in a directory.
    ("d/.", "new", Ok("new new/deep new/deep/two=2 new/one=1")),
    ("d/./", "new", Ok("new new/deep new/deep/two=2 new/one=1")),
    ("d/.", "new/", Ok("new new/deep new/deep/two=2 new/one=1")),
    ("d/.", "new/.", Err("there is no such directory")),
    ("d/.", "none/new", Err("the directory above it is not there")),
    ("d/.", "old", Err("it is a file, and a directory cannot be copied to one")),
    ("d/.", "dir", Ok("dir/deep dir/deep/two=2 dir/one=1")),
    ("d/./", "dir", Ok("dir/deep dir/deep/two=2 dir/one=1")),
    ("d/.", "dir/", Ok("dir/deep dir/deep/two=2 dir/one=1")),
    ("d/.", "dir/.", Ok("dir/deep dir/deep/two=2 dir/one=1")),
    // Links: themselves, unless what follows their name says what they lead to.
    ("lf", "new", Ok("new@f")),
    ("lf", "dir", Ok("dir/lf@f")),
    ("lf", "old", Ok("old@f")),
    ("lf/", "new", Err("")),
    ("ld", "dir", Ok("dir/ld@d")),
    ("ld/", "dir", Ok("dir/ld dir/ld/deep dir/ld/deep/two=2 dir/ld/one=1")),
    ("ld/.", "dir", Ok("dir/deep dir/deep/two=2 dir/one=1")),
    ("ld/.", "new", Ok("new new/deep new/deep/two=2 new/one=1")),
];

#[test]
fn every_way_to_write_a_path_means_what_docker_says() {
    let native = Native::start();
    for (inwards, from, to) in [(true, "here/s", "root/w/t"), (false, "root/w/s", "here/t")] {
        let (from, to) = (native.place.path(from), native.place.path(to));
        fs::create_dir_all(from.join("d/deep")).unwrap();
        for (name, content) in [("f", "f"), ("d/one", "1"), ("d/deep/two", "2")] {
            fs::write(from.join(name), content).unwrap();
        }
        symlink("f", from.join("lf")).unwrap();
        symlink("d", from.join("ld")).unwrap();
        for (source, destination, expected) in RULES {
            let _ = fs::remove_dir_all(&to);
            fs::create_dir_all(to.join("dir")).unwrap();
            fs::write(to.join("old"), "old").unwrap();
            symlink("old", to.join("to-old")).unwrap();
            symlink("dir", to.join("to-dir")).unwrap();
            let before = described(&to);
            let there = if inwards { ["s/", "box:/w/t/"] } else { ["box:/w/s/", "t/"] };
            let output = native.cp(&[&format!("{}{source}", there[0]), &format!("{}{destination}", there[1])]);
            let (said, after) = (text(&output.stderr), described(&to));
            let case = format!("{source} to {destination}, {}: {said}", if inwards { "in" } else { "out" });
            match expected {
                Ok(new) => {
                    assert_eq!(output.status.code(), Some(0), "{case}");
                    let came: Vec<&str> =
                        after.split(' ').filter(|one| !before.split(' ').any(|old| old == *one)).collect();
                    assert_eq!(came.join(" "), *new, "{case}");
                }
                Err(words) => {
                    assert_eq!((output.status.code(), said.lines().count()), (Some(125), 1), "{case}");
                    assert!(said.contains(words), "{case}");
                    assert_eq!(after, before, "{case}");
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_copied_is_refused_in_one_line() {
    let native = Native::start();
    let (here, root) = (native.place.path("here"), native.place.path("root"));
    make_tree(&here.join("src"));
    make_tree(&root.join("w/copy"));
    for directory in [&here, &root.join("w")] {
        fs::write(directory.join("old"), "mine").unwrap();
        symlink("nowhere", directory.join("dangling")).unwrap();
        let _ = std::os::unix::net::UnixListener::bind(directory.join("socket")).unwrap();
    }
    symlink("/etc/passwd", root.join("w/abs")).unwrap();
    for (arguments, why) in [
        (&["none", "box:/w"][..], "none: No such file or directory"),
        (&["none", "box:/w/x"], "none: No such file or directory"),
        (&["socket", "box:/w"], "socket: it is a device, pipe or socket"),
        (&["old", "box:/none/x"], "/none/x in the run: the directory above it is not there"),
        (&["old", "box:/w/none/"], "/w/none/ in the run: there is no such directory"),
        (&["old", "box:/w/old/"], "/w/old/ in the run: "),
        (&["old/", "box:/w"], "old/: Not a directory"),
        (&["src", "box:/w/old"], "/w/old in the run: it is a file, and a directory cannot be copied to one"),
        (&["old", "box:/w/socket"], "/w/socket in the run: it is neither a file nor a directory"),
        (&["old", "box:/w/dangling"], "/w/dangling in the run: it is a link to nothing"),
        (&["dangling", "-L", "box:/w/x"], "dangling: No such file or directory"),
        (&["box:/w/none", "x"], "/w/none in the run: there is no such file or directory"),
        (&["box:/w/socket", "x"], "/w/socket in the run: it is a device, pipe or socket"),
        (&["box:/w/old/", "x"], "/w/old/ in the run: it is not a directory"),
        (&["box:/w/old/x", "x"], "/w/old/x in the run: there is no such file or directory"),
        (&["box:/w/abs", "x"], "it is a link to /etc/passwd, outside of what is copied; -L copies what it leads to"),
        (&["box:/w/old", "none/x"], "none/x: the directory above it is not there"),
        (&["box:/w/old", "none/"], "none/: there is no such directory"),
        (&["box:/w/old", "old/"], "old/: Not a directory"),
        (&["box:/w/copy", "old"], "old: it is a file, and a directory cannot be copied to one"),
        (&["box:/w/old", "socket"], "socket: it is neither a file nor a directory"),
        (&["box:/w/old", "dangling"], "dangling: it is a link to nothing"),
        (&["--limit", "1", "box:/w/old", "x"], "the guest sends more than 1 B"),
        (&["--limit", "1K", "box:/w/old", "-"], "its archive is longer than 1.0 KiB"),
    ] {
        let output = native.cp(arguments);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(125), 1), "{arguments:?}: {said}");
        assert!(said.starts_with("bulkhead: cp: ") && said.contains(why), "{arguments:?}: {said}");
    }
    for directory in [&here, &root.join("w")] {
        assert_eq!(fs::read_to_string(directory.join("old")).unwrap(), "mine");
    }
}

#[test]
fn a_large_file_comes_back_the_same_and_fast() {
    let native = Native::start();
    let block: Vec<u8> = (0..1_u32 << 18).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let mut file = File::create(native.place.path("here/large")).unwrap();
    (0..256).for_each(|_| file.write_all(&block).unwrap());
    let start = Instant::now();
    native.well(&["large", "box:/w/large"]);
    let inwards = start.elapsed();
    native.well(&["box:/w/large", "back"]);
    println!("256 MiB: {inwards:?} in, {:?} out", start.elapsed() - inwards);
    let same = Command::new("cmp").arg(native.place.path("here/large")).arg(native.place.path("here/back")).status();
    assert!(same.unwrap().success());
}
