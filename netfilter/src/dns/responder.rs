//! What the guest's DNS questions get. No question is ever passed on: an allowed name has its own address here, and
//! is resolved on the host when somebody dials it; a denied one does not exist.

use std::net::Ipv4Addr;
use std::time::Duration;

use netfilter_control::{Decision, Name, NameError, Policy, Reason, Record, Rule, Target, reserved_for};

use super::message::{Question, Unanswerable, read};
use super::{qtype, rcode};
use crate::log::{Log, increase};
use crate::names::{Full, Names};

/// A label longer than this, in a name that a wildcard covers, is worth a look.
const LONG_LABEL: usize = 40;
/// So are this many labels more than the wildcard has.
const MANY_LABELS: usize = 3;

/// Answers one message.
pub fn answer(message: &[u8], policy: &Policy, names: &mut Names, log: &mut Log, now: Duration) -> Option<Vec<u8>> {
    let question = match read(message) {
        Ok(question) => question,
        Err(Unanswerable::Silence) => return None,
        Err(Unanswerable::Reply(reply)) => return Some(reply),
    };
    let name = match &question.name {
        Ok(name) => name.clone(),
        Err(NameError::Empty) => {
            return Some(question.refusal(rcode::REFUSED, Some("denied by sandbox policy: the root")));
        }
        Err(_) => return Some(deny(&question, Reason::BadName, None, log, now)),
    };
    if reserved_for(&name).is_some() {
        return Some(deny(&question, Reason::ReservedName, None, log, now));
    }
    match policy.decide_name(&name) {
        Decision::Allow(rule) => Some(allow(&question, &name, rule, names, log, now)),
        Decision::Deny(denial) => Some(deny(&question, Reason::Denied, Some(&denial.text), log, now)),
        Decision::PublicDoh(rule) => Some(deny(&question, Reason::PublicDoh, Some(&rule.text), log, now)),
        Decision::OtherPort(_) | Decision::NoRule => Some(deny(&question, Reason::NoRule, None, log, now)),
    }
}

fn allow(
    question: &Question<'_>,
    name: &Name,
    rule: &Rule,
    names: &mut Names,
    log: &mut Log,
    now: Duration,
) -> Vec<u8> {
    // An address is given for the one type alone that asks for it: what is never asked for costs the sandbox no name.
    if question.qtype != qtype::A {
        return question.nothing();
    }
    let wildcard = rule.target.is_wildcard().then_some(rule.text.as_str());
    match names.address(name, wildcard, now) {
        Ok((address, new)) => {
            increase(&mut log.counters.dns_answered, 1);
            if new {
                log.record(answered(name, address, rule), now);
            }
            question.address(address)
        }
        Err(Full::Lineage | Full::Wildcard) => deny(question, Reason::NameLimit, Some(&rule.text), log, now),
    }
}

fn answered(name: &Name, address: Ipv4Addr, rule: &Rule) -> Record {
    let unusual = match &rule.target {
        Target::Below(parent) | Target::AtOrBelow(parent) => {
            let extra = name.labels().count().saturating_sub(parent.labels().count());
            extra >= MANY_LABELS || name.labels().any(|label| label.len() > LONG_LABEL)
        }
        Target::Exact(_) | Target::Block(_) => false,
    };
    Record::DnsAnswered { name: name.to_string(), address: address.into(), rule: rule.text.clone(), unusual }
}

fn deny(question: &Question<'_>, reason: Reason, rule: Option<&str>, log: &mut Log, now: Duration) -> Vec<u8> {
    let name = question.shown();
    let (text, hint) = match reason {
        Reason::Denied => ("denied by sandbox policy: a rule denies this name", String::new()),
        Reason::PublicDoh => {
            ("denied by sandbox policy: DNS over HTTPS needs a rule of its own", format!("add a rule: {name}"))
        }
        Reason::ReservedName => ("denied by sandbox policy: a reserved name", String::new()),
        Reason::BadName => ("denied by sandbox policy: not a host name", String::new()),
        Reason::NameLimit => ("denied by sandbox policy: too many new names", "use fewer different names".to_owned()),
        _ => ("denied by sandbox policy: no rule allows this name", format!("add a rule: {name}")),
    };
    let reply = question.denied(text);
    let rule = rule.map(String::from);
    log.record(Record::DnsDenied { name, qtype: question.qtype, reason, rule, hint }, now);
    reply
}
