//! `bulkhead cp` against a supervisor that is the guest's: whatever comes over the connection, nothing outside the
//! destination changes, and the copy ends.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod common;

use std::fs::{self, File};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::{Place, frame, read_frame, text};
use serde_json::{Value, json};

/// Ends a copy that is held up at a pipe by a signal: how it ended, and after how long.
fn interrupted(mut command: Command, begun: &AtomicBool, signals: usize) -> (Option<i32>, String) {
    let mut copying = command.stderr(Stdio::piped()).spawn().unwrap();
    let (stdin, stdout) = (copying.stdin.take(), copying.stdout.take());
    while !begun.swap(false, Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(10));
    }
    // So long that it waits for the pipe.
    std::thread::sleep(Duration::from_millis(300));
    assert!(copying.try_wait().unwrap().is_none(), "it does not wait");
    let started = Instant::now();
    let id = rustix::process::Pid::from_child(&copying);
    for _ in 0..signals {
        // Not SIGINT, which who started us may ignore, and then so does it.
        rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
        std::thread::sleep(Duration::from_millis(60));
    }
    while copying.try_wait().unwrap().is_none() && started.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = copying.kill();
    drop((stdin, stdout));
    let output = copying.wait_with_output().unwrap();
    (output.status.code(), text(&output.stderr))
}

/// A run whose supervisor answers what a test wants.
struct Fake {
    place: Place,
    /// Its run is alive while this is locked, and so while it is open.
    _lock: File,
    socket: UnixListener,
}

fn exit(to: &mut UnixStream, code: u8) {
    frame(to, 0x86, json!({"code": code, "error": null, "stats": null}).to_string().as_bytes());
}

impl Fake {
    fn new() -> Self {
        let place = Place::new();
        let (run, lock) = place.run("0badbad0", 8192);
        // An address has room for 107 bytes only.
        let socket = UnixListener::bind(run.join("ctl.sock")).unwrap();
        fs::create_dir(place.path("here/to")).unwrap();
        fs::create_dir(place.path("outside")).unwrap();
        fs::write(place.path("outside/secret"), "secret").unwrap();
        Self { place, _lock: lock, socket }
    }

    /// Copies `box:/x` to `to`, from a guest that says `kind` of it and then sends what `send` writes.
    fn copy(&self, kind: &str, options: &[&str], send: impl Fn(&mut UnixStream) + Send + 'static) -> Output {
        let listener = self.socket.try_clone().unwrap();
        let kind = kind.to_owned();
        let over = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&over);
        let supervisor: JoinHandle<()> = std::thread::spawn(move || {
            loop {
                let (mut client, _) = listener.accept().unwrap();
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                // One that only woke an earlier supervisor.
                let Some((1, request)) = read_frame(&mut client) else { continue };
                let request: Value = serde_json::from_slice(&request).unwrap();
                if request["copy"] == "stat" {
                    let stat = json!({"kind": kind, "path": "/x", "uid": 0, "gid": 0}).to_string();
                    frame(&mut client, 0x82, stat.as_bytes());
                    exit(&mut client, 0);
                } else {
                    return send(&mut client);
                }
            }
        });
        let output = self.place.output(&[&["cp"], options, &["box:/x", "to"]].concat());
        // If it never came so far, this ends the supervisor's wait.
        over.store(true, Ordering::Relaxed);
        drop(UnixStream::connect(self.place.path("home/runs/0badbad0/ctl.sock")));
        supervisor.join().unwrap();
        output
    }

    fn assert_untouched(&self) {
        let outside: Vec<_> =
            fs::read_dir(self.place.path("outside")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(outside, ["secret"]);
        assert_eq!(fs::read_to_string(self.place.path("outside/secret")).unwrap(), "secret");
        let mut here: Vec<_> = fs::read_dir(self.place.path("here")).unwrap().map(|e| e.unwrap().file_name()).collect();
        here.sort();
        assert_eq!(here, ["bad.env", "binary.env", "file", "good.env", "spaced.env", "to"]);
        assert_eq!(fs::read_to_string(self.place.path("here/file")).unwrap(), "x");
    }

    fn copied(&self) -> Vec<PathBuf> {
        let to = self.place.path("here/to");
        self.place
            .listed()
            .into_iter()
            .filter_map(|path| path.strip_prefix(&to).ok().map(PathBuf::from))
            .filter(|p| p.as_os_str() != "")
            .collect()
    }
}

