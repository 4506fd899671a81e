//! A run as it is without any option of the network's, and what its guest reaches: nothing, or something is wrong.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4, TcpListener, UdpSocket};
use std::time::Duration;

use clap::Parser;
use guest::message::{Answered, Reached};
use netfilter_control::plan::GATEWAY;
use snapshot::store::{Chain, ChainLayer};

use super::super::launch::look_at;
use super::super::resolve::{check_host, make_spec};
use super::super::run::Run;
use crate::args::{Cli, Command};
use crate::files::channel::Channel;
use crate::frame::Request;
use crate::home::Home;
use crate::store::Store;

/// A name that is somebody's (RFC 2606).
const NAME: &str = "canary.example.com";
/// Nobody's address (RFC 5737), which takes the route that most take.
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// How long the guest may look: each of its tries takes seconds, where nobody answers.
const PATIENCE: Duration = Duration::from_secs(30);

/// Starts a run of this image, which is not executed, and has its guest look for a name, and for listeners on the host's
/// loopback and on an address of the host's own. An error says what is wrong.
pub(super) fn look(home: &Home, image: &str) -> Result<(), String> {
    let own = host_address().map(listen).transpose()?;
    let listeners: Vec<TcpListener> = [listen(Ipv4Addr::LOCALHOST)?].into_iter().chain(own).collect();
    let addresses = addresses(&listeners)?;

    let run = options(image)?;
    let mut spec = make_spec(&run, home, image, &["canary".to_owned()]).map_err(|error| error.to_string())?;
    check_host(&spec).map_err(|error| error.to_string())?;
    let store = Store::open(home).map_err(|error| error.to_string())?;
    let chain = Chain { layers: vec![ChainLayer::Own("1".to_owned())] };
    let (directory, lock) = store.create(&mut spec, &chain, 0).map_err(|error| error.to_string())?;
    let reached = look_at(&store, &directory, &spec, lock, || {
        let connection = directory.dial().map_err(|error| error.to_string())?;
        let request = Request::Reach { name: NAME.to_owned(), addresses: addresses.clone() };
        Channel::answer::<Reached>(PATIENCE, connection, request)
    })?;
    judge(&reached)?;
    for listener in &listeners {
        was_reached(listener, is_own)?;
    }
    Ok(())
}

/// Whether something has reached a listener from one of this host's own addresses, as a guest would. What others of its network send
/// there shows nothing.
fn was_reached(listener: &TcpListener, own: impl Fn(IpAddr) -> bool) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("a listener on the host: {error}");
    loop {
        match listener.accept() {
            Ok((_, peer)) if own(peer.ip()) => {
                let address = listener.local_addr().map_err(failed)?;
                return Err(format!("a listener on the host was reached: {address}, from {peer}"));
            }
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(failed(error)),
        }
    }
}

/// Whether an address is one of this host's: one that is not cannot be listened on.
fn is_own(address: IpAddr) -> bool {
    TcpListener::bind((address, 0)).is_ok()
}

/// A small run of an image, as its user would ask for it.
fn options(image: &str) -> Result<Run, String> {
    match Cli::try_parse_from(["bulkhead", "run", "-q", "-m", "128M", "--", image]).map(|cli| cli.command) {
        Ok(Command::Run(run)) => Ok(*run),
        _ => Err(format!("image {image}: its name is none that run takes")),
    }
}

fn listen(address: Ipv4Addr) -> Result<TcpListener, String> {
    let listener = TcpListener::bind((address, 0)).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    listener.map_err(|error| format!("a listener on {address}: {error}"))
}

/// The address that the host would dial from, if it has one. Nothing is sent.
fn host_address() -> Option<Ipv4Addr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((ELSEWHERE, 9)).ok()?;
    match socket.local_addr().ok()?.ip() {
        IpAddr::V4(address) if !address.is_loopback() => Some(address),
        _ => None,
    }
}

/// Where a guest may look for the listeners: at the host's addresses, at its gateway, and anywhere.
fn addresses(listeners: &[TcpListener]) -> Result<Vec<SocketAddrV4>, String> {
    let mut all = Vec::new();
    for listener in listeners {
        let address = listener.local_addr().map_err(|error| format!("a listener: {error}"))?;
        let IpAddr::V4(own) = address.ip() else { continue };
        let places = [own, GATEWAY, ELSEWHERE].into_iter().filter(|place| !place.is_loopback());
        all.extend(places.map(|place| SocketAddrV4::new(place, address.port())));
    }
    Ok(all)
}

/// Whether what a guest has reached is nothing: its name server must say that there is no such name, since that shows that there
/// is a network which denies.
fn judge(reached: &Reached) -> Result<(), String> {
    match reached.name {
        Some(Answered { code: 3, records: 0 }) => {}
        Some(Answered { code, records }) => {
            return Err(format!("{NAME} resolved in a guest that was allowed nothing: code {code}, {records} records"));
        }
        None => return Err("a guest's name server does not answer it".to_owned()),
    }
    match reached.connected.first() {
        Some(address) => Err(format!("a guest that was allowed nothing connected to {address}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_nothing_is_good() {
        let denied = Some(Answered { code: 3, records: 0 });
        let reached = |name, connected: &[SocketAddrV4]| judge(&Reached { name, connected: connected.to_vec() });
        assert_eq!(reached(denied, &[]), Ok(()));
        let address = SocketAddrV4::new(ELSEWHERE, 80);
        assert!(reached(denied, &[address]).unwrap_err().ends_with("connected to 192.0.2.1:80"));
        assert!(reached(None, &[]).unwrap_err().contains("does not answer"));
        for (code, records) in [(0, 1), (0, 0), (2, 0), (3, 1)] {
            assert!(reached(Some(Answered { code, records }), &[]).unwrap_err().contains("resolved"));
        }
    }

    #[test]
    fn only_the_hosts_own_connections_count() {
        assert!(is_own(Ipv4Addr::LOCALHOST.into()) && !is_own(ELSEWHERE.into()));
        let listener = listen(Ipv4Addr::LOCALHOST).unwrap();
        assert_eq!(was_reached(&listener, is_own), Ok(()), "nobody came");
        let dial = || std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _first = dial();
        assert_eq!(was_reached(&listener, |_| false), Ok(()), "a stranger");
        let _second = dial();
        assert!(was_reached(&listener, is_own).unwrap_err().contains("was reached: 127.0.0.1:"));
    }

    #[test]
    fn a_guest_looks_where_the_listeners_are() {
        let listener = listen(Ipv4Addr::LOCALHOST).unwrap();
        let port = listener.local_addr().unwrap().port();
        let expected = [GATEWAY, ELSEWHERE].map(|place| SocketAddrV4::new(place, port));
        assert_eq!(addresses(&[listener]).unwrap(), expected, "its own loopback is the guest's, not the host's");
        assert!(options("busybox").is_ok());
    }
}
