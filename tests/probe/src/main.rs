//! `probe`: waits on descriptor 3 for the number of a list and of an attempt, binds itself to the list, makes the attempt,
//! and writes back what the kernel said. It is called as the program that it stands in for, and has as little set-up.
#![cfg_attr(not(test), no_main)]
#![allow(missing_docs)]

use probe::{Surroundings, attempts};
use seccomp_lists::{NETFILTER, VMM_DISK, VMM_MAIN, VMM_START, VMM_VCPU};

const CONTROL: i32 = 3;

#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn main() -> libc::c_int {
    run().unwrap_or(99)
}

/// The order: list, attempt, and the parent's process id.
fn run() -> Option<libc::c_int> {
    let mut order = [0; 6];
    // SAFETY: the kernel writes into the array and no further.
    let length = unsafe { libc::read(CONTROL, order.as_mut_ptr().cast(), order.len()) };
    let [list, attempt, parent @ ..] = order;
    if usize::try_from(length).ok()? != order.len() {
        return None;
    }
    let attempt = *attempts().get(usize::from(attempt))?;
    let mut surroundings = Surroundings { parent: i32::from_le_bytes(parent), buffer: [0; 512] };
    // SAFETY: takes numbers. Unjailed it is not set yet.
    unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // As the VMM does it: first what all threads need, then what this one needs.
    let programs: &[_] = match list {
        1 => &[&VMM_START],
        2 => &[&VMM_START, &VMM_MAIN],
        3 => &[&VMM_START, &VMM_VCPU],
        4 => &[&VMM_START, &VMM_DISK],
        6 => &[&NETFILTER],
        _ => &[],
    };
    for program in programs {
        program.install().ok()?;
    }
    let result = attempt.make(&mut surroundings).to_le_bytes();
    // SAFETY: the kernel reads the array.
    let written = unsafe { libc::write(CONTROL, result.as_ptr().cast(), result.len()) };
    // SAFETY: ends the process, in a way that every list has.
    unsafe { libc::syscall(libc::SYS_exit_group, libc::c_int::from(written != 8)) };
    None
}
