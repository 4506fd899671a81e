//! The grammar, good and bad.

use netfilter_control::{Name, Policy, Protocol, Subject, Target};
use proptest::prelude::*;

use crate::{Argument, Compiler, PolicyError, classify_argument, explain};

fn compile(rules: &str) -> Result<Policy, PolicyError> {
    let mut compiler = Compiler::default();
    compiler.rules("--allow", rules)?;
    compiler.finish()
}

fn compile_file(text: &str) -> Result<Policy, PolicyError> {
    let mut compiler = Compiler::default();
    compiler.file("p.toml", text)?;
    compiler.finish()
}

/// Asserts that rules are refused, and which part of them is marked.
#[track_caller]
fn refused(rules: &str, token: &str, message: &str) {
    let error = compile(rules).expect_err(rules);
    let details = error.details();
    assert_eq!(&details.text[details.token.clone()], token, "{error}");
    assert!(error.to_string().contains(message), "{error}");
}

fn name(text: &str) -> Name {
    Name::parse(text).unwrap()
}

#[test]
fn rules_have_defaults_by_port() {
    let policy = compile(
        "api.example.com, *.github.com:443, .example.org:{443|8443}+tls,git.example.com:22,\
         web.example.com:80+http+ws+ro,db.example.com:5432+raw,cidr:10.1.2.0/24:6000-6010+raw,cidr:10.1.3.0/24:22",
    )
    .unwrap();
    let shown: Vec<(String, Protocol)> = policy
        .rules
        .iter()
        .map(|rule| {
            let ports: Vec<String> = rule.ports.iter().map(ToString::to_string).collect();
            (ports.join(" "), rule.protocol)
        })
        .collect();
    let expected = [
        ("443", Protocol::Tls),
        ("443", Protocol::Tls),
        ("443 8443", Protocol::Tls),
        ("22", Protocol::Ssh),
        ("80", Protocol::Http),
        ("5432", Protocol::Raw),
        ("6000-6010", Protocol::Raw),
        ("22", Protocol::Ssh),
    ];
    assert_eq!(shown, expected.map(|(ports, protocol)| (ports.to_owned(), protocol)));
    assert_eq!(policy.rules[1].target, Target::Below(name("github.com")));
    assert_eq!(policy.rules[2].target, Target::AtOrBelow(name("example.org")));
    assert!(policy.rules[4].terms.websocket);
    assert_eq!(policy.rules[4].terms.methods, ["GET", "HEAD", "OPTIONS"]);
    assert_eq!(policy.rules[0].text, "api.example.com");
}

#[test]
fn arguments_have_three_forms() {
    assert_eq!(classify_argument("o", "deny-all").unwrap(), Argument::DenyAll);
    assert_eq!(classify_argument("o", "deny-egress-except=a.example").unwrap(), Argument::Rules);
    assert_eq!(classify_argument("o", "@dir/p.toml").unwrap(), Argument::File("dir/p.toml"));
    for wrong in ["", "allow-all", "deny-egress-excpet=a.example", "@", "deny-all,a.example", "DENY-ALL"] {
        assert!(classify_argument("o", wrong).is_err(), "{wrong}");
    }
    let mut compiler = Compiler::default();
    compiler.argument("--network-policy", "deny-all").unwrap();
    assert_eq!(compiler.finish().unwrap(), Policy::default());
    let mut compiler = Compiler::default();
    let error = compiler.argument("--network-policy", "deny-egress-except=api.example.com:443+tsl").unwrap_err();
    let shown = "--network-policy: `tsl` is not an option of a rule\n  \
        deny-egress-except=api.example.com:443+tsl\n  \
        \u{20}                                      ^^^\n  \
        options are tls, http, ssh, raw, ro, ws, ech, nosni and shared-suffix";
    assert_eq!(error.to_string(), shown);
}

