//! Reading one question, and writing its answer (RFC 1035, 6891, 8914).

use std::net::Ipv4Addr;

use netfilter_control::{MAX_LABEL, Name, NameError};

use super::{qtype, rcode};
use crate::wire::Reader;

/// Seconds for which a guest may keep an answer.
const TTL: u32 = 60;
/// Most bytes of the text that goes with a refusal.
const MAX_TEXT: usize = 100;

/// A question as the guest asked it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question<'m> {
    id: [u8; 2],
    recursion_desired: bool,
    /// Name, type and class as they were sent: the answer repeats them.
    raw: &'m [u8],
    edns: bool,
    /// The name. An error if it is well-formed and yet no host name; `Empty` is the root.
    pub name: Result<Name, NameError>,
    /// The type that is asked for.
    pub qtype: u16,
}

/// What a message from the guest is, if it is no question that can be answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unanswerable {
    /// It gets no answer: an answer itself, or not even a header.
    Silence,
    /// It gets this answer.
    Reply(Vec<u8>),
}

/// Reads a message that should be one question.
pub fn read(message: &[u8]) -> Result<Question<'_>, Unanswerable> {
    let mut reader = Reader::new(message);
    let (Some(id), Some([high, low])) = (reader.array(), reader.array()) else { return Err(Unanswerable::Silence) };
    // An answer must never be answered, or two servers could talk for ever.
    if high & 0x80 != 0 {
        return Err(Unanswerable::Silence);
    }
    let recursion_desired = high & 1 != 0;
    let failure = |code| Unanswerable::Reply(header(id, recursion_desired, code, [0; 4]));
    if high & 0x78 != 0 {
        return Err(failure(rcode::NOTIMP));
    }
    // Truncated and authoritative make no sense in a question; "authentic data" and "checking disabled" do.
    if high & 0x06 != 0 || low & 0x40 != 0 {
        return Err(failure(rcode::FORMERR));
    }
    let counts = [reader.u16(), reader.u16(), reader.u16(), reader.u16()];
    let [Some(1), Some(0), Some(0), Some(additional @ 0..=1)] = counts else {
        return Err(failure(rcode::FORMERR));
    };
    let body = reader.rest();
    let (name, mut reader) = read_name(Reader::new(body)).ok_or_else(|| failure(rcode::FORMERR))?;
    let (Some(qtype), Some(class)) = (reader.u16(), reader.u16()) else { return Err(failure(rcode::FORMERR)) };
    let raw = body.get(..body.len().saturating_sub(reader.rest().len())).unwrap_or_default();
    let edns = additional == 1;
    if edns {
        let version = read_opt(&mut reader).ok_or_else(|| failure(rcode::FORMERR))?;
        if version != 0 {
            // BADVERS is 16: 0 in the header, 1 in the OPT record.
            let mut reply = header(id, recursion_desired, 0, [0, 0, 0, 1]);
            put_opt(&mut reply, 1, None);
            return Err(Unanswerable::Reply(reply));
        }
    }
    if !reader.is_empty() {
        return Err(failure(rcode::FORMERR));
    }
    let question = Question { id, recursion_desired, raw, edns, name, qtype };
    // Zone transfers, mail types of 1987 and "any" are wishes for whole zones.
    if class != 1 || (qtype::IXFR..=255).contains(&qtype) {
        return Err(Unanswerable::Reply(question.refusal(rcode::NOTIMP, None)));
    }
    Ok(question)
}

/// A name without compression: there is nothing in a question that it could point at. `None` if a label has a byte that
/// no host name has, so that no two readers see different names.
fn read_name(mut reader: Reader<'_>) -> Option<(Result<Name, NameError>, Reader<'_>)> {
    let mut text = String::new();
    loop {
        let length = usize::from(reader.u8()?);
        if length == 0 {
            return Some((Name::parse(&text), reader));
        }
        if length > MAX_LABEL {
            return None;
        }
        let label = reader.take(length)?;
        if !label.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')) {
            return None;
        }
        if !text.is_empty() {
            text.push('.');
        }
        text.push_str(std::str::from_utf8(label).ok()?);
        // 255 bytes on the wire, with the root and the first label's length.
        if text.len() > netfilter_control::MAX_NAME {
            return None;
        }
    }
}

/// RFC 6891: the OPT record. Returns the version. Options are skipped, but must lie inside.
fn read_opt(reader: &mut Reader<'_>) -> Option<u8> {
    let root = reader.u8()?;
    let kind = reader.u16()?;
    let _payload_size = reader.u16()?;
    let [_extended, version, _flags, _] = reader.array()?;
    let length = usize::from(reader.u16()?);
    let mut options = Reader::new(reader.take(length)?);
    if root != 0 || kind != qtype::OPT {
        return None;
    }
    while !options.is_empty() {
        let _code = options.u16()?;
        let length = usize::from(options.u16()?);
        options.take(length)?;
    }
    Some(version)
}

