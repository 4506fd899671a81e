//! From a SYN to a flow: the policy, the resolver, the classifier, the dial.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::time::Duration;

use netfilter_control::classify::{self, Reach};
use netfilter_control::{Cidr, Decision, Name, Reason, Record, Rule, Stage, Target};

use super::Engine;
use crate::dial::{Dial, Progress};
use crate::dns::resolver::Resolved;
use crate::dns::talk::{MAX_TALKS, Talk};
use crate::flow::joined::Joined;
use crate::flow::proxy::{self, Handshake};
use crate::flow::{Dialled, Flow, State};
use crate::gate::Segment;
use crate::host::{Host, Route, Token};
use crate::limits;

/// Why a flow is refused, and more about it.
type Refusal = (Reason, String);

/// The addresses that stand for names, and the link's own.
const POOL: Cidr = Cidr::v4(Ipv4Addr::new(198, 18, 0, 0), 15);

impl Engine {
    /// The guest asks for a new connection.
    pub(super) fn open(&mut self, segment: Segment<'_>, host: &mut dyn Host, now: Duration) {
        let (address, port) = (*segment.destination.ip(), segment.destination.port());
        // Whatever server it asks, its question is answered here.
        if port == 53 {
            return self.open_talk(segment, now);
        }
        let dialled = match self.names.name(address) {
            Some(name) => Dialled::Name(name.clone()),
            None => Dialled::Address(address),
        };
        let admitted = match self.policy.decide(dialled.subject(), port) {
            Decision::Allow(rule) => Ok(rule.clone()),
            Decision::Deny(denial) => Err((Reason::Denied, Some(denial.text.clone()))),
            Decision::OtherPort(rule) => Err((Reason::OtherPort, Some(rule.text.clone()))),
            Decision::PublicDoh(rule) => Err((Reason::PublicDoh, Some(rule.text.clone()))),
            Decision::NoRule if matches!(dialled, Dialled::Name(_)) => Err((Reason::NoRule, None)),
            Decision::NoRule => Err((Reason::UnknownAddress, None)),
        };
        let rule = match admitted {
            Ok(rule) => rule,
            Err((reason, rule)) => return self.refuse(segment, &dialled, rule, (reason, String::new()), now),
        };
        let proxy = self.proxy;
        let checked = self.within_limits(now).and_then(|()| match dialled {
            Dialled::Address(address) => reachable(SocketAddrV4::new(address, port), &rule, host, proxy),
            Dialled::Name(_) => Ok(()),
        });
        if let Err(refusal) = checked {
            return self.refuse(segment, &dialled, Some(rule.text), refusal, now);
        }
        self.begin(segment, dialled, rule, host, now);
    }

    fn within_limits(&mut self, now: Duration) -> Result<(), Refusal> {
        let limit = |what: String| Err((Reason::Limit, what));
        if self.flows.len() >= limits::FLOWS {
            return limit(format!("{} connections are open", limits::FLOWS));
        }
        if self.flows.values().filter(|flow| flow.is_pending()).count() >= limits::PENDING {
            return limit(format!("{} connections are being made", limits::PENDING));
        }
        if self.buckets.failures.available(now) == 0 {
            return limit(format!("over {} dials failed in a minute", limits::FAILED_DIALS_A_MINUTE));
        }
        if !self.buckets.flows.take(now) {
            return limit(format!("over {} new connections a second", limits::FLOWS_A_SECOND));
        }
        Ok(())
    }

    fn begin(&mut self, segment: Segment<'_>, dialled: Dialled, rule: Rule, host: &mut dyn Host, now: Duration) {
        let id = self.next_flow;
        self.next_flow = self.next_flow.saturating_add(1);
        let tuple = (segment.port, segment.destination);
        let syn = segment.packet.to_vec();
        let (state, resolved) = match (&dialled, self.proxy) {
            // The proxy resolves: whoever set it decides what it can reach.
            (_, Some(proxy)) => (State::Dialling(syn, Dial::new([proxy], now)), None),
            (Dialled::Address(address), None) => {
                let to = SocketAddr::new(IpAddr::V4(*address), segment.destination.port());
                (State::Dialling(syn, Dial::new([to], now)), None)
            }
            (Dialled::Name(name), None) => (State::Resolving(syn), self.resolver.resolve(name, host, now)),
        };
        self.tuples.insert(tuple, id);
        self.flows.insert(id, Flow { tuple, dialled, rule, since: now, state });
        match resolved {
            Some(resolved) => self.dial(id, &resolved, host, now),
            None => self.advance(id, None, host, now),
        }
    }

