//! `bulkhead run` and `exec` as people use them.

use crate::Test;
use crate::cli::Bulkhead;

pub(crate) const TESTS: &[Test] = &[
    ("run::a_command_runs_and_its_status_comes_back", a_command_runs_and_its_status_comes_back),
    ("run::piped_input_ends", piped_input_ends),
];

fn a_command_runs_and_its_status_comes_back() {
    let bulkhead = Bulkhead::new();
    assert_eq!(bulkhead.output(&["run", "busybox", "echo", "hello"]).expect(0), "hello\n");
    for (script, code) in [("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143), ("exit 255", 255)] {
        assert_eq!(bulkhead.output(&["run", "busybox", "sh", "-c", script]).expect(code), "");
    }
    assert!(bulkhead.runs().is_empty(), "a run without a name leaves nothing");
}

fn piped_input_ends() {
    let bulkhead = Bulkhead::new();
    assert_eq!(bulkhead.with_input(&["run", "-i", "busybox", "cat"], b"one\ntwo").expect(0), "one\ntwo");
    let large: Vec<u8> = (0..300_000).flat_map(|n| format!("{n}\n").into_bytes()).collect();
    let sum = bulkhead.with_input(&["run", "-i", "busybox", "md5sum"], &large).expect(0);
    let own = crate::command::output(&mut std::process::Command::new("md5sum"), &large).expect(0);
    assert_eq!(sum, own);
}
