//! Published ports: who connects to one here talks to a program in the guest, through its agent. The guest's network has no part
//! in it, and cannot connect outwards this way.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;
use std::time::Duration;

use guest::host::AgentError;
use guest::message::{ExecKind, ExecSpec};

use super::serve::Shared;
use crate::spec::Port;

/// Most connections at once, of all ports. The agent has room for twice as many execs.
const MAX_CONNECTIONS: usize = 32;
/// How long a client may still talk when the program has said all that it had to say.
const HALF_CLOSED: Duration = Duration::from_secs(120);

/// Listens on the host's side of each port, or says which it cannot.
pub(super) fn listen(ports: &[Port]) -> Result<Vec<(TcpListener, u16)>, String> {
    let one = |port: &Port| {
        let address = SocketAddr::new(port.address, port.host);
        let listener = TcpListener::bind(address).map_err(|error| format!("-p {address}:{}: {error}", port.guest))?;
        Ok((listener, port.guest))
    };
    ports.iter().map(one).collect()
}

/// Serves them for the rest of the process's life.
pub(super) fn serve(listeners: Vec<(TcpListener, u16)>, shared: &Arc<Shared>) -> io::Result<()> {
    let open = Arc::<AtomicUsize>::default();
    for (listener, port) in listeners {
        let (shared, open) = (Arc::clone(shared), Arc::clone(&open));
        Builder::new().name("port".into()).spawn(move || accept(&listener, port, &shared, &open))?;
    }
    Ok(())
}

fn accept(listener: &TcpListener, port: u16, shared: &Arc<Shared>, open: &Arc<AtomicUsize>) {
    loop {
        let Ok((stream, _)) = listener.accept() else {
            // Out of descriptors, for now: what is open will be closed.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        if open.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
            open.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let (shared, theirs) = (Arc::clone(shared), Arc::clone(open));
        let thread = Builder::new().name("port".into()).spawn(move || {
            // Who is refused, or cut off, sees it.
            let _ = join(&stream, port, &shared);
            let _ = stream.shutdown(Shutdown::Both);
            theirs.fetch_sub(1, Ordering::Relaxed);
        });
        if thread.is_err() {
            open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Joins a connection with the program that listens in the guest, until both directions have ended.
fn join(stream: &TcpStream, port: u16, shared: &Shared) -> Result<(), AgentError> {
    let (agent, id) = shared.agent_and_id("port")?;
    let _open = shared.open(&id);
    let exec = agent.exec(ExecSpec {
        id: id.clone(),
        kind: ExecKind::Connect { port },
        stdin: true,
        ..ExecSpec::default()
    })?;
    std::thread::scope(|scope| {
        let inwards = scope.spawn(|| exec.copy_stdin(&mut &*stream));
        let outwards = exec.copy_stdout(&mut &*stream);
        let how = if outwards.is_ok() { Shutdown::Write } else { Shutdown::Both };
        let _ = stream.shutdown(how);
        let _ = stream.set_read_timeout(Some(HALF_CLOSED));
        let _ = inwards.join();
    });
    // It has ended, unless one of its two sides is gone.
    let _ = exec.signal(9, true);
    exec.wait().map(drop)
}
