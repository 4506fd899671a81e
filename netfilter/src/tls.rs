//! The first flight of TLS: its hello must name the host that was dialled.
//!
//! rustls reads the hello, over however many records and segments it comes. What rustls does not tell (whether there is
//! an encrypted inner hello) is read from the same bytes here; both must see the same name.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use netfilter_control::{Name, Reason, Terms, quote};
use rustls::server::Acceptor;

use crate::wire::Reader;

/// Most bytes of a hello, with its records. Post-quantum key shares make about 1.8 KB.
pub const MAX_HELLO: usize = 32 << 10;

/// What is known of a hello.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Not all of it is there.
    More,
    /// It may pass.
    Pass {
        /// Its server name.
        server_name: Option<String>,
        /// The protocols that it offers, quoted.
        alpn: Vec<String>,
    },
    /// It must not pass.
    Refuse(Reason, String),
}

/// Reads one hello.
pub struct Hello {
    acceptor: Acceptor,
    /// The payloads of its records.
    handshake: Vec<u8>,
    /// Bytes of the flow that were read.
    seen: usize,
    /// What is left of the current record, or the part of its header that is there.
    record: Record,
}

#[derive(Debug, Clone, Copy)]
enum Record {
    Header([u8; 5], usize),
    Payload(usize),
}

impl std::fmt::Debug for Hello {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hello").field("seen", &self.seen).finish_non_exhaustive()
    }
}

impl Default for Hello {
    fn default() -> Self {
        Self { acceptor: Acceptor::default(), handshake: Vec::new(), seen: 0, record: Record::Header([0; 5], 0) }
    }
}

impl Hello {
    /// Bytes of the flow that were read so far.
    pub fn seen(&self) -> usize {
        self.seen
    }

    /// Reads on. `bytes` follow what was read before; bytes after the hello are not looked at.
    pub fn read(&mut self, bytes: &[u8], name: &Name, terms: &Terms) -> Verdict {
        let mut rest = bytes;
        while !rest.is_empty() {
            // One record at a time: the hello is judged with its last byte, whatever comes behind it.
            let taken = self.next_record_part(rest);
            let (part, tail) = rest.split_at_checked(taken).unwrap_or((rest, &[]));
            rest = tail;
            self.seen = self.seen.saturating_add(part.len());
            let mut unread = part;
            while !unread.is_empty() {
                match self.acceptor.read_tls(&mut unread) {
                    Ok(0) | Err(_) => return Verdict::Refuse(Reason::NotTls, "its records do not fit".to_owned()),
                    Ok(_) => {}
                }
            }
            self.keep(part);
            match self.acceptor.accept() {
                Ok(None) => {}
                Ok(Some(accepted)) => {
                    let hello = accepted.client_hello();
                    let alpn: Vec<Vec<u8>> =
                        hello.alpn().map(|offers| offers.map(<[u8]>::to_vec).collect()).unwrap_or_default();
                    return self.judge(hello.server_name(), &alpn, name, terms);
                }
                Err((error, _)) => return Verdict::Refuse(Reason::NotTls, quote(error.to_string().as_bytes())),
            }
            if self.seen > MAX_HELLO {
                return Verdict::Refuse(Reason::NotTls, format!("a hello of over {MAX_HELLO} bytes"));
            }
        }
        Verdict::More
    }

    /// How many of these bytes belong to the current record's header or payload.
    fn next_record_part(&self, bytes: &[u8]) -> usize {
        let wanted = match self.record {
            Record::Header(_, have) => 5usize.saturating_sub(have),
            Record::Payload(left) => left,
        };
        wanted.min(bytes.len()).max(1)
    }

    /// Follows the records (RFC 8446, 5.1): type, version, length, payload.
    fn keep(&mut self, part: &[u8]) {
        self.record = match self.record {
            Record::Header(mut header, have) => {
                let end = have.saturating_add(part.len());
                if let Some(slot) = header.get_mut(have..end) {
                    slot.copy_from_slice(part);
                }
                let [_, _, _, high, low] = header;
                match (end >= 5, usize::from(u16::from_be_bytes([high, low]))) {
                    (true, 0) => Record::Header([0; 5], 0),
                    (true, length) => Record::Payload(length),
                    (false, _) => Record::Header(header, end),
                }
            }
            Record::Payload(left) => {
                self.handshake.extend_from_slice(part);
                match left.saturating_sub(part.len()) {
                    0 => Record::Header([0; 5], 0),
                    left => Record::Payload(left),
                }
            }
        };
    }

