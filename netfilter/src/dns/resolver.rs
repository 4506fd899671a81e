//! The host-side resolver: asks the resolvers that the host's owner named, once for each connection or cached minute.
//! Only names that the policy allows come here, and only when the guest dials them.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use netfilter_control::Name;

use super::qtype;
use super::reply::{MAX_ADDRESSES, Reply, question, read};
use crate::host::{Host, Token};

/// How long a resolver may take before the next one is asked.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long the other family is waited for when one has an address.
const OTHER_FAMILY: Duration = Duration::from_millis(200);
/// Longest time for which an answer is kept, whatever it says itself.
const MAX_TTL: u32 = 60;
/// How long it is remembered that a name does not resolve.
const NEGATIVE: Duration = Duration::from_secs(5);
/// How often each server is asked.
const ROUNDS: usize = 2;
/// Most datagrams that answer nothing before a question counts as failed.
const MAX_STRAYS: u32 = 64;
/// Most answers that are kept. There are never more names than this to ask for.
const MAX_CACHE: usize = crate::names::MAX_NAMES;

/// Addresses, or why there are none.
pub type Resolved = Result<Vec<IpAddr>, String>;

/// Asks resolvers.
#[derive(Debug, Default)]
pub struct Resolver {
    servers: Vec<SocketAddr>,
    cache: HashMap<Name, (Resolved, Duration)>,
    lookups: HashMap<Name, Lookup>,
    queries: HashMap<Token, Query>,
}

/// A name that is being asked for.
#[derive(Debug)]
struct Lookup {
    attempt: usize,
    deadline: Duration,
    /// By type: what was found.
    found: BTreeMap<u16, Reply>,
    last_error: String,
}

/// One question on its way.
#[derive(Debug)]
struct Query {
    name: Name,
    qtype: u16,
    id: u16,
    server: SocketAddr,
    strays: u32,
    transport: Transport,
}

#[derive(Debug)]
enum Transport {
    Udp,
    /// Over TCP: what is still to be sent, and what has come.
    Tcp {
        connected: bool,
        unsent: Vec<u8>,
        received: Vec<u8>,
    },
}

impl Resolver {
    /// Takes another list of resolvers. Answers of the old ones are forgotten; questions on their way may still be
    /// answered by them.
    pub fn set_servers(&mut self, servers: Vec<SocketAddr>) {
        self.servers = servers;
        self.cache.clear();
    }

    /// The addresses of a name, if they are known; else they come from [`Self::ready`] or [`Self::expire`].
    pub fn resolve(&mut self, name: &Name, host: &mut dyn Host, now: Duration) -> Option<Resolved> {
        if let Some((resolved, until)) = self.cache.get(name)
            && now < *until
        {
            return Some(resolved.clone());
        }
        if self.lookups.contains_key(name) {
            return None;
        }
        let lookup = Lookup { attempt: 0, deadline: now, found: BTreeMap::new(), last_error: String::new() };
        self.lookups.insert(name.clone(), lookup);
        self.ask(name, host, now).inspect(|_| {
            self.lookups.remove(name);
        })
    }

    /// Asks the next server for what is not known yet. Some result if there is no next server.
    fn ask(&mut self, name: &Name, host: &mut dyn Host, now: Duration) -> Option<Resolved> {
        let lookup = self.lookups.get_mut(name)?;
        loop {
            let rounds = self.servers.len().saturating_mul(ROUNDS);
            let server = lookup.attempt.checked_rem(self.servers.len()).and_then(|at| self.servers.get(at));
            let Some(server) = server.filter(|_| lookup.attempt < rounds) else {
                let error = match (self.servers.is_empty(), lookup.last_error.is_empty()) {
                    (true, _) => "no resolver is set".to_owned(),
                    (_, true) => "no resolver answered".to_owned(),
                    _ => lookup.last_error.clone(),
                };
                return Some(Err(error));
            };
            lookup.attempt = lookup.attempt.saturating_add(1);
            lookup.deadline = now.saturating_add(PATIENCE);
            let missing = [qtype::A, qtype::AAAA].into_iter().filter(|qtype| !lookup.found.contains_key(qtype));
            let mut sent = false;
            for qtype in missing {
                let id = u16::try_from(host.random() & 0xffff).unwrap_or(0);
                let message = question(id, name, qtype);
                // A socket for each question: its port, chosen by the host's kernel, is half of what an answer must
                // know.
                let asked = host.datagrams(*server).and_then(|token| match host.write(token, &message) {
                    Ok(_) => Ok(token),
                    Err(error) => {
                        host.close(token, false);
                        Err(error)
                    }
                });
                match asked {
                    Ok(token) => {
                        let query = Query {
                            name: name.clone(),
                            qtype,
                            id,
                            server: *server,
                            strays: 0,
                            transport: Transport::Udp,
                        };
                        self.queries.insert(token, query);
                        sent = true;
                    }
                    Err(error) => lookup.last_error = format!("{server}: {error}"),
                }
            }
            if sent {
                return None;
            }
        }
    }

