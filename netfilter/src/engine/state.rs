//! A policy that changes, and what a snapshot keeps of a network.

use std::net::SocketAddrV4;
use std::time::Duration;

use netfilter_control::{Name, Policy, Record};
use serde::{Deserialize, Serialize};

use super::Engine;
use crate::flow::State;
use crate::host::Host;
use crate::limits;

/// What a snapshot keeps. Sockets, buffers and the policy are not in it: the policy of the day decides.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Saved {
    /// The names, in the order of their addresses.
    pub names: Vec<Name>,
    /// The connections that the saved machine believes to have.
    pub flows: Vec<SavedFlow>,
}

/// One connection of a saved machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedFlow {
    /// The guest's port.
    pub port: u16,
    /// The destination.
    pub destination: SocketAddrV4,
    /// The sequence number that the guest waits for.
    pub sequence: u32,
}

impl Engine {
    /// Puts a policy in force. Flows that it does not allow as they are end now: so many.
    pub fn set_policy(&mut self, policy: Policy, generation: u64, host: &mut dyn Host, now: Duration) -> u64 {
        self.policy = policy;
        let has_wildcard =
            |text: &str| self.policy.rules.iter().any(|rule| rule.text == text && rule.target.is_wildcard());
        self.names.keep_wildcards(has_wildcard);
        let (policy, proxied) = (&self.policy, self.proxy.is_some());
        let gone = self.flows.iter().filter(|(_, flow)| !flow.is_allowed_by(policy, proxied));
        let revoked: Vec<u64> = gone.map(|(id, _)| *id).collect();
        for id in &revoked {
            self.revoke(*id, host, now);
        }
        let revoked = u64::try_from(revoked.len()).unwrap_or(u64::MAX);
        self.log.answer(Record::PolicySet { generation, revoked });
        revoked
    }

    /// What a snapshot keeps.
    pub fn save(&self) -> Saved {
        let flows = self.flows.values().filter(|flow| matches!(flow.state, State::Joined(_)));
        let flows = flows.filter_map(|flow| {
            let sequence = self.stack.next_sequence(&flow.tuple)?;
            Some(SavedFlow { port: flow.tuple.0, destination: flow.tuple.1, sequence })
        });
        Saved { names: self.names.all().to_vec(), flows: flows.collect() }
    }

    /// Takes over what a snapshot kept: the names mean what they meant, and each connection of the saved machine is
    /// reset, so that whoever reads from one learns at once. An engine that has names or flows cannot.
    pub fn restore(&mut self, saved: Saved) -> Result<(), String> {
        if !self.flows.is_empty() || !self.names.all().is_empty() {
            return Err("this network has names or flows already".to_owned());
        }
        if saved.flows.len() > limits::FLOWS {
            return Err(format!("{} flows; at most {} can have been open", saved.flows.len(), limits::FLOWS));
        }
        if !self.names.restore(saved.names) {
            return Err("its names are too many, or one stands twice".to_owned());
        }
        for flow in &saved.flows {
            self.stack.reset((flow.port, flow.destination), flow.sequence);
        }
        let count = u64::try_from(saved.flows.len()).unwrap_or(u64::MAX);
        self.log.answer(Record::FlowsReset { count });
        Ok(())
    }
}
