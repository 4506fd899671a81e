//! Command lines that need no guest, and what they print.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod common;

use common::{Place, text};
use serde_json::{Value, json};

fn dry(place: &Place, options: &[&str]) -> Value {
    let output = place.output(&[&["run", "--dry-run"], options].concat());
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_dry_run_prints_what_was_asked_for_and_makes_nothing() {
    let place = Place::new();
    let before = place.listed();
    let spec = dry(&place, &["busybox"]);
    assert_eq!((&spec["process"]["command"], &spec["process"]["workdir"]), (&json!(["/bin/sh"]), &json!("/srv")));
    assert_eq!(
        (&spec["ephemeral"], &spec["machine"]["memory"], &spec["artifacts"]),
        (&json!(true), &json!(1 << 30), &json!(null))
    );

    let options = [
        "--cpu",
        "2",
        "-m",
        "4GB",
        "--disk",
        "1G",
        "--timeout",
        "15m",
        "--name",
        "n",
        "--label",
        "a=b",
        "--label",
        "c",
        "-e",
        "C=option",
        "--env-file",
        "good.env",
        "-u",
        "app",
        "-w",
        "/w",
        "--input",
        "file:/in",
        "--artifact",
        "out/*.txt",
        "--artifact",
        "/a",
        "--artifact-dir",
        "results",
        "--artifact-limit",
        "5M",
        "--kernel",
        "6.12",
        "busybox",
        "ls",
        "-l",
    ];
    let spec = dry(&place, &options);
    let here = place.path("here").canonicalize().unwrap();
    for (pointer, value) in [
        ("/machine/cpus", json!(2)),
        ("/machine/memory", json!(4_u64 << 30)),
        ("/machine/disk", json!(1 << 30)),
        ("/timeout_ms", json!(900_000)),
        ("/name", json!("n")),
        ("/ephemeral", json!(false)),
        ("/labels", json!({"a": "b", "c": ""})),
        ("/process/env", json!(["A=image", "B=file", "C=option"])),
        ("/process/user", json!("app")),
        ("/process/workdir", json!("/w")),
        ("/process/command", json!(["ls", "-l"])),
        ("/inputs", json!([{"source": here.join("file"), "destination": "/in"}])),
        ("/artifacts/patterns", json!(["/w/out/*.txt", "/a"])),
        ("/artifacts/directory", json!(here.join("results"))),
        ("/artifacts/limit", json!(5 << 20)),
    ] {
        assert_eq!(spec.pointer(pointer), Some(&value), "{pointer}");
    }
    assert_eq!(place.listed(), before);
}

#[test]
fn an_option_after_the_image_is_the_commands_and_earns_a_warning() {
    let place = Place::new();
    let output = place.output(&["run", "--dry-run", "busybox", "--memory", "4G", "sh"]);
    let warning = "bulkhead: warning: --memory stands after the image and so belongs to the command; options of bulkhead go before it \
                   (write -- to silence this)\n";
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), warning));
    let spec: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(spec["process"]["command"], json!(["--memory", "4G", "sh"]));
    for quiet in [
        &["run", "--dry-run", "busybox", "--", "--memory", "4G"][..],
        &["run", "-q", "--dry-run", "busybox", "--memory", "4G"],
    ] {
        assert!(place.output(quiet).stderr.is_empty(), "{quiet:?}");
    }
}

#[test]
fn what_came_of_a_run_is_told_to_programs_too() {
    let place = Place::new();
    let output = place.output(&["run", "--format", "json", "--name", "n", "nothing"]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(125), 0));
    let result: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!((&result["id"], &result["name"], &result["exit_code"]), (&json!(null), &json!("n"), &json!(125)));
    assert!(
        result["error"].as_str().unwrap().starts_with("cannot start run: image \"nothing\": not found"),
        "{result}"
    );
}

#[test]
fn results_are_printed_as_asked() {
    let place = Place::new();
    for (arguments, printed) in [
        (&["list"][..], "ID  NAME  IMAGE  STATE  AGE  CPU  MEM\n"),
        (&["ls", "--format", "table"], "ID  NAME  IMAGE  STATE  AGE  CPU  MEM\n"),
        (&["ps", "-a", "--format", "json"], "[]\n"),
        (&["list", "-q"], ""),
    ] {
        let output = place.output(arguments);
        assert_eq!(
            (output.status.code(), text(&output.stdout).as_str(), text(&output.stderr).as_str()),
            (Some(0), printed, ""),
            "{arguments:?}"
        );
    }
    for (shell, words) in
        [("bash", "complete -F _bulkhead"), ("zsh", "#compdef bulkhead"), ("fish", "complete -c bulkhead")]
    {
        let output = place.output(&["completion", shell]);
        let script = text(&output.stdout);
        assert!(output.status.success() && script.contains(words) && script.contains("artifact-dir"), "{shell}");
    }
}

#[test]
fn the_doctor_says_what_is_missing_and_how_to_mend_it() {
    let place = Place::new();
    let output = place.output(&["doctor", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(i32::from(report["ok"] != json!(true))), "{report}");
    let checks = report["checks"].as_array().unwrap();
    let names: Vec<&str> = checks.iter().map(|check| check["name"].as_str().unwrap()).collect();
    let all = [
        "host-kernel",
        "kvm",
        "limits",
        "user-namespaces",
        "cgroup",
        "landlock",
        "userfaultfd",
        "memory",
        "programs",
        "disk",
        "guest-kernel",
        "image",
    ];
    assert_eq!(names, all);
    assert!(checks.iter().all(|check| (check["verdict"] == "ok") == check["mend"].is_null()), "{report}");
    assert_eq!(checks[11]["found"], "bare, broken, busybox");
    let lines = text(&place.output(&["doctor"]).stdout);
    assert_eq!(lines.lines().count(), all.len(), "a line a check: {lines}");

    std::fs::remove_dir_all(place.path("home/images")).unwrap();
    std::fs::remove_file(place.path("lib/bulkhead/bulkhead-vmm")).unwrap();
    let output = place.output(&["doctor"]);
    assert_eq!(output.status.code(), Some(1));
    let lines = text(&output.stdout);
    for words in ["FAILED   programs", "bulkhead-vmm: not found in", "FAILED   image", "bulkhead image import"] {
        assert!(lines.contains(words), "{words}: {lines}");
    }
}
