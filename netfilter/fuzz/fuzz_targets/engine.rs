//! The whole engine: frames in any order, time, and a world that echoes. It dials what its policy allows and nothing
//! else, and does not panic, smoltcp included.
#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use netfilter::engine::Engine;
use netfilter::plan::{GATEWAY, GATEWAY_MAC, GUEST, GUEST_MAC};
use netfilter_fuzz::{ORIGIN, World, policy};

fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0))).sum()
}

fn fold(mut sum: u32) -> [u8; 2] {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

/// A frame of the guest's whose checksums are right, so that its contents are what is tried.
fn frame(protocol: u8, to: [u8; 4], payload: &[u8]) -> Vec<u8> {
    let mut payload = payload.to_vec();
    let at = if protocol == 6 { 16 } else { 6 };
    if payload.len() > at + 2 {
        if protocol == 17 {
            let length = (payload.len() as u16).to_be_bytes();
            payload[4..6].copy_from_slice(&length);
        }
        payload[at..at + 2].fill(0);
        let pseudo = sum(&GUEST.octets()) + sum(&to) + u32::from(protocol) + payload.len() as u32;
        let checksum = fold(pseudo + sum(&payload));
        payload[at..at + 2].copy_from_slice(&checksum);
    }
    let total = (payload.len() as u16 + 20).to_be_bytes();
    let mut packet = vec![0x45, 0, total[0], total[1], 0, 0, 0x40, 0, 64, protocol, 0, 0];
    packet.extend_from_slice(&GUEST.octets());
    packet.extend_from_slice(&to);
    let checksum = fold(sum(&packet));
    packet[10..12].copy_from_slice(&checksum);
    packet.extend_from_slice(&payload);
    [&GATEWAY_MAC[..], &GUEST_MAC, &[8, 0], &packet].concat()
}

fn question(name: &str) -> Vec<u8> {
    let mut payload = vec![0x9c, 0x40, 0, 53, 0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        payload.push(label.len() as u8);
        payload.extend_from_slice(label.as_bytes());
    }
    payload.extend_from_slice(&[0, 0, 1, 0, 1]);
    frame(17, GATEWAY.octets(), &payload)
}

fuzz_target!(|bytes: &[u8]| {
    let mut world = World::default();
    let mut engine = Engine::new(1);
    let mut now = Duration::ZERO;
    engine.set_resolvers(vec!["9.9.9.9:53".parse().unwrap()]);
    engine.set_policy(policy("a.example,b.example:{80|81}+http+ws,c.example:22,d.example:1-9+raw"), 1, &mut world, now);
    for name in ["a.example", "b.example", "c.example", "d.example"] {
        engine.frame(&question(name), &mut world, now);
    }
    let mut rest = bytes;
    // Each step: what to do, how long a payload, then the payload.
    while let [what, length, tail @ ..] = rest {
        let (payload, tail) = tail.split_at(tail.len().min(usize::from(*length)));
        rest = tail;
        match what % 8 {
            0 => engine.frame(payload, &mut world, now),
            1 => now += Duration::from_millis(u64::from(*length) * u64::from(*length)),
            2 => engine.frame(&frame(17, [198, 18, 0, 1], payload), &mut world, now),
            3 => engine.frame(&frame(1, [198, 18, 0, 1], payload), &mut world, now),
            _ => engine.frame(&frame(6, [198, 18, 1, 1 + what % 4], payload), &mut world, now),
        }
        for _ in 0..4 {
            for token in std::mem::take(&mut world.ready) {
                engine.ready(token, &mut world, now);
            }
            engine.run(&mut world, now);
            while engine.front().is_some() {
                engine.sent();
            }
        }
        let _ = engine.due(now);
    }
    for address in &world.dialled {
        assert_eq!(address.ip(), ORIGIN);
        assert!([443, 80, 81, 22].contains(&address.port()) || (1..=9).contains(&address.port()), "{address}");
    }
    let saved = engine.save();
    assert!(saved.names.len() == 4);
});
