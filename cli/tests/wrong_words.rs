//! Every wrong command line gets one line that names the thing, the value, the reason and the next step, and leaves nothing.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod common;

use common::{Place, text};

const TABLE: &str = include_str!("wrong_words.txt");

#[test]
fn wrong_command_lines_are_answered_in_one_line_and_leave_nothing() {
    let place = Place::new();
    let before = place.listed();
    let shown = place.path("");
    let shown = shown.to_str().unwrap().trim_end_matches('/');
    let lines: Vec<&str> = TABLE.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let mut seen = 0;
    for pair in lines.chunks(2) {
        let [arguments, expected] = pair else { panic!("a command line without its answer: {pair:?}") };
        let arguments: Vec<String> = serde_json::from_str(arguments).unwrap();
        let output = place.output(&arguments);
        let said = text(&output.stderr).replace(shown, "{place}");
        assert_eq!(said, format!("{expected}\n"), "{arguments:?}");
        assert_eq!((output.status.code(), output.stdout.len()), (Some(125), 0), "{arguments:?}");
        seen += 1;
    }
    assert!(seen >= 120, "{seen}");
    assert_eq!(place.listed(), before);
}