    /// A name is decided: every flow that waits for it goes on.
    pub(super) fn resolved(&mut self, name: &Name, resolved: &Resolved, host: &mut dyn Host, now: Duration) {
        let waits = |flow: &Flow| {
            matches!(&flow.dialled, Dialled::Name(own) if own == name) && matches!(flow.state, State::Resolving(_))
        };
        let waiting: Vec<u64> = self.flows.iter().filter(|(_, flow)| waits(flow)).map(|(id, _)| *id).collect();
        for id in waiting {
            self.dial(id, resolved, host, now);
        }
    }

    /// Dials those addresses of a name that may be dialled.
    fn dial(&mut self, id: u64, resolved: &Resolved, host: &mut dyn Host, now: Duration) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let port = flow.port();
        let addresses = match resolved {
            Ok(addresses) => addresses,
            Err(error) => return self.fail(id, Stage::Resolve, (Reason::Unresolvable, error.clone()), host, now),
        };
        let mut refusal = (Reason::Unresolvable, "it has no address".to_owned());
        let mut vetted = Vec::new();
        for address in addresses {
            match vet(*address, host) {
                Ok(()) => match self.policy.denied_address(*address, port) {
                    None => vetted.push(SocketAddr::new(*address, port)),
                    Some(denial) => refusal = (Reason::Denied, format!("{address}: {}", denial.text)),
                },
                Err(error) => refusal = error,
            }
        }
        if vetted.is_empty() {
            return self.fail(id, Stage::Resolve, refusal, host, now);
        }
        let State::Resolving(syn) = &mut flow.state else { return };
        flow.state = State::Dialling(std::mem::take(syn), Dial::new(vetted, now));
        self.advance(id, None, host, now);
    }

    /// Goes on with a flow that is not joined yet.
    pub(super) fn advance(&mut self, id: u64, ready: Option<Token>, host: &mut dyn Host, now: Duration) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let dialled = &flow.dialled;
        let port = flow.tuple.1.port();
        match &mut flow.state {
            State::Resolving(_) | State::Joined(_) => {}
            State::Dialling(syn, dial) => {
                let mut opened = Vec::new();
                let progress = dial.step(ready, host, now, &mut opened);
                self.tokens.extend(opened.into_iter().map(|token| (token, id)));
                match progress {
                    Progress::Pending => {}
                    Progress::Failed(error) => {
                        let refusal = match self.proxy {
                            Some(proxy) => {
                                (Reason::ProxyRefused, format!("the proxy {proxy} was not reached: {error}"))
                            }
                            None => (Reason::Unreachable, error.to_string()),
                        };
                        self.fail(id, Stage::Dial, refusal, host, now);
                    }
                    Progress::Reached(token, address) => {
                        // The policy may have changed since the address was vetted.
                        let denied = self.policy.denied_address(address.ip(), port);
                        if let Some(denial) = denied.filter(|_| self.proxy.is_none()) {
                            let detail = format!("{}: {}", address.ip(), denial.text);
                            host.close(token, true);
                            return self.fail(id, Stage::Dial, (Reason::Denied, detail), host, now);
                        }
                        let syn = std::mem::take(syn);
                        self.tokens.retain(|other, owner| *owner != id || *other == token);
                        if self.proxy.is_some() {
                            let handshake = Handshake::new(dialled, port);
                            flow.state = State::Asking(syn, token, address, handshake);
                            self.advance(id, None, host, now);
                        } else {
                            self.join(id, &syn, (token, address), Vec::new(), host, now);
                        }
                    }
                }
            }
            State::Asking(syn, token, address, handshake) => {
                let (token, address) = (*token, *address);
                let late = now >= flow.since.saturating_add(crate::dial::BUDGET);
                match handshake.step(token, host) {
                    proxy::Progress::Pending if !late => {}
                    proxy::Progress::Pending => {
                        let refusal = (Reason::ProxyRefused, format!("the proxy {address} did not answer in time"));
                        self.fail(id, Stage::Dial, refusal, host, now);
                    }
                    proxy::Progress::Refused(what) => {
                        let refusal = (Reason::ProxyRefused, format!("the proxy {address} {what}"));
                        self.fail(id, Stage::Dial, refusal, host, now);
                    }
                    proxy::Progress::Open(early) => {
                        let syn = std::mem::take(syn);
                        self.join(id, &syn, (token, address), early, host, now);
                    }
                }
            }
        }
    }

    /// The destination is reached: now the guest gets its answer.
    fn join(
        &mut self,
        id: u64,
        syn: &[u8],
        (token, address): (Token, SocketAddr),
        early: Vec<u8>,
        host: &mut dyn Host,
        now: Duration,
    ) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let Some(handle) = self.stack.open(flow.tuple.1, syn, now) else {
            host.close(token, true);
            return self.forget(id);
        };
        let joined = Joined::new(flow, handle, (token, address), early, now);
        let record = Record::FlowOpened {
            flow: id,
            subject: flow.dialled.to_string(),
            port: flow.port(),
            rule: flow.rule.text.clone(),
            protocol: flow.rule.protocol.word().to_owned(),
            upstream: address,
        };
        flow.state = State::Joined(Box::new(joined));
        self.log.record(record, now);
        self.dirty.insert(id);
    }

    fn open_talk(&mut self, segment: Segment<'_>, now: Duration) {
        if self.talks.len() >= MAX_TALKS || !self.buckets.questions.take(now) {
            return self.stack.segment(segment.packet, now);
        }
        if let Some(handle) = self.stack.open(segment.destination, segment.packet, now) {
            self.talks.insert((segment.port, segment.destination), Talk::new(handle, now));
        }
    }

    /// Refuses a connection before there is a flow. There is no socket for the segment, so it is reset.
    fn refuse(
        &mut self,
        segment: Segment<'_>,
        dialled: &Dialled,
        rule: Option<String>,
        (reason, detail): Refusal,
        now: Duration,
    ) {
        self.stack.segment(segment.packet, now);
        let record = Record::FlowDenied {
            flow: None,
            subject: dialled.to_string(),
            port: segment.destination.port(),
            stage: Stage::Syn,
            reason,
            detail,
            rule,
            hint: hint(dialled, segment.destination.port(), reason),
        };
        self.log.record(record, now);
    }
}

