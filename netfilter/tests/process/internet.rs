//! The Internet: origins, a resolver, and addresses that nobody may reach.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::{Arc, Mutex};

use crate::{ip, unshare};

pub(crate) const ORIGIN: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 34);
pub(crate) const RESOLVER: &str = "93.184.216.53:53";
pub(crate) const HOST: Ipv4Addr = Ipv4Addr::new(89, 1, 0, 1);
pub(crate) const ROUTER: Ipv4Addr = Ipv4Addr::new(89, 1, 0, 2);
/// An HTTP proxy, which lets nobody reach anything but one name.
pub(crate) const PROXY: &str = "89.1.0.2:3128";
/// Addresses with something behind them that no rule may reach by name.
const FORBIDDEN: [Ipv4Addr; 3] =
    [Ipv4Addr::new(10, 0, 0, 5), Ipv4Addr::new(169, 254, 169, 254), Ipv4Addr::new(192, 168, 7, 7)];

/// What names resolve to.
fn zone() -> BTreeMap<&'static str, Vec<Ipv4Addr>> {
    BTreeMap::from([
        ("api.example.com", vec![ORIGIN]),
        ("other.example.com", vec![ORIGIN]),
        ("private.example.com", vec![FORBIDDEN[0]]),
        ("metadata.example.com", vec![FORBIDDEN[1]]),
        ("host.example.com", vec![HOST]),
        ("router.example.com", vec![ROUTER]),
        ("loopback.example.com", vec![Ipv4Addr::LOCALHOST]),
        ("mixed.example.com", vec![FORBIDDEN[0], Ipv4Addr::LOCALHOST, ORIGIN]),
        ("large.example.com", std::iter::repeat_n(ORIGIN, 100).collect()),
    ])
}

/// The other end of the namespace, as the tests see it.
pub(crate) struct Internet {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Internet {
    pub(crate) fn start() -> Self {
        let mut command = unshare("internet");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut internet = Self { child, to, from };
        assert_eq!(internet.line(), "born");
        ip("link set lo up");
        ip(&format!("link add up0 type veth peer name up1 netns {}", internet.child.id()));
        ip(&format!("addr add {HOST}/24 dev up0"));
        ip("link set up0 up");
        ip(&format!("route add default via {ROUTER}"));
        assert_eq!(internet.ask("begin"), "ready");
        internet
    }

    /// Its network namespace, for further servers.
    #[allow(dead_code, reason = "the end-to-end tests, which share this file, have some")]
    pub(crate) fn namespace(&self) -> std::path::PathBuf {
        format!("/proc/{}/ns/net", self.child.id()).into()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn ask(&mut self, what: &str) -> String {
        writeln!(self.to, "{what}").unwrap();
        self.line()
    }

    /// Every name that the resolver was asked for, in order.
    pub(crate) fn names(&mut self) -> Vec<String> {
        self.ask("names").split(',').filter(|name| !name.is_empty()).map(String::from).collect()
    }

    /// How many connections reached an address that none may reach.
    pub(crate) fn forbidden(&mut self) -> usize {
        self.ask("forbidden").parse().unwrap()
    }
}

impl Drop for Internet {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Default)]
struct Seen {
    names: Vec<String>,
    forbidden: usize,
}

/// The role.
pub(crate) fn play() {
    // Else the kernel of this end says things of its own.
    let _ = std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
    println!("born");
    let seen = Arc::new(Mutex::new(Seen::default()));
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "begin" => {
                begin(&seen);
                println!("ready");
            }
            "names" => println!("{}", seen.lock().unwrap().names.join(",")),
            _ => println!("{}", seen.lock().unwrap().forbidden),
        }
    }
}

fn begin(seen: &Arc<Mutex<Seen>>) {
    ip("link set lo up");
    ip(&format!("addr add {ROUTER}/24 dev up1"));
    ip("link set up1 up");
    ip(&format!("route add default via {HOST}"));
    ip(&format!("addr add {ORIGIN}/32 dev lo"));
    ip("addr add 93.184.216.53/32 dev lo");
    for address in FORBIDDEN {
        ip(&format!("addr add {address}/32 dev lo"));
    }
    serve((ORIGIN, 7000).into(), echo);
    serve((ORIGIN, 7001).into(), sink);
    serve((ORIGIN, 7002).into(), source);
    serve((ORIGIN, 80).into(), web);
    serve((ORIGIN, 443).into(), echo);
    serve((ORIGIN, 22).into(), |mut stream| {
        if stream.write_all(b"SSH-2.0-test\r\n").is_ok() {
            echo(stream);
        }
    });
    serve(PROXY.parse().unwrap(), proxy);
    for address in FORBIDDEN.into_iter().chain([ROUTER]) {
        let seen = seen.clone();
        serve((address, 7000).into(), move |_| seen.lock().unwrap().forbidden += 1);
    }
    resolve(seen);
}

