//! The tests. They share the Internet and run one after the other; each has a filter and a guest of its own.

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, ExitCode};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use netfilter_control::{Cause, Event, Reason, Record, Request};
use smoltcp::socket::tcp::State;

use crate::filter::{Filter, policy};
use crate::internet::{HOST, Internet, ORIGIN, PROXY, ROUTER};

const ALL: &str = "*.example.com:1-65535+raw";

type Test = fn(&mut Internet);

pub(crate) fn run() -> ExitCode {
    let tests: [(&str, Test); 14] = [
        ("bytes_pass_and_directions_end_one_by_one", bytes_pass),
        ("large_transfers_arrive_whole", large_transfers),
        ("a_hundred_connections_at_once", a_hundred_connections),
        ("forbidden_addresses_are_silent", forbidden_addresses),
        ("only_allowed_names_are_asked_for", only_allowed_names),
        ("refusals_are_honest", refusals),
        ("protocols_are_checked", protocols),
        ("a_proxy_carries_all_or_nothing", proxy),
        ("a_policy_is_set_at_run_time", policies),
        ("a_restored_guest_wakes_at_once", restore),
        ("a_start_without_what_it_needs_is_refused", refused_start),
        ("a_first_order_may_come_late", late_start),
        ("a_filter_that_dies_opens_nothing", death),
        ("nothing_is_left_behind", nothing_left),
    ];
    let internet = Arc::new(Mutex::new(Internet::start()));
    let trials = tests
        .into_iter()
        .map(|(name, test)| {
            let internet = internet.clone();
            Trial::test(name, move || {
                let mut internet = internet.lock().map_err(|_| Failed::from("an earlier test failed"))?;
                test(&mut internet);
                Ok(())
            })
        })
        .collect();
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let conclusion = libtest_mimic::run(&arguments, trials);
    drop(internet);
    if conclusion.has_failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn bytes_pass(_: &mut Internet) {
    let (mut filter, mut guest) = Filter::start(ALL);
    let flow = guest.dial("api.example.com", 7000).unwrap();
    guest.write(flow, b"ping");
    assert_eq!(guest.read(flow, 4), b"ping");
    let opened = filter.record(|record| matches!(record, Record::FlowOpened { .. }));
    let Record::FlowOpened { subject, upstream, .. } = opened else { unreachable!() };
    assert_eq!((subject.as_str(), upstream), ("api.example.com", (ORIGIN, 7000).into()));

    // The guest ends first, and the answer comes after.
    let flow = guest.dial("api.example.com", 7001).unwrap();
    guest.write(flow, b"abc");
    guest.end(flow);
    assert_eq!(guest.read(flow, 100), format!("3 {}", 97 + 98 + 99).as_bytes());
    filter.record(|record| matches!(record, Record::FlowClosed { up: 3, cause: Cause::Finished, .. }));
    // The other side ends first.
    let flow = guest.dial("api.example.com", 7002).unwrap();
    guest.write(flow, b"5\n");
    assert_eq!(guest.read(flow, 100), [0, 1, 2, 3, 4]);
    guest.until("the end", |guest| guest.socket(flow).state() == State::CloseWait);
    guest.end(flow);
    guest.until("closed", |guest| guest.socket(flow).state() == State::Closed);
    filter.record(|record| matches!(record, Record::FlowClosed { down: 5, cause: Cause::Finished, .. }));
}

fn large_transfers(_: &mut Internet) {
    let (mut filter, mut guest) = Filter::start(ALL);
    let size = if cfg!(debug_assertions) { 8 << 20 } else { 512 << 20 };
    let flow = guest.dial("api.example.com", 7002).unwrap();
    let began = Instant::now();
    guest.write(flow, format!("{size}\n").as_bytes());
    let got = guest.read(flow, size);
    let down = began.elapsed();
    assert_eq!(got.len(), size);
    assert!(got.chunks(1 << 20).all(|part| part.iter().enumerate().all(|(n, byte)| *byte == (n % 251) as u8)));

    let flow = guest.dial("api.example.com", 7001).unwrap();
    let data: Vec<u8> = (0..size).map(|n| (n % 253) as u8).collect();
    let sum: u64 = data.iter().map(|byte| u64::from(*byte)).sum();
    let began = Instant::now();
    guest.write(flow, &data);
    guest.end(flow);
    let answer = guest.read(flow, 100);
    let up = began.elapsed();
    assert_eq!(answer, format!("{size} {sum}").as_bytes());
    println!("{} MiB: {down:?} to the guest, {up:?} from it; resident {} KiB", size >> 20, filter.memory("VmRSS:"));
    assert!(filter.counters().frames_in > 100);
}

fn a_hundred_connections(_: &mut Internet) {
    let (mut filter, mut guest) = Filter::start(ALL);
    let address = guest.lookup("api.example.com").unwrap();
    let mut flows = Vec::new();
    // 64 may be in the making at a time.
    for round in 0..2 {
        let new: Vec<_> = (0..50).map(|_| guest.begin(address, 7000)).collect();
        guest.until("all connected", |guest| new.iter().all(|flow| guest.socket(*flow).state() == State::Established));
        flows.extend(new.into_iter().enumerate().map(|(n, flow)| (round * 50 + n, flow)));
    }
    for (n, flow) in &flows {
        guest.write(*flow, format!("{n:04}").as_bytes());
    }
    for (n, flow) in &flows {
        assert_eq!(guest.read(*flow, 4), format!("{n:04}").as_bytes());
    }
    assert_eq!(filter.counters().flows_opened, 100);
}

fn forbidden_addresses(internet: &mut Internet) {
    let canary = TcpListener::bind((HOST, 7000)).unwrap();
    let loopback = TcpListener::bind((Ipv4Addr::LOCALHOST, 7000)).unwrap();
    let (mut filter, mut guest) = Filter::start(&format!("{ALL},cidr:89.1.0.0/24:7000+raw"));
    for (name, reason) in [
        ("private", Reason::ForbiddenAddress),
        ("metadata", Reason::ForbiddenAddress),
        ("loopback", Reason::ForbiddenAddress),
        ("host", Reason::HostAddress),
        ("router", Reason::HostAddress),
    ] {
        assert!(guest.dial(&format!("{name}.example.com"), 7000).is_none(), "{name}");
        filter.record(|record| record.reason() == Some(reason));
    }
    for address in [
        "10.0.0.5",
        "169.254.169.254",
        "127.0.0.1",
        "89.1.0.1",
        "89.1.0.2",
        "93.184.216.34",
        "198.18.0.1",
        "198.18.9.9",
    ] {
        let address: Ipv4Addr = address.parse().unwrap();
        let flow = guest.begin(address, 7000);
        if address.is_loopback() {
            continue;
        }
        guest.until("a reset", |guest| guest.socket(flow).state() == State::Closed);
    }
    let flow = guest.dial("mixed.example.com", 7000).unwrap();
    guest.write(flow, b"x");
    assert_eq!(guest.read(flow, 1), b"x");
    for listener in [canary, loopback] {
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "nobody came");
    }
    assert_eq!(internet.forbidden(), 0);
}

