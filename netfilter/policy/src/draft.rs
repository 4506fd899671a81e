//! A policy drafted from what a run was denied, for somebody to read, cut down and keep.

use std::collections::BTreeMap;
use std::fmt::Write;

use netfilter_control::{Name, Reason, Record};

use crate::Compiler;

/// Most rules of a draft: nobody reads more, and a guest can ask for as many names as it likes.
const MAX_DRAFT: usize = 100;

/// A policy file that would allow what these records say was denied. Only names are drafted, one by one: no wildcard,
/// and no address. The most often denied come first. Nothing in it was allowed by anybody yet.
///
/// ```
/// use netfilter_control::{Reason, Record};
/// let record = Record::DnsDenied {
///     name: "api.example.com".into(), qtype: 1, reason: Reason::NoRule, rule: None, hint: String::new(),
/// };
/// assert!(netfilter_policy::draft(&[record]).contains("\"api.example.com\","));
/// ```
pub fn draft<'r>(records: impl IntoIterator<Item = &'r Record>) -> String {
    // By name and port; a name that was asked for and not dialled has port 0.
    let mut denied: BTreeMap<(Name, u16), u64> = BTreeMap::new();
    for record in records {
        let (subject, port, reason) = match record {
            Record::DnsDenied { name, reason, qtype: 1 | 28, .. } => (name, 0, *reason),
            Record::FlowDenied { subject, port, reason, .. } => (subject, *port, *reason),
            _ => continue,
        };
        if !matches!(reason, Reason::NoRule | Reason::OtherPort | Reason::PublicDoh) {
            continue;
        }
        if let Ok(name) = Name::parse(subject) {
            let count = denied.entry((name, port)).or_default();
            *count = count.saturating_add(1);
        }
    }
    let mut rules: Vec<(String, u64)> = denied
        .iter()
        .filter(|((name, port), _)| *port != 0 || !denied.keys().any(|(other, dialled)| other == name && *dialled != 0))
        .map(|((name, port), count)| (rule(name, *port), *count))
        // What no policy may allow (a reserved name, a single label) is not worth drafting.
        .filter(|(rule, _)| Compiler::default().rules("draft", rule).is_ok())
        .collect();
    rules.sort_by(|(a, many), (b, more)| more.cmp(many).then_with(|| a.cmp(b)));
    let left_out = rules.len().saturating_sub(MAX_DRAFT);
    rules.truncate(MAX_DRAFT);

    let mut text =
        String::from("# Drafted from what was denied. Delete what the run does not need.\nversion = 1\nallow = [\n");
    for (rule, count) in &rules {
        let times = if *count == 1 { "once".to_owned() } else { format!("{count} times") };
        // Writing to a string does not fail.
        let _ = writeln!(text, "    \"{rule}\",  # denied {times}");
    }
    text.push_str("]\n");
    if left_out > 0 {
        let _ = writeln!(text, "# {left_out} more were denied and are not listed.");
    }
    text
}

fn rule(name: &Name, port: u16) -> String {
    match port {
        0 | 443 => name.to_string(),
        22 => format!("{name}:22"),
        80 => format!("{name}:80+http"),
        _ => format!("{name}:{port}+raw"),
    }
}

#[cfg(test)]
mod tests {
    use netfilter_control::Stage;

    use super::*;

    fn dns(name: &str, reason: Reason) -> Record {
        Record::DnsDenied { name: name.into(), qtype: 1, reason, rule: None, hint: String::new() }
    }

    fn flow(subject: &str, port: u16, reason: Reason) -> Record {
        let (detail, hint) = (String::new(), String::new());
        Record::FlowDenied {
            flow: None,
            subject: subject.into(),
            port,
            stage: Stage::Syn,
            reason,
            detail,
            rule: None,
            hint,
        }
    }

    #[test]
    fn a_draft_allows_what_was_denied_and_nothing_else() {
        let records = [
            dns("pypi.org", Reason::NoRule),
            dns("pypi.org", Reason::NoRule),
            dns("files.example.com", Reason::NoRule),
            flow("api.example.com", 80, Reason::OtherPort),
            flow("git.example.com", 22, Reason::OtherPort),
            dns("git.example.com", Reason::NoRule),
            flow("db.example.com", 5432, Reason::OtherPort),
            flow("203.0.113.7", 443, Reason::UnknownAddress),
            flow("tls.example.com", 443, Reason::ServerNameMismatch),
            dns("denied.example.com", Reason::Denied),
            dns("metadata.google.internal", Reason::NoRule),
            dns("wpad", Reason::NoRule),
            dns("bad\\x0a\",\"*.com", Reason::NoRule),
        ];
        let text = draft(&records);
        assert!(text.contains("\"pypi.org\",  # denied 2 times\n"), "{text}");
        let mut compiler = Compiler::default();
        compiler.file("draft", &text).unwrap();
        let rules: Vec<String> = compiler.finish().unwrap().rules.into_iter().map(|rule| rule.text).collect();
        let expected = [
            "pypi.org",
            "api.example.com:80+http",
            "db.example.com:5432+raw",
            "files.example.com",
            "git.example.com:22",
        ];
        assert_eq!(rules, expected);
    }

    #[test]
    fn a_flood_of_names_makes_a_short_draft() {
        let records: Vec<Record> = (0..1000).map(|n| dns(&format!("n{n}.example.com"), Reason::NoRule)).collect();
        let text = draft(&records);
        assert!(text.ends_with("# 900 more were denied and are not listed.\n"));
        assert!(Compiler::default().file("draft", &text).is_ok());
        assert!(Compiler::default().file("draft", &draft(&[])).is_ok());
    }
}
