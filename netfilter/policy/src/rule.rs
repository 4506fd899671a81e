//! One rule of the grammar: `["!"] TARGET [":" PORTS] *("+" OPT)`.

use std::net::IpAddr;
use std::ops::Range;

use netfilter_control::{Cidr, CidrError, Denial, Name, NameError, Ports, Protocol, Rule, Target, Terms};

use crate::check;
use crate::error::Fault;

/// What a rule's text means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Parsed {
    Allow(Rule),
    Deny(Denial),
    Preset(String),
}

/// A part of a text, with where it lies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Token<'t> {
    pub(crate) text: &'t str,
    pub(crate) at: usize,
}

impl<'t> Token<'t> {
    pub(crate) fn new(text: &'t str, at: usize) -> Self {
        Self { text, at }
    }

    pub(crate) fn span(&self) -> Range<usize> {
        self.at..self.at.saturating_add(self.text.len())
    }

    pub(crate) fn fault(&self, message: impl Into<String>, help: impl Into<String>) -> Fault {
        Fault::new(self.span(), message, help)
    }

    fn trim(self) -> Self {
        let trimmed = self.text.trim_start();
        let skipped = self.text.len().saturating_sub(trimmed.len());
        Self::new(trimmed.trim_end(), self.at.saturating_add(skipped))
    }

    fn strip(self, prefix: &str) -> Option<Self> {
        self.text.strip_prefix(prefix).map(|rest| Self::new(rest, self.at.saturating_add(prefix.len())))
    }

    /// The parts between separators, each with its place.
    pub(crate) fn split(self, separator: char) -> impl Iterator<Item = Token<'t>> {
        let mut at = self.at;
        self.text.split(separator).map(move |text| {
            let token = Token::new(text, at);
            at = at.saturating_add(text.len()).saturating_add(separator.len_utf8());
            token
        })
    }

    fn split_once(self, separator: char) -> Option<(Self, Self)> {
        let (left, right) = self.text.split_once(separator)?;
        let at = self.at.saturating_add(left.len()).saturating_add(separator.len_utf8());
        Some((Self::new(left, self.at), Self::new(right, at)))
    }
}

/// The words after `+`.
const OPTIONS: &str = "options are tls, http, ssh, raw, ro, ws, ech, nosni and shared-suffix";

/// Parses one rule.
pub(crate) fn parse(token: Token<'_>) -> Result<Parsed, Fault> {
    let whole = token.trim();
    if whole.text.is_empty() {
        return Err(token.fault("an empty rule", "write a host, such as api.example.com, or leave the comma out"));
    }
    let (denies, rest) = whole.strip("!").map_or((false, whole), |rest| (true, rest));
    let mut parts = rest.split('+');
    let Some(body) = parts.next() else { return Err(whole.fault("an empty rule", "")) };
    let options: Vec<Token<'_>> = parts.collect();

    if let Some(ident) = body.strip("preset:") {
        return preset(ident, denies, options.first());
    }
    if body.text.contains("://") {
        return Err(body.fault("a rule is a host, not a URL", "write the host alone, such as api.example.com"));
    }
    let shared = options.iter().any(|option| option.text == "shared-suffix");
    let (target, ports) = match body.strip("cidr:") {
        Some(rest) => {
            let (block, ports) = rest.split_once(':').map_or((rest, None), |(block, ports)| (block, Some(ports)));
            (Target::Block(parse_block(block, denies)?), ports)
        }
        None => {
            let (name, ports) = body.split_once(':').map_or((body, None), |(name, ports)| (name, Some(ports)));
            (parse_name(name, denies, shared)?, ports)
        }
    };
    if denies {
        return denial(whole, target, ports, options.first()).map(Parsed::Deny);
    }
    let ports_token = ports.unwrap_or(body);
    let ports = ports.map_or_else(|| Ok(vec![https()]), parse_ports)?;
    let (named, terms) = parse_options(&options)?;
    let protocol = match named {
        Some(protocol) => protocol,
        None => default_protocol(&ports, ports_token)?,
    };
    let rule = Rule { text: whole.text.to_owned(), target, ports, protocol, terms };
    check::rule(&rule, whole, &options)?;
    Ok(Parsed::Allow(rule))
}

