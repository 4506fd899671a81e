//! A guest that was allowed nothing looks for a way out that is none of the network's: sockets of the machine, the serial
//! console, the disk, frames that no stack would send. It prints what it tried, and what came of it.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use crate::ports;

/// What another guest that does the same would hear of this one.
const WORD: &[u8] = b"is this a way out";

/// The only other station of the link.
const GATEWAY: [u8; 6] = [0x02, 0x62, 0x75, 0x6c, 0x6b, 0x01];

/// Looks everywhere. `word` is this guest's own.
pub(crate) fn look(word: &str) {
    sockets();
    serial(word);
    disk();
    frames(word);
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn socket(family: i32, kind: i32, protocol: i32) -> io::Result<OwnedFd> {
    // SAFETY: it takes no pointers.
    let raw = check(unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol) })?;
    // SAFETY: it has just been made, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Connects to whoever may listen on the host, in other machines, or in none.
fn sockets() {
    let addresses = [0, 1, 2, 3, 4, 5, 99, i32::MAX as u32, u32::MAX - 1, u32::MAX];
    let ports = [0, 1, 22, 53, 80, 443, 1023, 1024, 1025, 7000, 1 << 31, u32::MAX - 1, u32::MAX];
    let mut tries = Vec::new();
    for kind in [libc::SOCK_STREAM, libc::SOCK_SEQPACKET] {
        tries.extend(addresses.iter().flat_map(|cid| ports.map(|port| (kind, *cid, port))));
    }
    // All at once: those that nobody answers take two seconds each.
    let threads: Vec<_> = tries
        .into_iter()
        .map(|(kind, cid, port)| {
            let connect = move || connect(kind, cid, port).map(|_| (cid, port));
            std::thread::Builder::new().stack_size(64 << 10).spawn(connect).expect("a thread")
        })
        .collect();
    let tried = threads.len();
    let mut reached = 0;
    for thread in threads {
        match thread.join().expect("a thread that ends") {
            // Where the kernel has a loopback of its own, that is this machine's agent and nobody else.
            Ok((cid @ (1 | 3), port)) => println!("vsock: {cid}:{port} is this machine's own"),
            Ok((cid, port)) => {
                println!("vsock: {cid}:{port} was reached");
                reached += 1;
            }
            Err(_) => {}
        }
    }
    println!("vsock: {reached} of {tried} reached");
}

fn connect(kind: i32, cid: u32, port: u32) -> io::Result<OwnedFd> {
    let socket = socket(libc::AF_VSOCK, kind, 0)?;
    // SAFETY: all zeros is a value of this type.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as u16;
    (address.svm_cid, address.svm_port) = (cid, port);
    // SAFETY: the address lives through the call, and its length is its own.
    check(unsafe {
        libc::connect(socket.as_raw_fd(), (&raw const address).cast(), size_of::<libc::sockaddr_vm>() as u32)
    })?;
    Ok(socket)
}

/// Makes a device file, whatever there is of them already.
fn device(kind: u32, major: u32, minor: u32) -> io::Result<File> {
    let path = format!("/tmp/device-{kind}-{major}-{minor}");
    if !Path::new(&path).exists() {
        let name = CString::new(path.clone())?;
        // SAFETY: the name lives through the call.
        check(unsafe { libc::mknod(name.as_ptr(), kind | 0o600, libc::makedev(major, minor)) })?;
    }
    File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
}

/// Writes to every serial port, by the kernel's drivers and by hand, and listens whether anybody answers.
fn serial(word: &str) {
    // ttyS0 to ttyS3, hvc0, console.
    let (mut there, mut heard) = (0, 0);
    for (major, minor) in [(4, 64), (4, 65), (4, 66), (4, 67), (229, 0), (5, 1)] {
        let Ok(mut file) = device(libc::S_IFCHR, major, minor) else { continue };
        there += usize::from(file.write_all(format!("{word} was here\r\n").as_bytes()).is_ok());
        let mut buffer = [0; 64];
        heard += file.read(&mut buffer).unwrap_or(0);
    }
    println!("serial: {heard} bytes came");
    ports::open();
    let mut answered = 0;
    for base in [0x3f8, 0x2f8, 0x3e8, 0x2e8] {
        for byte in word.bytes() {
            ports::put(base, byte);
        }
        // The line's status: that of a port that is not there is all ones.
        let status = ports::read(base + 5);
        answered += usize::from(status != 0xff && status & 1 != 0);
    }
    println!("ports: {answered} have something to say");
    eprintln!("{there} serial devices take something");
}

