//! An upstream proxy: every flow goes through it, or is refused.

use std::net::SocketAddr;
use std::time::Duration;

use netfilter_control::{Reason, Record};
use smoltcp::socket::tcp::State;

use super::net::{Answer, Net, ORIGIN};
use super::tls::hello;
use crate::host::Route;

const RULES: &str = "raw.example.com:1-65535+raw,web.example.com:80+http,api.example.com,git.example.com:22,\
                     cidr:93.184.216.0/24:1-65535+raw,cidr:10.0.0.0/8:1-65535+raw";

fn proxied() -> (Net, SocketAddr) {
    let proxy = "10.9.9.9:3128".parse().unwrap();
    let mut net = Net::new(RULES);
    net.engine.set_proxy(Some(proxy));
    (net, proxy)
}

/// The reason and the detail of the last refusal, and what is to be done about it.
fn refusal(net: &mut Net) -> Option<(Reason, String, String)> {
    net.records().into_iter().rev().find_map(|record| match record {
        Record::FlowDenied { reason, detail, hint, .. } => Some((reason, detail, hint)),
        _ => None,
    })
}

#[test]
fn it_carries_every_flow_or_none() {
    let (mut net, proxy) = proxied();
    let flow = net.dial("raw.example.com", 7000);
    assert_eq!(net.world.dialled, [proxy]);
    assert!(net.world.asked.is_empty(), "the proxy resolves");
    assert_eq!(net.state(flow), State::SynSent, "not before the proxy has said yes");
    assert_eq!(net.received(), b"CONNECT raw.example.com:7000 HTTP/1.1\r\nHost: raw.example.com:7000\r\n\r\n");
    net.answer(b"HTTP/1.1 200 OK\r\nVia: x\r\n\r\nSSH-2.0-early");
    assert_eq!(net.state(flow), State::Established);
    assert_eq!(net.read(flow), b"SSH-2.0-early");
    let by_address = net.begin(ORIGIN, 7000);
    assert!(net.received().starts_with(b"CONNECT 93.184.216.34:7000 HTTP/1.1\r\n"));
    net.answer(b"HTTP/1.1 403 Forbidden\r\n\r\n");
    assert_eq!(net.state(by_address), State::Closed);
    assert_eq!(net.refusal(), Some(Reason::ProxyRefused));
    // What the proxy's own address is to the policy and to this host does not matter.
    net.world.routes.insert(proxy.ip(), Route::Own);
    net.world.routes.insert(ORIGIN.into(), Route::Nowhere);
    net.set_policy(&format!("{},!cidr:10.9.0.0/16", RULES));
    assert_eq!(net.state(flow), State::Established);
    let silent = net.begin(ORIGIN, 7000);
    net.pass(Duration::from_secs(11));
    assert_eq!(net.state(silent), State::Closed);
    let (reason, detail, _) = refusal(&mut net).unwrap();
    assert_eq!((reason, detail.as_str()), (Reason::ProxyRefused, "the proxy 10.9.9.9:3128 did not answer in time"));
    net.world.answers.insert(proxy, Answer::Refuse);
    let flow = net.dial("raw.example.com", 7001);
    assert_eq!(net.state(flow), State::Closed);
    let (reason, detail, hint) = refusal(&mut net).unwrap();
    assert_eq!(reason, Reason::ProxyRefused);
    assert!(detail.starts_with("the proxy 10.9.9.9:3128 was not reached: connection refused"), "{detail}");
    assert!(hint.contains("the policy allows it"), "an agent need not ask for another policy: {hint}");
    assert!(net.world.dialled.iter().all(|address| *address == proxy), "there is no other way out");
}

/// The tunnel is no way around the checks: of TLS, of SSH, of each request of plain HTTP.
#[test]
fn what_goes_through_it_is_checked_as_ever() {
    let (mut net, _) = proxied();
    let flow = net.dial("web.example.com", 80);
    assert!(net.received().starts_with(b"CONNECT web.example.com:80 HTTP/1.1\r\n"));
    net.answer(b"HTTP/1.0 200 Connection established\r\n\r\n");
    net.write(flow, b"GET /a HTTP/1.1\r\nHost: web.example.com\r\n\r\n");
    assert!(net.received().ends_with(b"\r\n\r\nGET /a HTTP/1.1\r\nHost: web.example.com\r\n\r\n"));
    net.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi");
    assert!(net.read(flow).ends_with(b"\r\n\r\nhi"));
    net.write(flow, b"GET /a HTTP/1.1\r\nHost: other.example.com\r\n\r\n");
    assert_eq!(net.refusal(), Some(Reason::HostMismatch));

    for (name, port, bytes, reason) in [
        ("api.example.com", 443, hello("other.example.com"), Reason::ServerNameMismatch),
        ("git.example.com", 22, b"GET / HTTP/1.1\r\n\r\n".to_vec(), Reason::NotSsh),
    ] {
        let flow = net.dial(name, port);
        net.answer(b"HTTP/1.1 200 OK\r\n\r\n");
        assert_eq!(net.state(flow), State::Established, "{name}");
        net.write(flow, &bytes);
        assert_eq!(net.refusal(), Some(reason), "{name}");
        assert!(net.received().ends_with(b"\r\n\r\n"), "{name}: nothing but the question was said");
    }
}