fn entry(name: &str, kind: u8, link: &str, content: &[u8]) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[100..108].copy_from_slice(b"0006777\0");
    block[108..116].copy_from_slice(b"0000000\0");
    block[116..124].copy_from_slice(b"0000000\0");
    block[124..136].copy_from_slice(format!("{:011o}\0", content.len()).as_bytes());
    block[136..148].copy_from_slice(b"00000000000\0");
    block[148..156].copy_from_slice(b"        ");
    block[156] = kind;
    block[157..157 + link.len()].copy_from_slice(link.as_bytes());
    block[257..265].copy_from_slice(b"ustar  \0");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block.extend(content);
    block.resize(block.len().next_multiple_of(512), 0);
    block
}

fn assert_failed(output: &Output, words: &str) {
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), output.stdout.len(), said.lines().count()), (Some(125), 0, 1), "{said}");
    assert!(said.starts_with("bulkhead: cp: ") && said.contains(words) && !said.contains('\x1b'), "{words}: {said}");
}

#[test]
fn a_hostile_archive_can_at_worst_fail_the_copy() {
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("directory", entry("../file", b'0', "", b"evil"), "it leads out of the directory"),
        ("directory", entry("/tmp/evil", b'0', "", b"evil"), "it is absolute"),
        ("directory", [entry("l", b'2', "../../outside", b""), entry("l/secret", b'0', "", b"evil")].concat(), ""),
        (
            "directory",
            [entry("l", b'2', "d", b""), entry("l/secret", b'0', "", b"evil")].concat(),
            "symbolic link is in its way",
        ),
        ("directory", entry("\x1b[2J/../x", b'0', "", b"evil"), "it leads out"),
        ("directory", entry("", b'0', "", b"evil"), "a member without a name"),
        ("directory", vec![7; 5000], "the guest's archive"),
        ("directory", entry("f", b'0', "", b"cut short")[..515].to_vec(), "the guest's archive"),
        ("file", [entry("x", b'0', "", b"1"), entry("file", b'0', "", b"evil")].concat(), "not asked for"),
        ("file", entry("x", b'5', "", b""), "not asked for"),
        ("file", entry("x", b'3', "", b""), "not asked for"),
        ("file", Vec::new(), "the guest sent nothing"),
        ("link", entry("x", b'2', "/etc/shadow", b""), "outside of what is copied"),
        ("device", Vec::new(), "the guest's answer"),
        (r"\u001b]0;\u0007\nbulkhead: fine", Vec::new(), "the guest's answer"),
    ];
    for (kind, archive, words) in cases {
        let fake = Fake::new();
        let output = fake.copy(kind, &[], move |client| {
            // Until it does not listen any more.
            if archive.chunks(1000).all(|part| frame(client, 0x82, part)) {
                exit(client, 0);
            }
        });
        if words.is_empty() {
            assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        } else {
            assert_failed(&output, words);
        }
        fake.assert_untouched();
        assert!(fake.copied().iter().all(|path| !path.to_string_lossy().contains(".bulkhead-")), "{:?}", fake.copied());
    }
}

#[test]
fn a_guest_that_sends_for_ever_is_cut_off() {
    let fake = Fake::new();
    let output = fake.copy("directory", &["--limit", "1M"], |client| {
        let file = entry("f", b'0', "", &[0; 60_000]);
        while frame(client, 0x82, &file) {}
    });
    assert_failed(&output, "the guest sends more than 1.0 MiB");
    let output = fake.copy("directory", &[], |client| while frame(client, 0x82, &[0; 65_536]) {});
    assert_failed(&output, "goes on after its end");
    // Words without end, too.
    let output = fake.copy("directory", &[], |client| {
        for _ in 0..2000 {
            frame(client, 0x83, b"\x1b[2J evil words\n");
        }
        exit(client, 1);
    });
    assert_eq!(output.status.code(), Some(125));
    assert!(output.stderr.len() < 10_000 && !output.stderr.contains(&0x1b), "{}", text(&output.stderr));
    fake.assert_untouched();
}

