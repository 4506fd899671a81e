//! The few calls that neither the standard library nor rustix makes safely. Nothing else in this crate is unsafe.

#![allow(unsafe_code)]

use rustix::{fd::OwnedFd, process::Signal, thread::UnshareFlags};
use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    fs::File,
    io,
    net::Ipv4Addr,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, RawFd},
};

/// The port whose writes the VMM counts and times. Elsewhere nobody listens on it.
const MARK_PORT: u16 = 0x3f0;

/// From linux/sched.h; the libc crate's constant is of too narrow a type.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Writes a byte to the mark port: one exit of the vCPU, by which tests divide a boot into parts. The right to use
/// ports is given back at once, because children inherit it. Without the right to ask for it nothing happens.
pub(crate) fn mark(value: u8) {
    // SAFETY: iopl changes the privilege of port instructions for this thread, nothing in memory.
    if unsafe { libc::syscall(libc::SYS_iopl, 3) } != 0 {
        return;
    }
    // SAFETY: iopl just allowed the instruction; it touches no memory and no flags, and no device has this port.
    unsafe {
        std::arch::asm!("out dx, al", in("dx") MARK_PORT, in("al") value, options(nomem, nostack, preserves_flags));
    }
    // SAFETY: as the first.
    unsafe { libc::syscall(libc::SYS_iopl, 0) };
}

/// Makes a copy of this process, born in a cgroup if one is given: never outside of it for a moment, and without the
/// kernel-wide wait that moving a process costs. Returns a pidfd of the copy; `None` in the copy.
pub(crate) fn fork(cgroup: Option<BorrowedFd<'_>>) -> io::Result<Option<OwnedFd>> {
    Ok(fork_numbered(cgroup)?.map(|(pidfd, _)| pidfd))
}

/// The same, with the copy's number as this process knows it.
pub(crate) fn fork_numbered(cgroup: Option<BorrowedFd<'_>>) -> io::Result<Option<(OwnedFd, u32)>> {
    let mut pidfd: c_int = -1;
    // SAFETY: a C struct of integers, for which zero is a value.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = narrow(libc::CLONE_PIDFD)?;
    args.exit_signal = narrow(libc::SIGCHLD)?;
    args.pidfd = (&raw mut pidfd).addr() as u64;
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = narrow(cgroup.as_raw_fd())?;
    }
    // SAFETY: without CLONE_VM and with no stack given this is fork(2). The agent has one thread, so the copy holds no
    // lock of a thread that it does not have, and may go on to run ordinary code; that the C library's note of the
    // thread's id is the original's matters only to threads' calls, of which the copy makes none. The kernel writes
    // the pidfd to a variable that lives through the call.
    match unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        // SAFETY: the kernel just gave the descriptor, and nobody else has it.
        number => Ok(Some((unsafe { OwnedFd::from_raw_fd(pidfd) }, narrow(number)?))),
    }
}

/// Becomes another program; returns only if that fails. Unlike the C library's search functions it never hands a
/// file that the kernel does not understand to a shell.
pub(crate) fn execute(path: &CStr, args: &[CString], env: &[CString]) -> io::Error {
    let pointers = |list: &[CString]| -> Vec<*const c_char> {
        list.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect()
    };
    let (args, env) = (pointers(args), pointers(env));
    // Programs expect the defaults. The agent itself ignores SIGPIPE, and who started it may have had it ignore others.
    for signal in 1..=31 {
        // SAFETY: SIG_DFL installs no handler of ours; two of the signals cannot be set, and need not be.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: the path and each element of both lists are C strings that live through the call, and the lists end
    // with a null pointer.
    unsafe { libc::execve(path.as_ptr(), args.as_ptr(), env.as_ptr()) };
    io::Error::last_os_error()
}

/// Ends a forked copy without running what the original registered for its own end.
pub(crate) fn exit_now(status: c_int) -> ! {
    // SAFETY: _exit touches no memory of this process.
    unsafe { libc::_exit(status) }
}

/// Leaves namespaces for new ones.
pub(crate) fn unshare(flags: UnshareFlags) -> io::Result<()> {
    // SAFETY: unsafe because of CLONE_FILES, which would give the thread a descriptor table of its own; the agent has
    // one thread, and never passes that flag.
    unsafe { rustix::thread::unshare_unsafe(flags) }.map_err(Into::into)
}

/// Closes every descriptor from 3 up that is not in `keep`. For forked copies that never return to the code that owns
/// those descriptors: they execute something or end by [`exit_now`].
pub(crate) fn close_all_but(keep: &[RawFd]) {
    let mut keep: Vec<u32> = keep.iter().filter_map(|fd| u32::try_from(*fd).ok()).filter(|fd| *fd > 2).collect();
    keep.sort_unstable();
    let mut first = 3;
    for kept in keep {
        if kept > first {
            close_range(first, kept - 1);
        }
        first = kept + 1;
    }
    close_range(first, u32::MAX);
}

fn close_range(first: u32, last: u32) {
    // SAFETY: closes descriptors that nothing in this copy of the process uses or drops any more, as the caller says.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
}

/// Ignores a signal. For SIGCHLD: children are then reaped by the kernel.
pub(crate) fn ignore(signal: c_int) {
    // SAFETY: SIG_IGN installs no handler of ours.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}

/// A signal by its number: all but the two that the C library keeps for its threads.
pub(crate) fn signal(number: c_int) -> Option<Signal> {
    if !matches!(number, 1..=31 | 34..=64) {
        return None;
    }
    // SAFETY: unsafe because of what handling a reserved signal might do; this process only sends it.
    std::num::NonZeroI32::new(number).map(|number| unsafe { Signal::from_raw_nonzero_unchecked(number) })
}

/// A non-blocking listener on a vsock port, for connections from anywhere.
pub(crate) fn vsock_listener(port: u32) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: makes a descriptor or fails.
    let raw = check(unsafe { libc::socket(libc::AF_VSOCK, kind, 0) })?;
    // SAFETY: the kernel just gave it, and nobody else has it.
    let socket = unsafe { OwnedFd::from_raw_fd(raw) };
    // SAFETY: a C struct of integers, for which zero is a value.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = narrow(libc::AF_VSOCK)?;
    address.svm_port = port;
    address.svm_cid = libc::VMADDR_CID_ANY;
    let length = narrow(size_of::<libc::sockaddr_vm>())?;
    // SAFETY: the address is valid for its length during the call.
    check(unsafe { libc::bind(raw, (&raw const address).cast(), length) })?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

/// Adds bytes to the kernel's random pool, counts each as eight bits of entropy, and has the generator take them.
pub(crate) fn add_entropy(random: &File, bytes: &[u8]) -> io::Result<()> {
    const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
    const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
    let size: c_int = narrow(bytes.len())?;
    let bits = size.checked_mul(8).ok_or(io::ErrorKind::InvalidInput)?;
    // struct rand_pool_info: two ints, then the bytes.
    let mut info = Vec::with_capacity(bytes.len() + 8);
    info.extend_from_slice(&bits.to_ne_bytes());
    info.extend_from_slice(&size.to_ne_bytes());
    info.extend_from_slice(bytes);
    // SAFETY: the kernel reads two ints and then `size` bytes, all of which are in `info`.
    check(unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, info.as_ptr().cast::<c_void>()) })?;
    // SAFETY: takes no argument.
    check(unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG) })?;
    Ok(())
}

