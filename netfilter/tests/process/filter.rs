//! The filter's process, as its supervisor sees it.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use netfilter_control::{Config, ControlSocket, Counters, Event, Policy, Record, Request};
use netfilter_policy::Compiler;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, socketpair};

use crate::guest::Guest;
use crate::internet::RESOLVER;

pub(crate) struct Filter {
    pub(crate) child: Child,
    control: ControlSocket,
    pub(crate) events: Vec<Event>,
}

pub(crate) fn policy(rules: &str) -> Policy {
    let mut compiler = Compiler::default();
    compiler.rules("test", rules).unwrap();
    compiler.finish().unwrap()
}

/// A file in memory with this in it.
fn memory(bytes: &[u8]) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    File::from(fd.try_clone().unwrap()).write_all(bytes).unwrap();
    fd
}

impl Filter {
    /// Starts a filter with a policy, and a guest at its other end.
    pub(crate) fn start(rules: &str) -> (Self, Guest) {
        Self::start_with(rules, None)
    }

    /// The same, but all goes through a proxy.
    pub(crate) fn try_start_through(proxy: SocketAddr, policy: &[u8]) -> Result<(Self, Guest), String> {
        Self::begin(policy, None, Some(proxy), |_| ())
    }

    /// The same, with a policy that goes with it.
    pub(crate) fn start_through(proxy: SocketAddr, rules: &str) -> (Self, Guest) {
        let policy = serde_json::to_vec(&policy(rules)).unwrap();
        Self::begin(&policy, None, Some(proxy), |_| ()).unwrap()
    }

    pub(crate) fn start_with(rules: &str, saved: Option<&[u8]>) -> (Self, Guest) {
        Self::try_start(&serde_json::to_vec(&policy(rules)).unwrap(), saved).unwrap()
    }

    /// An error is what the filter said against it.
    pub(crate) fn try_start(policy: &[u8], saved: Option<&[u8]>) -> Result<(Self, Guest), String> {
        Self::try_start_when(policy, saved, |_| ())
    }

    /// Gives the first order when `ready` returns, which is called with the filter's process.
    pub(crate) fn try_start_when(
        policy: &[u8],
        saved: Option<&[u8]>,
        ready: impl FnOnce(&Child),
    ) -> Result<(Self, Guest), String> {
        Self::begin(policy, saved, None, ready)
    }

    fn begin(
        policy: &[u8],
        saved: Option<&[u8]>,
        proxy: Option<SocketAddr>,
        ready: impl FnOnce(&Child),
    ) -> Result<(Self, Guest), String> {
        let (ours, theirs) = ControlSocket::pair().unwrap();
        let (guest, frames) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        // The filter finds its control socket as descriptor 3.
        let child = Command::new("sh")
            .args(["-c", "exec \"$0\" 3<&0 </dev/null", env!("CARGO_BIN_EXE_bulkhead-netfilter")])
            .env_clear()
            .stdin(Stdio::from(theirs.as_fd().try_clone_to_owned().unwrap()))
            .spawn()
            .unwrap();
        drop(theirs);
        ready(&child);
        let mut filter = Self { child, control: ours, events: Vec::new() };
        let routes = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None).unwrap();
        let policy = memory(policy);
        let mut descriptors = vec![frames.as_fd(), routes.as_fd(), policy.as_fd()];
        let saved = saved.map(memory);
        descriptors.extend(saved.as_ref().map(AsFd::as_fd));
        let config =
            Config { generation: 1, resolvers: vec![RESOLVER.parse().unwrap()], proxy, restored: saved.is_some() };
        assert!(filter.control.send(&Request::Start(config), &descriptors).unwrap());
        match filter.wait(|event| matches!(event, Event::Running | Event::Refused { .. })) {
            Event::Refused { error } => {
                assert!(filter.child.wait().unwrap().success());
                Err(error)
            }
            _ => Ok((filter, Guest::new(guest))),
        }
    }

    /// Takes the events that are there.
    pub(crate) fn listen(&mut self) {
        while let Ok(Some((event, _))) = self.control.receive() {
            self.events.push(event);
        }
    }

    pub(crate) fn wait(&mut self, wanted: impl Fn(&Event) -> bool) -> Event {
        let end = Instant::now() + Duration::from_secs(10);
        while Instant::now() < end {
            self.listen();
            if let Some(at) = self.events.iter().position(&wanted) {
                return self.events.remove(at);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        panic!("no such event among {:?}", self.events);
    }

    pub(crate) fn record(&mut self, wanted: impl Fn(&Record) -> bool) -> Record {
        let event = self.wait(|event| matches!(event, Event::Record { record } if wanted(record)));
        let Event::Record { record } = event else { unreachable!() };
        record
    }

    pub(crate) fn set_policy(&mut self, generation: u64, bytes: &[u8]) {
        let file = memory(bytes);
        assert!(self.control.send(&Request::SetPolicy { generation }, &[file.as_fd()]).unwrap());
    }

    pub(crate) fn send(&self, request: &Request) {
        assert!(self.control.send(request, &[]).unwrap());
    }

    pub(crate) fn save(&mut self) -> Vec<u8> {
        let file = memory(b"");
        assert!(self.control.send(&Request::Save, &[file.as_fd()]).unwrap());
        self.wait(|event| *event == Event::Saved);
        let mut file = File::from(file);
        let mut bytes = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut bytes).unwrap();
        bytes
    }

    pub(crate) fn counters(&mut self) -> Counters {
        self.send(&Request::Stats);
        let Event::Stats(counters) = self.wait(|event| matches!(event, Event::Stats(_))) else { unreachable!() };
        counters
    }

    /// How many descriptors it has open.
    pub(crate) fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    /// A line of its `/proc/PID/status`, in KiB.
    pub(crate) fn memory(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
        line.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap()
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