#[test]
fn a_copy_that_the_guest_calls_failed_is_one() {
    let fake = Fake::new();
    let archive = [entry("d", b'5', "", b""), entry("d/whole", b'0', "", b"content")].concat();
    let output = fake.copy("directory", &[], move |client| {
        frame(client, 0x82, &archive);
        frame(client, 0x83, b"/x/unreadable: Permission denied\n");
        exit(client, 1);
    });
    assert_failed(&output, "/x/unreadable: Permission denied");
    // What came before is whole.
    assert_eq!(fs::read_to_string(fake.place.path("here/to/x/d/whole")).unwrap(), "content");
    // A supervisor that dies in the middle of a file leaves nothing of that file.
    let archive = entry("d/half", b'0', "", &[1; 5000]);
    let output = fake.copy("directory", &[], move |client| {
        frame(client, 0x82, &archive[..2000]);
    });
    assert_eq!(output.status.code(), Some(125));
    let expected: Vec<PathBuf> = ["x", "x/d", "x/d/whole"].iter().map(PathBuf::from).collect();
    assert_eq!(fake.copied(), expected);
}

#[test]
fn a_copy_that_waits_for_a_pipe_ends_by_a_signal() {
    let fake = Fake::new();
    let listener = fake.socket.try_clone().unwrap();
    let begun = Arc::new(AtomicBool::new(false));
    let tell = Arc::clone(&begun);
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let tell = Arc::clone(&tell);
            std::thread::spawn(move || {
                let mut client = client.unwrap();
                let Some((1, request)) = read_frame(&mut client) else { return };
                let request: Value = serde_json::from_slice(&request).unwrap();
                tell.store(request["copy"] != "stat", Ordering::Relaxed);
                match request["copy"].as_str().unwrap() {
                    "stat" => {
                        let stat = json!({"kind": "directory", "path": "/x", "uid": 0, "gid": 0}).to_string();
                        frame(&mut client, 0x82, stat.as_bytes());
                        exit(&mut client, 0);
                    }
                    // More than any pipe holds.
                    "out" => while frame(&mut client, 0x82, &[0; 65_536]) {},
                    _ => while read_frame(&mut client).is_some() {},
                }
            });
        }
    });
    for arguments in [["cp", "-", "box:/x"], ["cp", "box:/x", "-"]] {
        let command = || {
            let mut command = fake.place.command(&arguments);
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            command
        };
        for signals in [1, 2] {
            let (code, said) = interrupted(command(), &begun, signals);
            assert_eq!((code, said.as_str()), (Some(143), ""), "{arguments:?}, {signals}");
        }
    }
    fake.assert_untouched();
}

/// What a copy shows on a terminal, of a guest that takes its time over a file.
fn shown(options: &[&str], pause: Duration) -> String {
    let fake = Fake::new();
    let listener = fake.socket.try_clone().unwrap();
    let supervisor = std::thread::spawn(move || {
        // What is there, then the file itself.
        for _ in 0..2 {
            let (mut client, _) = listener.accept().unwrap();
            let Some((1, request)) = read_frame(&mut client) else { return };
            let request: Value = serde_json::from_slice(&request).unwrap();
            if request["copy"] == "stat" {
                let stat = json!({"kind": "file", "path": "/x", "uid": 0, "gid": 0}).to_string();
                frame(&mut client, 0x82, stat.as_bytes());
            } else {
                for part in entry("x", b'0', "", &[7; 40_000]).chunks(1000) {
                    std::thread::sleep(pause / 40);
                    frame(&mut client, 0x82, part);
                }
            }
            exit(&mut client, 0);
        }
    });
    let terminal = rustix::pty::openpt(rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY).unwrap();
    rustix::pty::unlockpt(&terminal).unwrap();
    let name = rustix::pty::ptsname(&terminal, Vec::new()).unwrap();
    let theirs = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    let mut command = fake.place.command(&[&["cp"], options, &["box:/x", "to/x"]].concat());
    let ended = command.stderr(theirs).status().unwrap();
    // It holds the other end, without which a terminal cannot be read.
    let mut seen = vec![0; 65_536];
    rustix::io::ioctl_fionbio(&terminal, true).unwrap();
    let n = rustix::io::read(&terminal, seen.as_mut_slice()).unwrap_or(0);
    drop(command);
    supervisor.join().unwrap();
    assert!(ended.success());
    assert_eq!(fs::read(fake.place.path("here/to/x")).unwrap(), [7; 40_000]);
    text(&seen[..n])
}

#[test]
fn a_copy_that_takes_long_says_how_far_it_is() {
    let slow = shown(&[], Duration::from_millis(2500));
    assert!(slow.contains("copying: ") && slow.contains(" of 39.0 KiB (") && slow.contains("/s, "), "{slow:?}");
    assert!(slow.ends_with("\r\x1b[K"), "{slow:?}");
    assert_eq!(shown(&["-q"], Duration::from_millis(1500)), "");
}