fn https() -> Ports {
    Ports::new(443, 443).unwrap_or(Ports::ALL)
}

fn preset(ident: Token<'_>, denies: bool, option: Option<&Token<'_>>) -> Result<Parsed, Fault> {
    if denies {
        return Err(ident.fault("a preset cannot be denied", "deny the hosts themselves"));
    }
    if let Some(option) = option {
        return Err(option.fault("a preset has no options", "its rules have their own"));
    }
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if ident.text.is_empty() || ident.text.len() > 64 || !ident.text.bytes().all(plain) {
        return Err(ident.fault(
            format!("`{}` is no name of a preset", ident.text),
            "a preset's name is lower-case letters, digits and `-`; it has no ports",
        ));
    }
    Ok(Parsed::Preset(ident.text.to_owned()))
}

fn denial(
    whole: Token<'_>,
    target: Target,
    ports: Option<Token<'_>>,
    option: Option<&Token<'_>>,
) -> Result<Denial, Fault> {
    if let Some(option) = option {
        return Err(option.fault("a denial has no options", "it denies every protocol: leave `+…` out"));
    }
    let ports = ports.map_or_else(|| Ok(vec![Ports::ALL]), parse_ports)?;
    Ok(Denial { text: whole.text.to_owned(), target, ports })
}

fn parse_name(token: Token<'_>, denies: bool, shared: bool) -> Result<Target, Fault> {
    let bare = token.text.trim_start_matches(['[', '*', '.']);
    if token.text.starts_with('[') || bare.parse::<IpAddr>().is_ok() {
        return Err(token.fault(
            "an address is not a host name",
            "to allow addresses write cidr:ADDRESS/32:PORT+raw; the guest has IPv4 alone",
        ));
    }
    if token.text.contains('/') {
        return Err(token.fault(
            "a rule is a host, not a URL or a block",
            "write the host alone; a block of addresses begins with `cidr:`",
        ));
    }
    let (name_token, target): (_, fn(Name) -> Target) = if let Some(rest) = token.strip("*.") {
        (rest, Target::Below)
    } else if let Some(rest) = token.strip(".") {
        (rest, Target::AtOrBelow)
    } else {
        (token, Target::Exact)
    };
    if name_token.text.contains('*') {
        let help =
            "`*.x` is every name below x, `.x` is x and every name below; no other `*` exists, and none means all";
        return Err(name_token.fault("`*` stands only at the beginning, before a dot", help));
    }
    let name = Name::parse(name_token.text).map_err(|error| {
        let help = match error {
            NameError::Character if !name_token.text.is_ascii() => {
                "write an internationalised name in its ASCII form (xn--…), which is what is compared"
            }
            NameError::Numeric => "to allow addresses write cidr:ADDRESS/32:PORT+raw",
            _ => "a host is written like api.example.com",
        };
        name_token.fault(format!("`{}` is no host name: {error}", name_token.text), help)
    })?;
    let target = target(name.clone());
    check::name(&name, target.is_wildcard(), denies, shared, name_token)?;
    Ok(target)
}

fn parse_block(token: Token<'_>, denies: bool) -> Result<Cidr, Fault> {
    let help = "a block is written like cidr:10.1.2.0/24";
    let Some((address, prefix)) = token.split_once('/') else {
        return Err(token.fault("a block of addresses without its prefix", "one address is cidr:10.1.2.3/32"));
    };
    if address.text.is_empty() || address.text.starts_with('[') || address.text.parse::<std::net::Ipv6Addr>().is_ok() {
        return Err(token.fault("the guest has IPv4 alone", "leave IPv6 blocks out: nothing can reach them"));
    }
    let address = address
        .text
        .parse::<std::net::Ipv4Addr>()
        .map_err(|_| address.fault(format!("`{}` is no IPv4 address", address.text), help))?;
    let number = Some(prefix.text).filter(|text| !text.starts_with('+')).and_then(|text| text.parse::<u8>().ok());
    let Some(number) = number else {
        return Err(prefix.fault(format!("`{}` is no prefix", prefix.text), help));
    };
    let block = Cidr::new(address.into(), number).map_err(|error| match error {
        CidrError::Prefix(_) => prefix.fault(error.to_string(), help),
        CidrError::HostBits(block) => token.fault(
            "an address inside of a block",
            format!("write cidr:{block} for the block, or cidr:{address}/32 for the address"),
        ),
    })?;
    if !denies {
        check::block(&block, token)?;
    }
    Ok(block)
}

