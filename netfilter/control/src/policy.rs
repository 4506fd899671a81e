//! The compiled policy: a flat table, and the one function that decides.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::cidr::{Cidr, Ports};
use crate::name::{Name, is_public_doh};

/// Most rules and denials of a policy together.
pub const MAX_RULES: usize = 1024;
/// Most bytes of a policy as it is sent: every rule at its largest stays below.
pub const MAX_POLICY: usize = 1 << 20;

/// The methods of HTTP that are allowed where a rule lists none.
pub const USUAL_METHODS: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];

/// What a run may reach. The default has no rule: nothing may be reached.
///
/// A denial that matches wins over every rule. Of the rules that match, the one whose target is narrowest decides:
/// an exact name before a wildcard, a longer wildcard before a shorter one, a smaller block before a larger one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// What is allowed.
    pub rules: Vec<Rule>,
    /// What is denied whatever `rules` say.
    pub denials: Vec<Denial>,
}

/// One thing that is allowed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// The rule as it was written: what events and explanations show.
    pub text: String,
    /// Whom it is about.
    pub target: Target,
    /// Destination ports.
    pub ports: Vec<Ports>,
    /// What must be spoken.
    pub protocol: Protocol,
    /// What else must hold.
    #[serde(default)]
    pub terms: Terms,
}

/// One thing that is denied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Denial {
    /// The denial as it was written.
    pub text: String,
    /// Whom it is about. A block also denies a name that resolves into it.
    pub target: Target,
    /// Destination ports.
    pub ports: Vec<Ports>,
}

/// Whom a rule is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// `x`: this name.
    Exact(Name),
    /// `*.x`: names below, at any depth, not the name itself.
    Below(Name),
    /// `.x`: the name itself and names below.
    AtOrBelow(Name),
    /// `cidr:`: addresses.
    Block(Cidr),
}

/// What must be spoken on a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// TLS whose server name is the name that was dialled. Passed through unread after its hello.
    Tls,
    /// HTTP/1.1 in the clear, every request head checked.
    Http,
    /// SSH, by its identification strings.
    Ssh,
    /// Anything: uninspected.
    Raw,
}

impl Protocol {
    /// The word of the policy grammar.
    pub fn word(self) -> &'static str {
        match self {
            Self::Tls => "tls",
            Self::Http => "http",
            Self::Ssh => "ssh",
            Self::Raw => "raw",
        }
    }
}

/// What else must hold on a flow that a rule allows. The default asks for nothing and permits no exception.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Terms {
    /// HTTP: requests may upgrade to a websocket, which is opaque from then on.
    pub websocket: bool,
    /// TLS: a hello with an encrypted inner hello is passed.
    pub encrypted_hello: bool,
    /// TLS: a hello without a server name is passed.
    pub nameless_hello: bool,
    /// TLS: each protocol that the client offers by ALPN must be one of these. Empty: anything.
    pub alpn: Vec<String>,
    /// HTTP: methods. Empty: the usual ones.
    pub methods: Vec<String>,
    /// HTTP: paths, each exact or with one `*` at its end. Empty: anything.
    pub paths: Vec<String>,
    /// Most bytes from the guest on one flow.
    pub max_up: Option<u64>,
    /// Most bytes to the guest on one flow.
    pub max_down: Option<u64>,
    /// Most bytes a second on one flow, each way.
    pub rate: Option<u64>,
    /// Longest life of a flow, in seconds.
    pub max_duration: Option<u64>,
}