fn only_allowed_names(internet: &mut Internet) {
    let (_filter, mut guest) = Filter::start("api.example.com:7000+raw,large.example.com:7000+raw");
    let before = internet.names().len();
    assert_eq!(guest.lookup("6461746120676f6573206f7574.evil.test"), None);
    assert_eq!(guest.lookup("other.example.com"), None);
    assert!(guest.lookup("api.example.com").is_some());
    assert_eq!(internet.names().len(), before, "an answer costs no question");
    let flow = guest.dial("large.example.com", 7000);
    assert!(flow.is_some(), "an answer that does not fit into UDP");
    let names = internet.names();
    assert_eq!(names[before..].iter().filter(|name| *name == "large.example.com").count(), 3, "A, AAAA, A over TCP");
    assert!(names[before..].iter().all(|name| name == "large.example.com"));
}

fn refusals(_: &mut Internet) {
    let (mut filter, mut guest) = Filter::start("api.example.com:{7000|7999}+raw,missing.example.com:7000+raw");
    assert!(guest.dial("api.example.com", 7999).is_none(), "nobody listens");
    filter.record(|record| record.reason() == Some(Reason::Unreachable));
    assert!(guest.dial("api.example.com", 7001).is_none(), "not a port of the rule");
    filter.record(|record| record.reason() == Some(Reason::OtherPort));
    assert!(guest.dial("missing.example.com", 7000).is_none());
    filter.record(|record| record.reason() == Some(Reason::Unresolvable));
    filter.send(&Request::SetResolvers { resolvers: vec!["93.184.216.34:7999".parse().unwrap()] });
    guest.until("the guest's patience", |_| true);
    assert!(guest.dial("missing.example.com", 7000).is_none(), "a resolver that is not there");
}

