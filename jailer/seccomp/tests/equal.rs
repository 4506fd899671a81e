//! The programs allow what the lists say, and nothing else: every system call, with arguments around every value that some
//! list looks at, is put to both.
#![allow(missing_docs, dead_code, clippy::unwrap_used, clippy::panic)]

mod bpf;
#[path = "../build/list.rs"]
mod list;
#[path = "../build/names.rs"]
mod names;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use bpf::{ALLOW, Data, KILL_PROCESS, X86_64, run};
use list::{Allowed, Condition, List, PROGRAMS, union};
use seccomp_lists::Program;

const ERROR: u32 = 0x0005_0000;
/// Beyond the last system call of any kernel to come soon.
const LAST: i64 = 700;

/// What the list says.
fn expected(list: &List, data: &Data) -> u32 {
    let holds = |condition: &Condition| {
        let given = data.arguments[usize::from(condition.index)];
        let seen = if condition.wide { u64::MAX } else { u32::MAX.into() };
        let mask = condition.mask.unwrap_or(u64::MAX) & seen;
        given & mask == condition.value & mask
    };
    match list.get(&data.number.into()).map(|call| &call.allowed) {
        None => KILL_PROCESS,
        Some(Allowed::Always) => ALLOW,
        Some(Allowed::Error(error)) => ERROR | u32::from(*error),
        Some(Allowed::Only(rules)) if rules.iter().any(|rule| rule.iter().all(holds)) => ALLOW,
        Some(Allowed::Only(_)) => KILL_PROCESS,
    }
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../resources/seccomp")
}

fn programs() -> Vec<(&'static str, List, &'static Program)> {
    let built = [
        &seccomp_lists::VMM_EXEC,
        &seccomp_lists::VMM_START,
        &seccomp_lists::VMM_MAIN,
        &seccomp_lists::VMM_VCPU,
        &seccomp_lists::VMM_DISK,
        &seccomp_lists::NETFILTER_EXEC,
        &seccomp_lists::NETFILTER,
    ];
    assert_eq!(built.len(), PROGRAMS.len());
    PROGRAMS
        .iter()
        .zip(built)
        .map(|((name, lists), program)| (*name, union(&directory(), lists).unwrap(), program))
        .collect()
}

/// Values that matter: each that some list compares with, its neighbours, single bits of it changed, and with bits that an
/// `int` does not have.
fn interesting(lists: &[&List]) -> BTreeSet<u64> {
    let conditions = lists.iter().flat_map(|list| list.values()).filter_map(|call| match &call.allowed {
        Allowed::Only(rules) => Some(rules.iter().flatten()),
        _ => None,
    });
    let mut values: BTreeSet<u64> = [0, 1, u64::MAX, u32::MAX.into()].into();
    for condition in conditions.flatten() {
        for value in [condition.value, condition.mask.unwrap_or(0)] {
            values.extend([value, value.wrapping_add(1), value.wrapping_sub(1), value | 1 << 32, value | 1 << 63]);
            values.extend((0..32).map(|bit| value ^ 1 << bit));
        }
    }
    values
}

