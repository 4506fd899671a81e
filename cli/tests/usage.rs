//! The program as a user starts it, up to where a host with KVM would be needed.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

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
