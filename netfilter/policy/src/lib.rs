//! The egress policy grammar.
//!
//! ```text
//! POLICY = "deny-all" | "deny-egress-except=" RULE *("," RULE) | "@" FILE
//! RULE   = ["!"] TARGET [":" PORTS] *("+" OPT)
//! TARGET = NAME | "*." NAME | "." NAME | "cidr:" BLOCK | "preset:" IDENT
//! PORTS  = PORT | PORT "-" PORT | "{" PORT *("|" PORT) "}"
//! ```
//!
//! [`Compiler`] takes policies in any of their forms, adds them up, and gives out the flat table that the network
//! filter enforces. What it does not understand it refuses, with a [`PolicyError`] that points at the token.
//!
//! ```
//! use netfilter_policy::Compiler;
//! let mut compiler = Compiler::default();
//! compiler.argument("--network-policy", "deny-egress-except=api.example.com,*.github.com").unwrap();
//! assert_eq!(compiler.finish().unwrap().rules.len(), 2);
//! ```
#![forbid(unsafe_code)]

mod check;
mod draft;
mod error;
mod explain;
mod file;
mod rule;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;

use netfilter_control::{Cidr, Decision, MAX_RULES, Policy, Rule, Target};

pub use draft::draft;
pub use error::{Details, PolicyError};
pub use explain::{Explanation, explain};

use error::Fault;
use rule::{Parsed, Token};

/// Most bytes of a policy's text.
pub const MAX_TEXT: usize = 64 << 10;

/// Reads the text of a preset by its name.
pub type Presets<'p> = dyn Fn(&str) -> Option<String> + 'p;

/// Adds policies up, and compiles them.
#[derive(Default)]
pub struct Compiler<'p> {
    presets: Option<&'p Presets<'p>>,
    open_egress: bool,
    policy: Policy,
    /// Where each rule was written, in the order of `policy.rules`.
    places: Vec<Place>,
}

impl fmt::Debug for Compiler<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler").field("policy", &self.policy).finish_non_exhaustive()
    }
}

#[derive(Debug, Clone)]
struct Place {
    origin: String,
    text: String,
    token: Range<usize>,
    lined: bool,
}

impl Place {
    fn error(&self, message: impl Into<String>, help: impl Into<String>) -> PolicyError {
        Fault::new(self.token.clone(), message, help).locate(&self.origin, &self.text, self.lined)
    }
}

/// What an argument of `--network-policy` is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Argument<'t> {
    /// `deny-all`.
    DenyAll,
    /// `deny-egress-except=…`.
    Rules,
    /// `@FILE`: the caller reads the file and gives its text to [`Compiler::file`].
    File(&'t str),
}

/// Says what an argument of `--network-policy` is.
pub fn classify_argument<'t>(origin: &str, text: &'t str) -> Result<Argument<'t>, PolicyError> {
    if text == "deny-all" {
        return Ok(Argument::DenyAll);
    }
    if text.starts_with(EXCEPT) {
        return Ok(Argument::Rules);
    }
    match text.strip_prefix('@') {
        Some("") | None => {}
        Some(path) => return Ok(Argument::File(path)),
    }
    let word = text.split(['=', ',']).next().unwrap_or(text);
    let help = "a policy is deny-all, deny-egress-except=HOST[,HOST…] or @FILE";
    Err(Fault::new(0..word.len(), format!("`{word}` is no policy"), help).locate(origin, text, false))
}

const EXCEPT: &str = "deny-egress-except=";

impl<'p> Compiler<'p> {
    /// A compiler that can read presets.
    #[must_use]
    pub fn with_presets(mut self, presets: &'p Presets<'p>) -> Self {
        self.presets = Some(presets);
        self
    }

    /// Lets blocks of over 2^24 addresses pass: the user said in so many words that egress may be open.
    #[must_use]
    pub fn accept_open_egress(mut self) -> Self {
        self.open_egress = true;
        self
    }

    /// Adds an argument of `--network-policy` that is not a file.
    pub fn argument(&mut self, origin: &str, text: &str) -> Result<(), PolicyError> {
        match classify_argument(origin, text)? {
            Argument::DenyAll => Ok(()),
            Argument::Rules => self.list(origin, text, EXCEPT.len()),
            Argument::File(_) => {
                let help = "its text is what is compiled";
                Err(Fault::new(0..text.len(), "a file that was not read", help).locate(origin, text, false))
            }
        }
    }

    /// Adds rules that are separated by commas, such as an argument of `--allow`.
    pub fn rules(&mut self, origin: &str, text: &str) -> Result<(), PolicyError> {
        self.list(origin, text, 0)
    }

    /// Adds a policy file.
    pub fn file(&mut self, origin: &str, text: &str) -> Result<(), PolicyError> {
        self.read_file(origin, text, false)
    }

