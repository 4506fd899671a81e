//! Compiles the lists in `resources/seccomp` into programs for the kernel.
#![allow(missing_docs, clippy::expect_used, clippy::panic)]

#[path = "build/list.rs"]
mod list;
#[path = "build/names.rs"]
mod names;

use std::fmt::Write;
use std::path::Path;

use list::{Allowed, Condition, List, PROGRAMS};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, sock_filter,
};

/// `SECCOMP_RET_ERRNO`, with the error in its lower half.
const RETURN_ERROR: u32 = 0x0005_0000;

fn main() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../resources/seccomp");
    println!("cargo:rerun-if-changed={}", directory.display());
    println!("cargo:rerun-if-changed=build");
    println!("cargo:rerun-if-changed=build.rs");
    let mut source = String::new();
    for (name, lists) in PROGRAMS {
        let list = list::union(&directory, lists).unwrap_or_else(|error| panic!("{error}"));
        let program = compile(&list).unwrap_or_else(|error| panic!("{name}: {error}"));
        let union = lists.join(", ");
        writeln!(source, "/// Allows {} system calls: {union}.\npub static {name}: Program = Program(&[", list.len())
            .expect("a string grows");
        for sock_filter { code, jt, jf, k } in program {
            writeln!(source, "    libc::sock_filter {{ code: {code}, jt: {jt}, jf: {jf}, k: {k} }},")
                .expect("a string grows");
        }
        source.push_str("]);\n");
    }
    let out = std::env::var_os("OUT_DIR").expect("cargo sets it");
    std::fs::write(Path::new(&out).join("programs.rs"), source).expect("the build directory is writable");
}

const LOAD: u16 = 0x20;
const IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;
/// Where `struct seccomp_data` has the number of the call, the architecture, and the arguments of 8 bytes.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;
/// `AUDIT_ARCH_X86_64`
const X86_64: u32 = 0xc000_003e;

/// What a program costs a start is, beside its length, which the kernel translates: the number of system calls, times what
/// each has to pass, since of calls that are allowed whatever their arguments the kernel remembers the answer (Linux 5.11), and
/// asks the program once. So each of these is a single instruction; calls whose arguments matter come before them.
fn compile(list: &List) -> Result<BpfProgram, Box<dyn std::error::Error>> {
    let mut rules = std::collections::BTreeMap::new();
    let mut always = Vec::new();
    let mut program = vec![
        statement(LOAD, 0, 0, ARCHITECTURE),
        statement(IF_EQUAL, 1, 0, X86_64),
        statement(RETURN, 0, 0, SeccompAction::KillProcess.into()),
        statement(LOAD, 0, 0, NUMBER),
    ];
    for (number, call) in list {
        let short = u32::try_from(*number)?;
        match &call.allowed {
            Allowed::Always => always.push(short),
            Allowed::Only(only) => match one_of(short, only) {
                Some(block) => program.extend(block),
                None => {
                    let only: Result<Vec<_>, _> = only.iter().map(|rule| rule_of(rule)).collect();
                    rules.insert(*number, only?);
                }
            },
            Allowed::Error(error) => {
                program.push(statement(IF_EQUAL, 0, 1, short));
                program.push(statement(RETURN, 0, 0, RETURN_ERROR | u32::from(*error)));
            }
        }
    }
    let filter = SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, TargetArch::x86_64)?;
    program.extend(BpfProgram::try_from(filter)?);
    // Its last instruction, which all calls without a rule come to, gives way to the others.
    let kill = program.pop().ok_or("an empty program")?;
    for (left, number) in (1..=u8::try_from(always.len())?).rev().zip(always) {
        program.push(statement(IF_EQUAL, left, 0, number));
    }
    program.push(kill);
    program.push(statement(RETURN, 0, 0, SeccompAction::Allow.into()));
    Ok(program)
}

/// A call of which one argument of 32 bits has to be one of some values, as most are: the argument is loaded once, and each
/// value takes one instruction. `seccompiler` takes seven.
fn one_of(number: u32, only: &[Vec<Condition>]) -> Option<Vec<sock_filter>> {
    let index = only.first()?.first()?.index;
    let value = |rule: &Vec<Condition>| match rule[..] {
        [Condition { index: other, wide: false, mask: None, value }] if other == index => u32::try_from(value).ok(),
        _ => None,
    };
    let values: Vec<u32> = only.iter().map(value).collect::<Option<_>>()?;
    let count = u8::try_from(values.len()).ok()?;
    let argument = ARGUMENTS + 8 * u32::from(index);
    let mut block = vec![statement(IF_EQUAL, 0, count.checked_add(3)?, number), statement(LOAD, 0, 0, argument)];
    block.extend((1..=count).rev().zip(values).map(|(left, value)| statement(IF_EQUAL, left, 0, value)));
    block.push(statement(RETURN, 0, 0, SeccompAction::KillProcess.into()));
    block.push(statement(RETURN, 0, 0, SeccompAction::Allow.into()));
    Some(block)
}

fn statement(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

fn rule_of(conditions: &[Condition]) -> Result<SeccompRule, seccompiler::BackendError> {
    let conditions: Result<Vec<_>, _> = conditions
        .iter()
        .map(|condition| {
            let length = if condition.wide { SeccompCmpArgLen::Qword } else { SeccompCmpArgLen::Dword };
            let operator = condition.mask.map_or(SeccompCmpOp::Eq, SeccompCmpOp::MaskedEq);
            SeccompCondition::new(condition.index, length, operator, condition.value)
        })
        .collect();
    SeccompRule::new(conditions?)
}
