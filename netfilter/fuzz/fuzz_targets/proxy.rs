//! Answers of an upstream proxy: a tunnel is open after a whole answer of success alone, and none of its bytes is lost.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netfilter::flow::Dialled;
use netfilter::flow::proxy::{Handshake, Progress};
use netfilter::host::Host;
use netfilter_fuzz::{ORIGIN, World};

/// The tunnel's bytes, if one was opened.
fn ask(answer: &[u8], step: usize) -> Option<Vec<u8>> {
    let mut world = World::saying(answer, step);
    let token = world.connect((ORIGIN, 3128).into()).unwrap();
    let mut handshake = Handshake::new(&Dialled::Address([93, 184, 216, 34].into()), 443);
    match handshake.step(token, &mut world) {
        Progress::Open(early) => Some([early, world.unread(token)].concat()),
        Progress::Refused(why) => {
            let shown = |c: char| c.is_ascii_graphic() || c == ' ' || c == '…';
            assert!(!why.is_empty() && why.len() < 1024 && why.chars().all(shown), "{why}");
            None
        }
        Progress::Pending => panic!("it has ended, so there is nothing to wait for"),
    }
}

fuzz_target!(|answer: &[u8]| {
    let tunnel = ask(answer, usize::MAX);
    if let Some(bytes) = &tunnel {
        assert!(answer.starts_with(b"HTTP/1.") && answer.ends_with(bytes));
        let head = &answer[..answer.len() - bytes.len()];
        assert!(head.ends_with(b"\r\n\r\n") && head[8..10] == *b" 2");
        assert_eq!(head.windows(4).filter(|window| window == b"\r\n\r\n").count(), 1);
    }
    // At the limit of its length an answer may be too long or not, by how it came.
    if answer.len() < 8000 {
        assert_eq!(tunnel, ask(answer, 1 + answer.len() % 7));
    }
});