/// Makes a mounted ext4, of which `root` is any directory, so many blocks large.
pub(crate) fn ext4_resize(root: &File, blocks: u64) -> io::Result<()> {
    const EXT4_IOC_RESIZE_FS: libc::c_ulong = 0x4008_6610;
    // SAFETY: the kernel reads one 64-bit number, which lives through the call.
    check(unsafe { libc::ioctl(root.as_raw_fd(), EXT4_IOC_RESIZE_FS, &raw const blocks) })?;
    Ok(())
}

/// Sets the loopback interface up.
pub(crate) fn loopback_up() -> io::Result<()> {
    set_up(&inet_socket()?, "lo")
}

/// Whether there is an interface of this name.
pub(crate) fn interface_exists(name: &str) -> io::Result<bool> {
    match interface(&inet_socket()?, libc::SIOCGIFINDEX, &mut request(name)?) {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(false),
        other => other.map(|()| true),
    }
}

/// Gives an interface its address, sets it up, and makes `gateway` the way to everywhere else.
pub(crate) fn interface_up(name: &str, address: Ipv4Addr, mask: Ipv4Addr, gateway: Ipv4Addr) -> io::Result<()> {
    let socket = inet_socket()?;
    for (what, value) in [(libc::SIOCSIFADDR, address), (libc::SIOCSIFNETMASK, mask)] {
        let mut asked = request(name)?;
        asked.ifr_ifru.ifru_addr = socket_address(value)?;
        interface(&socket, what, &mut asked)?;
    }
    set_up(&socket, name)?;
    // SAFETY: a C struct of integers and a pointer, for which zero is a value.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED)?;
    route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED)?;
    route.rt_gateway = socket_address(gateway)?;
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    // SAFETY: the kernel reads one rtentry, whose pointer is null.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCADDRT, &raw const route) })?;
    Ok(())
}

fn set_up(socket: &OwnedFd, name: &str) -> io::Result<()> {
    let mut asked = request(name)?;
    asked.ifr_ifru.ifru_flags = narrow(libc::IFF_UP | libc::IFF_RUNNING)?;
    interface(socket, libc::SIOCSIFFLAGS, &mut asked)
}

fn inet_socket() -> io::Result<OwnedFd> {
    let kind = rustix::net::SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, kind, None)?)
}

/// A request about an interface; its name has at most 15 bytes.
fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: a C struct of integers and bytes, for which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, byte) in request.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *to = narrow(byte)?;
    }
    Ok(request)
}

fn interface(socket: &OwnedFd, what: libc::Ioctl, request: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: the kernel reads and writes one ifreq.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), what, &raw mut *request) })?;
    Ok(())
}

fn socket_address(address: Ipv4Addr) -> io::Result<libc::sockaddr> {
    // SAFETY: a C struct of integers and bytes, for which zero is a value.
    let mut socket_address: libc::sockaddr = unsafe { std::mem::zeroed() };
    socket_address.sa_family = narrow(libc::AF_INET)?;
    // As in sockaddr_in: two bytes of port, then the address.
    for (to, byte) in socket_address.sa_data.iter_mut().skip(2).zip(address.octets()) {
        *to = byte.cast_signed();
    }
    Ok(socket_address)
}

/// A number as C's structures want it.
fn narrow<T, U: TryFrom<T>>(value: T) -> io::Result<U> {
    U::try_from(value).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
