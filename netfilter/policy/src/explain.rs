//! Which rule decides about a URL, and why.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use netfilter_control::classify::{self, Reach};
use netfilter_control::{Decision, Name, Policy, Protocol, Subject, Target, reserved_for};

/// What a policy says of one destination, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// Whether it may be reached.
    pub allowed: bool,
    /// The rule or denial that decides, as it was written.
    pub rule: Option<String>,
    /// Why, and what would change it. One sentence a line.
    pub reasons: Vec<String>,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.allowed { "allowed" } else { "denied" })?;
        if let Some(rule) = &self.rule {
            write!(f, " by `{rule}`")?;
        }
        self.reasons.iter().try_for_each(|reason| write!(f, "\n  {reason}"))
    }
}

/// Says which rule decides about `url`: a URL, or a host with an optional port.
///
/// ```
/// use netfilter_policy::{Compiler, explain};
/// let mut compiler = Compiler::default();
/// compiler.rules("--allow", "*.github.com").unwrap();
/// let policy = compiler.finish().unwrap();
/// assert!(explain(&policy, "https://api.github.com/user").unwrap().allowed);
/// assert!(!explain(&policy, "github.com").unwrap().allowed);
/// ```
pub fn explain(policy: &Policy, url: &str) -> Result<Explanation, String> {
    let (scheme, rest) = url.split_once("://").map_or((None, url), |(scheme, rest)| (Some(scheme), rest));
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let authority = authority.rsplit('@').next().unwrap_or_default();
    if authority.starts_with('[') || authority.parse::<Ipv6Addr>().is_ok() {
        return Err(format!("`{authority}` is an IPv6 address, and sandboxes have no IPv6: write the host's name"));
    }
    let (host, port) = authority.split_once(':').map_or((authority, None), |(host, port)| (host, Some(port)));
    let scheme_port = match scheme.map(str::to_ascii_lowercase).as_deref() {
        None | Some("https" | "wss") => 443,
        Some("http" | "ws") => 80,
        Some("ssh" | "git+ssh") => 22,
        Some("git") => 9418,
        Some("ftp") => 21,
        Some(other) => {
            return Err(format!("`{other}` is a scheme without a known port: write HOST:PORT"));
        }
    };
    let port = match port {
        None => scheme_port,
        Some(port) => port.parse::<u16>().ok().filter(|port| *port > 0).ok_or(format!("`{port}` is no port"))?,
    };
    if let Ok(address) = host.parse::<Ipv4Addr>() {
        return Ok(explain_address(policy, address, port));
    }
    let name = Name::parse(host).map_err(|error| format!("`{host}` is no host name: {error}"))?;
    let mut explanation = explain_name(policy, &name, port);
    if explanation.allowed && scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case("http")) {
        note_plain_http(policy, &name, port, &mut explanation);
    }
    Ok(explanation)
}

fn explain_name(policy: &Policy, name: &Name, port: u16) -> Explanation {
    let denied = |rule: Option<&str>, reasons: Vec<String>| Explanation {
        allowed: false,
        rule: rule.map(String::from),
        reasons,
    };
    if let Some(purpose) = reserved_for(name) {
        return denied(None, vec![format!("{name} is reserved for {purpose}, and never resolves in a sandbox")]);
    }
    match policy.decide(Subject::Name(name), port) {
        Decision::Allow(rule) => {
            let mut reasons = vec![target_in_words(&rule.target)];
            reasons.push(match rule.protocol {
                Protocol::Tls => format!("TLS whose server name is {name}; what it carries is not seen"),
                Protocol::Http => format!("HTTP/1.1 in the clear, every request for host {name}"),
                Protocol::Ssh => "SSH; what it carries is not seen".to_owned(),
                Protocol::Raw => "any protocol, unchecked".to_owned(),
            });
            Explanation { allowed: true, rule: Some(rule.text.clone()), reasons }
        }
        Decision::Deny(denial) => denied(
            Some(&denial.text),
            vec!["a denial wins over every rule".to_owned(), target_in_words(&denial.target)],
        ),
        Decision::OtherPort(rule) => {
            let ports: Vec<String> = rule.ports.iter().map(ToString::to_string).collect();
            let reason = format!("`{}` allows port {}, not {port}", rule.text, ports.join(", "));
            denied(None, vec![reason, format!("to allow it: {name}:{port}{}", suggestion(port))])
        }
        Decision::PublicDoh(rule) => {
            let reason = format!("{name} serves DNS over HTTPS, which no wildcard covers, `{}` neither", rule.text);
            denied(None, vec![reason, format!("to allow it: {name}:{port}{}", suggestion(port))])
        }
        Decision::NoRule => {
            let mut reasons = vec![format!("no rule is about {name}")];
            let apex = policy.rules.iter().find(|rule| matches!(&rule.target, Target::Below(own) if own == name));
            if let Some(rule) = apex {
                reasons.push(format!("`{}` is about names below {name}, not about {name} itself", rule.text));
            }
            reasons.push(format!("to allow it: {name}:{port}{}", suggestion(port)));
            denied(None, reasons)
        }
    }
}

fn explain_address(policy: &Policy, address: Ipv4Addr, port: u16) -> Explanation {
    let (allowed, rule, reason) = match policy.decide(Subject::Address(address.into()), port) {
        Decision::Allow(rule) => {
            let reach = match &rule.target {
                Target::Block(block) => classify::classify_for_block(block, address.into()),
                _ => classify::classify(address.into()),
            };
            match reach {
                Reach::Global => (true, Some(rule.text.clone()), "addresses are reached unchecked".to_owned()),
                Reach::Private(block) => {
                    let reason =
                        format!("`{}` is not about private addresses alone; {address} is in {block}", rule.text);
                    (false, None, reason)
                }
                Reach::Never(purpose) => (false, None, format!("{address} is never reached: {purpose}")),
            }
        }
        Decision::Deny(denial) => (false, Some(denial.text.clone()), "a denial wins over every rule".to_owned()),
        Decision::OtherPort(rule) => (false, None, format!("`{}` does not allow port {port}", rule.text)),
        Decision::PublicDoh(_) | Decision::NoRule => (
            false,
            None,
            format!("no cidr: rule is about {address}; a host that is allowed by name is reached by name"),
        ),
    };
    Explanation { allowed, rule, reasons: vec![reason] }
}

fn note_plain_http(policy: &Policy, name: &Name, port: u16, explanation: &mut Explanation) {
    if let Decision::Allow(rule) = policy.decide(Subject::Name(name), port)
        && rule.protocol == Protocol::Tls
    {
        explanation.allowed = false;
        explanation.reasons = vec![format!("`{}` wants TLS on port {port}; http: is in the clear", rule.text)];
    }
}

fn target_in_words(target: &Target) -> String {
    match target {
        Target::Exact(name) => format!("about {name} alone"),
        Target::Below(name) => format!("about every name below {name}, not {name} itself"),
        Target::AtOrBelow(name) => format!("about {name} and every name below it"),
        Target::Block(block) => format!("about the addresses of {block}"),
    }
}

fn suggestion(port: u16) -> &'static str {
    match port {
        443 | 22 => "",
        80 => "+http",
        _ => "+raw (or +tls, +http, +ssh)",
    }
}
