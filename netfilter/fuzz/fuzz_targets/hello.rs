//! TLS hellos: what passes names the host that was dialled, however it arrives.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netfilter::tls::{Hello, Verdict};
use netfilter_control::{Name, Terms};

fn judge(bytes: &[u8], step: usize) -> Verdict {
    let name = Name::parse("api.example.com").unwrap();
    let mut hello = Hello::default();
    for part in bytes.chunks(step) {
        match hello.read(part, &name, &Terms::default()) {
            Verdict::More => {}
            verdict => return verdict,
        }
    }
    Verdict::More
}

fuzz_target!(|bytes: &[u8]| {
    let whole = judge(bytes, bytes.len().max(1));
    if let Verdict::Pass { server_name, .. } = &whole {
        let name = server_name.as_deref().expect("a rule without +nosni");
        assert!(name.trim_end_matches('.').eq_ignore_ascii_case("api.example.com"), "{name}");
    }
    let pieces = judge(bytes, 1 + usize::from(bytes.first().copied().unwrap_or(0) % 17));
    let passes = |verdict: &Verdict| matches!(verdict, Verdict::Pass { .. });
    assert_eq!(passes(&whole), passes(&pieces));
});
