//! Heads of HTTP/1 messages (RFC 9112), read strictly. What two readers could understand differently is an error here.

use netfilter_control::{Name, Reason, Terms, USUAL_METHODS, quote};

/// Most bytes of a head.
pub const MAX_HEAD: usize = 32 << 10;
/// Most bytes of a request's target.
pub const MAX_TARGET: usize = 8 << 10;
/// Most fields of a head.
pub const MAX_FIELDS: usize = 100;

/// How long a message's body is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// There is none.
    None,
    /// This many bytes.
    Length(u64),
    /// Chunks.
    Chunked,
    /// All until the end of the connection: answers alone.
    UntilEnd,
}

/// Why a request is not passed on, and what the guest reads about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The status of the answer.
    pub status: u16,
    /// Why.
    pub reason: Reason,
    /// The same in words.
    pub text: String,
}

fn refusal(status: u16, reason: Reason, text: impl Into<String>) -> Refusal {
    Refusal { status, reason, text: text.into() }
}

fn bad(text: &str) -> Refusal {
    refusal(400, Reason::BadHttp, text)
}

/// A field of a head, as it was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Field<'h> {
    name: &'h str,
    value: &'h [u8],
}

impl Field<'_> {
    fn is(&self, name: &str) -> bool {
        self.name.eq_ignore_ascii_case(name)
    }
}

/// Fields that are about one connection, not about the message; ours are written anew.
const HOP_BY_HOP: [&str; 12] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "http2-settings",
    "content-length",
    "host",
];
/// Fields that no sender may take away by naming them in `Connection`.
const FRAMING: [&str; 3] = ["host", "content-length", "transfer-encoding"];

/// A request that may be passed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Its method.
    pub method: String,
    /// Its path, without what follows `?`.
    pub path: String,
    /// Its body.
    pub framing: Framing,
    /// Whether the connection ends after the answer.
    pub close: bool,
    /// Whether it is HTTP/1.0, to which no chunks and no interim answers may be sent.
    pub old: bool,
    /// Whether it asks for a websocket, and may.
    pub websocket: bool,
    /// The head that is sent on: written anew.
    pub head: Vec<u8>,
}

/// An answer that may be passed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Its status.
    pub status: u16,
    /// Its body.
    pub framing: Framing,
    /// Whether the connection ends after it.
    pub close: bool,
    /// The head that is sent on: written anew, without the line that says whether the connection ends, and without the
    /// empty line.
    pub head: Vec<u8>,
}

/// Reads a request's head, with its empty line, and checks it against the rule.
pub fn request(head: &[u8], name: &Name, port: u16, terms: &Terms) -> Result<Request, Refusal> {
    let (line, fields) = split(head)?;
    let mut words = line.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(bad("the request line is not METHOD TARGET VERSION"));
    };
    let old = match version {
        b"HTTP/1.1" => false,
        b"HTTP/1.0" => true,
        _ => return Err(bad("the version is neither HTTP/1.1 nor HTTP/1.0")),
    };
    let method = token(method).ok_or_else(|| bad("the method is not a token"))?;
    check_method(method, terms)?;
    let path = check_target(target, method, terms)?;
    check_host(&fields, name, port)?;

    let mut options = connection_options(&fields).ok_or_else(|| bad("`Connection` names a field that frames"))?;
    let close = options.iter().any(|option| option == "close") || old;
    let framing =
        framing(&fields, old).ok_or_else(|| bad("the length of the body is not clear"))?.unwrap_or(Framing::None);
    let websocket = check_upgrade(&fields, &options, method, old, framing, terms)?;
    if let Some(expect) = fields.iter().find(|field| field.is("expect"))
        && !expect.value.eq_ignore_ascii_case(b"100-continue")
    {
        return Err(refusal(417, Reason::BadHttp, "an expectation other than 100-continue"));
    }

    let mut out = Vec::with_capacity(head.len());
    for word in [method.as_bytes(), b" ", target, b" ", version, b"\r\nHost: ", name.as_str().as_bytes()] {
        out.extend_from_slice(word);
    }
    if port != 80 {
        out.extend_from_slice(format!(":{port}").as_bytes());
    }
    out.extend_from_slice(b"\r\n");
    options.retain(|option| option != "close" && option != "keep-alive");
    put_fields(&mut out, &fields, &options);
    put_framing(&mut out, framing);
    if websocket {
        out.extend_from_slice(b"Connection: Upgrade\r\nUpgrade: websocket\r\n");
    } else if close {
        out.extend_from_slice(b"Connection: close\r\n");
    }
    out.extend_from_slice(b"\r\n");
    Ok(Request { method: method.to_owned(), path, framing, close, old, websocket, head: out })
}