#[test]
fn a_program_is_its_list() {
    let programs = programs();
    let lists: Vec<&List> = programs.iter().map(|(_, list, _)| list).collect();
    let values = interesting(&lists);
    let few: BTreeSet<u64> = [0, 1, u64::MAX].into();
    for (name, list, program) in &programs {
        for number in -1..LAST {
            // Where no list looks at arguments, a few will do.
            let looked_at =
                |list: &&List| list.get(&number).is_some_and(|call| matches!(call.allowed, Allowed::Only(_)));
            let values = if lists.iter().any(looked_at) { &values } else { &few };
            let with = |index: usize, value: u64, others: u64| {
                let mut arguments = [others; 6];
                arguments[index] = value;
                Data { number: i32::try_from(number).unwrap(), architecture: X86_64, arguments }
            };
            // Conditions look at the first four arguments.
            for (index, &value) in (0..4).flat_map(|index| values.iter().map(move |value| (index, value))) {
                for others in [0, u64::MAX] {
                    let data = with(index, value, others);
                    let (said, done) = (expected(list, &data), run(program.instructions(), &data));
                    assert_eq!(said, done, "{name}: call {number} with argument {index} = {value:#x}");
                }
            }
        }
        for (number, call) in list.iter() {
            let Allowed::Only(rules) = &call.allowed else { continue };
            assert!(rules.iter().flatten().all(|condition| condition.index < 4), "{name}: {}", call.name);
            if rules.iter().all(|rule| rule.len() == 1) {
                continue;
            }
            // Where a rule joins conditions, every combination of what they compare with, and of values near that.
            let mut combinations = vec![[0; 6]];
            for index in 0..4 {
                let near = near(rules.iter().flatten().filter(|condition| usize::from(condition.index) == index));
                let with = |arguments: &[u64; 6]| {
                    let mut arguments = *arguments;
                    near.iter().map(move |value| (arguments[index] = *value, arguments).1).collect::<Vec<_>>()
                };
                combinations = combinations.iter().flat_map(with).collect();
            }
            for arguments in combinations {
                let data = Data { number: i32::try_from(*number).unwrap(), architecture: X86_64, arguments };
                let (said, done) = (expected(list, &data), run(program.instructions(), &data));
                assert_eq!(said, done, "{name}: {} with {arguments:x?}", call.name);
            }
        }
    }
}

/// What conditions compare with, and values near that; zero if there are none.
fn near<'a>(conditions: impl Iterator<Item = &'a Condition>) -> BTreeSet<u64> {
    let values = conditions.flat_map(|condition| [condition.value, condition.mask.unwrap_or(0)]);
    let near = |value: u64| {
        let flipped = (0..16).map(move |bit| value ^ 1 << bit);
        flipped.chain([value, value.wrapping_sub(1), value | 1 << 32, value | 1 << 63])
    };
    values.flat_map(near).chain([0]).collect()
}

#[test]
fn calls_of_other_architectures_are_not_ours() {
    for (name, _, program) in programs() {
        for number in 0..LAST {
            let number = i32::try_from(number).unwrap();
            // 32-bit code, and the x32 numbers of 64-bit code.
            let i386 = Data { number, architecture: 0x4000_0003, arguments: [0; 6] };
            let x32 = Data { number: number | 0x4000_0000, architecture: X86_64, arguments: [0; 6] };
            for data in [i386, x32] {
                assert_eq!(run(program.instructions(), &data), KILL_PROCESS, "{name}: {number}");
            }
        }
    }
}

#[test]
fn lists_are_short() {
    for (name, list, _) in programs() {
        let most = match name {
            "VMM_MAIN" => 49,
            "VMM_VCPU" => 26,
            "VMM_DISK" => 30,
            "NETFILTER" => 40,
            _ => 80,
        };
        assert!(list.len() <= most, "{name}: {} system calls, over {most}", list.len());
    }
}

#[test]
fn what_is_not_understood_is_refused() {
    for (text, complaint) in [
        ("[frobnicate]\nwhy = 'x'", "no such system call"),
        ("[read]", "does not say why"),
        ("[read]\nwhy = ''", "does not say why"),
        ("[read]\nwhy = 'x'\nony = ['op == 1']", "no such key"),
        ("[read]\nwhy = 'x'\nonly = []", "not a list of rules"),
        ("[ioctl]\nwhy = 'x'\nonly = ['op = KVM_RUN']", "neither"),
        ("[ioctl]\nwhy = 'x'\nonly = ['op == KVM_WALK']", "no such constant"),
        ("[ioctl]\nwhy = 'x'\nonly = ['request == KVM_RUN']", "no such argument"),
        ("[ioctl]\nwhy = 'x'\nerror = 'EWHATEVER'", "no such error"),
        ("[ioctl]\nwhy = 'x'\nonly = ['op == KVM_RUN']\nerror = 'ENOSYS'", "both"),
    ] {
        let error = list::parse(text).unwrap_err();
        assert!(error.contains(complaint), "{text}: {error}");
    }
}
