//! Answers of resolvers, and files of saved networks.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netfilter::dns::reply::{MAX_ADDRESSES, Reply, read};
use netfilter::engine::{Engine, Saved};
use netfilter_control::Name;

fuzz_target!(|message: &[u8]| {
    let name = Name::parse("api.example.com").unwrap();
    for qtype in [1, 28] {
        if let Some(Reply::Addresses(addresses, _)) = read(message, 7, &name, qtype) {
            assert!(addresses.len() <= MAX_ADDRESSES);
            assert!(addresses.iter().all(|address| address.is_ipv4() == (qtype == 1)));
        }
    }
    if let Ok(saved) = serde_json::from_slice::<Saved>(message) {
        let count = saved.names.len();
        let mut engine = Engine::new(1);
        if engine.restore(saved).is_ok() {
            assert_eq!(engine.save().names.len(), count);
        }
    }
});