    fn list(&mut self, origin: &str, text: &str, from: usize) -> Result<(), PolicyError> {
        check_length(origin, text)?;
        let rules = Token::new(text.get(from..).unwrap_or_default(), from);
        for token in rules.split(',') {
            let place = Place { origin: origin.to_owned(), text: text.to_owned(), token: token.span(), lined: false };
            let parsed = rule::parse(token).map_err(|fault| fault.locate(origin, text, false))?;
            self.add(parsed, &place, false)?;
        }
        Ok(())
    }

    fn read_file(&mut self, origin: &str, text: &str, preset: bool) -> Result<(), PolicyError> {
        check_length(origin, text)?;
        for (parsed, token) in file::parse_file(text).map_err(|fault| fault.locate(origin, text, true))? {
            let place = Place { origin: origin.to_owned(), text: text.to_owned(), token, lined: true };
            self.add(parsed, &place, preset)?;
        }
        Ok(())
    }

    fn add(&mut self, parsed: Parsed, place: &Place, preset: bool) -> Result<(), PolicyError> {
        match parsed {
            Parsed::Preset(name) => {
                if preset {
                    return Err(place.error("a preset inside of a preset", "list its rules instead"));
                }
                let Some(text) = self.presets.and_then(|presets| presets(&name)) else {
                    return Err(place.error(format!("no preset `{name}`"), "none is shipped; see docs/egress.md"));
                };
                self.read_file(&format!("preset:{name}"), &text, true)?;
            }
            Parsed::Allow(rule) => {
                self.check_breadth(&rule, place)?;
                let mail = |port: &u16| rule.ports.iter().any(|range| range.contains(*port));
                if let Some(port) = check::MAIL_PORTS.iter().find(|port| preset && mail(port)) {
                    return Err(place.error(format!("a preset that allows mail (port {port})"), "say so in a rule"));
                }
                self.check_contradiction(&rule, place)?;
                self.policy.rules.push(rule);
                self.places.push(place.clone());
            }
            Parsed::Deny(denial) => self.policy.denials.push(denial),
        }
        if self.policy.rules.len().saturating_add(self.policy.denials.len()) > MAX_RULES {
            return Err(place.error(format!("over {MAX_RULES} rules"), "write wildcards, or fewer rules"));
        }
        Ok(())
    }

    fn check_breadth(&self, rule: &Rule, place: &Place) -> Result<(), PolicyError> {
        let broad = |block: &Cidr| block.prefix() < check::OPEN_PREFIX;
        match rule.target {
            Target::Block(block) if broad(&block) && !self.open_egress => Err(place.error(
                format!("{block} is open egress"),
                "name what is needed, or give --i-accept-open-egress as well",
            )),
            _ => Ok(()),
        }
    }

    fn check_contradiction(&self, rule: &Rule, place: &Place) -> Result<(), PolicyError> {
        let overlap =
            |other: &Rule| other.ports.iter().any(|theirs| rule.ports.iter().any(|ours| ours.overlaps(theirs)));
        let contrary = self.policy.rules.iter().find(|other| {
            other.target == rule.target
                && overlap(other)
                && (other.protocol, &other.terms) != (rule.protocol, &rule.terms)
        });
        match contrary {
            Some(other) => Err(place.error(
                format!("this contradicts `{}`: same host and port, other terms", other.text),
                "keep one of them",
            )),
            None => Ok(()),
        }
    }

    /// The policy. A rule that a denial leaves nothing of is a contradiction.
    pub fn finish(self) -> Result<Policy, PolicyError> {
        for (rule, place) in self.policy.rules.iter().zip(&self.places) {
            let denied = match &rule.target {
                Target::Exact(name) => match self.policy.decide_name(name) {
                    Decision::Deny(denial) => Some(denial),
                    _ => None,
                },
                target => self.policy.denials.iter().find(|denial| {
                    let covered = |ports| denial.ports.iter().any(|denied| covers(denied, ports));
                    denial.target == *target && rule.ports.iter().all(covered)
                }),
            };
            if let Some(denial) = denied {
                let message =
                    format!("this allows nothing: `{}` denies all of it, and a denial always wins", denial.text);
                return Err(place.error(message, "leave one of the two out"));
            }
        }
        Ok(self.policy)
    }
}

fn covers(outer: &netfilter_control::Ports, inner: &netfilter_control::Ports) -> bool {
    outer.contains(inner.first()) && outer.contains(inner.last())
}

fn check_length(origin: &str, text: &str) -> Result<(), PolicyError> {
    if text.len() > MAX_TEXT {
        let message = format!("a policy of {} bytes", text.len());
        let fault = Fault::new(0..0, message, format!("at most {MAX_TEXT} bytes; write wildcards, or fewer rules"));
        return Err(fault.locate(origin, "", false));
    }
    Ok(())
}
