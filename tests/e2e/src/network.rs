//! What runs reach: an Internet in a network namespace of its own, with ordinary global addresses, at the other end of a host
//! that is one as well. All that crosses between the two is captured, and what the host says to itself.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustix::mount::mount_bind;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, recv, socket_with};
use rustix::thread::UnshareFlags;
use serde_json::Value;

use crate::cli::Bulkhead;
use crate::command::{Output, until};
use crate::internet::{HOST, Internet, ORIGIN, ROUTER};
use crate::refusals::private_mounts;
use crate::{Test, host, processes};

pub(crate) const TESTS: &[Test] = &[
    ("network::a_run_reaches_nothing_by_itself", a_run_reaches_nothing_by_itself),
    ("network::a_run_reaches_what_its_policy_names", a_run_reaches_what_its_policy_names),
];

pub(crate) const RESOLVER: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 53);
/// A port of many addresses where somebody listens whom no guest may reach.
const PORT: u16 = 7000;
/// TLS hellos: for api.example.com, for another name, for none.
const HELLO: &[u8] = include_bytes!("../../../netfilter/fuzz/corpus/hello/whole");
const OTHER: &[u8] = include_bytes!("../../../netfilter/fuzz/corpus/hello/other");
const NAMELESS: &[u8] = include_bytes!("../../../netfilter/fuzz/corpus/hello/nameless");

/// A host with an Internet, in which this process and what it starts are from now on.
pub(crate) struct World {
    /// What lies beyond it.
    pub(crate) internet: Internet,
    /// How many connections the host's own listeners got.
    own: Arc<AtomicUsize>,
    /// What is on the wire.
    pub(crate) capture: Capture,
    _resolvers: tempfile::TempDir,
}

