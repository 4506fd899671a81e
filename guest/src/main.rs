//! The agent's program: `/init` of every machine, and, for trying it out without one,
//! `bulkhead-guest --serve SOCKET ROOT [CGROUP]`.

#![no_main]
#![allow(unsafe_code)]

use std::{env, path::Path};

/// Instead of the language's own start, which needs descriptors 0 to 2: a kernel without a console starts its first
/// process with none, in a file system without `/dev/null`.
// SAFETY: the C library calls the one symbol of this name, with this signature's prefix; nothing else defines it.
#[unsafe(no_mangle)]
pub extern "C" fn main() -> i32 {
    if std::process::id() == 1 {
        // The kernel hands on the words after `--` on its command line.
        guest::agent::boot(env::args_os().skip(1).any(|word| word == guest::build::BUILDER_WORD));
    }
    if env::args_os().next().is_some_and(|name| name == guest::agent::MODPROBE) {
        return guest::agent::modprobe(env::args_os().collect());
    }
    let args: Vec<_> = env::args_os().skip(1).collect();
    match args.iter().map(Path::new).collect::<Vec<_>>()[..] {
        [flag, socket, root] if flag == Path::new("--serve") => serve(socket, root, None),
        [flag, socket, root, cgroup] if flag == Path::new("--serve") => serve(socket, root, Some(cgroup)),
        _ => {
            eprintln!("usage: bulkhead-guest --serve SOCKET ROOT [CGROUP]\nAs process 1 it runs a machine.");
            2
        }
    }
}

fn serve(socket: &Path, root: &Path, cgroup: Option<&Path>) -> i32 {
    match guest::agent::serve_directory(socket, root, cgroup) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("bulkhead-guest: {error}");
            1
        }
    }
}