fn serve(address: SocketAddr, each: impl Fn(TcpStream) + Send + Sync + 'static) {
    let listener = TcpListener::bind(address).unwrap();
    let each = Arc::new(each);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let each = each.clone();
            std::thread::spawn(move || each(stream));
        }
    });
}

fn echo(stream: TcpStream) {
    let _ = std::io::copy(&mut &stream, &mut &stream);
    let _ = stream.shutdown(Shutdown::Write);
}

/// Reads all, and says how much it was and what its bytes add up to.
fn sink(mut stream: TcpStream) {
    let (mut count, mut sum) = (0u64, 0u64);
    let mut buffer = vec![0; 1 << 20];
    while let Ok(read) = stream.read(&mut buffer) {
        if read == 0 {
            break;
        }
        count += read as u64;
        sum += buffer[..read].iter().map(|byte| u64::from(*byte)).sum::<u64>();
    }
    let _ = write!(stream, "{count} {sum}");
}

/// Reads a number and writes as many bytes.
fn source(stream: TcpStream) {
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).unwrap();
    let mut left: usize = line.trim().parse().unwrap();
    let pattern: Vec<u8> = (0..1 << 20).map(|n| (n % 251) as u8).collect();
    while left > 0 {
        let part = left.min(pattern.len());
        if (&stream).write_all(&pattern[..part]).is_err() {
            return;
        }
        left -= part;
    }
}

/// Makes a tunnel to a port of one name, and of no other.
fn proxy(mut stream: TcpStream) {
    let mut head = Vec::new();
    let mut byte = [0];
    // Not a byte of what comes after it.
    while !head.ends_with(b"\r\n\r\n") {
        if stream.read(&mut byte).unwrap_or(0) == 0 {
            return;
        }
        head.push(byte[0]);
    }
    let line = String::from_utf8(head).unwrap();
    let target = line.strip_prefix("CONNECT api.example.com:").and_then(|rest| rest.split(' ').next()?.parse().ok());
    let Some(origin) = target.and_then(|port: u16| TcpStream::connect((ORIGIN, port)).ok()) else {
        let _ = stream.write_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 3\r\n\r\nno\n");
        return;
    };
    if stream.write_all(b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n").is_err() {
        return;
    }
    let (from, to) = (stream.try_clone().unwrap(), origin.try_clone().unwrap());
    let up = std::thread::spawn(move || {
        let _ = std::io::copy(&mut &from, &mut &to);
        let _ = to.shutdown(Shutdown::Write);
    });
    let _ = std::io::copy(&mut &origin, &mut &stream);
    let _ = stream.shutdown(Shutdown::Write);
    let _ = up.join();
}

fn web(stream: TcpStream) {
    let mut reader = BufReader::new(&stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).unwrap_or(0) == 0 {
                return;
            }
        }
        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{head}", head.len());
        if (&stream).write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

/// A resolver that answers 40 addresses over UDP and cuts what is more.
fn resolve(seen: &Arc<Mutex<Seen>>) {
    let udp = UdpSocket::bind(RESOLVER).unwrap();
    let for_udp = seen.clone();
    std::thread::spawn(move || {
        let mut buffer = [0; 1500];
        while let Ok((count, from)) = udp.recv_from(&mut buffer) {
            udp.send_to(&reply(&buffer[..count], 40, &for_udp), from).unwrap();
        }
    });
    let for_tcp = seen.clone();
    serve(RESOLVER.parse().unwrap(), move |mut stream| {
        let mut length = [0; 2];
        if stream.read_exact(&mut length).is_ok() {
            let mut message = vec![0; usize::from(u16::from_be_bytes(length))];
            stream.read_exact(&mut message).unwrap();
            let reply = reply(&message, 1000, &for_tcp);
            stream.write_all(&(reply.len() as u16).to_be_bytes()).unwrap();
            stream.write_all(&reply).unwrap();
        }
    });
}

fn reply(message: &[u8], most: usize, seen: &Mutex<Seen>) -> Vec<u8> {
    let mut at = 12;
    let mut labels = Vec::new();
    while message[at] != 0 {
        let end = at + 1 + usize::from(message[at]);
        labels.push(String::from_utf8(message[at + 1..end].to_vec()).unwrap());
        at = end;
    }
    let name = labels.join(".");
    let zone = zone();
    let found = zone.get(name.as_str());
    seen.lock().unwrap().names.push(name);
    let a = message[at + 1..at + 3] == [0, 1];
    let addresses = if a { found.cloned().unwrap_or_default() } else { Vec::new() };
    let (cut, count) = if addresses.len() > most { (2, 0) } else { (0, addresses.len()) };
    let code = if found.is_some() { 0 } else { 3 };
    let mut reply = vec![message[0], message[1], 0x81 | cut, 0x80 | code, 0, 1, 0, count as u8, 0, 0, 0, 0];
    reply.extend_from_slice(&message[12..at + 5]);
    for address in &addresses[..count] {
        reply.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
        reply.extend_from_slice(&address.octets());
    }
    reply
}
