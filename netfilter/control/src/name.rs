//! Host names in the one form in which they are compared.

use std::borrow::Borrow;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Most bytes of a name, dots included, without a trailing one (RFC 1035, 2.3.4).
pub const MAX_NAME: usize = 253;
/// Most bytes of a label.
pub const MAX_LABEL: usize = 63;

/// A host name: lower case, no trailing dot, each label 1 to 63 letters, digits, `-` and `_`, the last no number.
///
/// Everything that names a host (a policy, a DNS question, a TLS hello, an HTTP authority) is made into this type
/// first, and only values of this type are compared. Two readers cannot see different names in the same bytes.
///
/// ```
/// use netfilter_control::Name;
/// assert_eq!(Name::parse("API.Example.com.").unwrap().as_str(), "api.example.com");
/// assert!(Name::parse("api..example.com").is_err());
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

/// Why bytes are not a [`Name`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Nothing, or the root alone.
    #[error("it is empty")]
    Empty,
    /// Over [`MAX_NAME`] bytes.
    #[error("it has over {MAX_NAME} characters")]
    Long,
    /// Two dots in a row, or one at the beginning.
    #[error("a label between its dots is empty")]
    EmptyLabel,
    /// Over [`MAX_LABEL`] bytes.
    #[error("a label between its dots has over {MAX_LABEL} characters")]
    LongLabel,
    /// A byte that no host name has.
    #[error("it has a character other than letters, digits, `-`, `_` and `.`")]
    Character,
    /// A label that begins or ends with a hyphen.
    #[error("a label begins or ends with `-`")]
    Hyphen,
    /// Its last label is digits alone, so that some reader takes it for an address.
    #[error("it is an address, or looks like one")]
    Numeric,
}

impl Name {
    /// Reads a name as people and programs write it: in any case, with or without the trailing dot.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let text = text.strip_suffix('.').unwrap_or(text);
        if text.is_empty() {
            return Err(NameError::Empty);
        }
        if text.len() > MAX_NAME {
            return Err(NameError::Long);
        }
        for label in text.split('.') {
            check_label(label)?;
        }
        // RFC 3696, 2: the last label of a name is not all digits. `0x7f.1` and `017700000001` are addresses to some.
        let last = text.rsplit('.').next().unwrap_or_default().to_ascii_lowercase();
        if last.starts_with("0x") || last.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(NameError::Numeric);
        }
        Ok(Self(text.to_ascii_lowercase()))
    }

    /// The name, lower case, without a trailing dot.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Its labels, from the host to the top.
    pub fn labels(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.0.split('.')
    }

    /// Whether it is a strict subdomain of `parent`, at any depth.
    pub fn is_below(&self, parent: &Self) -> bool {
        self.0.strip_suffix(parent.as_str()).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
    }
}

fn check_label(label: &str) -> Result<(), NameError> {
    if label.is_empty() {
        return Err(NameError::EmptyLabel);
    }
    if label.len() > MAX_LABEL {
        return Err(NameError::LongLabel);
    }
    if !label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_') {
        return Err(NameError::Character);
    }
    if label.starts_with('-') || label.ends_with('-') {
        return Err(NameError::Hyphen);
    }
    Ok(())
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl TryFrom<String> for Name {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        Self::parse(&text)
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0
    }
}

impl Borrow<str> for Name {
    fn borrow(&self) -> &str {
        &self.0
    }
}

/// Names that mean this machine, this link or a cloud's metadata service to somebody. No rule makes them resolve.
/// Returns what the name is reserved for.
pub fn reserved_for(name: &Name) -> Option<&'static str> {
    const BELOW: &[(&str, &str)] = &[
        ("localhost", "the machine itself"),
        ("local", "multicast DNS on a link"),
        ("arpa", "the Internet's own infrastructure"),
        ("internal", "private networks and cloud metadata"),
        ("invalid", "names that never exist"),
        ("onion", "Tor"),
        ("alt", "names outside of DNS"),
        ("lan", "private networks"),
        ("home", "private networks"),
        ("corp", "private networks"),
        ("localdomain", "the machine itself"),
    ];
    let top = name.labels().next_back()?;
    BELOW.iter().find(|(reserved, _)| *reserved == top).map(|(_, purpose)| *purpose)
}

