//! The end of a flow.

use std::time::Duration;

use netfilter_control::{Cause, Reason, Record, Stage};

use super::Engine;
use super::admit::hint;
use crate::flow::joined::End;
use crate::flow::{Flow, State};
use crate::host::Host;

impl Engine {
    /// A flow that could not be joined: the guest's SYN meets no socket, and is reset.
    pub(super) fn fail(
        &mut self,
        id: u64,
        stage: Stage,
        (reason, detail): (Reason, String),
        host: &mut dyn Host,
        now: Duration,
    ) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        // A failed dial counts double, once here: a guest that tries one address after the other is a scanner.
        if stage == Stage::Dial {
            let _ = self.buckets.failures.take(now);
            let _ = self.buckets.flows.take(now);
        }
        let syn = match &mut flow.state {
            State::Resolving(syn) => std::mem::take(syn),
            State::Dialling(syn, dial) => {
                dial.cancel(host);
                std::mem::take(syn)
            }
            State::Asking(syn, token, ..) => {
                host.close(*token, true);
                std::mem::take(syn)
            }
            State::Joined(_) => return,
        };
        let record = denied(id, flow, stage, reason, detail);
        self.forget(id);
        self.stack.segment(&syn, now);
        self.log.record(record, now);
    }

    /// A joined flow ends.
    pub(super) fn end(&mut self, id: u64, end: End, host: &mut dyn Host, now: Duration) {
        let Some(flow) = self.flows.get(&id) else { return };
        let State::Joined(joined) = &flow.state else { return };
        let (handle, upstream) = (joined.handle(), joined.upstream());
        let (up, down) = joined.bytes();
        let millis = u64::try_from(now.saturating_sub(flow.since).as_millis()).unwrap_or(u64::MAX);
        let refused = end.refusal.map(|(reason, detail)| denied(id, flow, joined.stage(), reason, detail));
        host.close(upstream, end.cause != Cause::Finished);
        if end.reset {
            self.stack.socket(handle).abort();
        }
        self.dying.push(handle);
        self.forget(id);
        if let Some(record) = refused {
            self.log.record(record, now);
        }
        self.log.record(Record::FlowClosed { flow: id, up, down, millis, cause: end.cause }, now);
    }

    /// Ends a flow whatever state it is in.
    pub(super) fn revoke(&mut self, id: u64, host: &mut dyn Host, now: Duration) {
        let refusal = (Reason::Revoked, "the new policy does not allow it".to_owned());
        if self.flows.get(&id).is_some_and(Flow::is_pending) {
            self.fail(id, Stage::Resolve, refusal, host, now);
        } else {
            let end = End { cause: Cause::Refused, refusal: Some(refusal), reset: true };
            self.end(id, end, host, now);
        }
    }

    /// Takes a flow out of the tables.
    pub(super) fn forget(&mut self, id: u64) {
        if let Some(flow) = self.flows.remove(&id) {
            self.tuples.remove(&flow.tuple);
        }
        self.tokens.retain(|_, owner| *owner != id);
        self.dirty.remove(&id);
    }
}

fn denied(id: u64, flow: &Flow, stage: Stage, reason: Reason, detail: String) -> Record {
    Record::FlowDenied {
        flow: Some(id),
        subject: flow.dialled.to_string(),
        port: flow.port(),
        stage,
        reason,
        detail,
        rule: Some(flow.rule.text.clone()),
        hint: hint(&flow.dialled, flow.port(), reason),
    }
}