/// Reads and writes where the disk has ended, and asks for what no disk of ours does.
fn disk() {
    let disks = std::fs::read_dir("/sys/block").map_or(0, |entries| {
        entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with("vd")).count()
    });
    let number = std::fs::read_to_string("/sys/block/vda/dev").unwrap_or_default();
    let (major, minor) = number.trim().split_once(':').unwrap_or_default();
    let disk = device(libc::S_IFBLK, major.parse().unwrap_or(0), minor.parse().unwrap_or(0)).expect("the disk");
    let sectors = std::fs::read_to_string("/sys/block/vda/size").unwrap_or_default();
    let size = sectors.trim().parse::<u64>().expect("its size") * 512;
    let mut done = Vec::new();
    let mut page = vec![0x5a; 4096];
    for at in [size, size + 4096, 1 << 40, 1 << 62, (1 << 63) - 4096] {
        if disk.write_at(&page, at).is_ok_and(|count| count > 0) && disk.sync_all().is_ok() {
            done.push(format!("wrote at {at}"));
        }
        if disk.read_at(&mut page, at).is_ok_and(|count| count > 0) {
            done.push(format!("read at {at}"));
        }
    }
    if disk.read_at(&mut vec![0; 8192], size - 4096).is_ok_and(|count| count > 4096) {
        done.push("read over the end".to_owned());
    }
    // BLKDISCARD, BLKSECDISCARD, BLKZEROOUT.
    for request in [0x1277, 0x127d, 0x127f] {
        for range in [[size, 4096], [size - 4096, 8192], [0, u64::MAX], [u64::MAX - 4095, 4096], [1 << 62, 1 << 62]] {
            // SAFETY: these requests read two numbers from what they are given.
            if unsafe { libc::ioctl(disk.as_raw_fd(), request, range.as_ptr()) } == 0 {
                done.push(format!("request {request:#x} of {range:?}"));
            }
        }
    }
    // SG_IO, SCSI_IOCTL_SEND_COMMAND, CDROMEJECT, BLKSETRO to writable: with nothing behind the pointer.
    for request in [0x2285, 1, 0x5309] {
        // SAFETY: there is nothing behind the pointer, which is an error and no access.
        if unsafe { libc::ioctl(disk.as_raw_fd(), request, std::ptr::null_mut::<u8>()) } == 0 {
            done.push(format!("request {request:#x}"));
        }
    }
    println!("disk: of {disks}, {} done: {}", done.len(), done.join(", "));
}

/// Sends frames to everybody, of kinds that no stack would, and listens whether anybody but the gateway is on the link.
fn frames(word: &str) {
    let all = libc::ETH_P_ALL as u16;
    let socket = socket(libc::AF_PACKET, libc::SOCK_RAW, i32::from(all.to_be())).expect("a packet socket");
    let index = std::fs::read_to_string("/sys/class/net/eth0/ifindex").unwrap_or_default();
    // SAFETY: all zeros is a value of this type.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = all.to_be();
    address.sll_ifindex = index.trim().parse().expect("an interface");
    // SAFETY: the address lives through the call, and its length is its own.
    let bound =
        unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size_of::<libc::sockaddr_ll>() as u32) };
    check(bound).expect("the interface");
    let text = std::fs::read_to_string("/sys/class/net/eth0/address").unwrap_or_default();
    let mut own = [0; 6];
    for (byte, digits) in own.iter_mut().zip(text.trim().split(':')) {
        *byte = u8::from_str_radix(digits, 16).expect("an address");
    }
    let mut sent = 0;
    for to in [[0xff; 6], own, GATEWAY, [2, 0, 0, 0, 0, 3], [1, 0x80, 0xc2, 0, 0, 0], [0x33, 0x33, 0, 0, 0, 1]] {
        for kind in [0x0800_u16, 0x0806, 0x86dd, 0x8100, 0x88cc, 0x88b5, 0x0004] {
            for from in [own, [2, 0, 0, 0, 0, 9]] {
                let frame = [&to[..], &from, &kind.to_be_bytes(), WORD, word.as_bytes(), &[0; 40]].concat();
                // SAFETY: the frame lives through the call, and its length is its own.
                let count =
                    unsafe { libc::send(socket.as_raw_fd(), frame.as_ptr().cast(), frame.len(), libc::MSG_DONTWAIT) };
                sent += usize::from(count > 0);
            }
        }
    }
    let mut strangers = 0;
    let end = std::time::Instant::now() + std::time::Duration::from_secs(2);
    while std::time::Instant::now() < end {
        let mut frame = [0; 2048];
        // SAFETY: all zeros is a value of this type.
        let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        let mut length = size_of::<libc::sockaddr_ll>() as u32;
        // SAFETY: buffer, address and length live through the call, and the lengths are their own.
        let count = unsafe {
            libc::recvfrom(
                socket.as_raw_fd(),
                frame.as_mut_ptr().cast(),
                frame.len(),
                libc::MSG_DONTWAIT,
                (&raw mut from).cast(),
                &raw mut length,
            )
        };
        match usize::try_from(count) {
            // Our own come back to us.
            Ok(_) if from.sll_pkttype == 4 => {}
            Ok(count) => {
                let frame = &frame[..count.min(frame.len())];
                let gateways = frame.get(6..12) == Some(&GATEWAY[..]);
                if !gateways || frame.windows(WORD.len()).any(|window| window == WORD) {
                    println!("link: {:02x?}", frame.get(..48.min(frame.len())));
                    strangers += 1;
                }
            }
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(10)),
        }
    }
    println!("link: {strangers} frames of strangers");
    eprintln!("{sent} frames were sent");
}
