//! Rows 47 and 53: answers of resolvers, as hostile as a guest's questions.

use std::net::IpAddr;

use netfilter_control::Name;
use proptest::prelude::*;

use crate::dns::qtype;
use crate::dns::reply::{MAX_ADDRESSES, Reply, question, read};

fn name() -> Name {
    Name::parse("api.example.com").unwrap()
}

fn wire(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in text.split('.') {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend_from_slice(label.as_bytes());
    }
    bytes.push(0);
    bytes
}

fn record(owner: &[u8], kind: u16, ttl: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = owner.to_vec();
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&[0, 1]);
    bytes.extend_from_slice(&ttl.to_be_bytes());
    bytes.extend_from_slice(&u16::try_from(data.len()).unwrap().to_be_bytes());
    bytes.extend_from_slice(data);
    bytes
}

fn reply(records: &[Vec<u8>]) -> Vec<u8> {
    let mut message = vec![0, 7, 0x81, 0x80, 0, 1, 0, u8::try_from(records.len()).unwrap(), 0, 0, 0, 0];
    message.extend(wire("api.example.com"));
    message.extend_from_slice(&[0, 1, 0, 1]);
    message.extend(records.concat());
    message
}

fn parse(message: &[u8]) -> Option<Reply> {
    read(message, 7, &name(), qtype::A)
}

fn addresses(list: &[[u8; 4]], ttl: u32) -> Option<Reply> {
    Some(Reply::Addresses(list.iter().map(|octets| IpAddr::from(*octets)).collect(), ttl))
}

#[test]
fn addresses_of_the_name_are_taken() {
    let owner = [0xc0, 12];
    let message = reply(&[record(&owner, 1, 300, &[1, 2, 3, 4]), record(&owner, 1, 60, &[5, 6, 7, 8])]);
    assert_eq!(parse(&message), addresses(&[[1, 2, 3, 4], [5, 6, 7, 8]], 60));
    assert_eq!(parse(&reply(&[])), addresses(&[], u32::MAX));
    let upper = record(&wire("API.example.COM"), 1, 9, &[1, 2, 3, 4]);
    assert_eq!(parse(&reply(&[upper])), addresses(&[[1, 2, 3, 4]], 9));
    let sent = question(7, &name(), qtype::A);
    assert_eq!(parse(&sent), None, "a question is no answer");
}

#[test]
fn row_47_aliases_are_followed_and_nothing_else_is() {
    let alias = |from: &str, to: &str| record(&wire(from), 5, 30, &wire(to));
    let address = |owner: &str| record(&wire(owner), 1, 300, &[1, 2, 3, 4]);
    let good = reply(&[address("c.test"), alias("b.test", "c.test"), alias("api.example.com", "b.test")]);
    assert_eq!(parse(&good), addresses(&[[1, 2, 3, 4]], 30));
    // Addresses of another name, which nobody asked for.
    assert_eq!(parse(&reply(&[address("evil.test")])), addresses(&[], u32::MAX));
    assert_eq!(parse(&reply(&[alias("api.example.com", "b.test"), address("api.example.com")])), addresses(&[], 30));
    let looping = reply(&[alias("api.example.com", "b.test"), alias("b.test", "api.example.com")]);
    assert_eq!(parse(&looping), Some(Reply::Failed));
    let names: Vec<String> = (0..10).map(|n| format!("n{n}.test")).collect();
    let mut chain = vec![alias("api.example.com", "n0.test")];
    chain.extend(names.windows(2).map(|pair| alias(&pair[0], &pair[1])));
    chain.push(address("n9.test"));
    assert_eq!(parse(&reply(&chain)), Some(Reply::Failed), "too long a chain");
}

#[test]
fn what_is_no_answer_to_the_question_is_passed_over() {
    let good = reply(&[record(&[0xc0, 12], 1, 300, &[1, 2, 3, 4])]);
    assert!(parse(&good).is_some());
    for (at, value) in [(1, 8), (2, 0x01), (2, 0x89), (5, 0), (5, 2), (13, b'x'), (28, 1), (30, 28), (32, 3)] {
        let mut other = good.clone();
        other[at] = value;
        assert_eq!(parse(&other), None, "byte {at}");
    }
    let mut truncated = good.clone();
    truncated[2] |= 2;
    assert_eq!(parse(&truncated), Some(Reply::Truncated));
    let mut code = good.clone();
    code[3] = 0x83;
    assert_eq!(parse(&code), Some(Reply::NoSuchName));
    code[3] = 0x82;
    assert_eq!(parse(&code), Some(Reply::Failed));
}

#[test]
fn row_53_hostile_answers_fail() {
    let good = reply(&[record(&[0xc0, 12], 1, 300, &[1, 2, 3, 4])]);
    for length in 0..good.len() {
        assert!(matches!(parse(&good[..length]), None | Some(Reply::Failed)), "cut to {length}");
    }
    for owner in [&[0xc0, 33][..], &[0xc0, 200], &[0xff, 0xff], &[1, b'a', 0xc0, 33], &[0x40, 1], &[1, b'.', 0]] {
        let message = reply(&[record(owner, 1, 300, &[1, 2, 3, 4])]);
        assert_eq!(parse(&message), Some(Reply::Failed), "{owner:?}");
    }
    for data in [&[1, 2, 3][..], &[1, 2, 3, 4, 5], &[]] {
        assert_eq!(parse(&reply(&[record(&[0xc0, 12], 1, 300, data)])), Some(Reply::Failed));
    }
    let many: Vec<Vec<u8>> = (0..200u8).map(|n| record(&[0xc0, 12], 1, 300, &[1, 2, 3, n])).collect();
    let Some(Reply::Addresses(list, _)) = parse(&reply(&many)) else { panic!() };
    assert_eq!(list.len(), MAX_ADDRESSES);
}

proptest! {
    #[test]
    fn no_answer_panics(tail in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut message = reply(&[]);
        message[7] = 20;
        message.extend(tail);
        let _ = parse(&message);
    }
}