/// Row 95: an empty list, a typo or an oversized policy opens nothing: it is refused.
#[test]
fn what_is_not_understood_is_refused() {
    refused("", "", "empty rule");
    refused("a.example,", "", "empty rule");
    refused("a.example,,b.example", "", "empty rule");
    refused("*", "*", "none means all");
    refused("*.*", "*", "`*` stands only");
    refused("a.*.example.com", "a.*.example.com", "`*` stands only");
    refused("example.*", "example.*", "`*` stands only");
    refused("*example.com", "*example.com", "`*` stands only");
    refused("*.example.com*", "example.com*", "`*` stands only");
    refused("..example.com", ".example.com", "empty");
    refused("a..example.com", "a..example.com", "empty");
    refused("exa mple.com", "exa mple.com", "no host name");
    refused("https://example.com", "https://example.com", "not a URL");
    refused("example.com/path", "example.com/path", "not a URL");
    refused("example", "example", "single label");
    refused("example.com:", "", "no port");
    refused("example.com:0", "0", "no port");
    refused("example.com:65536", "65536", "no port");
    refused("example.com:http", "http", "no port");
    refused("example.com:-1", "", "no port");
    refused("example.com:10-5+raw", "10-5", "no range");
    refused("example.com:{443|443}", "{443|443}", "overlap");
    refused("example.com:{443|}", "", "no port");
    refused("example.com:{443", "{443", "no port");
    refused("example.com:80", "80", "does not go without saying");
    refused("example.com:{443|22}", "{443|22}", "does not go without saying");
    refused("example.com:442-443", "442-443", "does not go without saying");
    refused("example.com+", "", "not an option");
    refused("example.com+TLS", "TLS", "not an option");
    refused("example.com+tls+tls", "tls", "twice");
    refused("example.com+tls+raw", "raw", "two protocols");
    refused("example.com+inspect", "inspect", "cannot be inspected");
    refused("example.com+ro", "ro", "not seen");
    refused("example.com+ws", "ws", "+http only");
    refused("example.com:80+http+ech", "ech", "+tls only");
    refused("example.com:25+raw+nosni", "nosni", "+tls only");
    refused("preset:nope", "preset:nope", "no preset");
    refused("preset:../x", "../x", "no name of a preset");
    refused("!preset:x", "x", "cannot be denied");
    refused("!a.example+tls", "tls", "no options");
    refused("deny-all", "deny-all", "single label");
    refused("localhost", "localhost", "reserved");
    refused("metadata.google.internal", "metadata.google.internal", "reserved");
    let many = (0..1025).map(|n| format!("h{n}.example.com")).collect::<Vec<_>>().join(",");
    assert!(compile(&many).unwrap_err().to_string().contains("over 1024 rules"));
    let long = format!("{}.example.com", "a".repeat(64 << 10));
    assert!(compile(&long).unwrap_err().to_string().contains("a policy of"));
}

/// Row 93: a wildcard on a suffix that is everybody's.
#[test]
fn a_wildcard_does_not_cover_a_public_suffix() {
    refused("*.com", "com", "single label");
    refused("*.co.uk", "co.uk", "public suffix");
    refused(".co.uk", "co.uk", "public suffix");
    for suffix in ["github.io", "s3.amazonaws.com", "workers.dev", "vercel.app", "ngrok.app", "compute.amazonaws.com"] {
        refused(&format!("*.{suffix}"), suffix, "public suffix");
        assert!(compile(&format!("*.{suffix}+shared-suffix")).is_ok(), "{suffix}");
    }
    refused("*.co.uk+shared-suffix", "co.uk", "public suffix");
    refused("a.example+shared-suffix", "shared-suffix", "with a wildcard only");
    assert!(compile("*.user.github.io,*.github.com,.example.co.uk,github.io").is_ok());
    assert!(compile("!*.github.io,!*.com").is_ok(), "anything may be denied");
}

/// Row 55: homoglyphs and full-width dots are no host names; an A-label is, as the bytes it is.
#[test]
fn names_are_ascii() {
    for text in ["exämple.com", "ехample.com", "example．com", "example。com", "ﬁ.example.com"] {
        refused(text, text, "ASCII form");
    }
    let policy = compile("xn--exmple-cua.com").unwrap();
    assert_eq!(policy.rules[0].target, Target::Exact(name("xn--exmple-cua.com")));
}

