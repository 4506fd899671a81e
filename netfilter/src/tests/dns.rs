//! Rows 36 to 41 and 51 to 56: DNS.

use std::net::Ipv4Addr;
use std::time::Duration;

use netfilter_control::{Name, Policy, Reason, Record};
use netfilter_policy::Compiler;
use proptest::prelude::*;

use super::frames::dns_question;
use crate::dns::responder::answer;
use crate::log::Log;
use crate::names::Names;

fn policy(rules: &str) -> Policy {
    let mut compiler = Compiler::default();
    compiler.rules("test", rules).unwrap();
    compiler.finish().unwrap()
}

struct Guest {
    policy: Policy,
    names: Names,
    log: Log,
}

impl Guest {
    fn new(rules: &str) -> Self {
        Self { policy: policy(rules), names: Names::default(), log: Log::default() }
    }

    fn send(&mut self, message: &[u8]) -> Option<Vec<u8>> {
        answer(message, &self.policy, &mut self.names, &mut self.log, Duration::ZERO)
    }

    fn ask(&mut self, name: &str, qtype: u16) -> Reply {
        Reply::read(&self.send(&dns_question(name, qtype, true)).expect(name))
    }

    fn denial(&mut self) -> Option<Reason> {
        let mut last = None;
        while let Some(record) = self.log.front() {
            if let Record::DnsDenied { reason, .. } = record {
                last = Some(*reason);
            }
            self.log.sent();
        }
        last
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Reply {
    code: u8,
    counts: [u16; 4],
    address: Option<Ipv4Addr>,
    text: String,
}

impl Reply {
    fn read(reply: &[u8]) -> Self {
        assert_eq!(&reply[..2], &[0xab, 0xcd]);
        assert_eq!(reply[2] & 0xfe, 0x80, "an answer, with no flag that is not ours");
        assert!(reply.len() <= 512);
        let counts = std::array::from_fn(|n| u16::from_be_bytes([reply[4 + 2 * n], reply[5 + 2 * n]]));
        let address = reply.windows(12).find(|w| w[..10] == [0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60]).map(|w| {
            let at = w.as_ptr() as usize - reply.as_ptr() as usize + 12;
            Ipv4Addr::new(reply[at], reply[at + 1], reply[at + 2], reply[at + 3])
        });
        let text = reply.windows(6).position(|w| w[..2] == [0, 15] && w[4..] == [0, 15]).map(|at| &reply[at + 6..]);
        let text = String::from_utf8(text.unwrap_or_default().to_vec()).unwrap();
        Self { code: reply[3] & 0x0f, counts, address, text }
    }
}

const A: u16 = 1;
const AAAA: u16 = 28;

#[test]
fn an_allowed_name_has_an_address_of_its_own() {
    let mut guest = Guest::new("api.example.com,*.example.org");
    let first = guest.ask("api.example.com", A);
    assert_eq!((first.code, first.counts, first.address), (0, [1, 1, 0, 1], Some([198, 18, 1, 1].into())));
    let second = guest.ask("x.example.org", A);
    assert_eq!(second.address, Some([198, 18, 1, 2].into()));
    assert_eq!(guest.ask("API.example.COM", A).address, first.address);
    let records = guest.log.front().cloned();
    assert!(matches!(records, Some(Record::DnsAnswered { name, .. }) if name == "api.example.com"));
    let plain = guest.send(&dns_question("api.example.com", A, false)).unwrap();
    assert_eq!(Reply::read(&plain).counts, [1, 1, 0, 0], "no EDNS unless it was asked with");
}

#[test]
fn row_9_ipv6_addresses_do_not_exist_and_the_name_does() {
    let mut guest = Guest::new("api.example.com");
    let reply = guest.ask("api.example.com", AAAA);
    assert_eq!((reply.code, reply.counts), (0, [1, 0, 1, 1]), "NOERROR, nothing, with a start of authority");
}

#[test]
fn row_36_a_denied_zone_is_answered_here() {
    let mut guest = Guest::new("api.example.com");
    let reply = guest.ask("6461746120676f6573206f7574.evil.test", A);
    assert_eq!((reply.code, reply.counts), (3, [1, 0, 1, 1]));
    assert!(reply.text.contains("denied by sandbox policy"), "{}", reply.text);
    assert_eq!(guest.denial(), Some(Reason::NoRule));
    assert_eq!(guest.ask("api.example.com.evil.test", A).code, 3);
    assert!(guest.names.all().is_empty());
}

#[test]
fn row_37_a_wildcard_is_no_tunnel() {
    let mut guest = Guest::new("*.example.com");
    let answered = (0..2_000).filter(|n| guest.ask(&format!("d{n}.example.com"), A).code == 0).count();
    assert_eq!(answered, 64);
    assert!(guest.ask("one-more.example.com", A).text.contains("too many new names"));

    let mut guest = Guest::new("*.example.com");
    for (name, unusual) in
        [("a.example.com", false), ("a.b.c.example.com", true), (&format!("{}.example.com", "a".repeat(41)), true)]
    {
        guest.ask(name, A);
        let Some(Record::DnsAnswered { unusual: found, .. }) = guest.log.front().cloned() else { panic!("{name}") };
        guest.log.sent();
        assert_eq!(found, unusual, "{name}");
    }
}

#[test]
fn rows_38_and_39_no_other_type_has_data() {
    let mut guest = Guest::new("api.example.com");
    for qtype in (0..=300).chain((301..=u16::MAX).step_by(97)) {
        let reply = guest.ask("api.example.com", qtype);
        let expected = match qtype {
            A => (0, 1),
            251..=255 => (4, 0),
            _ => (0, 0),
        };
        assert_eq!((reply.code, reply.counts[1]), expected, "type {qtype}");
    }
    assert_eq!(guest.ask("evil.test", 16).code, 3);
}

#[test]
fn row_41_public_doh_services_need_a_rule_of_their_own() {
    let mut guest = Guest::new(".cloudflare-dns.com");
    let reply = guest.ask("mozilla.cloudflare-dns.com", A);
    assert_eq!(reply.code, 3);
    assert_eq!(guest.denial(), Some(Reason::PublicDoh));
}

#[test]
fn row_53_malformed_questions_get_an_error_or_nothing() {
    let mut guest = Guest::new("api.example.com");
    let good = dns_question("api.example.com", A, true);
    for length in 0..good.len() {
        let reply = guest.send(&good[..length]);
        assert_eq!(reply.is_some(), length >= 4, "cut to {length}");
        assert!(reply.is_none_or(|reply| reply[3] & 15 == 1), "cut to {length}");
    }
    let mut code = |at: usize, bytes: &[u8]| {
        let mut message = good.clone();
        message[at..at + bytes.len()].copy_from_slice(bytes);
        guest.send(&message).map(|reply| reply[3] & 15)
    };
    assert_eq!(code(2, &[0x81]), None, "an answer is not answered");
    assert_eq!(code(2, &[0x09]), Some(4), "another operation");
    assert_eq!(code(2, &[0x03]), Some(1), "truncated");
    for counts in [[0, 0], [0, 2], [0xff, 0xff]] {
        assert_eq!(code(4, &counts), Some(1), "questions");
    }
    assert_eq!(code(7, &[1]), Some(1), "an answer in a question");
    assert_eq!(code(9, &[1]), Some(1), "an authority in a question");
    assert_eq!(code(11, &[2]), Some(1), "two additional records");
    assert_eq!(code(11, &[0]), Some(1), "bytes after the question");
    assert_eq!(code(12, &[0xc0, 12]), Some(1), "a compression loop");
    assert_eq!(code(12, &[0x40]), Some(1), "an extended label");
    for byte in [0, b' ', b'.', b'*', b'/', b'\\', b'@', 0x80, 0xff] {
        assert_eq!(code(14, &[byte]), Some(1), "{byte:#x} in a label");
    }
    let end = good.len();
    assert_eq!(code(end - 13, &[0, 3]), Some(4), "class CHAOS");
    assert_eq!(code(end - 5, &[1]), Some(0), "EDNS version 1: the code's low bits");
    assert_eq!(code(end - 10, &[0, 42]), Some(1), "an additional record that is no OPT");
    assert_eq!(code(end - 2, &[0, 4]), Some(1), "an option past the end");
    let long: Vec<String> = (0..5).map(|_| "a".repeat(60)).collect();
    assert_eq!(guest.send(&dns_question(&long.join("."), A, true)).map(|reply| reply[3] & 15), Some(1));
}

#[test]
fn row_54_names_have_one_form() {
    let mut guest = Guest::new("api.example.com");
    let mixed = guest.send(&dns_question("aPi.ExAmPlE.cOm", A, true)).unwrap();
    assert!(mixed.windows(4).any(|window| window == b"aPi\x07"), "the question is repeated as it was asked");
    assert_eq!(Reply::read(&mixed).code, 0);
    assert_eq!(guest.ask("", A).code, 5, "the root");
    assert_eq!(guest.ask("api", A).code, 3, "a single label");
    assert_eq!(guest.ask("example.com", A).code, 3);
    assert_eq!(guest.ask("1.2.3.4", A).code, 3);
    assert_eq!(guest.denial(), Some(Reason::BadName));
}

#[test]
fn row_56_special_names_do_not_exist() {
    let mut guest = Guest::new("api.example.com");
    for name in [
        "localhost",
        "x.localhost",
        "printer.local",
        "metadata.google.internal",
        "host.docker.internal",
        "1.0.18.198.in-addr.arpa",
        "wpad",
        "ipv4only.arpa",
    ] {
        assert_eq!(guest.ask(name, A).code, 3, "{name}");
    }
    // Even a policy that did not come from the compiler cannot make them resolve.
    let mut rules = policy("api.example.com");
    let name = Name::parse("metadata.google.internal").unwrap();
    rules.rules[0].target = netfilter_control::Target::Exact(name);
    guest.policy = rules;
    assert_eq!(guest.ask("metadata.google.internal", A).code, 3);
}

#[test]
fn row_126_a_denied_name_is_quoted_safely() {
    let mut guest = Guest::new("api.example.com");
    guest.ask("-evil-.test", A);
    let Some(Record::DnsDenied { name, .. }) = guest.log.front() else { panic!() };
    assert_eq!(name, "-evil-.test");
}

proptest! {
    #[test]
    fn no_message_panics_or_gets_a_false_address(message in prop::collection::vec(any::<u8>(), 0..120)) {
        let mut guest = Guest::new("api.example.com");
        let _ = guest.send(&message);
        prop_assert!(guest.names.all().is_empty() || message.windows(4).any(|w| w.eq_ignore_ascii_case(b"\x03api")));
    }

    #[test]
    fn a_changed_question_gets_a_whole_answer_or_none(at in 0usize..44, value in any::<u8>()) {
        let mut message = dns_question("api.example.com", A, true);
        let at = at % message.len();
        message[at] = value;
        let mut guest = Guest::new("api.example.com");
        if let Some(reply) = guest.send(&message) {
            prop_assert!(reply.len() >= 12 && reply[2] & 0x80 != 0);
        }
    }
}
