//! A connection to a program in the machine, over an exec's stdin and stdout: how ports are published. It is made to the loopback
//! interface by a process of the workload's.

use super::workload::wait_for;
use crate::sys;
use std::{
    fs::File,
    io::{self, Read, Write},
    net::{Ipv4Addr, Shutdown, TcpStream},
    os::fd::AsFd,
    time::Duration,
};

/// How often we look whether the other half has ended, when ours has.
const LONG: Duration = Duration::from_secs(3600);

/// Connects, and passes bytes on both ways until both have ended, each half in a process of its own.
pub(super) fn relay(port: u16) -> io::Result<()> {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_nodelay(true)?;
    let mut input = File::from(rustix::stdio::stdin().try_clone_to_owned()?);
    let mut output = File::from(rustix::stdio::stdout().try_clone_to_owned()?);
    // Whoever holds an end of a pipe that is the other half's hides its end.
    rustix::stdio::dup2_stdin(stream.as_fd())?;
    rustix::stdio::dup2_stdout(stream.as_fd())?;
    let Some(other) = sys::fork(None)? else {
        drop(input);
        let copied = pass_on(&mut &stream, &mut output);
        sys::exit_now(i32::from(copied.is_err()));
    };
    drop(output);
    // A server that reads no more may still have much to say.
    let _ = pass_on(&mut input, &mut &stream);
    let _ = stream.shutdown(Shutdown::Write);
    while !wait_for(&other, LONG) {}
    Ok(())
}

/// Until the end. Not by `io::copy`: the kernel's splice holds the pipe's lock while it waits for a socket, and with that the agent
/// at its other end.
fn pass_on(from: &mut dyn Read, to: &mut dyn Write) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => to.write_all(buffer.get(..count).unwrap_or_default())?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