#[test]
fn addresses_are_written_as_blocks() {
    refused("10.0.0.1", "10.0.0.1", "not a host name");
    refused("10.0.0.1:80+raw", "10.0.0.1", "not a host name");
    refused("2130706433.example.1", "2130706433.example.1", "looks like one");
    refused("[2001:db8::1]:443", "[2001", "not a host name");
    refused("cidr:10.0.0.1:80+raw", "10.0.0.1", "without its prefix");
    refused("cidr:10.0.0.1/24:80+raw", "10.0.0.1/24", "10.0.0.0/24");
    refused("cidr:10.0.0.0/33:80+raw", "33", "longer than the address");
    refused("cidr:10.0.0.0/+8:80", "", "no prefix");
    refused("cidr:10.0.0/8:80+raw", "10.0.0", "no IPv4 address");
    refused("cidr:[fd00::/8]:80+raw", "[fd00", "without its prefix");
    refused("cidr:10.0.0.0/24", "cidr:10.0.0.0/24", "has none");
    refused("cidr:10.0.0.0/24:80+http", "http", "has none");
    refused("cidr:0.0.0.0/0:1-65535+raw", "cidr:0.0.0.0/0:1-65535+raw", "open egress");
    refused("cidr:0.0.0.0/1:1-65535+raw", "cidr:0.0.0.0/1:1-65535+raw", "open egress");
    for never in ["127.0.0.0/8", "127.0.0.1/32", "169.254.169.254/32", "198.18.0.0/15", "168.63.129.16/32"] {
        refused(&format!("cidr:{never}:80+raw"), never, "never reached");
    }
    let mut open = Compiler::default().accept_open_egress();
    open.rules("--allow", "cidr:0.0.0.0/0:1-65535+raw").unwrap();
    assert_eq!(open.finish().unwrap().rules.len(), 1);
}

#[test]
fn a_contradiction_is_refused() {
    refused("a.example,a.example+nosni", "a.example+nosni", "contradicts `a.example`");
    refused("a.example:1-10+raw,a.example:10+tls", "a.example:10+tls", "contradicts");
    refused("a.example.com,!a.example.com", "a.example.com", "a denial always wins");
    refused("!*.example.com,a.example.com", "a.example.com", "a denial always wins");
    refused("*.example.com,!*.example.com", "*.example.com", "a denial always wins");
    refused("cidr:10.0.0.0/24:80+raw,!cidr:10.0.0.0/24", "cidr:10.0.0.0/24:80+raw", "a denial always wins");
    assert!(compile("a.example,a.example").is_ok());
    assert!(compile("*.example.com,!a.example.com").is_ok());
    assert!(compile("a.example.com,!a.example.com:22").is_ok());
}

#[test]
fn a_file_holds_rules_and_terms() {
    let policy = compile_file(
        r#"
version = 1
allow = ["api.example.com", "*.github.com"]
deny = ["gist.github.com", "cidr:1.2.3.0/24"]

[[rule]]
allow = "web.example.com:80+http"
methods = ["GET", "PROPFIND"]
paths = ["/owner/repo/*", "/exact"]
max_up = 1_000
max_down = 2_000
rate = 3_000
max_duration = 60

[[rule]]
allow = "h1.example.com"
alpn = ["http/1.1"]
"#,
    )
    .unwrap();
    assert_eq!((policy.rules.len(), policy.denials.len()), (4, 2));
    assert_eq!(policy.denials[0].text, "!gist.github.com");
    let terms = &policy.rules[2].terms;
    assert_eq!(terms.methods, ["GET", "PROPFIND"]);
    assert_eq!(terms.paths, ["/owner/repo/*", "/exact"]);
    assert_eq!(
        (terms.max_up, terms.max_down, terms.rate, terms.max_duration),
        (Some(1000), Some(2000), Some(3000), Some(60))
    );
    assert_eq!(policy.rules[3].terms.alpn, ["http/1.1"]);
}

