//! Rows 28, 41, 59 to 70: the first flight of TLS.

use std::time::Duration;

use netfilter_control::{Name, Reason, Record, Terms};
use proptest::prelude::*;
use smoltcp::socket::tcp::State;

use super::net::Net;
use crate::tls::{Hello, MAX_HELLO, Verdict};

fn vector16(body: &[u8]) -> Vec<u8> {
    [&u16::try_from(body.len()).unwrap().to_be_bytes()[..], body].concat()
}

fn extension(kind: u16, body: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &vector16(body)].concat()
}

fn server_names(entries: &[(u8, &[u8])]) -> Vec<u8> {
    let list: Vec<u8> = entries.iter().flat_map(|(kind, name)| [&[*kind][..], &vector16(name)].concat()).collect();
    extension(0, &vector16(&list))
}

fn alpn(offers: &[&[u8]]) -> Vec<u8> {
    let list: Vec<u8> =
        offers.iter().flat_map(|offer| [&[u8::try_from(offer.len()).unwrap()][..], offer].concat()).collect();
    extension(16, &vector16(&list))
}

/// A ClientHello of TLS 1.3, with these extensions besides the ones that every client sends.
pub(super) fn handshake(extensions: &[Vec<u8>]) -> Vec<u8> {
    let mut all = vec![
        extension(10, &vector16(&[0, 29])),
        extension(13, &vector16(&[4, 3, 8, 4, 4, 1])),
        extension(43, &[2, 3, 4]),
        extension(51, &vector16(&[&[0, 29, 0, 32][..], &[7; 32]].concat())),
    ];
    all.extend_from_slice(extensions);
    let mut body = vec![3, 3];
    body.extend_from_slice(&[9; 32]);
    body.push(0);
    body.extend(vector16(&[0x13, 1, 0x13, 2, 0xc0, 0x2f]));
    body.extend_from_slice(&[1, 0]);
    body.extend(vector16(&all.concat()));
    let length = u32::try_from(body.len()).unwrap().to_be_bytes();
    [&[1, length[1], length[2], length[3]][..], &body].concat()
}

/// A handshake in records of at most `size` bytes.
pub(super) fn records(handshake: &[u8], size: usize) -> Vec<u8> {
    handshake.chunks(size).flat_map(|part| [&[22, 3, 1][..], &vector16(part)].concat()).collect()
}

pub(super) fn hello(name: &str) -> Vec<u8> {
    records(&handshake(&[server_names(&[(0, name.as_bytes())])]), 16_000)
}

fn judge(bytes: &[u8], step: usize, terms: &Terms) -> Verdict {
    let name = Name::parse("api.example.com").unwrap();
    let mut reader = Hello::default();
    for part in bytes.chunks(step) {
        let verdict = reader.read(part, &name, terms);
        if verdict != Verdict::More {
            return verdict;
        }
    }
    Verdict::More
}

fn reason(bytes: &[u8]) -> Option<Reason> {
    match judge(bytes, 5000, &Terms::default()) {
        Verdict::Refuse(reason, _) => Some(reason),
        _ => None,
    }
}

fn pass() -> Verdict {
    Verdict::Pass { server_name: Some("api.example.com".into()), alpn: Vec::new() }
}

#[test]
fn rows_63_64_a_hello_in_any_pieces_is_one_hello() {
    let whole = handshake(&[server_names(&[(0, b"api.example.com")])]);
    for record in [1, 5, 64, 200, 16_000] {
        let bytes = records(&whole, record);
        for step in [1, 2, 5, 63, 1460, 20_000] {
            assert_eq!(judge(&bytes, step, &Terms::default()), pass(), "records of {record}, steps of {step}");
        }
        assert_eq!(judge(&bytes[..bytes.len() - 1], 1, &Terms::default()), Verdict::More);
    }
    let other = records(&handshake(&[server_names(&[(0, b"evil.example.com")])]), 1);
    assert_eq!(reason(&other), Some(Reason::ServerNameMismatch));
}