/// Reads an answer's head, with its empty line. `None` if it is not strictly framed.
pub fn answer(head: &[u8], method: &str) -> Option<Answer> {
    let (line, fields) = split(head).ok()?;
    let (version, rest) = line.split_at_checked(9)?;
    let old = match version {
        b"HTTP/1.1 " => false,
        b"HTTP/1.0 " => true,
        _ => return None,
    };
    let (digits, phrase) = rest.split_at_checked(3)?;
    let status = std::str::from_utf8(digits).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?;
    let status: u16 = status.parse().ok().filter(|status| (100..600).contains(status))?;
    // The space before an empty phrase is often left out.
    if !(phrase.is_empty() || phrase.starts_with(b" ")) {
        return None;
    }
    let options = connection_options(&fields)?;
    let declared = framing(&fields, false)?;
    let empty = method == "HEAD" || status < 200 || status == 204 || status == 304;
    if status < 200 && declared.is_some() {
        return None;
    }
    let body = if empty { Framing::None } else { declared.unwrap_or(Framing::UntilEnd) };
    let keep_alive = options.iter().any(|option| option == "keep-alive");
    let close = options.iter().any(|option| option == "close") || (old && !keep_alive) || body == Framing::UntilEnd;
    let mut out = Vec::with_capacity(head.len());
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(rest);
    out.extend_from_slice(b"\r\n");
    put_fields(&mut out, &fields, &options);
    // To a HEAD, and in a 304, the length is that of the body that is not there: worth knowing.
    put_framing(&mut out, declared.filter(|_| status >= 200 && status != 204).unwrap_or(Framing::None));
    Some(Answer { status, framing: body, close, head: out })
}

/// The first line, and the fields.
fn split(head: &[u8]) -> Result<(&[u8], Vec<Field<'_>>), Refusal> {
    let head = head.strip_suffix(b"\r\n\r\n").ok_or_else(|| bad("the head does not end"))?;
    let mut lines = head.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let first = lines.next().unwrap_or_default();
    let fields = lines.map(field).collect::<Option<Vec<Field<'_>>>>().ok_or_else(|| bad("a field is malformed"))?;
    if first.is_empty() || !printable(first) {
        return Err(bad("the first line is empty, or has control characters"));
    }
    if fields.len() > MAX_FIELDS {
        return Err(refusal(431, Reason::BadHttp, format!("over {MAX_FIELDS} fields")));
    }
    Ok((first, fields))
}

/// A field: a token, a colon right behind it, a value without control characters. A line that begins with a blank goes
/// on with the one before to some readers, and is an error here.
fn field(line: &[u8]) -> Option<Field<'_>> {
    let colon = line.iter().position(|byte| *byte == b':')?;
    let (name, value) = line.split_at_checked(colon)?;
    let value = value.strip_prefix(b":")?;
    let blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let start = value.iter().position(|byte| !blank(byte)).unwrap_or(value.len());
    let end = value.iter().rposition(|byte| !blank(byte)).map_or(start, |at| at.saturating_add(1));
    let value = value.get(start..end)?;
    printable(value).then_some(Field { name: token(name)?, value })
}

fn printable(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == b'\t' || (*byte >= 0x20 && *byte != 0x7f))
}

/// RFC 9110, 5.6.2.
fn token(bytes: &[u8]) -> Option<&str> {
    let fits = |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte);
    let text = std::str::from_utf8(bytes).ok()?;
    (!bytes.is_empty() && bytes.iter().all(fits)).then_some(text)
}

fn check_method(method: &str, terms: &Terms) -> Result<(), Refusal> {
    // CONNECT and TRACE are never an agent's business; PRI begins HTTP/2.
    let never = ["CONNECT", "TRACE", "PRI"].contains(&method);
    let listed = if terms.methods.is_empty() {
        USUAL_METHODS.contains(&method)
    } else {
        terms.methods.iter().any(|allowed| allowed == method)
    };
    if never || !listed {
        return Err(refusal(
            403,
            Reason::Method,
            format!("the rule does not allow the method {}", quote(method.as_bytes())),
        ));
    }
    Ok(())
}

/// The path of a target in origin form (or `*`, for OPTIONS).
fn check_target(target: &[u8], method: &str, terms: &Terms) -> Result<String, Refusal> {
    if target.len() > MAX_TARGET {
        return Err(refusal(414, Reason::BadHttp, format!("a target of over {MAX_TARGET} bytes")));
    }
    let text = std::str::from_utf8(target).map_err(|_| bad("the target is not ASCII"))?;
    if text.bytes().any(|byte| !byte.is_ascii_graphic() || byte == b'#') {
        return Err(bad("the target has characters that no target has"));
    }
    if !(text.starts_with('/') || text == "*" && method == "OPTIONS") {
        return Err(bad("the target is not a path: this is no proxy, hosts are reached as they are"));
    }
    let path = text.split('?').next().unwrap_or_default();
    if !terms.paths.is_empty() {
        let lower = path.to_ascii_lowercase();
        let tricks = ["//", "%2e", "%2f", "%5c", "%00", "\\", ";"].iter().any(|trick| lower.contains(trick));
        let dots = path.split('/').any(|segment| segment == "." || segment == "..");
        let listed = terms.paths.iter().any(|allowed| match allowed.strip_suffix('*') {
            Some(prefix) => path.starts_with(prefix),
            None => path == allowed,
        });
        if tricks || dots || !listed {
            return Err(refusal(
                403,
                Reason::Path,
                format!("the rule does not allow the path {}", quote(path.as_bytes())),
            ));
        }
    }
    Ok(quote(path.as_bytes()))
}