#[test]
fn a_file_that_is_not_understood_is_refused() {
    for (text, token, message) in [
        ("", "", "missing field `version`"),
        ("version = 2\n", "2", "version 2"),
        ("version = 1\nallwo = []\n", "allwo", "unknown field"),
        ("version = 1\nallow = [\"a.example:443+tsl\"]\n", "tsl", "not an option"),
        ("version = 1\nallow = [\"a.example\", 'b.example:99999']\n", "99999", "no port"),
        ("version = 1\ndeny = [\"a..example\"]\n", "a..example", "empty"),
        ("version = 1\ndeny = [\" a.example:x\"]\n", "x", "no port"),
        ("version = 1\ndeny = [\"!a.example\"]\n", "!", "`!` in a file"),
        ("version = 1\nallow = [\"!a.example\"]\n", "!", "`!` in a file"),
        ("version = 1\nallow = [\"a.example,b.example\"]\n", "\"a.example,b.example\"", "string of its own"),
        ("version = 1\nallow = [\"\\u0061.example:x\"]\n", "\"\\u0061.example:x\"", "no port"),
        ("version = 1\nallow = \"a.example\"\n", "\"a.example\"", "invalid type"),
        ("version = 1\n[[rule]]\nallow = \"a.example\"\nmethods = [\"GET\"]\n", "[\"GET\"]", "+http only"),
        ("version = 1\n[[rule]]\nallow = \"a.example:80+http\"\nmethods = []\n", "[]", "empty list"),
        ("version = 1\n[[rule]]\nallow = \"a.example:80+http\"\nmethods = [\"CONNECT\"]\n", "\"CONNECT\"", "no method"),
        ("version = 1\n[[rule]]\nallow = \"a.example:80+http+ro\"\nmethods = [\"GET\"]\n", "[\"GET\"]", "both"),
        ("version = 1\n[[rule]]\nallow = \"a.example:80+http\"\npaths = [\"/a/../b\"]\n", "\"/a/../b\"", "no path"),
        ("version = 1\n[[rule]]\nallow = \"a.example:80+http\"\npaths = [\"/a*b\"]\n", "\"/a*b\"", "no path"),
        ("version = 1\n[[rule]]\nallow = \"a.example\"\npaths = [\"/a\"]\n", "[\"/a\"]", "+http only"),
        ("version = 1\n[[rule]]\nallow = \"a.example\"\nmax_up = 0\n", "0", "allows nothing"),
        ("version = 1\n[[rule]]\nallow = \"a.example\"\nmax_up = -1\n", "-1", "invalid value"),
        ("version = 1\n[[rule]]\nallow = \"a.example\"\nsecrets = [\"x\"]\n", "secrets", "unknown field"),
        ("version = 1\n[[rule]]\nallow = \"preset:x\"\n", "\"preset:x\"", "preset with terms"),
        ("version = 1\nversion = 1\n", "version", "duplicate"),
    ] {
        let error = compile_file(text).expect_err(text);
        assert!(error.to_string().contains(message), "{text}\n{error}");
        let details = error.details();
        assert_eq!(&details.text[details.token.clone()], token, "{text}\n{error}");
    }
}

#[test]
fn presets_are_read_and_limited() {
    let presets = |name: &str| match name {
        "ours" => Some("version = 1\nallow = [\"a.example.com\"]\ndeny = [\"b.example.com\"]\n".to_owned()),
        "mail" => Some("version = 1\nallow = [\"m.example.com:587+raw\"]\n".to_owned()),
        "range" => Some("version = 1\nallow = [\"m.example.com:400-500+raw\"]\n".to_owned()),
        "nested" => Some("version = 1\nallow = [\"preset:ours\"]\n".to_owned()),
        _ => None,
    };
    let compile = |rules: &str| {
        let mut compiler = Compiler::default().with_presets(&presets);
        compiler.rules("--allow", rules)?;
        compiler.finish()
    };
    let policy = compile("preset:ours,c.example.com").unwrap();
    assert_eq!((policy.rules.len(), policy.denials.len()), (2, 1));
    for (rules, message) in [
        ("preset:mail", "allows mail (port 587)"),
        ("preset:range", "allows mail (port 465)"),
        ("preset:nested", "inside of a preset"),
        ("preset:other", "no preset"),
        ("preset:ours+raw", "no options"),
        ("preset:ours,b.example.com", "a denial always wins"),
    ] {
        let error = compile(rules).expect_err(rules);
        assert!(error.to_string().contains(message), "{error}");
    }
}