fn protocols(_: &mut Internet) {
    let (mut filter, mut guest) = Filter::start("api.example.com:{443|80}+http,other.example.com,other.example.com:22");
    let flow = guest.dial("api.example.com", 80).unwrap();
    guest.write(flow, b"GET /x HTTP/1.1\r\nHost: API.example.com\r\n\r\n");
    let answer = guest.read(flow, 39 + 42);
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.ends_with("\r\n\r\nGET /x HTTP/1.1\r\nHost: api.example.com\r\n\r\n"), "{answer}");
    guest.write(flow, b"GET /y HTTP/1.1\r\nHost: other.example.com\r\n\r\n");
    let refusal = String::from_utf8(guest.read(flow, 500)).unwrap();
    assert!(refusal.starts_with("HTTP/1.1 421 ") && refusal.contains("sandbox policy"), "{refusal}");
    filter.record(|record| matches!(record, Record::HttpRequest { status: 200, path, .. } if path == "/x"));
    filter.record(|record| record.reason() == Some(Reason::HostMismatch));

    let flow = guest.dial("other.example.com", 443).unwrap();
    guest.write(flow, b"SSH-2.0-tunnel\r\n");
    guest.until("a reset", |guest| guest.socket(flow).state() == State::Closed);
    filter.record(|record| record.reason() == Some(Reason::NotTls));

    let flow = guest.dial("other.example.com", 22).unwrap();
    assert_eq!(guest.read(flow, 14), b"SSH-2.0-test\r\n");
    guest.write(flow, b"SSH-2.0-client\r\n");
    assert_eq!(guest.read(flow, 16), b"SSH-2.0-client\r\n");
}