impl World {
    /// With a host that asks this name server.
    pub(crate) fn new(resolver: Ipv4Addr) -> Self {
        private_mounts();
        // SAFETY: this process has one thread, and no descriptors are concerned.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
        // The kernels of both ends would say things of their own.
        fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap();
        let resolvers = host::directory();
        let file = resolvers.path().join("resolv.conf");
        fs::write(&file, format!("nameserver {resolver}\n")).unwrap();
        mount_bind(&file, fs::canonicalize("/etc/resolv.conf").unwrap()).unwrap();
        let internet = Internet::start();
        let own = Arc::<AtomicUsize>::default();
        for address in [HOST, Ipv4Addr::LOCALHOST] {
            let (listener, own) = (TcpListener::bind((address, PORT)).unwrap(), Arc::clone(&own));
            std::thread::spawn(move || {
                for _ in listener.incoming() {
                    own.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        Self { internet, own, capture: Capture::start(), _resolvers: resolvers }
    }

    /// Nobody was reached who must not be, and nothing was on the wire but this: protocol, address and port of the other side.
    pub(crate) fn only(&mut self, expected: &[(u8, Ipv4Addr, u16)]) {
        assert_eq!((self.internet.forbidden(), self.own.load(Ordering::Relaxed)), (0, 0));
        let mut seen = self.capture.seen.lock().unwrap().clone();
        seen.retain(|packet| !matches!(packet.as_deref(), Some("arp" | "published")));
        let expected = expected.iter().map(|(protocol, address, port)| Some(format!("{protocol} {address}:{port}")));
        assert_eq!(seen, expected.collect());
    }
}

/// Every kind of packet that the host has sent or got, its own loopback included.
pub(crate) struct Capture {
    seen: Arc<Mutex<BTreeSet<Option<String>>>>,
    marks: Arc<Mutex<BTreeSet<(u8, u8)>>>,
}

impl Capture {
    fn start() -> Self {
        // All protocols, in the order of the network.
        let all = Protocol::from_raw(NonZeroU32::new(u32::from(3_u16.to_be())).unwrap());
        let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, Some(all)).unwrap();
        rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, 64 << 20).unwrap();
        let capture = Self { seen: Arc::default(), marks: Arc::default() };
        let (seen, marks) = (Arc::clone(&capture.seen), Arc::clone(&capture.marks));
        std::thread::spawn(move || {
            let mut frame = [0; 256];
            while let Ok((length, _)) = recv(&socket, &mut frame, RecvFlags::empty()) {
                let frame = &frame[..length];
                marks.lock().unwrap().extend(mark(frame));
                seen.lock().unwrap().insert(describe(frame));
            }
        });
        capture
    }

    /// Every pair of time to live and type of service in packets that the host sent to others.
    pub(crate) fn marks(&self) -> BTreeSet<(u8, u8)> {
        self.marks.lock().unwrap().clone()
    }
}

/// Time to live and type of service, if it is a packet of the host's.
fn mark(frame: &[u8]) -> Option<(u8, u8)> {
    let packet = frame.get(14..).filter(|_| frame[12..14] == [8, 0])?;
    (packet.get(12..16)? == HOST.octets() && packet.get(16)? != &127).then(|| (packet[8], packet[1]))
}

/// Protocol, address and port of the side that is not the host. Nothing if it is no such packet, which no test expects.
fn describe(frame: &[u8]) -> Option<String> {
    if frame.get(12..14)? == [8, 6] {
        return Some("arp".to_owned());
    }
    let packet = frame.get(14..).filter(|_| frame[12..14] == [8, 0])?;
    let address = |at: usize| Some(Ipv4Addr::from(*packet.get(at..)?.first_chunk::<4>()?));
    let (from, to) = (address(12)?, address(16)?);
    let ports = packet.get(usize::from(packet[0] & 15) * 4..)?;
    let port = |at: usize| Some(u16::from_be_bytes(*ports.get(at..)?.first_chunk()?));
    if from.is_loopback() && to.is_loopback() && [port(0)?, port(2)?].contains(&18_080) {
        return Some("published".to_owned());
    }
    let (other, port) = if from == HOST { (to, port(2)?) } else { (from, port(0)?) };
    Some(format!("{} {other}:{port}", packet[9]))
}

/// The events of a run that is kept.
pub(crate) fn events(bulkhead: &Bulkhead) -> Vec<Value> {
    let log = fs::read_to_string(bulkhead.runs()[0].join("events.jsonl")).unwrap();
    log.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Whether there is an event of this kind whose data has this text in that field.
pub(crate) fn has(events: &[Value], kind: &str, field: &str, text: &str) -> bool {
    events
        .iter()
        .any(|event| event["event"] == kind && event["data"][field].to_string().trim_matches('"').contains(text))
}

/// What a program in the guest gets that connects there, sends this, ends its direction and reads.
fn talk(bulkhead: &Bulkhead, to: &str, port: u16, bytes: &[u8]) -> Output {
    bulkhead.with_input(&["exec", "-i", "box", "nc", "-w", "5", to, &port.to_string()], bytes)
}

fn a_run_reaches_nothing_by_itself() {
    // Given a run that nothing was allowed,
    let mut world = World::new(RESOLVER);
    let bulkhead = Bulkhead::new();
    let resident = bulkhead.reside("box", &[]);
    // then it has an interface and a name server,
    let interface = bulkhead.shell("box", "ip addr show eth0; ip route; cat /etc/resolv.conf").expect(0);
    for part in ["mtu 65520", "inet 198.18.0.2/30", "default via 198.18.0.1", "nameserver 198.18.0.1"] {
        assert!(interface.contains(part), "{part}: {interface}");
    }
    assert!(!interface.contains("inet6"), "{interface}");
    // but no name resolves, whomever it asks,
    for server in ["", "8.8.8.8", "93.184.216.53"] {
        let answer = bulkhead.shell("box", &format!("nslookup api.example.com {server}"));
        assert!(answer.code == 1 && answer.stdout.contains("NXDOMAIN"), "{server}: {answer:?}");
    }
    // and no address is reached: not the gateway, the host, its router, its networks, metadata, nor anything else.
    let host = HOST.to_string();
    let addresses =
        ["198.18.0.1", "127.0.0.2", &host, &ROUTER.to_string(), "10.0.0.5", "169.254.169.254", "192.168.7.7"];
    for address in addresses {
        let answer = bulkhead.shell("box", &format!("nc -w 2 {address} {PORT} </dev/null"));
        assert_eq!((answer.code, answer.stdout.as_str()), (1, ""), "{address}: {answer:?}");
    }
    let pings = format!("ping -c 1 -W 1 {ORIGIN}; ping -c 1 -W 1 -s 1400 8.8.8.8; ping6 -c 1 -W 1 ff02::1%eth0; true");
    let pings = bulkhead.shell("box", &pings);
    assert!(!pings.stdout.contains("bytes from"), "{pings:?}");
    // What was denied is in the log, and says that it was the policy,
    until("the records", || has(&events(&bulkhead), "net.flow.denied", "reason", "unknown-address"));
    assert!(has(&events(&bulkhead), "net.dns.denied", "name", "api.example.com"));
    assert!(
        has(&events(&bulkhead), "net.dns.denied", "hint", "add a rule: api.example.com"),
        "{:?}",
        events(&bulkhead)
    );
    // and can be drafted from.
    let draft = bulkhead.output(&["policy", "learn", "box"]).expect(0);
    assert!(draft.contains("\"api.example.com\","), "{draft}");

    // Its filter is jailed like its VMM, but for the network.
    let inspected: Value = serde_json::from_str(&bulkhead.output(&["inspect", "box"]).expect(0)).unwrap();
    let processes = inspected[0]["processes"].as_array().unwrap();
    let names: Vec<&str> = processes.iter().map(|process| process["program"].as_str().unwrap()).collect();
    assert_eq!(names, ["bulkhead-vmm", "bulkhead-netfilter"]);
    let filter = &processes[1];
    assert_eq!(filter["namespaces"], serde_json::json!(["user", "mnt", "pid", "ipc", "uts", "cgroup"]));
    assert_eq!((&filter["capabilities"], &filter["no_new_privs"]), (&"0000000000000000".into(), &true.into()));
    assert_eq!((&filter["threads"][0]["filters"], &filter["landlock"]), (&2.into(), &true.into()));
    assert_ne!(filter["uid"], processes[0]["uid"]);

    // When the filter is killed, the network has ended, and the run has not.
    processes::child(&bulkhead, "bulkhead-netfilter").kill();
    until("word of the end", || has(&events(&bulkhead), "net.ended", "why", "SIGKILL"));
    let list = bulkhead.output(&["list"]).expect(0);
    assert!(list.contains("running (network-ended: bulkhead-netfilter: signal: 9 (SIGKILL))"), "{list}");
    let script = "nc -w 2 8.8.8.8 53 </dev/null 2>/dev/null || echo alive";
    assert_eq!(bulkhead.shell("box", script).expect(0), "alive\n");
    let refused = bulkhead.output(&["policy", "set", "box"]).refused(125);
    assert!(refused.ends_with(": the network of the run has ended\n"), "{refused}");
    assert_eq!(bulkhead.output(&["rm", "-f", "box"]).expect(0), "box\n");
    let said = resident.finish().stderr;
    assert!(said.contains(": its network ended before it did: bulkhead-netfilter: signal: 9"), "{said}");
    processes::none_left(&bulkhead);
    world.only(&[]);
    assert_eq!(world.internet.names(), [""; 0]);
}

fn a_run_reaches_what_its_policy_names() {
    let mut world = World::new(RESOLVER);
    let bulkhead = Bulkhead::new();
    // Given a run with a policy, some rules of which lead where no rule may,
    let policy = "deny-egress-except=api.example.com,api.example.com:80+http,api.example.com:22,\
                  api.example.com:{7000|7001|7002}+raw";
    let nowhere =
        ["host", "router", "loopback", "private", "metadata"].map(|name| format!("{name}.example.com:7000+raw"));
    let mut options = vec!["--network-policy", policy, "-p", "18080:8080"];
    options.extend(nowhere.iter().flat_map(|rule| ["--allow", rule.as_str()]));
    let resident = bulkhead.reside("box", &options);

    // then plain HTTP works, with nothing set up in the guest,
    let page = bulkhead.shell("box", "wget -q -O - http://api.example.com/a/page").expect(0);
    assert!(page.starts_with("GET /a/page HTTP/1.1\r\n") && page.contains("api.example.com\r\n"), "{page}");
    // TLS, if it names the same host,
    assert_eq!(talk(&bulkhead, "api.example.com", 443, HELLO).stdout.len(), String::from_utf8_lossy(HELLO).len());
    for hello in [OTHER, NAMELESS, b"GET / HTTP/1.1\r\n\r\n"] {
        assert_eq!(talk(&bulkhead, "api.example.com", 443, hello).stdout, "");
    }
    // SSH and nothing else on its port,
    assert!(talk(&bulkhead, "api.example.com", 22, b"SSH-2.0-x\r\n").stdout.contains("SSH-2.0-x\r\n"));
    assert!(!talk(&bulkhead, "api.example.com", 22, b"hello\r\n").stdout.contains("hello"));
    // and much, both ways.
    let script = "echo 9000000 | nc api.example.com 7002 | wc -c; head -c 9000000 /dev/zero | nc api.example.com 7001";
    assert_eq!(bulkhead.shell("box", script).expect(0), "9000000\n9000000 0");
    // Nothing else is reached: other names, other ports, another Host, names that mean the host or its networks.
    for (name, port) in [("other.example.com", 443), ("api.example.com", 8080), ("evil-api.example.com", 443)] {
        assert_eq!(talk(&bulkhead, name, port, HELLO).stdout, "", "{name}:{port}");
    }
    let forged = talk(&bulkhead, "api.example.com", 80, b"GET / HTTP/1.1\r\nHost: other.example.com\r\n\r\n").stdout;
    assert!(forged.starts_with("HTTP/1.1 4") && forged.contains("policy"), "{forged}");
    for name in ["host", "router", "loopback", "private", "metadata"] {
        let answer = talk(&bulkhead, &format!("{name}.example.com"), PORT, b"hello");
        assert_eq!((answer.code, answer.stdout.as_str()), (1, ""), "{name}");
    }
    // The log has each decision.
    let log = events(&bulkhead);
    for (kind, field, text) in [
        ("net.dns.answered", "name", "api.example.com"),
        ("net.http.request", "path", "/a/page"),
        ("net.flow.tls", "server_name", "api.example.com"),
        ("net.flow.denied", "reason", "server-name-mismatch"),
        ("net.flow.denied", "reason", "no-server-name"),
        ("net.flow.denied", "reason", "not-tls"),
        ("net.flow.denied", "reason", "not-ssh"),
        ("net.flow.denied", "reason", "other-port"),
        ("net.flow.denied", "reason", "forbidden-address"),
        ("net.flow.denied", "reason", "host-address"),
        ("net.flow.closed", "down", "9000000"),
    ] {
        assert!(has(&log, kind, field, text), "{kind} {field} {text}: {log:#?}");
    }

    // A published port leads in, to a program that listens on the guest's loopback, both ways and half-closed.
    let _server = bulkhead.start(&["exec", "box", "nc", "-l", "-p", "8080", "-e", "cat"]);
    let mut answer = Vec::new();
    until("an answer of the guest", || {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, 18_080)).unwrap();
        answer.clear();
        let asked = stream.write_all(&[7; 300_000]).and_then(|()| stream.shutdown(Shutdown::Write));
        asked.and_then(|()| stream.read_to_end(&mut answer)).is_ok_and(|length| length > 0)
    });
    assert!(answer == [7; 300_000], "{} bytes", answer.len());

    // When another policy is set, what it does not allow ends, and what it allows begins.
    let mut long = bulkhead.start(&["exec", "box", "sh", "-c", "(echo go; sleep 1000) | nc api.example.com 7000"]);
    long.until_printed("go\n");
    let refused = bulkhead.output(&["policy", "set", "box", "--allow", "*"]).refused(125);
    assert!(refused.contains("--allow"), "{refused}");
    let set = bulkhead.output(&["policy", "set", "box", "--allow", "other.example.com:80+http"]);
    assert!(set.code == 0 && set.stderr.contains("policy 2 is in force; 1 connection reset"), "{set:?}");
    until("the end of the connection", || has(&events(&bulkhead), "net.flow.denied", "reason", "revoked"));
    assert!(bulkhead.shell("box", "nslookup api.example.com").stdout.contains("NXDOMAIN"));
    let page = bulkhead.shell("box", "wget -q -O - http://other.example.com/").expect(0);
    assert!(page.starts_with("GET / HTTP/1.1\r\n"), "{page}");
    let inspected: Value = serde_json::from_str(&bulkhead.output(&["inspect", "box"]).expect(0)).unwrap();
    let expected = serde_json::json!({ "generation": 2, "allow": ["other.example.com:80+http"], "deny": [] });
    assert_eq!(inspected[0]["policy"], expected);

    // At the end the counters are there.
    bulkhead.output(&["rm", "-f", "box"]).expect(0);
    drop((long, resident));
    processes::none_left(&bulkhead);
    let origin = [22, 80, 443, 7000, 7001, 7002].map(|port| (6, ORIGIN, port));
    world.only(&[&origin[..], &[(17, RESOLVER, 53)]].concat());
    let asked: BTreeSet<String> = world.internet.names().into_iter().collect();
    let allowed = ["api", "host", "loopback", "metadata", "other", "private", "router"];
    assert_eq!(asked, allowed.map(|name| format!("{name}.example.com")).into());
}
