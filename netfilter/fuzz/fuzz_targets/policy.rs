//! The grammar: nothing that is compiled allows what it does not name, and every error can be shown.
#![no_main]

use libfuzzer_sys::fuzz_target;
use netfilter_control::{Decision, Name, Policy, Subject};
use netfilter_policy::{Compiler, explain};

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let canary = Name::parse("canary.unrelated-name.net").unwrap();
    for file in [false, true] {
        let mut compiler = Compiler::default();
        let read = if file { compiler.file("p.toml", text) } else { compiler.rules("--allow", text) };
        let compiled = read.and_then(|()| compiler.finish());
        match compiled {
            Ok(policy) => {
                if !text.contains("unrelated") && !text.contains("\\u") && !text.contains("net") {
                    assert!(!matches!(policy.decide(Subject::Name(&canary), 443), Decision::Allow(_)), "{text}");
                }
                let again: Policy = serde_json::from_slice(&serde_json::to_vec(&policy).unwrap()).unwrap();
                assert_eq!(again, policy);
                let _ = explain(&policy, text);
            }
            Err(error) => assert!(!error.to_string().contains('\u{1b}')),
        }
    }
});
