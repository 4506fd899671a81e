//! Questions of the guest: an answer is whole, and an address is given to an allowed name alone.
#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use netfilter::dns::responder;
use netfilter::log::Log;
use netfilter::names::Names;

fuzz_target!(|message: &[u8]| {
    let policy = netfilter_fuzz::policy("api.example.com,*.wild.example");
    let (mut names, mut log) = (Names::default(), Log::default());
    if let Some(reply) = responder::answer(message, &policy, &mut names, &mut log, Duration::ZERO) {
        assert!(reply.len() >= 12 && reply.len() <= 512);
        assert_eq!(reply[..2], message[..2]);
        assert_eq!(reply[2] & 0xfe, 0x80);
        assert_eq!(reply[7] == 1, log.counters.dns_answered == 1);
    }
    for name in names.all() {
        assert!(name.as_str() == "api.example.com" || name.as_str().ends_with(".wild.example"), "{name}");
    }
});
