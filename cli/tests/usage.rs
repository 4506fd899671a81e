//! The program as a user starts it, up to where a host with KVM would be needed.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn bulkhead(home: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
    command.args(arguments).env("BULKHEAD_HOME", home).stdin(Stdio::null()).output().unwrap()
}

fn errors(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn help_is_a_result_and_wrong_usage_a_failure_of_ours() {
    let home = tempfile::tempdir().unwrap();
    let help = bulkhead(home.path(), &["run", "--help"]);
    let text = String::from_utf8(help.stdout.clone()).unwrap();
    assert!(help.status.success() && help.stderr.is_empty());
    assert!(text.contains("bulkhead run [OPTIONS] IMAGE [--] [COMMAND [ARG...]]"), "{text}");
    assert!(!text.contains("cmdline-extra"), "{text}");
    for wrong in [&[][..], &["run"], &["run", "--cpus", "0", "x"], &["run", "--memroy", "1G", "x"], &["frob"]] {
        let output = bulkhead(home.path(), wrong);
        assert_eq!(output.status.code(), Some(125), "{wrong:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{wrong:?}");
    }
}

#[test]
fn an_empty_state_directory_lists_nothing() {
    let home = tempfile::tempdir().unwrap();
    let output = bulkhead(home.path(), &["list", "-q"]);
    assert!(output.status.success() && output.stdout.is_empty() && output.stderr.is_empty());
    let output = bulkhead(home.path(), &["exec", "8fc2", "true"]);
    assert_eq!(output.status.code(), Some(125));
    assert!(errors(&output).starts_with("bulkhead: run \"8fc2\": there is none"), "{}", errors(&output));
}

#[test]
fn a_run_that_cannot_start_says_why_in_one_line_and_leaves_nothing() {
    let home = tempfile::tempdir().unwrap();
    let image = home.path().join("images/busybox");
    std::fs::create_dir_all(&image).unwrap();
    std::fs::write(image.join("root.img"), [0; 4096]).unwrap();
    std::fs::write(image.join("image.json"), r#"{"name":"busybox"}"#).unwrap();
    let said = |arguments: &[&str]| {
        let output = bulkhead(home.path(), arguments);
        assert_eq!(output.status.code(), Some(125), "{arguments:?}");
        assert!(output.stdout.is_empty());
        let text = errors(&output);
        assert_eq!(text.lines().count(), 1, "{text}");
        text
    };
    assert!(said(&["run", "busybocks"]).contains("did you mean busybox?"));
    assert!(said(&["run", "busybox", "true"]).contains("no kernel in"));
    assert!(said(&["run", "-t", "busybox", "true"]).contains("the input device is not a TTY"));
    assert!(said(&["run", "-e", "=1", "busybox", "true"]).contains("the name is empty"));
    assert!(!home.path().join("runs").exists(), "not even a place for runs was made");
}

/// Somebody who has no rights.
const NOBODY: u32 = 65_534;

/// What each of these commands says, as somebody else where we are root: one line, and a status of 125.
fn refused(home: &Path, commands: &[&[&str]]) -> Vec<String> {
    let said = commands.iter().map(|arguments| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
        command.args(*arguments).env("BULKHEAD_HOME", home).stdin(Stdio::null());
        if rustix::process::geteuid().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        let output = command.output().unwrap();
        let said = errors(&output);
        assert_eq!((output.status.code(), said.lines().count()), (Some(125), 1), "{arguments:?}: {said}");
        assert!(output.stdout.is_empty() || arguments[0] == "list", "{arguments:?}");
        said.replace("bulkhead: cannot start run: ", "bulkhead: ").replace(home.to_str().unwrap(), "HOME")
    });
    said.collect()
}

/// That all of them say this.
fn assert_all(said: &[String], words: &[&str]) {
    for line in said {
        assert!(words.iter().all(|words| line.contains(words)), "{words:?}: {line}");
    }
}

#[test]
fn a_state_directory_that_cannot_be_used_is_told_and_not_taken_for_an_empty_one() {
    let root = rustix::process::geteuid().is_root();
    let place = tempfile::tempdir().unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let runs: &[&[&str]] =
        &[&["list"], &["list", "-q"], &["inspect", "x"], &["rm", "x"], &["exec", "x", "true"], &["cp", "x:/y", "z"]];
    let images: &[&[&str]] = &[&["image", "list"], &["image", "inspect", "x"], &["image", "rm", "x"], &["run", "x"]];
    let kernels: &[&[&str]] = &[&["kernel", "list"], &["kernel", "inspect", "x"], &["kernel", "rm", "x"]];
    let all = [runs, images, kernels].concat();

    // A file.
    let file = place.path().join("file");
    fs::write(&file, "").unwrap();
    let next = "set BULKHEAD_HOME to a directory of yours";
    assert_all(&refused(&file, &all), &[&format!("bulkhead: HOME: it is not a directory; {next}\n")]);
    let words = format!("/file is not a directory; {next}\n");
    assert_all(&refused(&file.join("below"), &all), &["bulkhead: HOME: ", &words]);

    // One that is somebody else's, or whose owner may not enter it either; then parts of it.
    let home = place.path().join("home");
    fs::create_dir(&home).unwrap();
    let denied = if root {
        format!(
            "permission denied: it belongs to user 0, and this is user {NOBODY}; run this as that user, or {next}\n"
        )
    } else {
        "permission denied: it is yours and has mode 000; change that (chmod u+rwx)\n".to_owned()
    };
    let close =
        |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(if root { 0o700 } else { 0 })).unwrap();
    close(&home);
    assert_all(&refused(&home, &all), &[&format!("bulkhead: HOME: {denied}")]);
    fs::set_permissions(&home, fs::Permissions::from_mode(0o755)).unwrap();
    if root {
        std::os::unix::fs::chown(&home, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    for (part, commands) in [("runs", runs), ("images", images), ("kernels", kernels)] {
        let path = home.join(part);
        fs::write(&path, "").unwrap();
        assert_all(&refused(&home, commands), &[&format!("HOME/{part}"), "is not a directory", next]);
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        close(&path);
        assert_all(&refused(&home, commands), &["permission denied: ", &format!("HOME/{part}")]);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        fs::remove_dir(&path).unwrap();
    }
    // A run that may not be looked at might be the one that is meant.
    let run = home.join("runs/0badbad0");
    fs::create_dir_all(&run).unwrap();
    if root {
        std::os::unix::fs::chown(home.join("runs"), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    close(&run);
    assert_all(&refused(&home, runs), &["permission denied: ", "HOME/runs/0badbad0"]);
    fs::set_permissions(&run, fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn a_closed_pipe_is_quiet() {
    let home = tempfile::tempdir().unwrap();
    for arguments in [&["list"][..], &["--help"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
        let output = command.args(arguments).env("BULKHEAD_HOME", home.path()).stdout(writer).output().unwrap();
        assert!(output.stderr.is_empty(), "{arguments:?}: {}", errors(&output));
    }
}
