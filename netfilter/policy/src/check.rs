//! What a rule may not say, however well it is written.

use netfilter_control::{Cidr, Name, Protocol, Rule, Target, classify, reserved_for};

use crate::error::Fault;
use crate::rule::Token;

/// Blocks with a shorter prefix are open egress by another name.
pub(crate) const OPEN_PREFIX: u8 = 8;
/// Mail submission: what spam and exfiltration would use first. In no preset.
pub(crate) const MAIL_PORTS: [u16; 3] = [25, 465, 587];

/// A name that no rule may have.
pub(crate) fn name(
    name: &Name,
    wildcard: bool,
    denies: bool,
    shared_allowed: bool,
    token: Token<'_>,
) -> Result<(), Fault> {
    if denies {
        return Ok(());
    }
    if let Some(purpose) = reserved_for(name) {
        return Err(token.fault(
            format!("`{name}` is reserved for {purpose}, and never resolves in a sandbox"),
            "to reach a host of your own network write cidr:ADDRESS/32:PORT+raw",
        ));
    }
    if name.labels().count() < 2 {
        let help = if wildcard { "a wildcard stands below a domain of one owner" } else { "write the full name" };
        return Err(token.fault(format!("`{name}` is a single label"), help));
    }
    if wildcard {
        wildcard_suffix(name, shared_allowed, token)?;
    }
    Ok(())
}

/// `*.co.uk` and `*.github.io` are everybody's: who may reach them may reach an attacker's host.
fn wildcard_suffix(name: &Name, shared_allowed: bool, token: Token<'_>) -> Result<(), Fault> {
    let is_suffix = |text: &str| {
        let suffix = psl::suffix(text.as_bytes())?;
        (suffix.is_known() && suffix.as_bytes() == text.as_bytes()).then(|| suffix.typ())
    };
    // The list also has entries of the form `*.x`: then it is the names right below x that are shared.
    let found = is_suffix(name.as_str()).or_else(|| is_suffix(&format!("a.{name}")));
    match found {
        None => Ok(()),
        Some(Some(psl::Type::Private)) if shared_allowed => Ok(()),
        Some(Some(psl::Type::Private)) => Err(token.fault(
            format!("anybody can get a name below `{name}`: it is a public suffix"),
            "name the hosts one by one, or add +shared-suffix if you mean all of them",
        )),
        Some(_) => Err(token.fault(
            format!("anybody can get a name below `{name}`: it is a public suffix"),
            "name the hosts one by one",
        )),
    }
}

/// A block that no rule may have.
pub(crate) fn block(block: &Cidr, token: Token<'_>) -> Result<(), Fault> {
    match classify::never_reached(block) {
        Some(purpose) => Err(token.fault(
            format!("{block} is never reached by any rule: {purpose}"),
            "a host's own services can be offered to a guest over vsock, not over its network",
        )),
        None => Ok(()),
    }
}

/// Options that do not go with the rule's protocol or target.
pub(crate) fn rule(rule: &Rule, whole: Token<'_>, options: &[Token<'_>]) -> Result<(), Fault> {
    let blame = |word: &str| options.iter().find(|option| option.text == word).copied().unwrap_or(whole);
    let protocol = rule.protocol;
    if matches!(rule.target, Target::Block(_)) && matches!(protocol, Protocol::Tls | Protocol::Http) {
        return Err(blame(protocol.word()).fault(
            format!("{} is checked against a name, and a block has none", protocol.word()),
            "add +raw (or +ssh): addresses are reached unchecked",
        ));
    }
    let misplaced = [
        ("ro", !rule.terms.methods.is_empty(), Protocol::Http),
        ("ws", rule.terms.websocket, Protocol::Http),
        ("ech", rule.terms.encrypted_hello, Protocol::Tls),
        ("nosni", rule.terms.nameless_hello, Protocol::Tls),
    ];
    for (word, set, wanted) in misplaced {
        if set && protocol != wanted {
            let help = if word == "ro" && protocol == Protocol::Tls {
                "what happens inside of TLS is not seen, so methods cannot be enforced there"
            } else {
                "leave it out"
            };
            return Err(blame(word).fault(format!("`{word}` has a meaning with +{} only", wanted.word()), help));
        }
    }
    if options.iter().any(|option| option.text == "shared-suffix") && !rule.target.is_wildcard() {
        return Err(blame("shared-suffix").fault("`shared-suffix` has a meaning with a wildcard only", "leave it out"));
    }
    Ok(())
}

/// Whether a token of HTTP (RFC 9110, 5.6.2), which methods are.
pub(crate) fn is_http_token(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
}
