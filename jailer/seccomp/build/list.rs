//! Lists as they are written: TOML, a table for each system call.
//!
//! ```toml
//! [madvise]
//! why = "..."
//! only = ["advice == MADV_DONTNEED", "..."]   # one of these has to hold; without it, any arguments
//!
//! [clone3]
//! why = "..."
//! error = "ENOSYS"                             # not executed; this is its answer
//! ```
//!
//! `seldom = "..."` says when a call is made that the end-to-end tests may not make. All others they do make: see
//! `tests/e2e/src/calls.rs`.
//!
//! A condition is `ARGUMENT == VALUE` or `ARGUMENT & VALUE == VALUE`; several are joined by `and`.

use std::collections::BTreeMap;
use std::path::Path;

use crate::names::{Argument, argument, constant, number};

/// What may be asked for: by number of the system call.
pub(crate) type List = BTreeMap<i64, Call>;

/// A system call of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) name: String,
    pub(crate) allowed: Allowed,
}

/// When it is allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Allowed {
    /// Whatever its arguments.
    Always,
    /// If every condition of one of these rules holds.
    Only(Vec<Vec<Condition>>),
    /// Never: this error is its answer.
    Error(u16),
}

/// `argument & mask == value`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Condition {
    pub(crate) index: u8,
    pub(crate) wide: bool,
    pub(crate) mask: Option<u64>,
    pub(crate) value: u64,
}

/// The programs, and the lists whose union each one allows.
///
/// A thread inherits the filters of the one that starts it, and can only add to them. So what the VMM installs first
/// allows what each of its threads needs, and each narrows itself.
pub(crate) const PROGRAMS: &[(&str, &[&str])] = &[
    ("VMM_EXEC", &["exec", "vmm-start", "vmm-main", "vmm-vcpu", "vmm-disk"]),
    ("VMM_START", &["vmm-start", "vmm-main", "vmm-vcpu", "vmm-disk"]),
    ("VMM_MAIN", &["vmm-main"]),
    ("VMM_VCPU", &["vmm-vcpu"]),
    ("VMM_DISK", &["vmm-disk"]),
    ("NETFILTER_EXEC", &["exec", "netfilter"]),
    ("NETFILTER", &["netfilter"]),
];

/// Reads and joins lists.
pub(crate) fn union(directory: &Path, names: &[&str]) -> Result<List, String> {
    let mut all = List::new();
    for name in names {
        let path = directory.join(format!("{name}.toml"));
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        for (number, call) in parse(&text).map_err(|error| format!("{}: {error}", path.display()))? {
            match all.get_mut(&number) {
                None => drop(all.insert(number, call)),
                Some(known) => known.allowed = join(&known.allowed, call.allowed)?,
            }
        }
    }
    Ok(all)
}

fn join(one: &Allowed, other: Allowed) -> Result<Allowed, String> {
    Ok(match (one, other) {
        (Allowed::Only(some), Allowed::Only(more)) => {
            let mut rules = some.clone();
            rules.extend(more.into_iter().filter(|rule| !some.contains(rule)));
            Allowed::Only(rules)
        }
        (Allowed::Error(one), Allowed::Error(other)) if *one == other => Allowed::Error(other),
        (Allowed::Error(_), _) | (_, Allowed::Error(_)) => return Err("a call both fails and is allowed".to_owned()),
        (Allowed::Always, _) | (_, Allowed::Always) => Allowed::Always,
    })
}

/// Reads one list.
pub(crate) fn parse(text: &str) -> Result<List, String> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
    let mut list = List::new();
    for (name, value) in table {
        let number = number(&name).ok_or_else(|| format!("{name}: no such system call is known"))?;
        let allowed = call(&name, &value).map_err(|error| format!("{name}: {error}"))?;
        list.insert(number, Call { name, allowed });
    }
    Ok(list)
}

fn call(name: &str, value: &toml::Value) -> Result<Allowed, String> {
    let table = value.as_table().ok_or("not a table")?;
    let known = ["why", "only", "error", "seldom"];
    if let Some(unknown) = table.keys().find(|key| !known.contains(&key.as_str())) {
        return Err(format!("{unknown}: no such key"));
    }
    if table.get("why").and_then(toml::Value::as_str).is_none_or(str::is_empty) {
        return Err("it does not say why".to_owned());
    }
    match (table.get("only"), table.get("error")) {
        (None, None) => Ok(Allowed::Always),
        (Some(only), None) => {
            let rules = only.as_array().filter(|rules| !rules.is_empty()).ok_or("only: not a list of rules")?;
            rules
                .iter()
                .map(|rule| rule_of(name, rule.as_str().unwrap_or_default()))
                .collect::<Result<_, _>>()
                .map(Allowed::Only)
        }
        (None, Some(error)) => {
            let value = error.as_str().and_then(constant).ok_or("error: no such error is known")?;
            Ok(Allowed::Error(u16::try_from(value).map_err(|_| "error: too large")?))
        }
        (Some(_), Some(_)) => Err("both only and error".to_owned()),
    }
}

fn rule_of(call: &str, text: &str) -> Result<Vec<Condition>, String> {
    text.split(" and ").map(|condition| condition_of(call, condition)).collect()
}

fn condition_of(call: &str, text: &str) -> Result<Condition, String> {
    let unclear = || format!("{text:?}: neither ARGUMENT == VALUE nor ARGUMENT & MASK == VALUE");
    let value = |name: &str| constant(name).ok_or_else(|| format!("{name}: no such constant is known"));
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    let (name, mask, wanted) = match words[..] {
        [name, "==", wanted] => (name, None, value(wanted)?),
        [name, "&", mask, "==", wanted] => (name, Some(value(mask)?), value(wanted)?),
        _ => return Err(unclear()),
    };
    let Argument { index, wide } =
        argument(call, name).ok_or_else(|| format!("{name}: no such argument of it is known"))?;
    Ok(Condition { index, wide, mask, value: wanted })
}
