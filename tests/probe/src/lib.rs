//! What a program that broke out of itself would try, one system call each.
//!
//! Nothing here harms the machine that it runs on: where an attempt would change something for others, its arguments are
//! such that the kernel refuses them last, and unjailed it then counts as one that failed.

mod files;
mod kernel;
mod processes;

use std::ffi::CStr;

use libc::c_long;

/// The lists that the probe can bind itself to, as the VMM's threads and the egress filter do. The two that start a program
/// are the jailer's.
pub const LISTS: [&str; 7] = ["exec", "start", "main", "vcpu", "disk", "netfilter-exec", "netfilter"];

/// What attempts need.
#[derive(Debug)]
pub struct Surroundings {
    /// A process outside of the jail: the parent.
    pub parent: i32,
    /// Room for what the kernel writes.
    pub buffer: [u64; 512],
}

/// A system call that is tried.
#[derive(Debug)]
pub struct Attempt {
    /// In words.
    pub name: &'static str,
    /// Its number.
    pub call: c_long,
    /// Its arguments.
    pub arguments: fn(&mut Surroundings) -> [u64; 6],
    /// How it may end where a list allows it: errors, because the other walls stand; 0, which is any success, for what does
    /// no harm, or is what the program is for.
    pub where_allowed: &'static [i32],
}

impl Attempt {
    const fn or(self, where_allowed: &'static [i32]) -> Self {
        Self { where_allowed, ..self }
    }

    /// Makes the call. Returns what the kernel does: negative numbers are errors.
    pub fn make(&self, surroundings: &mut Surroundings) -> i64 {
        let [a, b, c, d, e, f] = (self.arguments)(surroundings);
        // SAFETY: what the kernel writes, it writes to the buffer; pointers to text are static; every other argument is a
        // number. What changes this process (its user, its limits, its memory beyond its own) ends with it.
        let result = unsafe { libc::syscall(self.call, a, b, c, d, e, f) };
        if result == -1 { -i64::from(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)) } else { result }
    }
}

const fn attempt(name: &'static str, call: c_long, arguments: fn(&mut Surroundings) -> [u64; 6]) -> Attempt {
    Attempt { name, call, arguments, where_allowed: &[] }
}

/// Those that are given, then zeros.
fn args(given: &[u64]) -> [u64; 6] {
    let mut all = [0; 6];
    for (argument, value) in all.iter_mut().zip(given) {
        *argument = *value;
    }
    all
}

/// Text as an argument.
fn t(text: &CStr) -> u64 {
    text.as_ptr().addr() as u64
}

/// A number as a register has it: a negative one in all 64 bits.
fn n(number: impl Into<i64>) -> u64 {
    number.into().cast_unsigned()
}

impl Surroundings {
    fn room(&mut self) -> u64 {
        self.buffer.as_mut_ptr().addr() as u64
    }
}

/// All of them.
pub fn attempts() -> Vec<&'static Attempt> {
    [files::ATTEMPTS, processes::ATTEMPTS, kernel::ATTEMPTS].into_iter().flatten().collect()
}