fn check_host(fields: &[Field<'_>], name: &Name, port: u16) -> Result<(), Refusal> {
    let mut hosts = fields.iter().filter(|field| field.is("host"));
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return Err(bad("there is not exactly one Host"));
    };
    let text = std::str::from_utf8(host.value).unwrap_or_default();
    let (found, found_port) = match text.split_once(':') {
        Some((found, digits)) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            (found, digits.parse::<u16>().ok())
        }
        Some(_) => (text, None),
        None => (text, Some(80)),
    };
    let same = Name::parse(found).as_ref() == Ok(name);
    if !same || found_port != Some(port) {
        let text = format!("the request is for {}, and the connection was made to {name}:{port}", quote(host.value));
        return Err(refusal(421, Reason::HostMismatch, text));
    }
    Ok(())
}

/// The options of `Connection`, lower case. `None` if one names a field that says how long a message is, or for whom.
fn connection_options(fields: &[Field<'_>]) -> Option<Vec<String>> {
    let mut options = Vec::new();
    for field in fields.iter().filter(|field| field.is("connection")) {
        for option in field.value.split(|byte| *byte == b',') {
            let option = option.trim_ascii();
            if option.is_empty() {
                continue;
            }
            let option = token(option)?.to_ascii_lowercase();
            if FRAMING.contains(&option.as_str()) {
                return None;
            }
            options.push(option);
        }
    }
    Some(options)
}

/// How the body is framed, if the head says so. The outer `None` is what cannot be understood in one way only.
fn framing(fields: &[Field<'_>], old: bool) -> Option<Option<Framing>> {
    let only = |name: &str| {
        let mut found = fields.iter().filter(|field| field.is(name));
        match (found.next(), found.next()) {
            (first, None) => Some(first.map(|field| field.value)),
            _ => None,
        }
    };
    match (only("content-length")?, only("transfer-encoding")?) {
        (None, None) => Some(None),
        (Some(length), None) => {
            let digits = !length.is_empty() && length.len() <= 18 && length.iter().all(u8::is_ascii_digit);
            let text = std::str::from_utf8(length).ok().filter(|_| digits)?;
            Some(Some(Framing::Length(text.parse().ok()?)))
        }
        (None, Some(coding)) if coding.eq_ignore_ascii_case(b"chunked") && !old => Some(Some(Framing::Chunked)),
        _ => None,
    }
}

fn check_upgrade(
    fields: &[Field<'_>],
    options: &[String],
    method: &str,
    old: bool,
    framing: Framing,
    terms: &Terms,
) -> Result<bool, Refusal> {
    let mut upgrades = fields.iter().filter(|field| field.is("upgrade"));
    let asked = options.iter().any(|option| option == "upgrade");
    let (first, second) = (upgrades.next(), upgrades.next());
    if first.is_none() && !asked {
        return Ok(false);
    }
    let websocket = first.is_some_and(|field| field.value.eq_ignore_ascii_case(b"websocket"));
    let plain = asked && second.is_none() && method == "GET" && !old && framing == Framing::None;
    if !(terms.websocket && websocket && plain) {
        let text =
            if websocket && !terms.websocket { "the rule has no +ws" } else { "an upgrade other than to a websocket" };
        return Err(refusal(403, Reason::Upgrade, text));
    }
    Ok(true)
}

fn put_fields(out: &mut Vec<u8>, fields: &[Field<'_>], options: &[String]) {
    for field in fields {
        let dropped = HOP_BY_HOP.iter().any(|name| field.is(name)) || options.iter().any(|option| field.is(option));
        if !dropped {
            for part in [field.name.as_bytes(), b": ", field.value, b"\r\n"] {
                out.extend_from_slice(part);
            }
        }
    }
}

fn put_framing(out: &mut Vec<u8>, framing: Framing) {
    match framing {
        Framing::Length(length) => out.extend_from_slice(format!("Content-Length: {length}\r\n").as_bytes()),
        Framing::Chunked => out.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
        Framing::None | Framing::UntilEnd => {}
    }
}