fn proxy(internet: &mut Internet) {
    let before = internet.names().len();
    let (mut filter, mut guest) = Filter::start_through(PROXY.parse().unwrap(), ALL);
    let flow = guest.dial("api.example.com", 7000).unwrap();
    guest.write(flow, b"ping");
    assert_eq!(guest.read(flow, 4), b"ping");
    let opened = filter.record(|record| matches!(record, Record::FlowOpened { .. }));
    let Record::FlowOpened { subject, upstream, .. } = opened else { unreachable!() };
    assert_eq!((subject.as_str(), upstream), ("api.example.com", PROXY.parse().unwrap()));
    let flow = guest.dial("api.example.com", 7002).unwrap();
    guest.write(flow, b"1000000\n");
    assert_eq!(guest.read(flow, 1_000_000).len(), 1_000_000);
    let flow = guest.dial("api.example.com", 7001).unwrap();
    guest.write(flow, &[1; 1_000_000]);
    guest.end(flow);
    assert_eq!(guest.read(flow, 100), b"1000000 1000000");
    // What the proxy refuses, a server that is there included, is not dialled otherwise.
    for (name, port) in [("api.example.com", 7999), ("other.example.com", 7000), ("private.example.com", 7000)] {
        assert!(guest.dial(name, port).is_none(), "{name}:{port}");
        let refused = filter.record(|record| record.reason() == Some(Reason::ProxyRefused));
        let Record::FlowDenied { detail, .. } = refused else { unreachable!() };
        assert_eq!(detail, format!("the proxy {PROXY} refused: it said HTTP/1.1 403 Forbidden"));
    }
    let (mut filter, mut guest) = Filter::start_through((ROUTER, 3129).into(), ALL);
    assert!(guest.dial("api.example.com", 7000).is_none(), "nobody is there");
    filter.record(|record| record.reason() == Some(Reason::ProxyRefused));
    // What only whoever resolves names could deny.
    let beside = |rules: &str| serde_json::to_vec(&policy(rules)).unwrap();
    let refused = "the policy: !cidr:203.0.113.0/24: behind a proxy it would not hold for api.example.com:7000+raw,";
    let names = beside("api.example.com:7000+raw,!cidr:203.0.113.0/24");
    let error = Filter::try_start_through(PROXY.parse().unwrap(), &names).err().unwrap();
    assert!(error.starts_with(refused), "{error}");
    let blocks = beside("cidr:203.0.112.0/23:7000+raw,!cidr:203.0.113.0/24");
    let (mut filter, _guest) = Filter::try_start_through(PROXY.parse().unwrap(), &blocks).unwrap();
    filter.set_policy(2, &names);
    let answer = filter.wait(|event| matches!(event, Event::PolicyRefused { .. } | Event::PolicySet { .. }));
    assert!(matches!(&answer, Event::PolicyRefused { error, .. } if error.starts_with(refused)), "{answer:?}");
    assert_eq!(internet.names().len(), before, "no resolver was asked");
    assert_eq!(internet.forbidden(), 0);
}

fn policies(_: &mut Internet) {
    let (mut filter, mut guest) = Filter::start("api.example.com:7000+raw,other.example.com:7000+raw");
    let kept = guest.dial("api.example.com", 7000).unwrap();
    let cut = guest.dial("other.example.com", 7000).unwrap();
    for broken in [&b""[..], b"{}x", b"{\"rules\":[]}", b"{\"rules\":[{}],\"denials\":[]}", &[b' '; 2 << 20]] {
        filter.set_policy(2, broken);
        filter.wait(|event| matches!(event, Event::PolicyRefused { generation: 2, .. }));
    }
    guest.write(cut, b"still");
    assert_eq!(guest.read(cut, 5), b"still", "a policy that is refused changes nothing");
    filter.set_policy(3, &serde_json::to_vec(&policy("api.example.com:7000+raw")).unwrap());
    let began = Instant::now();
    guest.until("a reset", |guest| guest.socket(cut).state() == State::Closed);
    assert!(began.elapsed() < Duration::from_secs(1));
    filter.record(|record| *record == Record::PolicySet { generation: 3, revoked: 1 });
    // The answer does not wait behind records.
    let place = |wanted: &dyn Fn(&Event) -> bool| filter.events.iter().position(wanted).unwrap();
    let answer = place(&|event| *event == Event::PolicySet { generation: 3, revoked: 1 });
    let revoked = |event: &Event| matches!(event, Event::Record { record } if record.reason() == Some(Reason::Revoked));
    assert!(answer < place(&revoked), "{:?}", filter.events);
    guest.write(kept, b"kept");
    assert_eq!(guest.read(kept, 4), b"kept");
    assert_eq!(guest.lookup("other.example.com"), None);
}