#[test]
fn row_65_a_large_hello_is_read_and_an_endless_one_is_not() {
    let key_share = extension(0x6399, &vec![7; 16_000]);
    let large = handshake(&[server_names(&[(0, b"api.example.com")]), key_share]);
    assert_eq!(judge(&records(&large, 4000), 1460, &Terms::default()), pass());
    let endless = [&[1, 0, 0xff, 0xff][..], &vec![0; 60_000]].concat();
    assert!(matches!(judge(&records(&endless, 16_000), 1460, &Terms::default()), Verdict::Refuse(Reason::NotTls, _)));
    let fits = MAX_HELLO;
    assert!(fits >= 16 << 10);
}

#[test]
fn row_59_a_hello_without_a_name_needs_the_rule() {
    let nameless = records(&handshake(&[]), 16_000);
    assert_eq!(reason(&nameless), Some(Reason::NoServerName));
    let terms = Terms { nameless_hello: true, ..Terms::default() };
    assert_eq!(judge(&nameless, 100, &terms), Verdict::Pass { server_name: None, alpn: Vec::new() });
    assert!(matches!(judge(&hello("evil.example.com"), 100, &terms), Verdict::Refuse(Reason::ServerNameMismatch, _)));
}

#[test]
fn rows_60_61_66_the_name_is_the_name_that_was_dialled() {
    for name in ["api.example.com", "API.Example.COM"] {
        assert!(matches!(judge(&hello(name), 100, &Terms::default()), Verdict::Pass { .. }), "{name}");
    }
    for name in ["other.example.com", "example.com", "xapi.example.com", "api.example.com.evil.test"] {
        assert_eq!(reason(&hello(name)), Some(Reason::ServerNameMismatch), "{name}");
    }
    for name in
        [&b"api.example.com\0.evil.test"[..], b"api.example\xff.com", b"", b"api example.com", b"api..example.com"]
    {
        assert!(reason(&records(&handshake(&[server_names(&[(0, name)])]), 16_000)).is_some(), "{name:?}");
    }
    // An address is no name.
    assert_eq!(reason(&hello("93.184.216.34")), Some(Reason::ServerNameMismatch));
    let terms = Terms { nameless_hello: true, ..Terms::default() };
    assert!(matches!(judge(&hello("93.184.216.34"), 100, &terms), Verdict::Refuse(Reason::ServerNameMismatch, _)));
    let lists: [&[(u8, &[u8])]; 4] = [
        &[(0, b"api.example.com"), (0, b"evil.test")],
        &[(0, b"evil.test"), (0, b"api.example.com")],
        &[(1, b"api.example.com")],
        &[(0, b"api.example.com"), (1, b"evil.test")],
    ];
    for list in lists {
        assert!(reason(&records(&handshake(&[server_names(list)]), 16_000)).is_some(), "{list:?}");
    }
    let twice = [server_names(&[(0, b"api.example.com")]), server_names(&[(0, b"api.example.com")])];
    assert!(reason(&records(&handshake(&twice), 16_000)).is_some());
}

#[test]
fn row_62_an_encrypted_hello_needs_the_rule() {
    for kind in [0xfe0d, 0xffce] {
        let outer =
            [server_names(&[(0, b"api.example.com")]), extension(kind, &[0, 0, 1, 0, 1, 7, 0, 0, 0, 4, 1, 2, 3, 4])];
        let bytes = records(&handshake(&outer), 16_000);
        assert_eq!(reason(&bytes), Some(Reason::EncryptedHello), "{kind:#x}");
        let terms = Terms { encrypted_hello: true, ..Terms::default() };
        assert_eq!(judge(&bytes, 100, &terms), pass());
    }
}

#[test]
fn rows_28_68_what_is_no_tls_does_not_pass() {
    for bytes in [
        &b"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n"[..],
        b"SSH-2.0-OpenSSH_9\r\n",
        &[0x80, 0x2e, 1, 0, 2, 0, 0x15, 0, 0, 0, 0x10, 1, 0, 0x80, 2, 0, 0x80, 3, 0, 0x80, 4, 0, 0x80],
        &[22, 3, 1, 0, 0, 22, 3, 1, 0, 0],
        &[23, 3, 3, 0, 4, 1, 2, 3, 4],
        &[21, 3, 3, 0, 2, 1, 0],
        &[22, 3, 1, 0xff, 0xff],
        &[22, 3, 1, 0, 4, 2, 0, 0, 0],
    ] {
        let verdict = judge(bytes, 1, &Terms::default());
        assert!(!matches!(verdict, Verdict::Pass { .. }), "{bytes:?}");
        if bytes.len() > 5 {
            assert!(matches!(verdict, Verdict::Refuse(Reason::NotTls, _)), "{bytes:?}: {verdict:?}");
        }
    }
}

