//! Rows 21, 74 to 84: HTTP in the clear.

use std::time::Duration;

use netfilter_control::{Name, Reason, Record, Terms};
use proptest::prelude::*;
use smoltcp::socket::tcp::State;

use super::net::{Net, policy};
use crate::http::head::{self, Framing};
use crate::http::{Connection, Course, Happening};

const WEB: &str = "web.example.com:80+http";

fn connection(terms: Terms) -> Connection {
    Connection::new(Name::parse("web.example.com").unwrap(), 80, terms)
}

/// Gives all of a request to a fresh connection, in steps.
fn ask(request: &[u8], step: usize, terms: &Terms) -> Connection {
    let mut connection = connection(terms.clone());
    for part in request.chunks(step) {
        let mut rest = part;
        while !rest.is_empty() {
            let taken = connection.from_guest(rest);
            if taken == 0 {
                return connection;
            }
            rest = &rest[taken..];
        }
    }
    connection
}

fn status(request: &str) -> Option<u16> {
    match ask(request.as_bytes(), 7, &Terms::default()).happenings().pop() {
        Some(Happening::Refused(refusal)) => Some(refusal.status),
        _ => None,
    }
}

fn head(lines: &str) -> String {
    format!("GET / HTTP/1.1\r\nHost: web.example.com\r\n{lines}\r\n")
}

#[test]
fn a_request_is_written_anew() {
    let request = "POST /a?b=c HTTP/1.1\r\nX-One:  1 \r\nhOsT: WEB.example.com.:80\r\nConnection: X-Gone, keep-alive\r\n\
        X-Gone: 1\r\nTE: trailers\r\nContent-Length: 5\r\n\r\nhello";
    for step in [1, 3, 1000] {
        let mut connection = ask(request.as_bytes(), step, &Terms::default());
        assert_eq!(
            String::from_utf8(connection.to_upstream().clone()).unwrap(),
            "POST /a?b=c HTTP/1.1\r\nHost: web.example.com\r\nX-One: 1\r\nContent-Length: 5\r\n\r\nhello"
        );
    }
}

#[test]
fn row_74_the_host_is_the_one_that_was_dialled() {
    let with = |host: &str| format!("GET / HTTP/1.1\r\n{host}\r\n");
    assert_eq!(status(&with("Host: web.example.com\r\n")), None);
    assert_eq!(status(&with("Host: web.example.com:80\r\n")), None);
    for host in [
        "other.example.com",
        "web.example.com:81",
        "web.example.com:",
        "web.example.com:80:80",
        "evil.test",
        "web.example.com@evil.test",
        "web.example.com, evil.test",
        "93.184.216.34",
        "[::1]",
        "",
        "web.example.com/x",
    ] {
        assert_eq!(status(&with(&format!("Host: {host}\r\n"))), Some(421), "{host}");
    }
    assert_eq!(status(&with("")), Some(400), "no Host");
    assert_eq!(status(&with("Host: web.example.com\r\nHost: web.example.com\r\n")), Some(400));
    assert_eq!(status(&with("Host: web.example.com\r\nhost: evil.test\r\n")), Some(400));
}

