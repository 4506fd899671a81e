//! An error that points at the token.

use std::fmt;
use std::ops::Range;

/// Why a policy is refused. Its text shows the line and marks the token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyError(Box<Details>);

/// What a [`PolicyError`] holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Details {
    /// Where the text came from: an option's name or a file's.
    pub origin: String,
    /// The line in a file, from 1. `None` for an option.
    pub line: Option<usize>,
    /// The line's text.
    pub text: String,
    /// The token: bytes of `text`.
    pub token: Range<usize>,
    /// What is wrong.
    pub message: String,
    /// What to do about it. Empty if `message` says it.
    pub help: String,
}

/// What is wrong with a part of some text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) token: Range<usize>,
    pub(crate) message: String,
    pub(crate) help: String,
}

impl Fault {
    pub(crate) fn new(token: Range<usize>, message: impl Into<String>, help: impl Into<String>) -> Self {
        Self { token, message: message.into(), help: help.into() }
    }

    /// The same fault, seen from a text in which this one begins at `offset`.
    pub(crate) fn shifted(mut self, offset: usize) -> Self {
        self.token = self.token.start.saturating_add(offset)..self.token.end.saturating_add(offset);
        self
    }

    /// Names the place: `text` is all that was given, and `lined` whether it has lines worth a number.
    pub(crate) fn locate(self, origin: &str, text: &str, lined: bool) -> PolicyError {
        let start = floor_boundary(text, self.token.start);
        let end = floor_boundary(text, self.token.end.max(start));
        let before = text.get(..start).unwrap_or_default();
        let line_start = before.rfind('\n').map_or(0, |at| at.saturating_add(1));
        let line = text.get(line_start..).and_then(|rest| rest.lines().next()).unwrap_or_default();
        let within = |at: usize| at.saturating_sub(line_start).min(line.len());
        PolicyError(Box::new(Details {
            origin: origin.to_owned(),
            line: lined.then(|| before.matches('\n').count().saturating_add(1)),
            text: line.to_owned(),
            token: within(start)..within(end),
            message: self.message,
            help: self.help,
        }))
    }
}

impl PolicyError {
    /// Its parts.
    pub fn details(&self) -> &Details {
        &self.0
    }
}

fn floor_boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

/// At most this many characters of a line are shown before and after the token's beginning.
const CONTEXT: usize = 60;

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Details { origin, line, text, token, message, help } = &*self.0;
        // Both quote what was given.
        let [origin, message, help] = [origin, message, help].map(|part| part.chars().map(visible).collect::<String>());
        match line {
            Some(line) => write!(f, "{origin}:{line}: {message}")?,
            None => write!(f, "{origin}: {message}")?,
        }
        let (before, rest) = text.split_at_checked(token.start).unwrap_or((text, ""));
        let marked = rest.get(..token.len()).unwrap_or(rest);
        let after = rest.get(marked.len()..).unwrap_or_default();
        let skipped = before.chars().count().saturating_sub(CONTEXT);
        let lead: String = before.chars().skip(skipped).map(visible).collect();
        let marked: String = marked.chars().take(CONTEXT).map(visible).collect();
        let tail: String = after.chars().take(CONTEXT).map(visible).collect();
        let dots = if skipped > 0 { "…" } else { "" };
        write!(f, "\n  {dots}{lead}{marked}{tail}\n  ")?;
        let width = dots.chars().count().saturating_add(lead.chars().count());
        write!(f, "{}{}", " ".repeat(width), "^".repeat(marked.chars().count().max(1)))?;
        if !help.is_empty() {
            write!(f, "\n  {help}")?;
        }
        Ok(())
    }
}

impl std::error::Error for PolicyError {}

/// A policy may come from somebody else: nothing in it reaches the terminal as a control sequence.
fn visible(character: char) -> char {
    let reordering = matches!(character, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}');
    if character.is_control() || reordering || character == '\u{feff}' { '\u{fffd}' } else { character }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_is_marked() {
        let text = "version = 1\nallow = [\"a.example:443+tsl\"]\n";
        let at = text.find("tsl").unwrap();
        let error = Fault::new(at..at + 3, "no such option `tsl`", "options: tls").locate("p.toml", text, true);
        assert_eq!(
            error.to_string(),
            "p.toml:2: no such option `tsl`\n  allow = [\"a.example:443+tsl\"]\n                          ^^^\n  options: tls"
        );
    }

    #[test]
    fn no_control_character_is_shown() {
        let text = "a\u{1b}[2Jb\u{202e}c";
        let shown = Fault::new(0..1, "bad", "").locate("--allow", text, false).to_string();
        assert!(shown.chars().all(|c| c == '\n' || visible(c) == c), "{shown:?}");
        let quoting = Fault::new(0..1, format!("`{text}` is no name"), format!("not {text}"));
        let shown = quoting.locate("a\u{1b}b.toml", text, true).to_string();
        assert!(shown.chars().all(|c| c == '\n' || visible(c) == c), "{shown:?}");
    }

    #[test]
    fn a_token_anywhere_can_be_shown() {
        for text in ["", "ä", "a\nb", "\n\n"] {
            for start in 0..6 {
                for end in 0..6 {
                    let _ = Fault::new(start..end, "x", "").locate("o", text, true).to_string();
                }
            }
        }
    }
}
