//! A guest as Linux behaves, for tests: one socket that accepts a connection of the host.

use std::collections::VecDeque;

use super::muxer::HOST_CID;
use super::packet::{Header, Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM};

pub(super) const CID: u64 = 3;
pub(super) const PORT: u32 = 9000;

/// The byte at an offset of a test stream. The period is a prime, so that a lost or doubled block shows.
pub(super) fn byte_at(offset: usize) -> u8 {
    u8::try_from(offset % 251).unwrap()
}

/// One end of a test stream: says what comes next, or checks it.
#[derive(Debug, Default)]
pub(super) struct Pattern {
    pub(super) offset: usize,
}

impl Pattern {
    pub(super) fn make(&self, len: usize) -> Vec<u8> {
        (self.offset..self.offset + len).map(byte_at).collect()
    }

    pub(super) fn check(&mut self, bytes: &[u8]) {
        assert_eq!(bytes, self.make(bytes.len()), "at offset {}", self.offset);
        self.offset += bytes.len();
    }
}

#[derive(Debug)]
pub(super) struct GuestSocket {
    pub(super) host_port: Option<u32>,
    pub(super) out: VecDeque<(Header, Vec<u8>)>,
    pub(super) received: VecDeque<u8>,
    pub(super) peer_shutdown: u32,
    pub(super) own_shutdown: u32,
    pub(super) reset: bool,
    pub(super) buf_alloc: u32,
    fwd_cnt: u32,
    last_fwd_cnt: u32,
    tx_cnt: u32,
    peer_alloc: u32,
    peer_fwd: u32,
    pub(super) ops: Vec<Op>,
}

impl GuestSocket {
    pub(super) fn new(buf_alloc: u32) -> Self {
        Self {
            host_port: None,
            out: VecDeque::new(),
            received: VecDeque::new(),
            peer_shutdown: 0,
            own_shutdown: 0,
            reset: false,
            buf_alloc,
            fwd_cnt: 0,
            last_fwd_cnt: 0,
            tx_cnt: 0,
            peer_alloc: 0,
            peer_fwd: 0,
            ops: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, op: Op, flags: u32, payload: Vec<u8>) {
        let header = self.header(op, flags, u32::try_from(payload.len()).unwrap());
        self.out.push_back((header, payload));
    }

    pub(super) fn header(&mut self, op: Op, flags: u32, len: u32) -> Header {
        self.last_fwd_cnt = self.fwd_cnt;
        Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port: PORT,
            dst_port: self.host_port.unwrap_or(0),
            len,
            kind: TYPE_STREAM,
            op: op as u16,
            flags,
            buf_alloc: self.buf_alloc,
            fwd_cnt: self.fwd_cnt,
        }
    }

    pub(super) fn on_packet(&mut self, header: &Header, payload: &[u8]) {
        assert_eq!((header.src_cid, header.dst_cid), (HOST_CID, CID));
        assert_eq!(header.len as usize, payload.len());
        let op = Op::from_wire(header.op).unwrap();
        self.ops.push(op);
        if op != Op::Request && (self.reset || self.host_port != Some(header.src_port)) {
            return;
        }
        self.peer_alloc = header.buf_alloc;
        self.peer_fwd = header.fwd_cnt;
        match op {
            Op::Request => {
                self.host_port = Some(header.src_port);
                self.push(Op::Response, 0, Vec::new());
            }
            Op::Response => panic!("the host never accepts"),
            Op::Reset => self.reset = true,
            Op::Shutdown => {
                self.peer_shutdown |= header.flags;
                if self.peer_shutdown == SHUTDOWN_BOTH && self.received.is_empty() {
                    self.push(Op::Reset, 0, Vec::new());
                    self.reset = true;
                }
            }
            Op::Data => {
                assert!(!payload.is_empty());
                assert_eq!(self.peer_shutdown & SHUTDOWN_SEND, 0, "data after shutdown");
                self.received.extend(payload);
                assert!(self.received.len() <= self.buf_alloc as usize, "the device overran the guest's buffer");
            }
            Op::CreditUpdate => {}
            Op::CreditRequest => self.push(Op::CreditUpdate, 0, Vec::new()),
        }
    }

    /// Newer Linux sends no more than it would itself receive.
    pub(super) fn room(&self) -> usize {
        let window = self.peer_alloc.min(self.buf_alloc);
        window.saturating_sub(self.tx_cnt.wrapping_sub(self.peer_fwd)) as usize
    }

    pub(super) fn sends(&self) -> bool {
        self.host_port.is_some()
            && !self.reset
            && self.own_shutdown & SHUTDOWN_SEND == 0
            && self.peer_shutdown & SHUTDOWN_RECEIVE == 0
    }

    /// Sends what there is room for; returns how much.
    pub(super) fn send(&mut self, bytes: &[u8]) -> usize {
        if !self.sends() {
            return 0;
        }
        let count = bytes.len().min(self.room()).min(64 * 1024);
        if count > 0 {
            self.tx_cnt = self.tx_cnt.wrapping_add(u32::try_from(count).unwrap());
            self.push(Op::Data, 0, bytes[..count].to_vec());
        }
        count
    }

    pub(super) fn read(&mut self, limit: usize) -> Vec<u8> {
        let count = limit.min(self.received.len());
        let bytes: Vec<u8> = self.received.drain(..count).collect();
        self.fwd_cnt = self.fwd_cnt.wrapping_add(u32::try_from(count).unwrap());
        let delta = self.fwd_cnt.wrapping_sub(self.last_fwd_cnt);
        let free = self.buf_alloc.saturating_sub(delta);
        if delta > 0 && !self.reset && (free < 64 * 1024 || self.received.is_empty()) {
            self.push(Op::CreditUpdate, 0, Vec::new());
        }
        bytes
    }

    pub(super) fn at_end(&self) -> bool {
        self.received.is_empty() && (self.reset || self.peer_shutdown & SHUTDOWN_SEND != 0)
    }

    pub(super) fn shutdown(&mut self, flags: u32) {
        if self.host_port.is_some() && !self.reset {
            self.own_shutdown |= flags;
            let flags = self.own_shutdown;
            self.push(Op::Shutdown, flags, Vec::new());
        }
    }

    pub(super) fn close(&mut self) {
        if self.own_shutdown == SHUTDOWN_BOTH || self.host_port.is_none() || self.reset {
            return;
        }
        if self.peer_shutdown == SHUTDOWN_BOTH {
            self.push(Op::Reset, 0, Vec::new());
            self.reset = true;
        } else {
            self.shutdown(SHUTDOWN_BOTH);
        }
    }
}