#[test]
fn an_answer_may_come_in_pieces() {
    let (mut net, _) = proxied();
    let flow = net.dial("raw.example.com", 7000);
    for byte in b"HTTP/1.1 204 \r\nContent-Length: 5\r\n\r" {
        net.answer(&[*byte]);
        assert_eq!(net.state(flow), State::SynSent);
    }
    net.answer(b"\nearly");
    assert_eq!(net.state(flow), State::Established);
    assert_eq!(net.read(flow), b"early");
    net.write(flow, b"late");
    assert!(net.received().ends_with(b"\r\n\r\nlate"));
}

#[test]
fn what_is_no_consent_is_refused_in_plain_words() {
    let long = [&b"HTTP/1.1 200 OK\r\nX: "[..], &[b'x'; 9000]].concat();
    for (answer, words) in [
        (&b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic\r\n\r\n"[..], "wants a login"),
        (b"HTTP/1.1 403 Forb\x1bidden\r\n\r\n", "refused: it said HTTP/1.1 403 Forb\\x1bidden"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://evil.example.com/\r\n\r\n", "refused: it said HTTP/1.1 302 Found"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "refused: it said HTTP/1.1 100"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "does not speak HTTP/1"),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", "does not speak HTTP/1"),
        (b"HTTP/1.1  200 OK\r\n\r\n", "does not speak HTTP/1"),
        (b"HTTP/1.1200 OK\r\n\r\n", "does not speak HTTP/1"),
        (b"HTTP/2 200\r\n\r\n", "does not speak HTTP/1: it said HTTP/2 200"),
        // Whoever says something else is not waited for.
        (b"SSH-2.0-OpenSSH\r\n", "does not speak HTTP/1: it said SSH-2.0-OpenSSH"),
        (b"\x16\x03", "does not speak HTTP/1: it said \\x16\\x03"),
        (b"\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "does not speak HTTP/1"),
        (&long, "gave an answer that does not end within 8192 bytes"),
    ] {
        let (mut net, proxy) = proxied();
        let flow = net.dial("raw.example.com", 7000);
        net.answer(answer);
        assert_eq!(net.state(flow), State::Closed, "{words}");
        let (reason, detail, _) = refusal(&mut net).unwrap();
        assert_eq!(reason, Reason::ProxyRefused);
        assert!(detail.starts_with(&format!("the proxy {proxy} {words}")), "{detail}");
        assert_eq!(net.peer().1.closed, Some(true), "{words}: the connection to the proxy is reset");
    }
    for line_feeds in [&b"HTTP/1.1 200 OK\n\n"[..], b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\n", b""] {
        let (mut net, _) = proxied();
        let flow = net.dial("raw.example.com", 7000);
        net.answer(line_feeds);
        assert_eq!(net.state(flow), State::SynSent, "it has not ended");
        net.hang_up();
        assert_eq!(net.state(flow), State::Closed);
        let (_, detail, _) = refusal(&mut net).unwrap();
        assert!(detail.ends_with(" closed the connection without an answer"), "{detail}");
    }
}

/// A guest that reached the proxy itself could ask it for anything.
#[test]
fn no_rule_reaches_the_proxy_or_the_host_by_address() {
    let (mut net, proxy) = proxied();
    for own in ["10.0.0.5", "10.0.0.1"] {
        net.world.routes.insert(own.parse().unwrap(), if own == "10.0.0.1" { Route::Router } else { Route::Own });
    }
    for (address, port, reason) in [
        ("10.9.9.9", 3128, Reason::ForbiddenAddress),
        ("10.0.0.5", 22, Reason::HostAddress),
        ("10.0.0.1", 22, Reason::HostAddress),
        ("127.0.0.1", 3128, Reason::UnknownAddress),
        ("169.254.169.254", 80, Reason::UnknownAddress),
    ] {
        let flow = net.begin(address.parse().unwrap(), port);
        if address != "127.0.0.1" {
            assert_eq!(net.state(flow), State::Closed, "{address}");
            assert_eq!(net.refusal(), Some(reason), "{address}");
        }
    }
    assert!(net.world.dialled.is_empty());
    // Another port of the same machine is the policy's to allow, and the proxy's.
    net.begin(
        match proxy.ip() {
            std::net::IpAddr::V4(address) => address,
            _ => unreachable!(),
        },
        22,
    );
    assert!(net.received().starts_with(b"CONNECT 10.9.9.9:22 "));
}