    fn judge(&self, server_name: Option<&str>, alpn: &[Vec<u8>], name: &Name, terms: &Terms) -> Verdict {
        let Some(extensions) = extensions(&self.handshake) else {
            return Verdict::Refuse(Reason::NotTls, "its extensions cannot be read".to_owned());
        };
        if extensions.encrypted && !terms.encrypted_hello {
            return Verdict::Refuse(Reason::EncryptedHello, "the rule has no +ech".to_owned());
        }
        match (server_name, extensions.server_name) {
            (None, None) if terms.nameless_hello => {}
            (None, None) => return Verdict::Refuse(Reason::NoServerName, "the rule has no +nosni".to_owned()),
            (found, raw) => {
                let agrees = |text: Option<&[u8]>| {
                    let text = text.and_then(|bytes| std::str::from_utf8(bytes).ok());
                    text.is_some_and(|text| Name::parse(text).as_ref() == Ok(name))
                };
                if !agrees(found.map(str::as_bytes)) || !agrees(raw) {
                    // An address in the extension is no name to rustls.
                    return Verdict::Refuse(Reason::ServerNameMismatch, quote(raw.unwrap_or_default()));
                }
            }
        }
        let offers: Vec<String> = alpn.iter().take(16).map(|offer| quote(offer)).collect();
        let listed = |offer: &Vec<u8>| terms.alpn.iter().any(|listed| listed.as_bytes() == offer);
        if !terms.alpn.is_empty() && (alpn.is_empty() || !alpn.iter().all(listed)) {
            return Verdict::Refuse(Reason::Alpn, offers.join(" "));
        }
        Verdict::Pass { server_name: server_name.map(String::from), alpn: offers }
    }
}

/// What is read here of a hello's extensions.
struct Extensions<'h> {
    server_name: Option<&'h [u8]>,
    encrypted: bool,
}

/// Walks a ClientHello (RFC 8446, 4.1.2) to its extensions. `None` if it does not hold together, or has two names.
fn extensions(handshake: &[u8]) -> Option<Extensions<'_>> {
    const SERVER_NAME: u16 = 0;
    const ENCRYPTED_CLIENT_HELLO: u16 = 0xfe0d;
    const ENCRYPTED_SERVER_NAME: u16 = 0xffce;
    let mut reader = Reader::new(handshake);
    let [kind, a, b, c] = reader.array()?;
    let length = usize::try_from(u32::from_be_bytes([0, a, b, c])).ok()?;
    let mut hello = Reader::new(reader.take(length)?);
    let _version_and_random: [u8; 34] = hello.array()?;
    let session = hello.u8()?;
    hello.take(usize::from(session))?;
    let suites = hello.u16()?;
    hello.take(usize::from(suites))?;
    let compressions = hello.u8()?;
    hello.take(usize::from(compressions))?;
    let mut found = Extensions { server_name: None, encrypted: false };
    if kind != 1 {
        return None;
    }
    if hello.is_empty() {
        return Some(found);
    }
    let length = hello.u16()?;
    let mut list = Reader::new(hello.take(usize::from(length))?);
    while !list.is_empty() {
        let (kind, length) = (list.u16()?, list.u16()?);
        let body = list.take(usize::from(length))?;
        match kind {
            SERVER_NAME => {
                let first = found.server_name.is_none();
                found.server_name = Some(one_server_name(body).filter(|_| first)?);
            }
            ENCRYPTED_CLIENT_HELLO | ENCRYPTED_SERVER_NAME => found.encrypted = true,
            _ => {}
        }
    }
    hello.is_empty().then_some(found)
}

/// RFC 6066, 3: a list, in which there is one name of the one type that was ever defined.
fn one_server_name(body: &[u8]) -> Option<&[u8]> {
    let mut reader = Reader::new(body);
    let length = reader.u16()?;
    let mut list = Reader::new(reader.take(usize::from(length))?);
    let (kind, length) = (list.u8()?, list.u16()?);
    let name = list.take(usize::from(length))?;
    (kind == 0 && list.is_empty() && reader.is_empty()).then_some(name)
}