impl Question<'_> {
    /// The name for a record, with whatever it holds made printable.
    pub fn shown(&self) -> String {
        match &self.name {
            Ok(name) => name.to_string(),
            Err(_) => netfilter_control::quote(&self.raw_text()),
        }
    }

    fn raw_text(&self) -> Vec<u8> {
        let mut reader = Reader::new(self.raw);
        let mut text = Vec::new();
        while let Some(length) = reader.u8().filter(|length| *length > 0) {
            if !text.is_empty() {
                text.push(b'.');
            }
            text.extend_from_slice(reader.take(usize::from(length)).unwrap_or_default());
        }
        if text.is_empty() { b".".to_vec() } else { text }
    }

    /// The answer with an address.
    pub fn address(&self, address: Ipv4Addr) -> Vec<u8> {
        let mut reply = self.begin(rcode::NOERROR, [1, 0]);
        // The name is the one at byte 12.
        reply.extend_from_slice(&[0xc0, 12]);
        reply.extend_from_slice(&qtype::A.to_be_bytes());
        reply.extend_from_slice(&1u16.to_be_bytes());
        reply.extend_from_slice(&TTL.to_be_bytes());
        reply.extend_from_slice(&4u16.to_be_bytes());
        reply.extend_from_slice(&address.octets());
        self.end(reply, None)
    }

    /// "The name exists and has no such record": NOERROR, nothing, and a start of authority that says how long.
    /// Some resolvers take NXDOMAIN for one type to mean that there is no address either.
    pub fn nothing(&self) -> Vec<u8> {
        let mut reply = self.begin(rcode::NOERROR, [0, 1]);
        put_soa(&mut reply);
        self.end(reply, None)
    }

    /// "The name does not exist", with the reason for those who read it (extended error 15, "blocked").
    pub fn denied(&self, text: &str) -> Vec<u8> {
        let mut reply = self.begin(rcode::NXDOMAIN, [0, 1]);
        put_soa(&mut reply);
        self.end(reply, Some(text))
    }

    /// Another refusal.
    pub fn refusal(&self, code: u8, text: Option<&str>) -> Vec<u8> {
        self.end(self.begin(code, [0, 0]), text)
    }

    fn begin(&self, code: u8, [answers, authorities]: [u16; 2]) -> Vec<u8> {
        let counts = [1, answers, authorities, u16::from(self.edns)];
        let mut reply = header(self.id, self.recursion_desired, code, counts);
        reply.extend_from_slice(self.raw);
        reply
    }

    fn end(&self, mut reply: Vec<u8>, text: Option<&str>) -> Vec<u8> {
        if self.edns {
            put_opt(&mut reply, 0, text);
        }
        reply
    }
}

fn header(id: [u8; 2], recursion_desired: bool, code: u8, counts: [u16; 4]) -> Vec<u8> {
    let mut reply = Vec::with_capacity(512);
    reply.extend_from_slice(&id);
    // An answer, recursion available.
    reply.extend_from_slice(&[0x80 | u8::from(recursion_desired), 0x80 | (code & 0x0f)]);
    counts.iter().for_each(|count| reply.extend_from_slice(&count.to_be_bytes()));
    reply
}

/// A start of authority of the root: it is above every name.
fn put_soa(reply: &mut Vec<u8>) {
    reply.push(0);
    reply.extend_from_slice(&qtype::SOA.to_be_bytes());
    reply.extend_from_slice(&1u16.to_be_bytes());
    reply.extend_from_slice(&TTL.to_be_bytes());
    // Server and mailbox are the root; serial 1, refresh, retry, expire, and how long "nothing" holds.
    reply.extend_from_slice(&22u16.to_be_bytes());
    reply.extend_from_slice(&[0, 0]);
    for number in [1, 3600, 600, 86_400, TTL] {
        reply.extend_from_slice(&number.to_be_bytes());
    }
}

fn put_opt(reply: &mut Vec<u8>, extended_rcode: u8, text: Option<&str>) {
    reply.push(0);
    reply.extend_from_slice(&qtype::OPT.to_be_bytes());
    reply.extend_from_slice(&1232u16.to_be_bytes());
    reply.extend_from_slice(&[extended_rcode, 0, 0, 0]);
    let text = text.map(|text| text.as_bytes().get(..MAX_TEXT).unwrap_or(text.as_bytes()));
    let length = |text: &[u8]| u16::try_from(text.len()).unwrap_or(0);
    match text {
        None => reply.extend_from_slice(&[0, 0]),
        Some(text) => {
            // RFC 8914: option 15, a code, a text. Code 15: "blocked".
            reply.extend_from_slice(&length(text).saturating_add(6).to_be_bytes());
            reply.extend_from_slice(&15u16.to_be_bytes());
            reply.extend_from_slice(&length(text).saturating_add(2).to_be_bytes());
            reply.extend_from_slice(&15u16.to_be_bytes());
            reply.extend_from_slice(text);
        }
    }
}
