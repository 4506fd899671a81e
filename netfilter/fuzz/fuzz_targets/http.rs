//! HTTP: what is passed on is understood in one way, is for the one host, and does not depend on how it arrived.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netfilter::http::{Connection, head};
use netfilter_control::{Name, Terms};

/// Plays a connection: the bytes before the first 0xff are the guest's, the others the server's.
fn play(bytes: &[u8], step: usize, terms: &Terms) -> (Vec<u8>, Vec<u8>) {
    let cut = bytes.iter().position(|byte| *byte == 0xff).unwrap_or(bytes.len());
    let (guest, server) = bytes.split_at(cut);
    let mut connection = Connection::new(Name::parse("web.example.com").unwrap(), 80, terms.clone());
    let mut feed = |bytes: &[u8], take: &mut dyn FnMut(&mut Connection, &[u8]) -> usize| {
        let mut rest = bytes;
        while !rest.is_empty() {
            let taken = take(&mut connection, &rest[..rest.len().min(step)]);
            assert!(taken <= rest.len().min(step));
            if taken == 0 {
                break;
            }
            rest = &rest[taken..];
        }
    };
    feed(guest, &mut |connection, part| connection.from_guest(part));
    feed(server, &mut |connection, part| connection.from_upstream(part));
    connection.upstream_ended();
    (connection.to_upstream().clone(), connection.to_guest().clone())
}

fuzz_target!(|bytes: &[u8]| {
    let terms = Terms { websocket: true, ..Terms::default() };
    let (up, _) = play(bytes, bytes.len().max(1), &terms);
    if let Some(end) = up.windows(4).position(|window| window == b"\r\n\r\n") {
        let head = &up[..end + 4];
        let name = Name::parse("web.example.com").unwrap();
        let again = head::request(head, &name, 80, &terms).expect("what was passed on is good");
        assert_eq!(again.head, head, "written anew once more it is the same");
    }
    let (pieces, _) = play(bytes, 1 + bytes.len() % 7, &terms);
    // Chunks may be cut elsewhere; heads are the same.
    let head_of = |up: &[u8]| up.windows(4).position(|window| window == b"\r\n\r\n").map(|end| up[..end].to_vec());
    assert_eq!(head_of(&up), head_of(&pieces));
});
