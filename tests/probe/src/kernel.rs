//! Sockets, memory, and the rest of what the kernel offers.

use libc::{
    AF_ALG, AF_INET, AF_INET6, AF_NETLINK, AF_PACKET, AF_UNIX, AF_VSOCK, MAP_ANONYMOUS, MAP_PRIVATE, PROT_EXEC,
    PROT_READ, PROT_WRITE, SOCK_DGRAM, SOCK_RAW, SOCK_STREAM,
};

use crate::{Attempt, args, attempt, n, t};

pub(crate) const ATTEMPTS: &[Attempt] = &[
    attempt("make a socket: AF_UNIX SOCK_STREAM", libc::SYS_socket, |_| args(&[n(AF_UNIX), n(SOCK_STREAM)])),
    attempt("make a socket: AF_UNIX SOCK_DGRAM", libc::SYS_socket, |_| args(&[n(AF_UNIX), n(SOCK_DGRAM)])),
    attempt("make a socket: AF_INET SOCK_STREAM", libc::SYS_socket, |_| args(&[n(AF_INET), n(SOCK_STREAM)])).or(&[0]),
    attempt("make a socket: AF_INET SOCK_DGRAM", libc::SYS_socket, |_| args(&[n(AF_INET), n(SOCK_DGRAM)])).or(&[0]),
    attempt("make a socket: AF_INET6 SOCK_STREAM", libc::SYS_socket, |_| args(&[n(AF_INET6), n(SOCK_STREAM)])).or(&[0]),
    attempt("make a socket: AF_NETLINK SOCK_RAW", libc::SYS_socket, |_| args(&[n(AF_NETLINK), n(SOCK_RAW)])),
    attempt("make a socket: AF_PACKET SOCK_RAW", libc::SYS_socket, |_| args(&[n(AF_PACKET), n(SOCK_RAW)])),
    attempt("make a socket: AF_VSOCK SOCK_STREAM", libc::SYS_socket, |_| args(&[n(AF_VSOCK), n(SOCK_STREAM)])),
    attempt("make a socket: AF_ALG SOCK_DGRAM", libc::SYS_socket, |_| args(&[n(AF_ALG), n(SOCK_DGRAM)])),
    attempt("make a socket: AF_INET SOCK_STREAM, SCTP", libc::SYS_socket, |_| {
        args(&[n(AF_INET), n(SOCK_STREAM), n(132)])
    }),
    attempt("make a socket: AF_INET SOCK_RAW", libc::SYS_socket, |_| args(&[n(AF_INET), n(SOCK_RAW), n(1)])),
    attempt("filter what a socket takes", libc::SYS_setsockopt, |s| {
        args(&[n(3), n(libc::SOL_SOCKET), n(libc::SO_ATTACH_FILTER), s.room(), n(16)])
    }),
    attempt("make a pair of sockets", libc::SYS_socketpair, |s| args(&[n(AF_UNIX), n(SOCK_STREAM), n(0), s.room()])),
    attempt("reach an abstract socket", libc::SYS_connect, |s| args(&[n(3), s.room(), n(16)])).or(&[libc::EINVAL]),
    attempt("offer an abstract socket", libc::SYS_bind, |s| args(&[n(3), s.room(), n(2)])),
    attempt("listen", libc::SYS_listen, |_| args(&[n(3), n(1)])),
    attempt("accept", libc::SYS_accept4, |_| args(&[n(3)])),
    attempt("ask who is at the other end", libc::SYS_getsockopt, |s| args(&[n(3), n(1), n(17), s.room(), s.room()]))
        .or(&[0]),
    attempt("send a file's bytes", libc::SYS_sendfile, |_| args(&[n(1), n(0), n(0), n(1)])),
    attempt("make a pipe", libc::SYS_pipe2, |s| args(&[s.room()])),
    attempt("copy a descriptor", libc::SYS_dup, |_| args(&[n(0)])),
    attempt("put a descriptor in a place", libc::SYS_dup2, |_| args(&[n(0), n(9)])),
    attempt("splice", libc::SYS_vmsplice, |s| args(&[n(1), s.room()])),
    attempt("map memory that is executable", libc::SYS_mmap, |_| {
        args(&[n(0), n(4096), n(PROT_READ | PROT_WRITE | PROT_EXEC), n(MAP_PRIVATE | MAP_ANONYMOUS), n(-1)])
    }),
    attempt("make memory executable", libc::SYS_mprotect, |_| args(&[n(0), n(0), n(PROT_READ | PROT_EXEC)])),
    attempt("make memory executable, with a key", libc::SYS_pkey_mprotect, |_| {
        args(&[n(0), n(0), n(PROT_READ | PROT_EXEC), n(-1)])
    }),
    attempt("lock memory", libc::SYS_mlockall, |_| args(&[n(1)])),
    attempt("share memory", libc::SYS_shmget, |_| args(&[n(1), n(4096)])),
    attempt("make a queue of messages", libc::SYS_msgget, |_| args(&[n(1)])),
    attempt("make semaphores", libc::SYS_semget, |_| args(&[n(1), n(1)])),
    attempt("open a queue by name", libc::SYS_mq_open, |_| args(&[t(c"probe")])),
    attempt("keys: make one", libc::SYS_add_key, |_| args(&[t(c"user"), t(c"probe"), t(c"x"), n(1), n(-2)])),
    attempt("keys: ask", libc::SYS_keyctl, |_| args(&[n(0), n(-3)])),
    attempt("keys: request", libc::SYS_request_key, |_| args(&[t(c"user"), t(c"probe-none")])),
    attempt("load a program into the kernel", libc::SYS_bpf, |s| args(&[n(0), s.room(), n(64)])),
    attempt("measure the machine", libc::SYS_perf_event_open, |s| args(&[s.room(), n(0), n(-1), n(-1)])),
    attempt("serve page faults", libc::SYS_userfaultfd, |_| args(&[n(1)])),
    attempt("make a ring for input and output", libc::SYS_io_uring_setup, |s| args(&[n(1), s.room()])),
    attempt("make a Landlock domain", libc::SYS_landlock_create_ruleset, |_| args(&[n(0), n(0), n(1)])),
    attempt("read the kernel's log", libc::SYS_syslog, |_| args(&[n(10)])),
    attempt("read the host's name", libc::SYS_uname, |s| args(&[s.room()])),
    attempt("change the host's name", libc::SYS_sethostname, |_| args(&[t(c""), n(-1)])),
    attempt("see the host's load", libc::SYS_sysinfo, |s| args(&[s.room()])),
    attempt("load a module", libc::SYS_finit_module, |_| args(&[n(-1), t(c"")])),
    attempt("start another kernel", libc::SYS_kexec_load, |_| args(&[n(0), n(0), n(0), n(-1)])),
    attempt("switch the machine off", libc::SYS_reboot, |_| args(&[n(0)])),
    attempt("use ports", libc::SYS_iopl, |_| args(&[n(0)])),
    attempt("set the clock", libc::SYS_clock_settime, |s| args(&[n(-100), s.room()])),
    attempt("read the clock's state", libc::SYS_adjtimex, |s| args(&[s.room()])),
    attempt("make a timer", libc::SYS_timer_create, |s| args(&[n(1), n(0), s.room()])),
    attempt("have itself signalled later", libc::SYS_alarm, |_| args(&[n(0)])),
    attempt("put input into a terminal", libc::SYS_ioctl, |s| args(&[n(0), libc::TIOCSTI, s.room()])),
    attempt("ask about a terminal", libc::SYS_ioctl, |s| args(&[n(0), libc::TCGETS, s.room()])),
    attempt("ask about a file", libc::SYS_ioctl, |s| args(&[n(2), 0x8008_6601, s.room()])),
    attempt("get signals about a descriptor", libc::SYS_fcntl, |_| args(&[n(3), n(libc::F_SETOWN)])),
    attempt("lock a file", libc::SYS_fcntl, |s| args(&[n(2), n(libc::F_SETLK), s.room()])),
    attempt("make a file longer", libc::SYS_fallocate, |_| args(&[n(2), n(0), n(0), n(1)])),
    attempt("give memory back for good", libc::SYS_madvise, |_| args(&[n(0), n(0), n(libc::MADV_REMOVE)])),
];
