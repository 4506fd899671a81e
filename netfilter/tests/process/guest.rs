//! A guest: a TCP stack at the other end of the frame socket.

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use netfilter::plan::{GATEWAY, GATEWAY_MAC, GUEST, GUEST_MAC, MTU};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant as Time;
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr};

pub(crate) struct Guest {
    wire: Wire,
    interface: Interface,
    sockets: SocketSet<'static>,
    began: Instant,
    port: u16,
    question: u16,
}

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(20);

impl Guest {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        let mut wire = Wire { fd, incoming: VecDeque::new(), outgoing: VecDeque::new(), other: Vec::new() };
        let mut interface = Interface::new(Config::new(HardwareAddress::Ip), &mut wire, Time::ZERO);
        interface.update_ip_addrs(|addresses| addresses.push(IpCidr::new(IpAddress::Ipv4(GUEST), 30)).unwrap());
        interface.routes_mut().add_default_ipv4_route(GATEWAY).unwrap();
        Self { wire, interface, sockets: SocketSet::new(Vec::new()), began: Instant::now(), port: 20_000, question: 0 }
    }

    /// Goes on as another guest that was saved, at this one's end of the link.
    pub(crate) fn adopt(&mut self, saved: Self) {
        self.interface = saved.interface;
        self.sockets = saved.sockets;
        self.began = saved.began;
        self.port = saved.port;
    }

    /// Plays until something holds.
    pub(crate) fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            self.turn(Duration::from_millis(5));
            if holds(self) {
                return;
            }
        }
        panic!("{what}: not within {} s", PATIENCE.as_secs());
    }

    fn turn(&mut self, wait: Duration) {
        let now = Time::from_micros(i64::try_from(self.began.elapsed().as_micros()).unwrap());
        self.interface.poll(now, &mut self.wire, &mut self.sockets);
        let room = self.wire.flush();
        if self.wire.fill() == 0 {
            let flags = if room { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
            let _ = poll(&mut [PollFd::new(&self.wire.fd, flags)], Some(&Timespec::try_from(wait).unwrap()));
            self.wire.fill();
        }
        self.interface.poll(now, &mut self.wire, &mut self.sockets);
        self.wire.flush();
    }

    pub(crate) fn lookup(&mut self, name: &str) -> Option<Ipv4Addr> {
        self.question += 1;
        let mut message = self.question.to_be_bytes().to_vec();
        message.extend_from_slice(&[1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
        for label in name.split('.') {
            message.push(label.len() as u8);
            message.extend_from_slice(label.as_bytes());
        }
        message.extend_from_slice(&[0, 0, 1, 0, 1]);
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0];
        packet.extend_from_slice(&GUEST.octets());
        packet.extend_from_slice(&GATEWAY.octets());
        for field in [40_000, 53, message.len() as u16 + 8, 0] {
            packet.extend_from_slice(&u16::to_be_bytes(field));
        }
        packet.extend_from_slice(&message);
        let total = (packet.len() as u16).to_be_bytes();
        packet[2..4].copy_from_slice(&total);
        let sum: u32 = packet[..20].chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
        self.wire.outgoing.push_back(packet);
        let id = self.question.to_be_bytes();
        let mut found = None;
        self.until(name, |guest| {
            let reply = guest.wire.other.iter().find(|packet| packet.len() > 40 && packet[28..30] == id);
            found = reply.map(|reply| {
                let address = &reply[reply.len() - 4..];
                (reply[31] & 15 == 0).then(|| Ipv4Addr::new(address[0], address[1], address[2], address[3]))
            });
            found.is_some()
        });
        found.unwrap()
    }

    pub(crate) fn begin(&mut self, address: Ipv4Addr, port: u16) -> SocketHandle {
        let buffer = || SocketBuffer::new(vec![0; 1 << 20]);
        let mut socket = Socket::new(buffer(), buffer());
        socket.set_nagle_enabled(false);
        socket.set_ack_delay(None);
        self.port += 1;
        socket.connect(self.interface.context(), (IpAddress::Ipv4(address), port), self.port).unwrap();
        self.sockets.add(socket)
    }

    /// Connects to a name. `None` if it is refused.
    pub(crate) fn dial(&mut self, name: &str, port: u16) -> Option<SocketHandle> {
        let address = self.lookup(name)?;
        self.dial_address(address, port)
    }

    pub(crate) fn dial_address(&mut self, address: Ipv4Addr, port: u16) -> Option<SocketHandle> {
        let handle = self.begin(address, port);
        self.until("a decision", |guest| guest.socket(handle).state() != State::SynSent);
        (self.socket(handle).state() == State::Established).then_some(handle)
    }

    pub(crate) fn socket(&mut self, handle: SocketHandle) -> &mut Socket<'static> {
        self.sockets.get_mut(handle)
    }

    pub(crate) fn write(&mut self, handle: SocketHandle, bytes: &[u8]) {
        let mut rest = bytes;
        self.until("writing", |guest| {
            while let Ok(sent @ 1..) = guest.socket(handle).send_slice(rest) {
                rest = &rest[sent..];
            }
            rest.is_empty()
        });
    }

    /// Ends its direction.
    pub(crate) fn end(&mut self, handle: SocketHandle) {
        self.socket(handle).close();
    }

    /// Reads as many bytes as `wanted`, or until the other side ends.
    pub(crate) fn read(&mut self, handle: SocketHandle, wanted: usize) -> Vec<u8> {
        let mut all = Vec::new();
        let mut last = Instant::now();
        let mut buffer = vec![0; 1 << 20];
        while all.len() < wanted && last.elapsed() < PATIENCE {
            self.turn(Duration::from_millis(5));
            match self.socket(handle).recv_slice(&mut buffer) {
                Ok(0) => {}
                Ok(count) => {
                    all.extend_from_slice(&buffer[..count]);
                    last = Instant::now();
                }
                Err(_) => break,
            }
        }
        all
    }
}