fn parse_ports(token: Token<'_>) -> Result<Vec<Ports>, Fault> {
    let listed = token.text.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
    let mut ports = match listed {
        Some(list) => Token::new(list, token.at.saturating_add(1))
            .split('|')
            .map(parse_range)
            .collect::<Result<Vec<Ports>, Fault>>()?,
        None => vec![parse_range(token)?],
    };
    ports.sort_unstable();
    for pair in ports.windows(2) {
        if let [first, second] = pair
            && first.overlaps(second)
        {
            return Err(token.fault(format!("ports {first} and {second} overlap"), "name each port once"));
        }
    }
    Ok(ports)
}

fn parse_range(token: Token<'_>) -> Result<Ports, Fault> {
    let number = |token: Token<'_>| {
        let digits = !token.text.is_empty() && token.text.bytes().all(|byte| byte.is_ascii_digit());
        let number = if digits { token.text.parse::<u16>().ok().filter(|port| *port > 0) } else { None };
        number.ok_or_else(|| {
            token.fault(
                format!("`{}` is no port", token.text),
                "ports are written 443, 8000-8010 or {443|8443}, from 1 to 65535",
            )
        })
    };
    let (first, last) = match token.split_once('-') {
        Some((first, last)) => (number(first)?, number(last)?),
        None => {
            let port = number(token)?;
            (port, port)
        }
    };
    Ports::new(first, last).map_err(|error| token.fault(error.to_string(), "the smaller port comes first"))
}

fn parse_options(options: &[Token<'_>]) -> Result<(Option<Protocol>, Terms), Fault> {
    let mut protocol = None;
    let mut terms = Terms::default();
    for (index, option) in options.iter().enumerate() {
        if options.iter().take(index).any(|earlier| earlier.text == option.text) {
            return Err(option.fault(format!("`{}` stands twice", option.text), "name it once"));
        }
        let named = match option.text {
            "tls" => Some(Protocol::Tls),
            "http" => Some(Protocol::Http),
            "ssh" => Some(Protocol::Ssh),
            "raw" => Some(Protocol::Raw),
            "ro" => {
                terms.methods = ["GET", "HEAD", "OPTIONS"].map(String::from).to_vec();
                None
            }
            "ws" => {
                terms.websocket = true;
                None
            }
            "ech" => {
                terms.encrypted_hello = true;
                None
            }
            "nosni" => {
                terms.nameless_hello = true;
                None
            }
            "shared-suffix" => None,
            "inspect" => {
                return Err(option.fault(
                    "TLS cannot be inspected by this version",
                    "leave `+inspect` out to pass TLS through by its server name, or use +http where the host serves it",
                ));
            }
            other => return Err(option.fault(format!("`{other}` is not an option of a rule"), OPTIONS)),
        };
        if let (Some(first), Some(_)) = (protocol, named) {
            let first: Protocol = first;
            return Err(option.fault(
                format!("two protocols in one rule: {} and {}", first.word(), option.text),
                "write a rule for each port",
            ));
        }
        protocol = protocol.or(named);
    }
    Ok((protocol, terms))
}

/// The protocol that goes without saying: TLS on 443 and SSH on 22.
fn default_protocol(ports: &[Ports], token: Token<'_>) -> Result<Protocol, Fault> {
    let usual = |range: &Ports| match (range.first(), range.last()) {
        (443, 443) => Some(Protocol::Tls),
        (22, 22) => Some(Protocol::Ssh),
        _ => None,
    };
    let mut protocols = ports.iter().map(usual);
    let first = protocols.next().flatten();
    match first {
        Some(protocol) if protocols.all(|other| other == first) => Ok(protocol),
        _ => Err(token.fault(
            "the protocol on these ports does not go without saying",
            "add +tls, +http, +ssh or, for anything and unchecked, +raw",
        )),
    }
}
