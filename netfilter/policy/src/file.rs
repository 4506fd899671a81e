//! The file form: the same rules, with terms that have no short form.

use std::ops::Range;

use netfilter_control::{Protocol, Rule};
use serde::Deserialize;
use toml::Spanned;

use crate::check::is_http_token;
use crate::error::Fault;
use crate::rule::{Parsed, Token, parse};

/// The one version there is.
const VERSION: u32 = 1;
/// Most entries of a list of methods, paths or ALPN names.
const MAX_LIST: usize = 64;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    version: Spanned<u32>,
    #[serde(default)]
    allow: Vec<Spanned<String>>,
    #[serde(default)]
    deny: Vec<Spanned<String>>,
    #[serde(default)]
    rule: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    allow: Spanned<String>,
    methods: Option<Spanned<Vec<Spanned<String>>>>,
    paths: Option<Spanned<Vec<Spanned<String>>>>,
    alpn: Option<Spanned<Vec<Spanned<String>>>>,
    max_up: Option<Spanned<u64>>,
    max_down: Option<Spanned<u64>>,
    rate: Option<Spanned<u64>>,
    max_duration: Option<Spanned<u64>>,
}

/// What a file holds: each rule with its place.
pub(crate) fn parse_file(text: &str) -> Result<Vec<(Parsed, Range<usize>)>, Fault> {
    let file: File = toml::from_str(text).map_err(|error| {
        let message = error.message().lines().collect::<Vec<_>>().join("; ");
        Fault::new(error.span().unwrap_or(0..0), message, "docs/egress.md shows what a policy file may hold")
    })?;
    if *file.version.get_ref() != VERSION {
        let message = format!("version {} of the file form", file.version.get_ref());
        return Err(Fault::new(file.version.span(), message, "this program reads version = 1"));
    }
    let mut rules = Vec::new();
    for allowed in &file.allow {
        rules.push((quoted(text, allowed, false)?, allowed.span()));
    }
    for denied in &file.deny {
        rules.push((quoted(text, denied, true)?, denied.span()));
    }
    for entry in file.rule {
        let span = entry.allow.span();
        rules.push((Parsed::Allow(with_terms(text, entry)?), span));
    }
    Ok(rules)
}

/// Parses the rule in a quoted string, so that a fault points into the file.
fn quoted(text: &str, value: &Spanned<String>, denies: bool) -> Result<Parsed, Fault> {
    let span = value.span();
    let inner = span.start.saturating_add(1)..span.end.saturating_sub(1);
    // With escapes in the string, places inside of it are not places in the file: the whole string is shown then.
    let plain = text.get(inner.clone()) == Some(value.get_ref());
    let blame = |fault: Fault| if plain { fault.shifted(inner.start) } else { Fault { token: span.clone(), ..fault } };
    if value.get_ref().trim_start().starts_with('!') {
        let help = "in a file, a denial stands in the list `deny`, without `!`";
        return Err(blame(Fault::new(0..1, "`!` in a file", help)));
    }
    if value.get_ref().contains(',') {
        return Err(Fault::new(span.clone(), "a `,` in a rule", "each rule is a string of its own"));
    }
    let written = if denies { format!("!{}", value.get_ref().trim()) } else { value.get_ref().clone() };
    let leading = value.get_ref().len().saturating_sub(value.get_ref().trim_start().len());
    parse(Token::new(&written, 0)).map_err(|mut fault| {
        if denies {
            // The `!` that was put in front, and the blanks that were not.
            fault.token = fault.token.start.saturating_sub(1)..fault.token.end.saturating_sub(1);
            fault = fault.shifted(leading);
        }
        blame(fault)
    })
}

fn with_terms(text: &str, entry: Entry) -> Result<Rule, Fault> {
    let Parsed::Allow(mut rule) = quoted(text, &entry.allow, false)? else {
        let help = "list presets in `allow = […]`; their rules have their own terms";
        return Err(Fault::new(entry.allow.span(), "a preset with terms", help));
    };
    let only = |wanted: Protocol, key: &str, span: Range<usize>| {
        if rule.protocol == wanted {
            return Ok(());
        }
        Err(Fault::new(span, format!("`{key}` has a meaning with +{} only", wanted.word()), "leave it out"))
    };
    if let Some(methods) = entry.methods {
        only(Protocol::Http, "methods", methods.span())?;
        if !rule.terms.methods.is_empty() {
            return Err(Fault::new(methods.span(), "`methods` and `+ro` both say which methods", "leave one out"));
        }
        rule.terms.methods = list(methods, "method", |method| {
            let forbidden = ["CONNECT", "TRACE", "PRI"].iter().any(|word| word.eq_ignore_ascii_case(method));
            is_http_token(method) && !forbidden && method.len() <= 32
        })?;
    }
    if let Some(paths) = entry.paths {
        only(Protocol::Http, "paths", paths.span())?;
        rule.terms.paths = list(paths, "path", is_path)?;
    }
    if let Some(alpn) = entry.alpn {
        only(Protocol::Tls, "alpn", alpn.span())?;
        let fits = |name: &str| (1..=255).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
        rule.terms.alpn = list(alpn, "ALPN protocol", fits)?;
    }
    rule.terms.max_up = entry.max_up.map(|limit| positive(&limit)).transpose()?;
    rule.terms.max_down = entry.max_down.map(|limit| positive(&limit)).transpose()?;
    rule.terms.rate = entry.rate.map(|limit| positive(&limit)).transpose()?;
    rule.terms.max_duration = entry.max_duration.map(|limit| positive(&limit)).transpose()?;
    Ok(rule)
}

/// A path of a request: exact, or a prefix before `*`. Encoded or doubled slashes and dot segments match no rule, so
/// none is one.
fn is_path(path: &str) -> bool {
    let fixed = path.strip_suffix('*').unwrap_or(path);
    fixed.starts_with('/')
        && fixed.len() <= 1024
        && fixed.bytes().all(|byte| byte.is_ascii_graphic() && !b"*?#%\\".contains(&byte))
        && !fixed.contains("//")
        && !fixed.split('/').any(|segment| segment == "." || segment == "..")
}

fn list(values: Spanned<Vec<Spanned<String>>>, what: &str, fits: impl Fn(&str) -> bool) -> Result<Vec<String>, Fault> {
    let span = values.span();
    let values = values.into_inner();
    if values.is_empty() {
        return Err(Fault::new(span, format!("an empty list would allow no {what}"), "leave the key out to allow all"));
    }
    if values.len() > MAX_LIST {
        return Err(Fault::new(span, format!("over {MAX_LIST} entries"), "write a shorter list"));
    }
    if let Some(wrong) = values.iter().find(|value| !fits(value.get_ref())) {
        return Err(Fault::new(wrong.span(), format!("this is no {what} that a rule can have"), ""));
    }
    Ok(values.into_iter().map(Spanned::into_inner).collect())
}

fn positive(limit: &Spanned<u64>) -> Result<u64, Fault> {
    match limit.get_ref() {
        0 => Err(Fault::new(limit.span(), "a limit of 0 allows nothing", "leave the rule out, or name a limit")),
        limit => Ok(*limit),
    }
}