struct Wire {
    fd: OwnedFd,
    incoming: VecDeque<Vec<u8>>,
    outgoing: VecDeque<Vec<u8>>,
    /// Packets that are not TCP.
    other: Vec<Vec<u8>>,
}

impl Wire {
    /// Sends what is there. Whether all was sent.
    fn flush(&mut self) -> bool {
        while let Some(packet) = self.outgoing.front() {
            let mut frame = GATEWAY_MAC.to_vec();
            frame.extend_from_slice(&GUEST_MAC);
            frame.extend_from_slice(&[8, 0]);
            frame.extend_from_slice(packet);
            match send(&self.fd, &frame, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(_) => drop(self.outgoing.pop_front()),
                Err(Errno::AGAIN) => return false,
                Err(_) => {
                    self.outgoing.clear();
                    return true;
                }
            }
        }
        true
    }

    fn fill(&mut self) -> usize {
        let mut buffer = [0; 65_600];
        let mut frames = 0;
        while frames < 32 {
            match recv(&self.fd, &mut buffer, RecvFlags::DONTWAIT) {
                Ok((_, count @ 34..)) => {
                    frames += 1;
                    let packet = buffer[14..count].to_vec();
                    if packet[9] == 6 { self.incoming.push_back(packet) } else { self.other.push(packet) }
                }
                _ => break,
            }
        }
        frames
    }
}

struct In(Vec<u8>);
struct Out<'w>(&'w mut VecDeque<Vec<u8>>);

impl Device for Wire {
    type RxToken<'a> = In;
    type TxToken<'a> = Out<'a>;

    fn receive(&mut self, _: Time) -> Option<(In, Out<'_>)> {
        Some((In(self.incoming.pop_front()?), Out(&mut self.outgoing)))
    }

    fn transmit(&mut self, _: Time) -> Option<Out<'_>> {
        (self.outgoing.len() < 64).then_some(Out(&mut self.outgoing))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = MTU;
        capabilities
    }
}

impl RxToken for In {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

impl TxToken for Out<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut packet = vec![0; len];
        let result = f(&mut packet);
        self.0.push_back(packet);
        result
    }
}