#[test]
fn row_70_offered_protocols_are_recorded_and_may_be_limited() {
    let offers =
        |offers: &[&[u8]]| records(&handshake(&[server_names(&[(0, b"api.example.com")]), alpn(offers)]), 16_000);
    let Verdict::Pass { alpn: seen, .. } = judge(&offers(&[b"h2", b"x\n\x1b"]), 100, &Terms::default()) else {
        panic!()
    };
    assert_eq!(seen, ["h2", "x\\x0a\\x1b"]);
    let terms = Terms { alpn: vec!["http/1.1".into()], ..Terms::default() };
    assert!(matches!(judge(&offers(&[b"http/1.1"]), 100, &terms), Verdict::Pass { .. }));
    for refused in [offers(&[b"h2", b"http/1.1"]), offers(&[b"h2"]), hello("api.example.com")] {
        assert!(matches!(judge(&refused, 100, &terms), Verdict::Refuse(Reason::Alpn, _)));
    }
}

#[test]
fn a_flow_passes_the_very_bytes_that_were_judged() {
    let mut net = Net::new("*.example.com");
    let flow = net.dial("api.example.com", 443);
    let bytes = [hello("api.example.com"), b"early data behind the hello".to_vec()].concat();
    net.answer(b"a server that speaks first");
    for part in bytes.chunks(7) {
        let before = net.received().len();
        net.write(flow, part);
        assert!(before == 0 || net.received().len() == before + part.len(), "nothing before all was judged");
    }
    assert_eq!(net.received(), bytes);
    assert_eq!(net.read(flow), b"a server that speaks first");
    let records = net.records();
    assert!(
        records.iter().any(
            |record| matches!(record, Record::FlowTls { server_name: Some(name), .. } if name == "api.example.com")
        )
    );

    // Another name, though it is allowed as well.
    net.lookup("other.example.com").unwrap();
    let flow = net.dial("api.example.com", 443);
    net.write(flow, &hello("other.example.com"));
    assert_eq!(net.state(flow), State::Closed);
    assert!(net.received().is_empty());
    assert_eq!(net.refusal(), Some(Reason::ServerNameMismatch));
}

#[test]
fn row_21_a_slow_hello_meets_an_absolute_deadline() {
    let mut net = Net::new("api.example.com");
    let flow = net.dial("api.example.com", 443);
    for byte in hello("api.example.com") {
        net.write(flow, &[byte]);
        net.pass(Duration::from_millis(900));
    }
    assert_eq!(net.state(flow), State::Closed);
    assert_eq!(net.refusal(), Some(Reason::Slow));
    assert!(net.received().is_empty());
}

proptest! {
    #[test]
    fn no_bytes_panic_or_pass(bytes in prop::collection::vec(any::<u8>(), 0..300), step in 1usize..50) {
        let verdict = judge(&bytes, step, &Terms::default());
        prop_assert!(verdict == Verdict::More || matches!(verdict, Verdict::Refuse(..)), "it passed");
    }

    /// One changed byte never makes another name pass, and never differs by how the bytes arrive.
    #[test]
    fn a_changed_hello_is_judged_the_same_in_any_pieces(at in 0usize..400, value in any::<u8>(), step in 1usize..50) {
        let mut bytes = hello("api.example.com");
        let at = at % bytes.len();
        bytes[at] = value;
        let whole = judge(&bytes, bytes.len(), &Terms::default());
        let pieces = judge(&bytes, step, &Terms::default());
        let passes = |verdict: &Verdict| matches!(verdict, Verdict::Pass { .. });
        prop_assert_eq!(passes(&whole), passes(&pieces));
        if let Verdict::Pass { server_name, .. } = whole {
            prop_assert_eq!(server_name.map(|name| name.to_ascii_lowercase()), Some("api.example.com".to_owned()));
        }
    }
}
