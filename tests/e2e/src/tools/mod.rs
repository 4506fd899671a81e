//! The usual tools in a real guest: what a policy allows works with nothing set up, and nothing else does.
//!
//! `checks.rs` is a table: a row of the design's catalogue of bypasses, a command, what must come of it. One guest runs all of
//! them, in a few boots' time less than one boot for each; every check is reported by its name.

mod checks;
mod expected;
mod site;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use crate::cli::Bulkhead;
use crate::command::until;
use crate::internet::ORIGIN;
use crate::network::{World, events, has};
use crate::{Test, host, processes};
use checks::Check;
use site::{RESOLVER, SITE, Site};

pub(crate) const TESTS: &[Test] = &[("tools::what_is_allowed_works_and_nothing_else", what_is_allowed_works)];

/// What every check may use.
const PRELUDE: &str = r#"
export LC_ALL=C HOME=/root
cd /root
page() { curl -sS --max-time 60 "$@"; }
# Whether it was over within seconds, long before any timeout.
at_once() { began=$(date +%s); "$@"; code=$?; [ $(($(date +%s) - began)) -le 8 ] && echo at-once; return $code; }
# What a server has to say to these bytes, whose \r and \n are written so.
say() { name=$1 port=$2; shift 2; printf "$@" | nc -w 15 "$name" "$port"; }
# The ports, of these, that take a connection.
open_ports() { name=$1; shift; for port; do nc -z -w 3 "$name" "$port" 2>/dev/null && printf '%s ' "$port"; done; echo; }
# How many certificates a server shows.
certificates() { openssl s_client "$@" </dev/null 2>/dev/null | grep -c 'BEGIN CERTIFICATE'; }
"#;

/// Runs checks in the guest: each list beside the others, and in itself one after the other.
fn run(bulkhead: &Bulkhead, lists: &[&[Check]]) -> Vec<String> {
    let mut script = format!("mkdir -p /tmp/checks; cat >/tmp/checks/prelude <<'@@@'\n{PRELUDE}\n@@@\n");
    for (name, text) in [("frames", include_str!("frames.py")), ("talk", include_str!("talk.py"))] {
        let _ = write!(script, "cat >/tmp/{name}.py <<'@@@'\n{text}\n@@@\n");
    }
    let mut number = 0;
    for list in lists {
        let mut files = String::new();
        for check in *list {
            let file = format!("/tmp/checks/{number}");
            let _ = write!(script, "cat >{file} <<'@@@'\n. /tmp/checks/prelude\n{}\n@@@\n", check.script);
            let _ = write!(files, " {file}");
            number += 1;
        }
        let _ = write!(
            script,
            "( for file in{files}; do\n began=$(date +%s%N)\n timeout {} sh $file </dev/null >$file.out 2>&1\n \
             echo \"[status $?] [$((($(date +%s%N) - began) / 1000000)) ms]\" >>$file.out\ndone ) &\n",
            if host::soak() { 3000 } else { 150 }
        );
    }
    script += "wait\nfor file in $(seq 0 ";
    let _ = writeln!(script, "{}); do echo \"@@@ $file\"; cat /tmp/checks/$file.out; done", number - 1);
    let output = bulkhead.with_input(&["exec", "-i", "box", "sh"], script.as_bytes()).done().stdout;
    let told: BTreeMap<usize, &str> = output
        .split("@@@ ")
        .filter_map(|part| part.split_once('\n'))
        .map(|(number, text)| (number.parse().unwrap(), text))
        .collect();
    let mut failed = Vec::new();
    for (number, check) in lists.iter().copied().flatten().enumerate() {
        let text = told[&number];
        let wrong = check.wrong(text);
        let took = text.lines().last().unwrap_or_default();
        let verdict = if wrong.is_empty() { "ok" } else { "failed" };
        println!("row {:>4}, {}: {verdict} {took}", check.row, check.name);
        if !wrong.is_empty() {
            failed.push(format!("row {}, {}: {wrong:?}\n$ {}\n{text}", check.row, check.name, check.script));
        }
    }
    failed
}

