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
        "seccomp",
        "userfaultfd",
        "memory",
        "programs",
        "jail",
        "network",
        "disk",
        "guest-kernel",
        "image",
        "proxy",
        "canary",
    ];
    assert_eq!(names, all);
    assert!(checks.iter().all(|check| (check["verdict"] == "ok") == check["mend"].is_null()), "{report}");
    assert_eq!(checks[14]["found"], "bare, broken, busybox");
    let lines = text(&place.output(&["doctor"]).stdout);
    assert_eq!(lines.lines().count(), all.len(), "a line a check: {lines}");

    std::fs::remove_dir_all(place.path("home/images")).unwrap();
    std::fs::remove_file(place.path("lib/bulkhead/bulkhead-vmm")).unwrap();
    let output = place.output(&["doctor"]);
    assert_eq!(output.status.code(), Some(1));
    let lines = text(&output.stdout).split_ascii_whitespace().collect::<Vec<_>>().join(" ");
    for words in ["FAILED programs", "bulkhead-vmm: not found in", "FAILED image", "bulkhead image import"] {
        assert!(lines.contains(words), "{words}: {lines}");
    }
}

#[test]
fn a_policy_is_checked_and_explained() {
    let place = Place::new();
    let policy = |words: &[&str]| {
        let output = place.output(&[&["policy"], words].concat());
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let denied = "denied: everything that no rule allows\n";
    assert_eq!(policy(&["check"]), (Some(0), denied.to_owned(), String::new()));
    let given = ["--network-policy", "deny-egress-except=api.example.com,*.github.com", "--allow", "!gist.github.com"];
    let (code, said, wrong) = policy(&[&["check"], &given[..]].concat());
    let rules = "allowed: api.example.com\nallowed: *.github.com\ndenied, whatever a rule says: !gist.github.com\n";
    assert_eq!((code, said, wrong), (Some(0), format!("{denied}{rules}"), String::new()));
    let (_, table, _) = policy(&[&["check", "--format", "json"], &given[..]].concat());
    assert_eq!(serde_json::from_str::<Value>(&table).unwrap()["rules"][1]["target"], json!({ "below": "github.com" }));

    let explained = |url| policy(&[&["explain"], &given[..], &[url]].concat());
    let (code, said, _) = explained("https://api.github.com/user");
    assert_eq!((code, said.lines().next()), (Some(0), Some("allowed by `*.github.com`")), "{said}");
    for url in ["gist.github.com", "github.com", "api.example.com:22", "10.0.0.1", "http://api.example.com/"] {
        let (code, said, wrong) = explained(url);
        assert!((code, wrong.as_str()) == (Some(1), "") && said.starts_with("denied"), "{url}: {said}{wrong}");
    }

    std::fs::write(place.path("policy.toml"), "version = 1\nallow = [\"a.example.com\", \"b.example\"]\n").unwrap();
    let file = format!("@{}", place.path("policy.toml").display());
    let (code, said, _) = policy(&["explain", "--network-policy", &file, "a.example.com"]);
    assert_eq!(code, Some(0), "{said}");

    // What is wrong is shown with its place, and none of it runs.
    std::fs::write(place.path("bad.toml"), "version = 1\nallow = [\"*.com\"]\n").unwrap();
    std::fs::write(place.path("bytes.toml"), [b'v', 0xff]).unwrap();
    let at = |name: &str| format!("@{}", place.path(name).display());
    for (given, words) in [
        ("allow-all".to_owned(), &["--network-policy", "`allow-all` is no policy", "^^^", "deny-all"][..]),
        ("deny-egress-except=".to_owned(), &["--network-policy"]),
        ("deny-egress-except=a.example.com,https://b".to_owned(), &["--network-policy", "https:", "^"]),
        ("deny-egress-except=127.0.0.1".to_owned(), &["127.0.0.1", "^"]),
        (at("bad.toml"), &["bad.toml:2", "*.com", "^"]),
        (at("bytes.toml"), &["bytes.toml", "not UTF-8 from byte 1 on"]),
        (at("none.toml"), &["none.toml", "No such file"]),
    ] {
        let (code, said, wrong) = policy(&["check", "--network-policy", &given]);
        assert_eq!((code, said.as_str()), (Some(125), ""), "{given}");
        assert!(words.iter().all(|word| wrong.contains(word)), "{given}: {wrong}");
        assert!(wrong.lines().all(|line| line.starts_with("bulkhead: ")), "{wrong}");
    }
}

#[test]
fn a_run_that_lives_shows_what_its_process_has() {
    let place = Place::new();
    let (run, _lock) = place.run("00000002", 1 << 30);
    let inspected = || -> Value {
        let output = place.output(&["inspect", "box"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()[0]["processes"].take()
    };
    assert_eq!(inspected(), json!([]), "no VMM yet");

    // Given this process in the place of the VMM,
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let started: u64 = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(19).unwrap().parse().unwrap();
    let missing = json!([["landlock", "the kernel has none"]]);
    let jail = |started: u64| {
        let jail = json!({"pid": std::process::id(), "started": started, "cgroup": null, "unenforced": missing});
        std::fs::write(run.join("jail.json"), jail.to_string()).unwrap();
    };
    jail(started);
    // then what the kernel says of it is shown,
    let processes = inspected();
    let process = &processes[0];
    assert_eq!(process["pid"], json!(std::process::id()));
    assert_eq!(process["uid"], json!(rustix::process::getuid().as_raw()));
    assert_eq!((&process["namespaces"], &process["landlock"]), (&json!([]), &json!(false)));
    assert_eq!(process["unenforced"], json!([{"part": "landlock", "why": "the kernel has none"}]));
    let threads = process["threads"].as_array().unwrap();
    assert!(threads.len() > 1 && threads.iter().all(|thread| thread["name"].is_string()), "{process}");
    // and nothing of a process that has got its id meanwhile.
    jail(started + 1);
    assert_eq!(inspected(), json!([]));
}
