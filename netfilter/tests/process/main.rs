//! The filter as a process, between a guest's stack that is played here and hosts in network namespaces of their own.
//!
//! This program starts itself again in a new network namespace, the filter's, and once more in another, the Internet's,
//! where ordinary global addresses are its own. It needs `unshare`, `ip` and either root or user namespaces.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::needless_pass_by_value,
    reason = "a test: what cannot be is a failure"
)]

mod filter;
mod guest;
mod internet;
mod tests;

use std::process::{Command, ExitCode, Stdio};

const ROLE: &str = "BULKHEAD_TEST_ROLE";

fn main() -> ExitCode {
    match std::env::var(ROLE).as_deref() {
        Ok("internet") => {
            internet::play();
            ExitCode::SUCCESS
        }
        Ok("filter") => tests::run(),
        _ => {
            let status = unshare("filter").args(std::env::args_os().skip(1)).status();
            let status = status.expect("unshare(1), of util-linux, runs");
            ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
        }
    }
}

/// This program in a role, in a new network namespace.
fn unshare(role: &str) -> Command {
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.arg("--net").arg("--").arg(std::env::current_exe().unwrap()).env(ROLE, role).stdin(Stdio::null());
    command
}

/// Runs ip(8).
fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split_whitespace()).status().expect("ip(8), of iproute2, runs");
    assert!(status.success(), "ip {arguments}: {status}");
}