    /// Whether a socket is one of ours.
    pub fn owns(&self, token: Token) -> bool {
        self.queries.contains_key(&token)
    }

    /// A socket of ours has something. Returns a name that is decided.
    pub fn ready(&mut self, token: Token, host: &mut dyn Host, now: Duration) -> Option<(Name, Resolved)> {
        let query = self.queries.get_mut(&token)?;
        let mut buffer = [0; 4096];
        let reply = match &mut query.transport {
            Transport::Udp => loop {
                match host.read(token, &mut buffer) {
                    Ok(count) => {
                        let message = buffer.get(..count).unwrap_or_default();
                        // What is no answer to this question is passed over, whoever sent it, but not for ever.
                        query.strays = query.strays.saturating_add(1);
                        match read(message, query.id, &query.name, query.qtype) {
                            Some(reply) => break reply,
                            None if query.strays < MAX_STRAYS => {}
                            None => break Reply::Failed,
                        }
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return None,
                    Err(error) => {
                        if let Some(lookup) = self.lookups.get_mut(&query.name) {
                            lookup.last_error = format!("{}: {error}", query.server);
                        }
                        break Reply::Failed;
                    }
                }
            },
            Transport::Tcp { connected, unsent, received } => {
                match tcp_step(token, host, connected, unsent, received, &mut buffer) {
                    Step::Wait => return None,
                    Step::Failed => Reply::Failed,
                    Step::Message(message) => {
                        read(&message, query.id, &query.name, query.qtype).unwrap_or(Reply::Failed)
                    }
                }
            }
        };
        let query = self.queries.remove(&token)?;
        host.close(token, false);
        if reply == Reply::Truncated && matches!(query.transport, Transport::Udp) {
            self.ask_over_tcp(query, host);
            return None;
        }
        let lookup = self.lookups.get_mut(&query.name)?;
        if matches!(reply, Reply::Failed | Reply::Truncated) {
            if lookup.last_error.is_empty() {
                lookup.last_error = format!("{}: it failed to answer", query.server);
            }
        } else {
            if matches!(&reply, Reply::Addresses(addresses, _) if !addresses.is_empty()) {
                lookup.deadline = lookup.deadline.min(now.saturating_add(OTHER_FAMILY));
            }
            lookup.found.insert(query.qtype, reply);
        }
        self.decide(&query.name, host, now)
    }

    fn ask_over_tcp(&mut self, query: Query, host: &mut dyn Host) {
        let message = question(query.id, &query.name, query.qtype);
        let length = u16::try_from(message.len()).unwrap_or(0);
        let unsent = [&length.to_be_bytes()[..], &message].concat();
        match host.connect(query.server) {
            Ok(token) => {
                let transport = Transport::Tcp { connected: false, unsent, received: Vec::new() };
                self.queries.insert(token, Query { transport, ..query });
            }
            Err(error) => {
                if let Some(lookup) = self.lookups.get_mut(&query.name) {
                    lookup.last_error = format!("{}: {error}", query.server);
                }
            }
        }
    }

    /// A name whose questions have all come back is decided, or the next server is asked.
    fn decide(&mut self, name: &Name, host: &mut dyn Host, now: Duration) -> Option<(Name, Resolved)> {
        if self.queries.values().any(|query| query.name == *name) {
            return None;
        }
        let lookup = self.lookups.get(name)?;
        let complete = [qtype::A, qtype::AAAA].iter().all(|qtype| lookup.found.contains_key(qtype));
        // One family that failed does not spoil the other, if that one has an address.
        let resolved = match collect(&lookup.found) {
            Some((addresses, ttl)) => Ok((addresses, ttl)),
            None if complete => Err("it has no address".to_owned()),
            None => Err(self.ask(name, host, now)?.err()?),
        };
        Some((name.clone(), self.conclude(name, resolved, host, now)))
    }

    fn conclude(
        &mut self,
        name: &Name,
        resolved: Result<(Vec<IpAddr>, u32), String>,
        host: &mut dyn Host,
        now: Duration,
    ) -> Resolved {
        self.lookups.remove(name);
        self.drop_queries(name, host);
        let (resolved, keep) = match resolved {
            Ok((addresses, ttl)) => (Ok(addresses), Duration::from_secs(u64::from(ttl.min(MAX_TTL)))),
            Err(error) => (Err(error), NEGATIVE),
        };
        if self.cache.len() >= MAX_CACHE {
            self.cache.clear();
        }
        self.cache.insert(name.clone(), (resolved.clone(), now.saturating_add(keep)));
        resolved
    }

    fn drop_queries(&mut self, name: &Name, host: &mut dyn Host) {
        self.queries.retain(|token, query| {
            if query.name == *name {
                host.close(*token, false);
            }
            query.name != *name
        });
    }

    /// Gives up on servers that took too long. Returns the names that are decided.
    pub fn expire(&mut self, host: &mut dyn Host, now: Duration) -> Vec<(Name, Resolved)> {
        let late: Vec<Name> =
            self.lookups.iter().filter(|(_, lookup)| lookup.deadline <= now).map(|(name, _)| name.clone()).collect();
        late.into_iter()
            .filter_map(|name| {
                self.drop_queries(&name, host);
                if let Some(lookup) = self.lookups.get_mut(&name)
                    && lookup.last_error.is_empty()
                {
                    lookup.last_error = "no resolver answered in time".to_owned();
                }
                self.decide(&name, host, now)
            })
            .collect()
    }

    /// When [`Self::expire`] has something to do.
    pub fn due(&self) -> Option<Duration> {
        self.lookups.values().map(|lookup| lookup.deadline).min()
    }
}

/// All addresses that were found, the two families taking turns, or `None` if there are none.
fn collect(found: &BTreeMap<u16, Reply>) -> Option<(Vec<IpAddr>, u32)> {
    let of = |qtype: u16| match found.get(&qtype) {
        Some(Reply::Addresses(addresses, ttl)) => (addresses.as_slice(), *ttl),
        _ => (&[][..], u32::MAX),
    };
    let ((v4, ttl4), (v6, ttl6)) = (of(qtype::A), of(qtype::AAAA));
    let turns = v4.len().max(v6.len());
    let both = (0..turns).flat_map(|turn| [v6.get(turn), v4.get(turn)]).flatten();
    let addresses: Vec<IpAddr> = both.copied().take(MAX_ADDRESSES).collect();
    let ttl = if v4.is_empty() {
        ttl6
    } else if v6.is_empty() {
        ttl4
    } else {
        ttl4.min(ttl6)
    };
    (!addresses.is_empty()).then_some((addresses, ttl))
}

enum Step {
    Wait,
    Failed,
    Message(Vec<u8>),
}

/// Goes on with a question over TCP (RFC 7766): a length of two bytes before each message.
fn tcp_step(
    token: Token,
    host: &mut dyn Host,
    connected: &mut bool,
    unsent: &mut Vec<u8>,
    received: &mut Vec<u8>,
    buffer: &mut [u8],
) -> Step {
    if !*connected {
        match host.connected(token) {
            Ok(()) => *connected = true,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Step::Wait,
            Err(_) => return Step::Failed,
        }
    }
    while !unsent.is_empty() {
        match host.write(token, unsent) {
            Ok(count) => drop(unsent.drain(..count.min(unsent.len()))),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Step::Wait,
            Err(_) => return Step::Failed,
        }
    }
    loop {
        match host.read(token, buffer) {
            Ok(0) => return Step::Failed,
            Ok(count) => received.extend_from_slice(buffer.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Step::Wait,
            Err(_) => return Step::Failed,
        }
        if let Some((length, rest)) = received.split_first_chunk()
            && let Some(message) = rest.get(..usize::from(u16::from_be_bytes(*length)))
        {
            return Step::Message(message.to_vec());
        }
    }
}
