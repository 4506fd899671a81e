//! The host's name servers, which a run's network filter asks, and when they are looked up again.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use netfilter_control::MAX_RESOLVERS;

/// How often they are looked up again.
const AGAIN: Duration = Duration::from_secs(10);
/// Where the host says whom to ask for names.
const RESOLVERS: &str = "/etc/resolv.conf";
/// The port of name servers.
const DNS: u16 = 53;

/// What the filter knows of them.
#[derive(Debug)]
pub(super) struct Resolvers {
    path: PathBuf,
    known: Vec<SocketAddr>,
    /// When they are looked up again, whatever happens until then.
    due: Instant,
}

impl Resolvers {
    /// Those of now. Without any, no name can be reached.
    pub(super) fn of_the_host() -> Self {
        Self::of(RESOLVERS.into())
    }

    fn of(path: PathBuf) -> Self {
        let mut resolvers = Self { path, known: Vec::new(), due: Instant::now() };
        resolvers.known = resolvers.read().unwrap_or_default();
        resolvers.put_off();
        resolvers
    }

    /// What the filter was told last.
    pub(super) fn known(&self) -> &[SocketAddr] {
        &self.known
    }

    /// When [`Self::refresh`] has something to do.
    pub(super) fn due(&self) -> Instant {
        self.due
    }

    /// Looks them up again if it is time, and tells the filter of others. Without room for that now, it is tried again next time.
    pub(super) fn refresh(&mut self, tell: impl FnOnce(&[SocketAddr]) -> bool) {
        if Instant::now() < self.due {
            return;
        }
        self.put_off();
        if let Some(found) = self.read().filter(|found| *found != self.known)
            && tell(&found)
        {
            self.known = found;
        }
    }

    fn put_off(&mut self) {
        let now = Instant::now();
        self.due = now.checked_add(AGAIN).unwrap_or(now);
    }

    /// Nothing if the file cannot be read: it may be being replaced, and those that are known are better than none.
    fn read(&self) -> Option<Vec<SocketAddr>> {
        std::fs::read_to_string(&self.path).ok().map(|text| named(&text))
    }
}

/// From the text of resolv.conf(5). An address with a zone is one of a link, which the filter does not ask.
fn named(text: &str) -> Vec<SocketAddr> {
    let addresses = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let address = words.next().filter(|word| *word == "nameserver").and_then(|_| words.next())?;
        Some(SocketAddr::new(address.parse::<IpAddr>().ok()?, DNS))
    });
    addresses.take(MAX_RESOLVERS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_are_those_of_the_host() {
        let text = "# nameserver 1.1.1.1\nsearch lan\nnameserver 9.9.9.9 # x\n nameserver\t2620:fe::fe\n\
                    nameserver fe80::1%eth0\nnameserver x\nnameserver";
        let expected = ["9.9.9.9:53", "[2620:fe::fe]:53"].map(|address| address.parse::<SocketAddr>().unwrap());
        assert_eq!(named(text), expected);
        assert_eq!(named(&"nameserver 9.9.9.9\n".repeat(20)).len(), MAX_RESOLVERS);
    }

    #[test]
    fn a_file_that_cannot_be_read_takes_no_name_server_away() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("resolv.conf");
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        std::fs::write(&path, "nameserver 9.9.9.9\n").unwrap();
        let mut resolvers = Resolvers::of(path.clone());
        let mut told = Vec::new();
        let mut again = |resolvers: &mut Resolvers, room: bool| {
            resolvers.due = Instant::now();
            resolvers.refresh(|found| {
                told.push(found.to_vec());
                room
            });
        };
        std::fs::write(&path, b"nameserver 1.1.1.1 # \xff\n").unwrap();
        again(&mut resolvers, true);
        std::fs::remove_file(&path).unwrap();
        again(&mut resolvers, true);
        assert_eq!(resolvers.known(), [address("9.9.9.9:53")]);

        // Others are told until there was room for it, and only then.
        std::fs::write(&path, "nameserver 1.1.1.1\n").unwrap();
        again(&mut resolvers, false);
        assert_eq!(resolvers.known(), [address("9.9.9.9:53")]);
        again(&mut resolvers, true);
        again(&mut resolvers, true);
        assert_eq!(resolvers.known(), [address("1.1.1.1:53")]);
        assert_eq!(told, [[address("1.1.1.1:53")], [address("1.1.1.1:53")]]);
        // Before it is time again, nobody looks.
        std::fs::write(&path, "").unwrap();
        resolvers.refresh(|_| panic!("too early"));
    }
}
