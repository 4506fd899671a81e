//! The policies that the checks are for, and what must be heard and written because of them, and what must not.

/// The first policy. Some of its rules lead where no rule may.
pub(super) const POLICY: &str = r#"
version = 1
allow = [
    "www.example.com", "two.example.com", "git.example.com", "git.example.com:22", "pypi.example.com", "npm.example.com",
    "*.wild.example.com", ".cloudflare-dns.com",
    "www.example.com:80+http", "ro.example.com:80+http+ro", "ws.example.com:80+http+ws",
    "www.example.com:{7003|7025}+raw", "raw.example.com:{7000|7001|7002}+raw", "chain.example.com:7000+raw",
    "flip.example.com:7000+raw", "private.example.com:7000+raw", "rfc1918.example.com:7000+raw",
    "metadata.example.com:7000+raw", "loopback.example.com:7000+raw", "anything.example.com:7000+raw",
    "carrier.example.com:7000+raw", "azure.example.com:7000+raw", "pool.example.com:7000+raw",
    "host.example.com:7000+raw", "router.example.com:7000+raw", "mapped.example.com:7000+raw",
    "nat64.example.com:7000+raw", "local6.example.com:7000+raw", "alias.example.com:7000+raw",
    "none.example.com:7000+raw",
]
deny = ["gone.wild.example.com"]
"#;

/// Another policy, with terms on methods and paths.
pub(super) const NEXT: &str = r#"
version = 1
allow = ["git.example.com"]
[[rule]]
allow = "www.example.com:80+http"
methods = ["GET"]
paths = ["/", "/simple/*"]
"#;

/// The names that this host may ask for: none but what was allowed and dialled.
pub(super) const ASKED: &[&str] = &[
    "www.example.com",
    "two.example.com",
    "git.example.com",
    "pypi.example.com",
    "npm.example.com",
    "any.wild.example.com",
    "ro.example.com",
    "ws.example.com",
    "raw.example.com",
    "chain.example.com",
    "flip.example.com",
    "private.example.com",
    "rfc1918.example.com",
    "metadata.example.com",
    "loopback.example.com",
    "anything.example.com",
    "carrier.example.com",
    "azure.example.com",
    "pool.example.com",
    "host.example.com",
    "router.example.com",
    "mapped.example.com",
    "nat64.example.com",
    "local6.example.com",
    "alias.example.com",
    "none.example.com",
];

/// What no server may ever have got.
pub(super) const UNHEARD: &[&str] = &["evil.test", "smuggled", "denied.example", "6461746120"];

/// What the servers must have got, for all that the tools say.
pub(super) const HEARD: &[&str] = &[
    "heard the guest goes on",
    "heard at once",
    "sni www.example.com",
    "http POST /repo.git/git-receive-pack git.example.com",
    "http PUT /put www.example.com",
    // What is inside of TLS is its server's to judge: docs/egress.md.
    "http GET / fronted.example.net",
];

/// What must be in the log after all of the first policy's checks: row, kind, field, text.
pub(super) const EVENTS: &[(&str, &str, &str, &str)] = &[
    ("", "net.dns.answered", "name", "www.example.com"),
    ("36", "net.dns.denied", "hint", "add a rule: "),
    ("41", "net.dns.denied", "reason", "public-doh"),
    ("56", "net.dns.denied", "reason", "reserved-name"),
    ("49", "net.flow.denied", "reason", "unknown-address"),
    ("49", "net.flow.denied", "hint", "dial by name"),
    ("27", "net.flow.denied", "reason", "other-port"),
    ("42", "net.flow.denied", "reason", "forbidden-address"),
    ("44", "net.flow.denied", "reason", "host-address"),
    ("", "net.flow.denied", "reason", "unresolvable"),
    ("59", "net.flow.denied", "reason", "no-server-name"),
    ("60", "net.flow.denied", "reason", "server-name-mismatch"),
    ("62", "net.flow.denied", "reason", "encrypted-hello"),
    ("68", "net.flow.denied", "reason", "not-tls"),
    ("28", "net.flow.denied", "reason", "not-ssh"),
    ("21", "net.flow.denied", "reason", "slow"),
    ("74", "net.flow.denied", "reason", "host-mismatch"),
    ("78", "net.flow.denied", "reason", "method"),
    ("77", "net.flow.denied", "reason", "upgrade"),
    ("79", "net.flow.denied", "reason", "bad-http"),
    ("80", "net.flow.denied", "reason", "bad-answer"),
    ("70", "net.flow.tls", "alpn", "h2"),
    ("30", "net.flow.opened", "protocol", "raw"),
    ("31", "net.flow.closed", "cause", "finished"),
    ("31", "net.flow.closed", "cause", "guest-reset"),
    ("", "net.http.request", "path", "/meet"),
    ("1", "net.frames.dropped", "class", "ethertype"),
    ("2", "net.frames.dropped", "class", "vlan"),
    ("3", "net.frames.dropped", "class", "llc"),
    ("6", "net.frames.dropped", "class", "source-mac"),
    ("7", "net.frames.dropped", "class", "arp"),
    ("9", "net.frames.dropped", "class", "ipv6"),
    ("10", "net.frames.dropped", "class", "fragment"),
    ("11", "net.frames.dropped", "class", "ipv4-header"),
    ("13", "net.frames.dropped", "class", "destination-address"),
    ("14", "net.frames.dropped", "class", "protocol"),
    ("15", "net.frames.dropped", "class", "icmp"),
    ("17", "net.frames.dropped", "class", "destination-mac"),
    ("", "net.frames.dropped", "class", "source-address"),
];