fn what_is_allowed_works() {
    // Given a host with an Internet in which everything answers, and a run with a policy,
    let mut world = World::new(RESOLVER);
    let site = Site::start(&world.internet);
    let bulkhead = Bulkhead::new();
    let file = bulkhead.home().join("policy.toml");
    std::fs::write(&file, expected::POLICY).unwrap();
    let policy = format!("@{}", file.display());
    let words =
        ["sh", "-c", "sysctl -qw net.ipv4.ip_default_ttl=33 net.ipv4.tcp_timestamps=0; echo here; exec sleep 100000"];
    let options = ["run", "--name", "box", "--cpus", "2", "--network-policy", &policy, "nettools"];
    let mut resident = bulkhead.start(&[&options[..], &words].concat());
    resident.until_printed("here\n");

    // then what it allows works, and nothing else does,
    let mut failed = run(&bulkhead, &[checks::TOOLS, checks::SLOW]);
    failed.extend(run(&bulkhead, &[checks::ALONE]));
    if host::soak() {
        failed.extend(run(&bulkhead, &[checks::SOAK]));
    }
    let log = events(&bulkhead);
    for (row, kind, field, text) in expected::EVENTS {
        if !has(&log, kind, field, text) {
            failed.push(format!("row {row}: no event {kind} with {field} {text}"));
        }
    }
    let text = std::fs::read_to_string(bulkhead.runs()[0].join("events.jsonl")).unwrap();
    if text.contains("secret-") {
        failed.push("row 129: the log has what it must not: secret-".to_owned());
    }
    let filter = processes::child(&bulkhead, "bulkhead-netfilter");
    let memory = filter.peak_memory().unwrap();
    println!("row  107, the filter's memory: {} KiB at most", memory);
    assert!(memory < 192 << 10, "{memory} KiB");
    assert!(failed.is_empty(), "{} checks failed\n{}", failed.len(), failed.join("\n\n"));

    // and when another policy is in force, what it does not allow ends, even while bytes come.
    new_policy(&bulkhead);
    // When the filter is killed, there is no way out any more, and the run goes on.
    filter.kill();
    until("word of the end", || has(&events(&bulkhead), "net.ended", "why", "SIGKILL"));
    let failed = run(&bulkhead, &[checks::AFTER]);
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
    assert_eq!(bulkhead.output(&["rm", "-f", "box"]).expect(0), "box\n");
    let said = resident.finish().stderr;
    assert!(said.contains(": its network ended before it did"), "{said}");
    processes::none_left(&bulkhead);

    // Nothing was on the wire but what was allowed, in packets that the host's kernel wrote,
    let expected = [22, 80, 443, 7000, 7003, 7025].map(|port| (6, SITE, port));
    let raw = [7000, 7001, 7002].map(|port| (6, ORIGIN, port));
    world.only(&[&expected[..], &raw, &[(17, RESOLVER, 53)]].concat());
    assert_eq!(
        world.capture.marks(),
        BTreeSet::from([(64, 0)]),
        "time to live and type of service of what the host sent"
    );
    // and no other name was asked for, no other host heard of.
    let heard = site.heard();
    let asked: BTreeSet<&str> = heard.iter().filter_map(|line| line.strip_prefix("name ")).collect();
    let stray: Vec<_> = asked.difference(&expected::ASKED.iter().copied().collect()).copied().collect();
    assert_eq!(stray, [""; 0], "names that were asked for");
    assert_eq!(world.internet.names(), [""; 0]);
    for line in &heard {
        for word in expected::UNHEARD {
            assert!(!line.contains(word), "{line}");
        }
    }
    for line in expected::HEARD {
        assert!(heard.iter().any(|heard| heard == line), "{line} was not heard: {heard:#?}");
    }
}

/// A policy is set while a flow that it does not allow lives, and one that it allows on other terms.
fn new_policy(bulkhead: &Bulkhead) {
    // This nc keeps its direction open at the end of its input.
    let script =
        "echo 100000000000 | nc raw.example.com 7002 | (head -c 1000 >/dev/null; echo go; cat >/dev/null); echo cut";
    let mut long = bulkhead.start(&["exec", "box", "sh", "-c", script]);
    long.until_printed("go\n");
    let broken = bulkhead.home().join("broken.toml");
    std::fs::write(&broken, "version = 1\nallow = [\"*\"]\n").unwrap();
    bulkhead.output(&["policy", "set", "box", "--network-policy", &format!("@{}", broken.display())]).refused(125);
    assert!(!long.printed().contains("cut"), "a policy that is refused changes nothing");
    let file = bulkhead.home().join("next.toml");
    std::fs::write(&file, expected::NEXT).unwrap();
    let set = bulkhead.output(&["policy", "set", "box", "--network-policy", &format!("@{}", file.display())]);
    assert!(set.code == 0 && set.stderr.contains("policy 2 is in force; 1 connection reset"), "{set:?}");
    long.until_printed("cut\n");
    let failed = run(bulkhead, &[checks::NEXT_CHECKS]);
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}
