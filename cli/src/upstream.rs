//! What the host's owner has set for the network of every run: `network.toml` of the state directory. No run can.

use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::home::open_file;

/// In the state directory.
const FILE: &str = "network.toml";
/// Most bytes of it.
const MAX: u64 = 64 << 10;
/// The one version there is.
const VERSION: u32 = 1;

/// Why it is not known what was set. No run starts then: it could be that it must not dial by itself.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {why}; docs/egress.md shows what it may hold", path = path.display())]
pub(crate) struct UpstreamError {
    path: PathBuf,
    why: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    version: u32,
    proxy: Option<String>,
}

/// The file of a state directory.
pub(crate) fn path(home: &Path) -> PathBuf {
    home.join(FILE)
}

/// The HTTP proxy that every connection of every run goes through, if there is one.
pub(crate) fn proxy(home: &Path) -> Result<Option<SocketAddr>, UpstreamError> {
    let path = path(home);
    read(&path).map_err(|why| UpstreamError { path, why })
}

fn read(path: &Path) -> Result<Option<SocketAddr>, String> {
    let file = match open_file(path) {
        // A link to nothing is something that was set.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !path.is_symlink() => return Ok(None),
        other => other.map_err(|error| error.to_string())?,
    };
    let mut text = String::new();
    file.take(MAX).read_to_string(&mut text).map_err(|error| error.to_string())?;
    if u64::try_from(text.len()).unwrap_or(MAX) >= MAX {
        return Err(format!("over {MAX} bytes"));
    }
    let settings: Settings = toml::from_str(&text).map_err(|error| {
        let message = error.message().lines().collect::<Vec<_>>().join("; ");
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let line = before.matches('\n').count().saturating_add(1);
        format!("line {line}: {message}")
    })?;
    if settings.version != VERSION {
        return Err(format!("version {}; this program reads version = {VERSION}", settings.version));
    }
    settings.proxy.map(|given| address(&given).map_err(|why| format!("proxy = {given:?}: {why}"))).transpose()
}

/// What is written as `ADDRESS:PORT`, or as an `http://` URL of that.
fn address(given: &str) -> Result<SocketAddr, &'static str> {
    let (scheme, rest) = given.split_once("://").unwrap_or(("http", given));
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    if scheme != "http" {
        return Err("only a proxy that is spoken to in HTTP without TLS can be used");
    }
    if rest.contains('@') {
        return Err("no login can be given to a proxy; it has to let this host in without");
    }
    let address: SocketAddr =
        rest.parse().map_err(|_| "it is not ADDRESS:PORT; a name is not looked up, since nobody is asked for it")?;
    // What is written as IPv4 in IPv6 is that IPv4 address to whoever dials it, and to every check.
    let address = SocketAddr::new(address.ip().to_canonical(), address.port());
    let nobodys = match address.ip() {
        IpAddr::V4(v4) => v4.is_unspecified() || v4.is_multicast() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unspecified() || v6.is_multicast(),
    };
    if nobodys || address.port() == 0 {
        return Err("nobody can be there");
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Option<String>, String> {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(path(home.path()), text).unwrap();
        let told = proxy(home.path()).map(|found| found.map(|address| address.to_string()));
        told.map_err(|error| error.to_string().replace(home.path().to_str().unwrap(), ""))
    }

    #[test]
    fn a_proxy_may_be_anywhere_that_somebody_can_be() {
        for (given, meant) in [
            ("10.0.0.7:3128", "10.0.0.7:3128"),
            ("http://10.0.0.7:3128", "10.0.0.7:3128"),
            ("http://10.0.0.7:3128/", "10.0.0.7:3128"),
            ("127.0.0.1:8080", "127.0.0.1:8080"),
            ("[2001:db8::7]:80", "[2001:db8::7]:80"),
            ("[::ffff:10.0.0.7]:3128", "10.0.0.7:3128"),
        ] {
            assert_eq!(of(&format!("version = 1\nproxy = \"{given}\"\n")), Ok(Some(meant.to_owned())));
        }
        assert_eq!(of("version = 1\n"), Ok(None));
        let home = tempfile::tempdir().unwrap();
        assert!(matches!(proxy(home.path()), Ok(None)), "without the file, nothing is set");
    }

    /// Whoever sets a proxy relies on it, so what is not understood is never taken for nothing.
    #[test]
    fn what_is_not_understood_is_refused() {
        for (text, words) in [
            ("", "missing field `version`"),
            ("version = 2\nproxy = \"10.0.0.7:3128\"\n", "version 2; this program reads version = 1"),
            ("version = 1\nprxy = \"10.0.0.7:3128\"\n", "line 2: unknown field `prxy`"),
            ("version = 1\nproxy = \"10.0.0.7:3128\n", "line 2: "),
            ("version = 1\nproxy = \"\"\n", "proxy = \"\": it is not ADDRESS:PORT"),
            ("version = 1\nproxy = \"10.0.0.7\"\n", "it is not ADDRESS:PORT"),
            ("version = 1\nproxy = \"proxy.example.com:3128\"\n", "a name is not looked up"),
            ("version = 1\nproxy = \"https://10.0.0.7:3128\"\n", "without TLS"),
            ("version = 1\nproxy = \"socks5://10.0.0.7:1080\"\n", "in HTTP"),
            ("version = 1\nproxy = \"http://a:b@10.0.0.7:3128\"\n", "no login"),
            ("version = 1\nproxy = \"0.0.0.0:3128\"\n", "nobody can be there"),
            ("version = 1\nproxy = \"10.0.0.7:0\"\n", "nobody can be there"),
            ("version = 1\nproxy = \"[ff02::1]:80\"\n", "nobody can be there"),
            ("version = 1\nproxy = \"[::ffff:0.0.0.0]:80\"\n", "nobody can be there"),
            (&"#".repeat(64 << 10), "over 65536 bytes"),
        ] {
            let error = of(text).unwrap_err();
            assert!(error.starts_with("/network.toml: ") && error.contains(words), "{text:.80}: {error}");
            assert!(error.ends_with("; docs/egress.md shows what it may hold"), "{error}");
        }
        let home = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("nowhere", path(home.path())).unwrap();
        assert!(proxy(home.path()).unwrap_err().to_string().contains("No such file"));
        std::fs::remove_file(path(home.path())).unwrap();
        std::fs::create_dir(path(home.path())).unwrap();
        assert!(proxy(home.path()).unwrap_err().to_string().contains("is a directory"));
    }
}
