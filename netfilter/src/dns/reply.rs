//! Reading what a resolver answered to a question of ours. It may be as hostile as a guest.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netfilter_control::Name;

use super::{qtype, rcode};
use crate::wire::Reader;

/// Most addresses that are taken from one answer.
pub const MAX_ADDRESSES: usize = 16;
/// Most aliases that are followed.
const MAX_ALIASES: usize = 8;
/// Most records of an answer that are looked at.
const MAX_RECORDS: usize = 128;

/// What a resolver says of one name and type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// These addresses, perhaps none, for this many seconds.
    Addresses(Vec<IpAddr>, u32),
    /// The name does not exist.
    NoSuchName,
    /// It did not fit: ask over TCP.
    Truncated,
    /// The resolver cannot say.
    Failed,
}

/// A question for a resolver.
pub fn question(id: u16, name: &Name, qtype: u16) -> Vec<u8> {
    let mut message = id.to_be_bytes().to_vec();
    // Recursion desired; one question, one OPT record.
    message.extend_from_slice(&[1, 0, 0, 1, 0, 0, 0, 0, 0, 1]);
    put_name(&mut message, name);
    message.extend_from_slice(&qtype.to_be_bytes());
    message.extend_from_slice(&[0, 1]);
    // 1,232 bytes fit everywhere without fragments.
    message.extend_from_slice(&[0, 0, 41, 0x04, 0xd0, 0, 0, 0, 0, 0, 0]);
    message
}

fn put_name(message: &mut Vec<u8>, name: &Name) {
    for label in name.labels() {
        message.push(u8::try_from(label.len()).unwrap_or(0));
        message.extend_from_slice(label.as_bytes());
    }
    message.push(0);
}

/// Reads the answer to [`question`]. `None` if it is not one: it is passed over, and the right one may still come.
pub fn read(message: &[u8], id: u16, name: &Name, qtype: u16) -> Option<Reply> {
    let mut reader = Reader::new(message);
    let found = reader.u16()?;
    let [high, low] = reader.array()?;
    let (questions, answers) = (reader.u16()?, reader.u16()?);
    let _authorities_additionals = reader.u32()?;
    if found != id || high & 0xf8 != 0x80 || questions != 1 {
        return None;
    }
    let asked = read_name(message, &mut reader)?;
    if !asked.eq_ignore_ascii_case(name.as_str().as_bytes()) || reader.u16()? != qtype || reader.u16()? != 1 {
        return None;
    }
    if high & 0x02 != 0 {
        return Some(Reply::Truncated);
    }
    Some(match low & 0x0f {
        rcode::NOERROR => read_answers(message, reader, answers, name, qtype).unwrap_or(Reply::Failed),
        rcode::NXDOMAIN => Reply::NoSuchName,
        _ => Reply::Failed,
    })
}

/// The addresses of the name that the chain of aliases ends at. Records about other names are passed over.
fn read_answers<'m>(message: &'m [u8], mut reader: Reader<'m>, count: u16, name: &Name, qtype: u16) -> Option<Reply> {
    let mut aliases: Vec<(Vec<u8>, Vec<u8>, u32)> = Vec::new();
    let mut addresses: Vec<(Vec<u8>, IpAddr, u32)> = Vec::new();
    for _ in 0..usize::from(count).min(MAX_RECORDS) {
        let owner = read_name(message, &mut reader)?.to_ascii_lowercase();
        let (kind, class, ttl) = (reader.u16()?, reader.u16()?, reader.u32()?);
        let length = usize::from(reader.u16()?);
        let mut data = Reader::new(reader.take(length)?);
        if class != 1 {
            continue;
        }
        match kind {
            qtype::CNAME => aliases.push((owner, read_name(message, &mut data)?.to_ascii_lowercase(), ttl)),
            qtype::A if qtype == qtype::A => {
                addresses.push((owner, IpAddr::V4(Ipv4Addr::from(data.array::<4>()?)), ttl));
            }
            qtype::AAAA if qtype == qtype::AAAA => {
                addresses.push((owner, IpAddr::V6(Ipv6Addr::from(data.array::<16>()?)), ttl));
            }
            _ => continue,
        }
        if !data.is_empty() {
            return None;
        }
    }
    let mut owner = name.as_str().as_bytes();
    let mut least = u32::MAX;
    for _ in 0..MAX_ALIASES {
        let Some((_, target, ttl)) = aliases.iter().find(|(from, ..)| from == owner) else { break };
        owner = target;
        least = least.min(*ttl);
    }
    if aliases.iter().any(|(from, ..)| from == owner) {
        return None;
    }
    let ours = addresses.into_iter().filter(|(from, ..)| from == owner).take(MAX_ADDRESSES);
    let (addresses, ttls): (Vec<IpAddr>, Vec<u32>) = ours.map(|(_, address, ttl)| (address, ttl)).unzip();
    Some(Reply::Addresses(addresses, ttls.into_iter().fold(least, u32::min)))
}

/// A name, with compression (RFC 1035, 4.1.4): each pointer must lead further back than the one before, so it ends.
/// Labels come back as they are, joined by dots; a label with a dot in it fails, since it would read as two.
fn read_name<'m>(message: &'m [u8], reader: &mut Reader<'m>) -> Option<Vec<u8>> {
    let mut name = Vec::new();
    let mut followed: Option<Reader<'_>> = None;
    let mut limit = message.len();
    loop {
        let current = followed.as_mut().unwrap_or(&mut *reader);
        let length = current.u8()?;
        match length {
            0 => return Some(name),
            1..=63 => {
                let label = current.take(usize::from(length))?;
                if label.contains(&b'.') {
                    return None;
                }
                if !name.is_empty() {
                    name.push(b'.');
                }
                name.extend_from_slice(label);
                if name.len() > netfilter_control::MAX_NAME {
                    return None;
                }
            }
            0xc0.. => {
                let target = usize::from(u16::from_be_bytes([length & 0x3f, current.u8()?]));
                if target >= limit {
                    return None;
                }
                limit = target;
                followed = Some(Reader::new(message.get(target..)?));
            }
            _ => return None,
        }
    }
}