fn restore(_: &mut Internet) {
    let (mut filter, mut guest) = Filter::start(ALL);
    let flow = guest.dial("api.example.com", 7000).unwrap();
    guest.write(flow, b"x");
    assert_eq!(guest.read(flow, 1), b"x");
    let address = guest.lookup("api.example.com").unwrap();
    let saved = filter.save();
    drop(filter);
    let (mut filter, mut again) = Filter::start_with(ALL, Some(&saved));
    again.adopt(guest);
    again.until("a reset", |guest| guest.socket(flow).state() == State::Closed);
    filter.record(|record| *record == Record::FlowsReset { count: 1 });
    let flow = again.dial_address(address, 7000).expect("the name kept its address");
    again.write(flow, b"y");
    assert_eq!(again.read(flow, 1), b"y");
}

fn refused_start(_: &mut Internet) {
    let good = serde_json::to_vec(&policy(ALL)).unwrap();
    for (saved, error) in [
        (&b"not a saved network"[..], "expected"),
        (b"{\"names\":[\"a.example\",\"a.example\"],\"flows\":[]}", "stands twice"),
        (b"{\"names\":[\"..\"],\"flows\":[]}", "is empty"),
        (b"{\"names\":[],\"flows\":[],\"more\":1}", "unknown field"),
    ] {
        let refused = Filter::try_start(&good, Some(saved)).err().expect(error);
        assert!(refused.starts_with("the saved network: ") && refused.contains(error), "{refused}");
    }
    for policy in [&b""[..], b"{}", b"{\"rules\":[],\"denials\":[],\"allow\":[]}"] {
        let refused = Filter::try_start(policy, None).err().expect("a broken policy");
        assert!(refused.starts_with("the policy: "), "{refused}");
    }
}

fn late_start(_: &mut Internet) {
    let good = serde_json::to_vec(&policy(ALL)).unwrap();
    let asleep = |child: &Child| {
        // Its list of calls is in force when it waits, and had better have that one.
        let stat = format!("/proc/{}/stat", child.id());
        let end = Instant::now() + Duration::from_secs(10);
        while !std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(" (netfilter) S ")) {
            let stat = std::fs::read_to_string(&stat);
            assert!(Instant::now() < end && !stat.as_ref().is_ok_and(|stat| stat.contains(") Z ")), "{stat:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    Filter::try_start_when(&good, None, asleep).unwrap();
}

fn death(_: &mut Internet) {
    let (mut filter, mut guest) = Filter::start(ALL);
    let flow = guest.dial("api.example.com", 7000).unwrap();
    filter.child.kill().unwrap();
    filter.child.wait().unwrap();
    let before = guest.begin(ORIGIN, 7000);
    let _ = guest.socket(flow).send_slice(b"into nothing");
    let end = Instant::now() + Duration::from_millis(300);
    guest.until("silence", |_| Instant::now() > end);
    assert_eq!(guest.socket(before).state(), State::SynSent);
    assert!(!guest.socket(flow).can_recv());
}

fn nothing_left(_: &mut Internet) {
    let (mut filter, mut guest) = Filter::start(ALL);
    let before = filter.descriptors();
    for _ in 0..20 {
        let flow = guest.dial("api.example.com", 7000).unwrap();
        guest.write(flow, b"x");
        guest.end(flow);
        assert_eq!(guest.read(flow, 10), b"x");
    }
    let aborted = guest.dial("api.example.com", 7000).unwrap();
    guest.socket(aborted).abort();
    let _ = guest.dial("api.example.com", 7999);
    let _ = guest.dial("private.example.com", 7000);
    let end = Instant::now() + Duration::from_secs(5);
    guest.until("as few descriptors as before", |_| filter.descriptors() == before || Instant::now() > end);
    assert_eq!(filter.descriptors(), before);
    filter.send(&Request::Stop);
    let Event::Stopped(counters) = filter.wait(|event| matches!(event, Event::Stopped(_))) else { unreachable!() };
    assert_eq!((counters.flows_opened, counters.flows_closed, counters.flows_denied), (21, 21, 2));
    assert!(filter.child.wait().unwrap().success());
}