/// What a policy says of one destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision<'p> {
    /// This rule allows it.
    Allow(&'p Rule),
    /// This denial denies it.
    Deny(&'p Denial),
    /// Only other ports of it are allowed, by this rule among others.
    OtherPort(&'p Rule),
    /// A wildcard would allow it, but does not cover public DNS-over-HTTPS services.
    PublicDoh(&'p Rule),
    /// No rule is about it.
    NoRule,
}

/// A destination, as the guest means it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject<'a> {
    /// A name.
    Name(&'a Name),
    /// An address that stands for no name.
    Address(IpAddr),
}

impl Target {
    /// Whether it is about `subject`.
    pub fn matches(&self, subject: Subject<'_>) -> bool {
        match (self, subject) {
            (Self::Exact(own), Subject::Name(name)) => own == name,
            (Self::Below(parent), Subject::Name(name)) => name.is_below(parent),
            (Self::AtOrBelow(parent), Subject::Name(name)) => parent == name || name.is_below(parent),
            (Self::Block(block), Subject::Address(address)) => block.contains(address),
            (Self::Block(_), Subject::Name(_)) | (_, Subject::Address(_)) => false,
        }
    }

    /// Orders the targets that match one subject: the narrowest is the largest.
    fn narrowness(&self) -> (bool, usize, bool) {
        match self {
            Self::Exact(name) => (true, name.as_str().len(), true),
            Self::Below(name) => (false, name.as_str().len(), true),
            Self::AtOrBelow(name) => (false, name.as_str().len(), false),
            Self::Block(block) => (false, usize::from(block.prefix()), false),
        }
    }

    /// Whether it is about many names.
    pub fn is_wildcard(&self) -> bool {
        matches!(self, Self::Below(_) | Self::AtOrBelow(_))
    }
}

fn any_contains(ports: &[Ports], port: u16) -> bool {
    ports.iter().any(|range| range.contains(port))
}

impl Policy {
    /// Decides about one destination and port.
    pub fn decide(&self, subject: Subject<'_>, port: u16) -> Decision<'_> {
        let denied =
            self.denials.iter().find(|denial| denial.target.matches(subject) && any_contains(&denial.ports, port));
        if let Some(denial) = denied {
            return Decision::Deny(denial);
        }
        let about: Vec<&Rule> = self.rules.iter().filter(|rule| rule.target.matches(subject)).collect();
        let doh = matches!(subject, Subject::Name(name) if is_public_doh(name));
        let covers = |rule: &&&Rule| any_contains(&rule.ports, port) && !(doh && rule.target.is_wildcard());
        if let Some(rule) = about.iter().filter(covers).max_by_key(|rule| rule.target.narrowness()) {
            return Decision::Allow(rule);
        }
        match about.iter().max_by_key(|rule| rule.target.narrowness()) {
            Some(rule) if doh && rule.target.is_wildcard() => Decision::PublicDoh(rule),
            Some(rule) => Decision::OtherPort(rule),
            None => Decision::NoRule,
        }
    }

    /// The decision that a DNS question about a name gets: allowed if the name may be reached on any port.
    pub fn decide_name(&self, name: &Name) -> Decision<'_> {
        let subject = Subject::Name(name);
        let mut decision = self.decide(subject, 0);
        if matches!(decision, Decision::NoRule | Decision::PublicDoh(_)) {
            return decision;
        }
        for rule in self.rules.iter().filter(|rule| rule.target.matches(subject)) {
            // A range of which denials leave something has such a port at its beginning, or right after a denied range.
            let candidates = rule.ports.iter().map(Ports::first).chain(
                self.denials
                    .iter()
                    .filter(|denial| denial.target.matches(subject))
                    .flat_map(|denial| denial.ports.iter().filter_map(|ports| ports.last().checked_add(1))),
            );
            for port in candidates.filter(|port| any_contains(&rule.ports, *port)) {
                match self.decide(subject, port) {
                    allowed @ Decision::Allow(_) => return allowed,
                    denied @ Decision::Deny(_) => decision = denied,
                    _ => {}
                }
            }
        }
        decision
    }

    /// The denial that an address falls under when a name that is allowed resolves to it.
    pub fn denied_address(&self, address: IpAddr, port: u16) -> Option<&Denial> {
        let subject = Subject::Address(address);
        self.denials.iter().find(|denial| denial.target.matches(subject) && any_contains(&denial.ports, port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::parse(text).unwrap()
    }

    fn rule(target: Target, ports: &[(u16, u16)], protocol: Protocol) -> Rule {
        let text = format!("{target:?}");
        let ports = ports.iter().map(|(first, last)| Ports::new(*first, *last).unwrap()).collect();
        Rule { text, target, ports, protocol, terms: Terms::default() }
    }

    fn denial(target: Target, ports: &[(u16, u16)]) -> Denial {
        let Rule { text, target, ports, .. } = rule(target, ports, Protocol::Raw);
        Denial { text, target, ports }
    }

    fn allows(policy: &Policy, host: &str, port: u16) -> bool {
        matches!(policy.decide(Subject::Name(&name(host)), port), Decision::Allow(_))
    }

    /// Row 95: the empty policy denies everything.
    #[test]
    fn an_empty_policy_denies() {
        let policy = Policy::default();
        assert_eq!(policy.decide(Subject::Name(&name("example.com")), 443), Decision::NoRule);
        assert_eq!(policy.decide(Subject::Address([93, 184, 216, 34].into()), 443), Decision::NoRule);
        assert_eq!(policy.decide_name(&name("example.com")), Decision::NoRule);
    }

    /// Row 92: apex, prefix and suffix confusions.
    #[test]
    fn wildcards_match_at_label_boundaries() {
        let below = Policy {
            rules: vec![rule(Target::Below(name("github.com")), &[(443, 443)], Protocol::Tls)],
            ..Policy::default()
        };
        let at = Policy {
            rules: vec![rule(Target::AtOrBelow(name("github.com")), &[(443, 443)], Protocol::Tls)],
            ..Policy::default()
        };
        for (host, by_below, by_at) in [
            ("github.com", false, true),
            ("api.github.com", true, true),
            ("a.b.github.com", true, true),
            ("evilgithub.com", false, false),
            ("github.com.evil.tld", false, false),
            ("github.co", false, false),
            ("com", false, false),
        ] {
            assert_eq!(allows(&below, host, 443), by_below, "*.github.com and {host}");
            assert_eq!(allows(&at, host, 443), by_at, ".github.com and {host}");
        }
    }

    /// Row 27: port tricks.
    #[test]
    fn only_the_ports_of_a_rule_are_allowed() {
        let policy = Policy {
            rules: vec![rule(Target::Exact(name("a.example")), &[(443, 443), (8000, 8001)], Protocol::Tls)],
            ..Policy::default()
        };
        let allowed: Vec<u16> = (0..=u16::MAX).filter(|port| allows(&policy, "a.example", *port)).collect();
        assert_eq!(allowed, [443, 8000, 8001]);
        assert!(matches!(policy.decide(Subject::Name(&name("a.example")), 22), Decision::OtherPort(_)));
    }

    #[test]
    fn a_denial_wins_in_whatever_order() {
        let policy = Policy {
            rules: vec![rule(Target::Below(name("example.com")), &[(1, 65535)], Protocol::Raw)],
            denials: vec![denial(Target::Exact(name("bad.example.com")), &[(1, 1000), (1001, 65535)])],
        };
        assert!(allows(&policy, "good.example.com", 443));
        assert!(matches!(policy.decide(Subject::Name(&name("bad.example.com")), 443), Decision::Deny(_)));
        assert!(matches!(policy.decide_name(&name("bad.example.com")), Decision::Deny(_)));
    }

    #[test]
    fn a_name_resolves_if_any_port_is_left() {
        let rules = vec![rule(Target::Exact(name("a.example")), &[(443, 445)], Protocol::Raw)];
        let with = |ports: &[(u16, u16)]| Policy {
            rules: rules.clone(),
            denials: vec![denial(Target::AtOrBelow(name("a.example")), ports)],
        };
        assert!(matches!(with(&[(443, 444)]).decide_name(&name("a.example")), Decision::Allow(_)));
        assert!(matches!(with(&[(444, 65535)]).decide_name(&name("a.example")), Decision::Allow(_)));
        assert!(matches!(with(&[(443, 444), (445, 500)]).decide_name(&name("a.example")), Decision::Deny(_)));
    }

    #[test]
    fn the_narrowest_target_decides() {
        let policy = Policy {
            rules: vec![
                rule(Target::Exact(name("a.b.example.com")), &[(443, 443)], Protocol::Tls),
                rule(Target::AtOrBelow(name("b.example.com")), &[(443, 443)], Protocol::Ssh),
                rule(Target::Below(name("example.com")), &[(443, 443)], Protocol::Raw),
            ],
            ..Policy::default()
        };
        for (host, protocol) in [
            ("a.b.example.com", Protocol::Tls),
            ("x.b.example.com", Protocol::Ssh),
            ("b.example.com", Protocol::Ssh),
            ("c.example.com", Protocol::Raw),
        ] {
            let Decision::Allow(rule) = policy.decide(Subject::Name(&name(host)), 443) else { panic!("{host}") };
            assert_eq!(rule.protocol, protocol, "{host}");
        }
    }

    /// Row 41: DNS over HTTPS through an allowed wildcard.
    #[test]
    fn a_wildcard_does_not_cover_public_doh() {
        let wildcard = rule(Target::AtOrBelow(name("dns.google")), &[(443, 443)], Protocol::Tls);
        let exact = rule(Target::Exact(name("dns.google")), &[(443, 443)], Protocol::Tls);
        let policy = |rules: Vec<Rule>| Policy { rules, ..Policy::default() };
        let by_wildcard = policy(vec![wildcard.clone()]);
        assert!(matches!(by_wildcard.decide(Subject::Name(&name("dns.google")), 443), Decision::PublicDoh(_)));
        assert!(matches!(by_wildcard.decide_name(&name("dns.google")), Decision::PublicDoh(_)));
        assert!(allows(&by_wildcard, "other.dns.google", 443));
        assert!(allows(&policy(vec![wildcard, exact]), "dns.google", 443));
    }

    #[test]
    fn names_and_blocks_do_not_match_each_other() {
        let block = Cidr::v4([10, 1, 2, 0].into(), 24);
        let policy = Policy {
            rules: vec![
                rule(Target::Block(block), &[(5432, 5432)], Protocol::Raw),
                rule(Target::AtOrBelow(name("example.com")), &[(443, 443)], Protocol::Tls),
            ],
            denials: vec![denial(Target::Block(Cidr::v4([10, 1, 2, 7].into(), 32)), &[(1, 65535)])],
        };
        assert!(matches!(policy.decide(Subject::Address([10, 1, 2, 3].into()), 5432), Decision::Allow(_)));
        assert!(matches!(policy.decide(Subject::Address([10, 1, 2, 7].into()), 5432), Decision::Deny(_)));
        assert_eq!(policy.decide(Subject::Address([10, 1, 3, 3].into()), 5432), Decision::NoRule);
        assert!(policy.denied_address([10, 1, 2, 7].into(), 443).is_some());
        assert!(policy.denied_address([10, 1, 2, 8].into(), 443).is_none());
    }

    #[test]
    fn a_policy_reads_back_as_it_was_written() {
        let policy = Policy {
            rules: vec![
                rule(Target::Block(Cidr::v4([10, 1, 2, 0].into(), 24)), &[(1, 2)], Protocol::Ssh),
                rule(Target::Below(name("example.com")), &[(443, 443)], Protocol::Tls),
            ],
            denials: vec![denial(Target::Exact(name("b.example.com")), &[(1, 65535)])],
        };
        let text = serde_json::to_string(&policy).unwrap();
        assert_eq!(serde_json::from_str::<Policy>(&text).unwrap(), policy);
        for broken in [
            text.replace("example.com", "example..com"),
            text.replace("[443,443]", "[443,442]"),
            text.replace("10.1.2.0", "10.1.2.1"),
            text.replace("\"denials\"", "\"denial\""),
        ] {
            assert_ne!(broken, text);
            assert!(serde_json::from_str::<Policy>(&broken).is_err(), "{broken}");
        }
    }
}