#[test]
fn rows_77_78_methods_and_other_protocols() {
    let with = |method: &str| format!("{method} / HTTP/1.1\r\nHost: web.example.com\r\n\r\n");
    for method in ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
        assert_eq!(status(&with(method)), None, "{method}");
    }
    for method in ["CONNECT", "TRACE", "PRI", "PROPFIND", "get", "X"] {
        assert_eq!(status(&with(method)), Some(403), "{method}");
    }
    assert_eq!(status("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), Some(400));
    assert_eq!(status("CONNECT web.example.com:80 HTTP/1.1\r\nHost: web.example.com:80\r\n\r\n"), Some(403));
    let listed = Terms { methods: vec!["PROPFIND".into(), "CONNECT".into()], ..Terms::default() };
    let mut allowed = ask(with("PROPFIND").as_bytes(), 99, &listed);
    assert!(allowed.happenings().is_empty());
    for method in ["GET", "CONNECT"] {
        let mut refused = ask(with(method).as_bytes(), 99, &listed);
        assert!(matches!(&refused.happenings()[..], [Happening::Refused(refusal)] if refusal.reason == Reason::Method));
    }
    for line in [
        "GET http://web.example.com/ HTTP/1.1",
        "GET https://evil.test/ HTTP/1.1",
        "GET * HTTP/1.1",
        "GET x HTTP/1.1",
        "GET /a#b HTTP/1.1",
        "GET /\u{7f} HTTP/1.1",
        "GET / HTTP/1.1 ",
        "GET  / HTTP/1.1",
        "GET / HTTP/2.0",
        "GET /",
        "GET / http/1.1",
        "GET\t/\tHTTP/1.1",
        " GET / HTTP/1.1",
    ] {
        assert_eq!(status(&format!("{line}\r\nHost: web.example.com\r\n\r\n")), Some(400), "{line}");
    }
    assert_eq!(status("OPTIONS * HTTP/1.1\r\nHost: web.example.com\r\n\r\n"), None);
}

#[test]
fn row_79_a_request_that_two_readers_could_frame_differently_is_refused() {
    for lines in [
        "Content-Length: 5\r\nContent-Length: 5\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: 5, 5\r\n",
        "Content-Length: +5\r\n",
        "Content-Length: -5\r\n",
        "Content-Length: 0x5\r\n",
        "Content-Length: 5 5\r\n",
        "Content-Length: \r\n",
        "Content-Length: 99999999999999999999\r\n",
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: identity\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked, chunked\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding:\u{b}chunked\r\n",
        "Content-Length : 5\r\n",
        "Connection: content-length\r\nContent-Length: 5\r\n",
        "Connection: Host\r\n",
        "Connection: close, Transfer-Encoding\r\n",
        " folded: 1\r\n",
        "A: 1\r\n folded\r\n",
        "A: 1\r\n\tfolded\r\n",
        "A\r\n",
        ": 1\r\n",
        "A B: 1\r\n",
        "A: \u{0}\r\n",
        "A: 1\u{1}\r\n",
        "A: 1\rB: 2\r\n",
        "A: 1\nB: 2\r\n",
        "A: 1\r\r\n",
        "Ä: 1\r\n",
    ] {
        assert_eq!(status(&head(lines)), Some(400), "{lines:?}");
    }
    assert_eq!(status("\r\nGET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n"), Some(400), "an empty line first");
    assert_eq!(status("\nGET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n"), Some(400));
    assert_eq!(status("GET / HTTP/1.1\nHost: web.example.com\n\n"), Some(400), "bare line feeds");
    assert_eq!(status("GET / HTTP/1.0\r\nHost: web.example.com\r\nTransfer-Encoding: chunked\r\n\r\n"), Some(400));
    assert_eq!(status(&head("Expect: 200-maybe\r\n")), Some(417));
}

#[test]
fn row_79_chunks_are_digits_and_data() {
    let chunked = |body: &str| format!("{}{body}", head("Transfer-Encoding: chunked\r\n"));
    for step in [1, 4, 1000] {
        let request = chunked("4\r\nwiki\r\n00005\r\npedia\r\n0\r\nHost: evil.test\r\nAuthorization: x\r\n\r\n");
        let mut connection = ask(request.as_bytes(), step, &Terms::default());
        assert!(connection.happenings().is_empty());
        let sent = String::from_utf8(connection.to_upstream().clone()).unwrap();
        let body = sent.split_once("\r\n\r\n").unwrap().1;
        assert!(body.ends_with("\r\n0\r\n\r\n") && !body.contains("evil"), "row 81: trailers are dropped: {body:?}");
        let data: String = body.split("\r\n").skip(1).step_by(2).collect();
        assert_eq!(data, "wikipedia");
    }
    for body in [
        "4;ext=1\r\nwiki\r\n",
        "4;ext\n\r\nwiki\r\n",
        "4 \r\nwiki\r\n",
        " 4\r\nwiki\r\n",
        "+4\r\nwiki\r\n",
        "0x4\r\nwiki\r\n",
        "\r\nwiki\r\n",
        "4\nwiki\r\n",
        "4\r\nwikix\r\n",
        "4\r\nwiki\n",
        "4\r\nwiki\r\r\n",
        "ffffffffffffffff\r\nwiki\r\n",
        "g\r\nwiki\r\n",
        "0\r\na\nb\r\n\r\n",
    ] {
        assert_eq!(status(&chunked(body)), Some(400), "{body:?}");
    }
}

#[test]
fn row_84_heads_are_limited() {
    let many = "A: 1\r\n".repeat(100);
    assert_eq!(status(&head(&many)), Some(431));
    assert_eq!(status(&head(&"A: 1\r\n".repeat(99))), None);
    assert_eq!(status(&format!("GET /{} HTTP/1.1\r\nHost: web.example.com\r\n\r\n", "a".repeat(9000))), Some(414));
    assert_eq!(status(&head(&format!("A: {}\r\n", "a".repeat(40_000)))), Some(431));
    let mut endless = ask(&vec![b'a'; 1 << 20], 1000, &Terms::default());
    assert!(endless.to_upstream().is_empty());
    assert_eq!(endless.course(), Course::Closing);
}

#[test]
fn paths_are_compared_as_they_are_written() {
    let terms = Terms { paths: vec!["/owner/repo/*".into(), "/exact".into()], ..Terms::default() };
    let allowed = |target: &str| {
        let request = format!("GET {target} HTTP/1.1\r\nHost: web.example.com\r\n\r\n");
        ask(request.as_bytes(), 99, &terms).happenings().is_empty()
    };
    for target in ["/owner/repo/", "/owner/repo/x/y?z=/../", "/exact", "/exact?x"] {
        assert!(allowed(target), "{target}");
    }
    for target in [
        "/",
        "/owner/repo",
        "/owner/repox/",
        "/exact/",
        "/exactly",
        "/owner/repo/../other",
        "/owner/repo/./x",
        "/owner/repo/%2e%2e/other",
        "/owner/repo/%2E./x",
        "/owner/repo/..%2fother",
        "/owner/repo//x",
        "/owner/repo/\\..\\x",
        "/owner/repo/..;/x",
        "/OWNER/repo/",
        "/owner/repo/%5c..",
        "*",
    ] {
        assert!(!allowed(target), "{target}");
    }
}

#[test]
fn row_82_an_upgrade_needs_the_rule() {
    let request = head("Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n");
    assert_eq!(status(&request), Some(403));
    for lines in [
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n",
        "Upgrade: h2c\r\n",
        "Connection: upgrade\r\n",
        "Connection: Upgrade\r\nUpgrade: TLS/1.0\r\n",
    ] {
        assert_eq!(status(&head(lines)), Some(403), "row 77: {lines:?}");
    }
    let terms = Terms { websocket: true, ..Terms::default() };
    let mut connection = ask(request.as_bytes(), 9, &terms);
    let sent = String::from_utf8(connection.to_upstream().clone()).unwrap();
    assert!(sent.ends_with("Sec-WebSocket-Key: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"), "{sent}");
    connection.to_upstream().clear();
    let answer = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x81\x00";
    assert_eq!(connection.from_upstream(answer), answer.len() - 2, "what follows is not HTTP");
    assert_eq!(connection.course(), Course::Tunnel);
    for refused in [
        head("Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 5\r\n"),
        head("Connection: Upgrade\r\nUpgrade: websocket\r\nUpgrade: h2c\r\n"),
        head("Connection: Upgrade\r\nUpgrade: websocket, h2c\r\n"),
        request.replace("GET", "POST"),
        request.replace("HTTP/1.1", "HTTP/1.0"),
    ] {
        assert_eq!(ask(refused.as_bytes(), 99, &terms).course(), Course::Closing, "{refused}");
    }
    // An answer of 101 that nobody asked for.
    let mut connection = ask(head("").as_bytes(), 99, &terms);
    connection.from_upstream(answer);
    assert_eq!(connection.course(), Course::Broken);
    // A refused upgrade is an ordinary answer.
    let mut connection = ask(request.as_bytes(), 99, &terms);
    connection.from_upstream(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n");
    assert_eq!(connection.course(), Course::Open);
}

/// Gives an answer to one request, in steps; what the guest gets, and the course.
fn get(answer: &str, request: &str, step: usize) -> (String, Course) {
    let mut connection = ask(request.as_bytes(), 99, &Terms::default());
    assert!(connection.happenings().is_empty(), "{request}");
    for part in answer.as_bytes().chunks(step) {
        let mut rest = part;
        while !rest.is_empty() {
            let taken = connection.from_upstream(rest);
            if taken == 0 {
                break;
            }
            rest = &rest[taken..];
        }
    }
    (String::from_utf8_lossy(connection.to_guest()).into_owned(), connection.course())
}

#[test]
fn answers_are_written_anew() {
    for step in [1, 5, 1000] {
        let (got, course) =
            get("HTTP/1.1 200 OK\r\nA:1\r\nKeep-Alive: 5\r\nContent-Length: 2\r\n\r\nhi", &head(""), step);
        assert_eq!(got, "HTTP/1.1 200 OK\r\nA: 1\r\nContent-Length: 2\r\n\r\nhi");
        assert_eq!(course, Course::Open);
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX: y\r\n\r\n";
        let (got, course) = get(chunked, &head(""), step);
        assert!(got.ends_with("0\r\n\r\n") && !got.contains("X: y"), "{got}");
        assert_eq!(course, Course::Open);
        let (got, course) = get("HTTP/1.0 200 OK\r\n\r\nuntil the end", &head(""), step);
        assert_eq!(got, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end");
        assert_eq!(course, Course::Open);
        let (got, course) = get("HTTP/1.1 304\r\nContent-Length: 9\r\n\r\n", &head(""), step);
        assert_eq!((got.as_str(), course), ("HTTP/1.1 304\r\nContent-Length: 9\r\n\r\n", Course::Open));
        let request = head("").replace("GET", "HEAD");
        let (got, course) = get("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", &request, step);
        assert_eq!((got.as_str(), course), ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", Course::Open));
        let request = head("Expect: 100-continue\r\nContent-Length: 1\r\n");
        let (got, _) = get("HTTP/1.1 100 Continue\r\n\r\n", &request, step);
        assert_eq!(got, "HTTP/1.1 100 Continue\r\n\r\n");
    }
}

#[test]
fn row_80_an_answer_that_is_not_strictly_framed_ends_both_sides() {
    for answer in [
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nhi",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nhi",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nhi",
        "HTTP/1.1 200 OK\nContent-Length: 2\n\nhi",
        "HTTP/1.1 200 OK\r\nA: 1\r\n folded\r\n\r\n",
        "HTTP/1.1 200 OK\r\nA: 1\rContent-Length: 3\r\n\r\nhi",
        "\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        "HTTP/2 200\r\n\r\n",
        "HTTP/1.1 20 OK\r\n\r\n",
        "HTTP/1.1 2000 OK\r\n\r\n",
        "HTTP/1.1 600 OK\r\n\r\n",
        "HTTP/1.1  200 OK\r\n\r\n",
        "ICY 200 OK\r\n\r\n",
        "hello, I speak first\r\n\r\n",
        "HTTP/1.1 100 Continue\r\nContent-Length: 2\r\n\r\nhi",
        "HTTP/1.1 101 Switching Protocols\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nhi\r\n0\r\n\r\n",
    ] {
        let (_, course) = get(answer, &head(""), 3);
        assert_eq!(course, Course::Broken, "{answer:?}");
    }
    // More than was asked for: it must not become the next answer.
    for answer in ["HTTP/1.1 204 No\r\n\r\nbody", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi!"] {
        let (_, course) = get(answer, &head(""), 1000);
        assert_eq!(course, Course::Broken, "{answer:?}");
    }
    let (_, course) = get(&"HTTP/1.1 103 Early Hints\r\n\r\n".repeat(17), &head(""), 100);
    assert_eq!(course, Course::Broken, "a flood of interim answers");
    let mut early = connection(Terms::default());
    early.from_upstream(b"HTTP/1.1 200 OK\r\n");
    assert_eq!(early.course(), Course::Broken, "an answer to nothing");
    // Shorter than announced.
    let mut short = ask(head("").as_bytes(), 99, &Terms::default());
    short.from_upstream(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi");
    short.upstream_ended();
    assert_eq!(short.course(), Course::Broken);
}

#[test]
fn row_76_every_request_on_a_connection_is_checked() {
    let second = "GET /2 HTTP/1.1\r\nHost: evil.test\r\n\r\n";
    let both = format!("{}{second}", head(""));
    let mut connection = connection(Terms::default());
    let taken = connection.from_guest(both.as_bytes());
    assert_eq!(taken, head("").len(), "one request is outstanding at a time");
    assert_eq!(connection.from_guest(second.as_bytes()), 0);
    connection.to_upstream().clear();
    connection.from_upstream(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    connection.from_guest(second.as_bytes());
    assert!(connection.to_upstream().is_empty());
    assert!(matches!(&connection.happenings()[..],
        [Happening::Answered { status: 200, .. }, Happening::Refused(refusal)] if refusal.reason == Reason::HostMismatch));
    assert!(String::from_utf8_lossy(connection.to_guest()).contains("421 Misdirected Request"));
}

#[test]
fn an_early_answer_ends_the_connection_after_it() {
    let mut connection = ask(head("Content-Length: 100\r\n").replace("GET", "POST").as_bytes(), 99, &Terms::default());
    connection.from_guest(b"some of it");
    connection.from_upstream(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno");
    assert_eq!(connection.course(), Course::Closing);
    assert!(String::from_utf8_lossy(connection.to_guest()).contains("Connection: close\r\n\r\nno"));
}

#[test]
fn a_flow_of_requests_and_answers() {
    let mut net = Net::new(WEB);
    let flow = net.dial("web.example.com", 80);
    for n in 0..3 {
        net.write(flow, format!("GET /{n}?secret=1 HTTP/1.1\r\nHost: web.example.com\r\n\r\n").as_bytes());
        assert!(
            net.received().ends_with(format!("GET /{n}?secret=1 HTTP/1.1\r\nHost: web.example.com\r\n\r\n").as_bytes())
        );
        net.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi");
        assert!(net.read(flow).ends_with(b"\r\n\r\nhi"));
    }
    let paths: Vec<String> = net
        .records()
        .into_iter()
        .filter_map(|record| match record {
            Record::HttpRequest { path, status: 200, .. } => Some(path),
            _ => None,
        })
        .collect();
    assert_eq!(paths, ["/0", "/1", "/2"], "row 129: without what follows the question mark");
    net.write(flow, b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n");
    let refused = String::from_utf8(net.read(flow)).unwrap();
    assert!(refused.starts_with("HTTP/1.1 421 ") && refused.contains("denied by sandbox policy"), "{refused}");
    assert_eq!(net.refusal(), Some(Reason::HostMismatch));
    assert!(net.peer().1.finished);
    net.end(flow);
    net.pass(Duration::from_secs(1));
    assert!(net.peer().1.closed.is_some());
}

#[test]
fn requests_that_come_early_wait_for_their_turn() {
    let mut net = Net::new(WEB);
    let flow = net.dial("web.example.com", 80);
    let requests: String = (0..5).map(|n| head("").replace("GET /", &format!("GET /{n}"))).collect();
    net.write(flow, requests.as_bytes());
    for n in 0..5 {
        let received = String::from_utf8(net.received()).unwrap();
        assert_eq!(received.matches("GET ").count(), n + 1, "one at a time");
        assert!(received.contains(&format!("GET /{n} ")));
        net.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    }
    assert_eq!(net.read(flow), b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n".repeat(5));
}

#[test]
fn a_rate_slows_requests_down() {
    let mut policy = policy(WEB);
    policy.rules[0].terms.rate = Some(100);
    let mut net = Net::with_policy(policy);
    let flow = net.dial("web.example.com", 80);
    let began = net.now;
    net.write(flow, head(&format!("X-Long: {}\r\n", "a".repeat(400))).as_bytes());
    while net.received().is_empty() {
        net.pass(Duration::from_millis(100));
    }
    assert!(net.now - began > Duration::from_secs(3));
}

#[test]
fn large_bodies_pass_both_ways() {
    let mut net = Net::new(WEB);
    let flow = net.dial("web.example.com", 80);
    let body: Vec<u8> = (0..1_000_000u32).map(|n| u8::try_from(n % 251).unwrap()).collect();
    net.write(
        flow,
        format!("POST / HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: {}\r\n\r\n", body.len()).as_bytes(),
    );
    net.write(flow, &body);
    assert!(net.received().ends_with(&body));
    net.answer(
        &[
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec(),
            format!("{:x}\r\n", body.len()).into_bytes(),
            body.clone(),
            b"\r\n0\r\n\r\n".to_vec(),
        ]
        .concat(),
    );
    let mut got = net.read(flow);
    for _ in 0..50 {
        net.poke();
        got.extend(net.read(flow));
    }
    assert!(got.ends_with(b"\r\n0\r\n\r\n"));
    assert!(got.len() > body.len());
}

#[test]
fn an_answer_that_breaks_off_is_a_reset() {
    let mut net = Net::new(WEB);
    let flow = net.dial("web.example.com", 80);
    net.write(flow, head("").as_bytes());
    net.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf");
    net.hang_up();
    assert_eq!(net.state(flow), State::Closed);

    let flow = net.dial("web.example.com", 80);
    net.write(flow, head("").as_bytes());
    net.answer(b"HTTP/1.1 200 OK\r\n\r\nall of it");
    net.hang_up();
    assert!(net.read(flow).ends_with(b"all of it"));
    assert_eq!(net.state(flow), State::CloseWait, "an orderly end");

    let flow = net.dial("web.example.com", 80);
    net.write(flow, head("").as_bytes());
    net.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhiX");
    assert_eq!(net.state(flow), State::Closed);
    assert_eq!(net.refusal(), Some(Reason::BadAnswer));
}

#[test]
fn row_21_a_slow_head_meets_an_absolute_deadline_and_an_idle_connection_does_not() {
    let mut net = Net::new(WEB);
    let flow = net.dial("web.example.com", 80);
    net.pass(Duration::from_secs(200));
    assert_eq!(net.state(flow), State::Established, "a connection that was made ahead");
    for byte in head("X-Slow: 1\r\n").bytes() {
        net.write(flow, &[byte]);
        net.pass(Duration::from_millis(400));
    }
    assert_eq!(net.state(flow), State::Closed);
    assert_eq!(net.refusal(), Some(Reason::Slow));
    let flow = net.dial("web.example.com", 80);
    net.pass(Duration::from_secs(301));
    assert_eq!(net.state(flow), State::Closed);
}

#[test]
fn a_websocket_is_a_pipe_after_its_answer() {
    let mut net = Net::with_policy(policy("web.example.com:80+http+ws"));
    let flow = net.dial("web.example.com", 80);
    net.write(flow, head("Connection: Upgrade\r\nUpgrade: websocket\r\n").as_bytes());
    net.answer(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\x81\x02hi");
    assert!(net.read(flow).ends_with(b"\r\n\r\n\x81\x02hi"));
    net.write(flow, b"\x81\x85anything");
    assert!(net.received().ends_with(b"\r\n\r\n\x81\x85anything"));
    net.answer(b"more");
    assert_eq!(net.read(flow), b"more");
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), step in 1usize..50) {
        let mut connection = ask(&bytes, step, &Terms::default());
        connection.from_upstream(&bytes);
    }

    /// What passes has one Host, the right one, and one framing, however the request was built.
    #[test]
    fn what_passes_is_framed_once(lines in prop::collection::vec(prop::sample::select(vec![
        "Host: web.example.com\r\n", "Host: evil.test\r\n", "Content-Length: 3\r\n", "Transfer-Encoding: chunked\r\n",
        "Connection: close\r\n", "Connection: host\r\n", "X: y\r\n", " z\r\n", "X: a\nHost: evil.test\r\n", "content-length:4\r\n",
        "Transfer-Encoding : chunked\r\n", "Trailer: Host\r\n"]), 0..6)) {
        let request = format!("POST / HTTP/1.1\r\n{}\r\n", lines.concat());
        let name = Name::parse("web.example.com").unwrap();
        if let Ok(request) = head::request(request.as_bytes(), &name, 80, &Terms::default()) {
            let text = String::from_utf8(request.head).unwrap().to_ascii_lowercase();
            prop_assert_eq!(text.matches("\r\nhost:").count(), 1);
            prop_assert!(text.contains("\r\nhost: web.example.com\r\n") && !text.contains("evil"));
            let framings = text.matches("content-length").count() + text.matches("transfer-encoding").count();
            prop_assert_eq!(framings, usize::from(request.framing != Framing::None));
        }
    }

    /// However the bytes arrive, the same comes out.
    #[test]
    fn pieces_do_not_matter(step in 1usize..40, other in 1usize..40, at in 0usize..140, value in any::<u8>()) {
        let mut bytes = format!("{}4\r\nwiki\r\n0\r\n\r\n", head("Transfer-Encoding: chunked\r\n").replace("GET", "POST")).into_bytes();
        let at = at % bytes.len();
        bytes[at] = value;
        let (mut a, mut b) = (ask(&bytes, step, &Terms::default()), ask(&bytes, other, &Terms::default()));
        prop_assert_eq!(a.course(), b.course());
        let (a, b) = (a.happenings(), b.happenings());
        prop_assert_eq!(a, b);
    }
}
