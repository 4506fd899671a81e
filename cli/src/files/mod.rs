//! Files between host and guest, as tar archives.
//!
//! - [`archive`] reads an archive that comes from a guest, and [`extract`] puts what is in it below one directory.
//!   Everything in it is hostile.
//! - [`pack`] makes an archive of the user's files.
//! - [`rules`] says what goes where, as docker does.
//! - [`channel`] carries an archive over a supervisor's connection.

pub(crate) mod archive;
pub(crate) mod channel;
pub(crate) mod copy;
pub(crate) mod extract;
pub(crate) mod pack;
pub(crate) mod rules;

/// The file mode creation mask in a process's status file; the usual one if it does not say.
fn mask(status: &str) -> u32 {
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|mask| u32::from_str_radix(mask.trim(), 8).ok()).unwrap_or(0o022)
}

/// The user's file mode creation mask. Reading it from the kernel's file does not change it, as the call would.
pub(crate) fn umask() -> u32 {
    mask(&std::fs::read_to_string("/proc/self/status").unwrap_or_default())
}

#[cfg(test)]
mod extract_tests;