/// Names of public DNS-over-HTTPS services. A wildcard does not cover them, since whoever reaches one can resolve any
/// name, and the questions carry data. A rule that names one exactly does.
pub fn is_public_doh(name: &Name) -> bool {
    const SERVICES: &[&str] = &[
        "1dot1dot1dot1.cloudflare-dns.com",
        "adblock.dns.mullvad.net",
        "base.dns.mullvad.net",
        "chrome.cloudflare-dns.com",
        "cloudflare-dns.com",
        "dns-family.adguard.com",
        "dns-unfiltered.adguard.com",
        "dns.adguard-dns.com",
        "dns.adguard.com",
        "dns.alidns.com",
        "dns.cloudflare.com",
        "dns.controld.com",
        "dns.digitale-gesellschaft.ch",
        "dns.google",
        "dns.google.com",
        "dns.mullvad.net",
        "dns.nextdns.io",
        "dns.quad9.net",
        "dns.sb",
        "dns.switch.ch",
        "dns.umbrella.com",
        "dns10.quad9.net",
        "dns11.quad9.net",
        "dns12.quad9.net",
        "dns9.quad9.net",
        "dns64.dns.google",
        "doh.applied-privacy.net",
        "doh.cleanbrowsing.org",
        "doh.dns.apple.com",
        "doh.dns.sb",
        "doh.familyshield.opendns.com",
        "doh.libredns.gr",
        "doh.mullvad.net",
        "doh.opendns.com",
        "doh.pub",
        "doh.sb",
        "doh.umbrella.com",
        "doh.xfinity.com",
        "extended.dns.mullvad.net",
        "family.cloudflare-dns.com",
        "freedns.controld.com",
        "jp.tiarap.org",
        "mozilla.cloudflare-dns.com",
        "one.one.one.one",
        "ordns.he.net",
        "security.cloudflare-dns.com",
        "unfiltered.adguard-dns.com",
    ];
    SERVICES.contains(&name.as_str())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> Name {
        Name::parse(text).unwrap()
    }

    /// Row 54: case, trailing dot, double dot, root, single label.
    #[test]
    fn names_have_one_form() {
        assert_eq!(name("ExAmPlE.CoM."), name("example.com"));
        assert_eq!(name("_sip._tcp.example.com").as_str(), "_sip._tcp.example.com");
        for (text, error) in [
            ("", NameError::Empty),
            (".", NameError::Empty),
            ("..", NameError::EmptyLabel),
            ("a..b", NameError::EmptyLabel),
            (".a", NameError::EmptyLabel),
            ("a.b..", NameError::EmptyLabel),
            ("a b.com", NameError::Character),
            ("a\0.com", NameError::Character),
            ("exämple.com", NameError::Character),
            ("evil.com\u{ff0e}example.com", NameError::Character),
            ("-a.com", NameError::Hyphen),
            ("a-.com", NameError::Hyphen),
            ("127.0.0.1", NameError::Numeric),
            ("2130706433", NameError::Numeric),
            ("0x7f.0x1", NameError::Numeric),
            ("a.1", NameError::Numeric),
        ] {
            assert_eq!(Name::parse(text), Err(error), "{text:?}");
        }
        assert_eq!(Name::parse(&format!("{}.com", "a".repeat(64))), Err(NameError::LongLabel));
        let long = [&"a".repeat(63)[..]; 4].join(".");
        assert_eq!(Name::parse(&long), Err(NameError::Long));
        assert!(Name::parse(&long[2..]).is_ok(), "253 characters are a name");
    }

    #[test]
    fn below_means_at_a_label_boundary() {
        assert!(name("api.github.com").is_below(&name("github.com")));
        assert!(name("a.b.github.com").is_below(&name("github.com")));
        assert!(!name("github.com").is_below(&name("github.com")));
        assert!(!name("evilgithub.com").is_below(&name("github.com")));
        assert!(!name("github.com.evil.tld").is_below(&name("github.com")));
    }

    /// Row 56: special names.
    #[test]
    fn special_names_are_reserved() {
        for text in [
            "localhost",
            "a.localhost",
            "printer.local",
            "1.0.0.127.in-addr.arpa",
            "metadata.google.internal",
            "host.docker.internal",
            "home.arpa",
        ] {
            assert!(reserved_for(&name(text)).is_some(), "{text}");
        }
        assert!(reserved_for(&name("local.example.com")).is_none());
    }

    proptest! {
        #[test]
        fn a_name_reads_back_as_itself(text in "[a-zA-Z0-9_.-]{0,70}") {
            if let Ok(name) = Name::parse(&text) {
                prop_assert_eq!(Name::parse(name.as_str()), Ok(name.clone()));
                prop_assert!(!name.as_str().ends_with('.') && !name.as_str().contains(".."));
            }
        }
    }
}