/// What would allow it, for whoever reads the record: often an agent.
pub(super) fn hint(dialled: &Dialled, port: u16, reason: Reason) -> String {
    let protocol = match port {
        443 | 22 => "",
        80 => "+http",
        _ => "+raw",
    };
    match (reason, dialled) {
        (Reason::NoRule | Reason::OtherPort | Reason::PublicDoh, Dialled::Name(name)) => {
            format!("add a rule: {name}:{port}{protocol}")
        }
        (Reason::UnknownAddress, _) => "dial by name; addresses are reached by cidr: rules alone".to_owned(),
        (Reason::ForbiddenAddress | Reason::HostAddress, _) => {
            "no rule can allow it by name; a private address needs a cidr: rule".to_owned()
        }
        (Reason::EncryptedHello, _) => "turn encrypted client hello off, or add +ech to the rule".to_owned(),
        (Reason::NoServerName, _) => "send a server name, or add +nosni to the rule".to_owned(),
        (Reason::Limit, _) => "try again later, with fewer connections".to_owned(),
        (Reason::ProxyRefused, _) => {
            "the policy allows it; the host's owner set the proxy, and can tell why it does not".to_owned()
        }
        _ => String::new(),
    }
}

/// Whether a `cidr:` rule may reach an address of its block.
fn reachable(to: SocketAddrV4, rule: &Rule, host: &mut dyn Host, proxy: Option<SocketAddr>) -> Result<(), Refusal> {
    let address = *to.ip();
    let Target::Block(block) = &rule.target else {
        return Err((Reason::UnknownAddress, String::new()));
    };
    if POOL.contains(address.into()) {
        return Err((Reason::UnknownAddress, String::new()));
    }
    judge(classify::classify_for_block(block, address.into()), address.into())?;
    // What a guest could ask of it itself, no policy would see.
    if proxy == Some(to.into()) {
        return Err((Reason::ForbiddenAddress, format!("{to} is the upstream proxy")));
    }
    match own(address.into(), host) {
        // It is the proxy that dials, and it may know a way.
        Err((Reason::Unreachable, _)) if proxy.is_some() => Ok(()),
        // The proxy may run on this host, or beside it.
        other => other,
    }
}

/// Whether an address that a name resolved to may be dialled.
fn vet(address: IpAddr, host: &mut dyn Host) -> Result<(), Refusal> {
    judge(classify::classify(address), address)?;
    own(address, host)
}

fn judge(reach: Reach, address: IpAddr) -> Result<(), Refusal> {
    match reach {
        Reach::Global => Ok(()),
        Reach::Private(block) => Err((Reason::ForbiddenAddress, format!("{address} is private, in {block}"))),
        Reach::Never(purpose) => Err((Reason::ForbiddenAddress, format!("{address}: {purpose}"))),
    }
}

/// The host's own addresses change while it runs, so the host is asked each time.
fn own(address: IpAddr, host: &mut dyn Host) -> Result<(), Refusal> {
    match host.route(address) {
        Ok(Route::Elsewhere) => Ok(()),
        Ok(Route::Own) => Err((Reason::HostAddress, format!("{address} is the host's own"))),
        Ok(Route::Router) => Err((Reason::HostAddress, format!("{address} is the host's router"))),
        Ok(Route::Nowhere) => Err((Reason::Unreachable, format!("the host has no route to {address}"))),
        Err(error) => {
            Err((Reason::HostAddress, format!("{address}: cannot tell whether it is the host's own: {error}")))
        }
    }
}