#[test]
fn an_explanation_names_the_rule_and_the_way() {
    let policy = compile(
        "*.github.com,!gist.github.com,web.example.com:80+http,cidr:10.1.2.0/24:5432+raw,cidr:8.0.0.0/8:53+raw,.dns.google",
    )
    .unwrap();
    for (url, allowed, rule, reason) in [
        ("https://api.github.com/user", true, Some("*.github.com"), "TLS whose server name is api.github.com"),
        ("API.GITHUB.COM.", true, Some("*.github.com"), "below github.com"),
        ("https://u:p@api.github.com:443/x?y#z", true, Some("*.github.com"), "TLS"),
        ("github.com", false, None, "not about github.com itself"),
        ("gist.github.com", false, Some("!gist.github.com"), "a denial wins"),
        ("api.github.com:22", false, None, "allows port 443, not 22"),
        ("ssh://api.github.com", false, None, "to allow it: api.github.com:22"),
        ("http://web.example.com/", true, Some("web.example.com:80+http"), "HTTP/1.1 in the clear"),
        ("https://web.example.com/", false, None, "allows port 80, not 443"),
        ("http://api.github.com:443/", false, Some("*.github.com"), "wants TLS"),
        ("https://dns.google/dns-query", false, None, "no wildcard covers"),
        ("http://metadata.google.internal/", false, None, "reserved"),
        ("10.1.2.3:5432", true, Some("cidr:10.1.2.0/24:5432+raw"), "unchecked"),
        ("10.1.2.3:22", false, None, "does not allow port 22"),
        ("8.8.8.8:53", true, Some("cidr:8.0.0.0/8:53+raw"), "unchecked"),
        ("1.1.1.1", false, None, "no cidr: rule"),
        ("unknown.example.net", false, None, "to allow it: unknown.example.net:443"),
    ] {
        let explanation = explain(&policy, url).expect(url);
        assert_eq!(explanation.allowed, allowed, "{url}: {explanation}");
        assert_eq!(explanation.rule.as_deref(), rule, "{url}: {explanation}");
        assert!(explanation.to_string().contains(reason), "{url}: {explanation}");
    }
    for wrong in ["gopher://a.example/", "a.example:0", "a..example", "https://"] {
        assert!(explain(&policy, wrong).is_err(), "{wrong}");
    }
}

proptest! {
    /// Whatever is compiled allows only names and ports that its text names.
    #[test]
    fn no_text_panics_or_opens_everything(text in "[a-z*.:+!{}|,/0-9-]{0,40}") {
        if let Ok(policy) = compile(&text) {
            let other = name("canary.unrelated-name.net");
            prop_assert!(!matches!(policy.decide(Subject::Name(&other), 443), netfilter_control::Decision::Allow(_)));
        }
    }

    #[test]
    fn no_file_panics(text in "(version = 1\n)?(allow|deny|rule|\\[\\[rule\\]\\]|=|\\[|\\]|\"|\n|[a-z.:+*]| ){0,30}") {
        if let Err(error) = compile_file(&text) {
            let _ = error.to_string();
        }
    }
}

#[test]
fn an_ipv6_destination_is_refused_by_that_name() {
    let policy = Compiler::default().finish().unwrap();
    for url in ["http://[::1]/", "[2001:db8::1]:443", "2001:db8::1", "https://[fe80::1"] {
        let error = explain(&policy, url).unwrap_err();
        assert!(error.contains("IPv6"), "{error}");
    }
}
