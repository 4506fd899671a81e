//! The names that the lists use, and the numbers that the kernel knows.

use libc::c_long;

macro_rules! calls {
    ($($name:ident $number:ident)*) => { &[$((stringify!($name), libc::$number)),*] };
}

/// System calls that some list names.
const CALLS: &[(&str, c_long)] = calls! {
    arch_prctl SYS_arch_prctl
    brk SYS_brk
    clock_gettime SYS_clock_gettime
    clone SYS_clone
    clone3 SYS_clone3
    close SYS_close
    close_range SYS_close_range
    connect SYS_connect
    epoll_create1 SYS_epoll_create1
    epoll_ctl SYS_epoll_ctl
    epoll_pwait SYS_epoll_pwait
    eventfd2 SYS_eventfd2
    execveat SYS_execveat
    exit SYS_exit
    exit_group SYS_exit_group
    fallocate SYS_fallocate
    fcntl SYS_fcntl
    fdatasync SYS_fdatasync
    fstat SYS_fstat
    fstatfs SYS_fstatfs
    fsync SYS_fsync
    ftruncate SYS_ftruncate
    futex SYS_futex
    getpeername SYS_getpeername
    getpid SYS_getpid
    getrandom SYS_getrandom
    getsockopt SYS_getsockopt
    gettid SYS_gettid
    ioctl SYS_ioctl
    lseek SYS_lseek
    madvise SYS_madvise
    membarrier SYS_membarrier
    mmap SYS_mmap
    mprotect SYS_mprotect
    mremap SYS_mremap
    munmap SYS_munmap
    newfstatat SYS_newfstatat
    poll SYS_poll
    ppoll SYS_ppoll
    prctl SYS_prctl
    pread64 SYS_pread64
    preadv SYS_preadv
    prlimit64 SYS_prlimit64
    pwrite64 SYS_pwrite64
    pwritev SYS_pwritev
    read SYS_read
    readlink SYS_readlink
    readv SYS_readv
    recvfrom SYS_recvfrom
    recvmsg SYS_recvmsg
    restart_syscall SYS_restart_syscall
    rseq SYS_rseq
    rt_sigaction SYS_rt_sigaction
    rt_sigprocmask SYS_rt_sigprocmask
    rt_sigreturn SYS_rt_sigreturn
    sched_getaffinity SYS_sched_getaffinity
    sched_yield SYS_sched_yield
    seccomp SYS_seccomp
    sendmsg SYS_sendmsg
    sendto SYS_sendto
    set_robust_list SYS_set_robust_list
    set_tid_address SYS_set_tid_address
    setsockopt SYS_setsockopt
    shutdown SYS_shutdown
    socket SYS_socket
    sigaltstack SYS_sigaltstack
    statx SYS_statx
    tgkill SYS_tgkill
    uname SYS_uname
    waitid SYS_waitid
    write SYS_write
    writev SYS_writev
};

/// An argument that some list looks at.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Argument {
    /// Its place, from 0.
    pub(crate) index: u8,
    /// Whether the kernel looks at all 64 bits. Of an `int` it sees 32, whatever lies above.
    pub(crate) wide: bool,
}

const ARGUMENTS: &[(&str, &str, Argument)] = &[
    ("arch_prctl", "op", Argument { index: 0, wide: false }),
    ("clone", "flags", Argument { index: 0, wide: true }),
    ("fallocate", "mode", Argument { index: 1, wide: false }),
    ("fcntl", "op", Argument { index: 1, wide: false }),
    ("ioctl", "op", Argument { index: 1, wide: false }),
    ("madvise", "advice", Argument { index: 2, wide: false }),
    ("mmap", "prot", Argument { index: 2, wide: true }),
    ("mmap", "flags", Argument { index: 3, wide: true }),
    ("mprotect", "prot", Argument { index: 2, wide: true }),
    ("prctl", "op", Argument { index: 0, wide: false }),
    ("prctl", "signal", Argument { index: 1, wide: true }),
    ("prlimit64", "new", Argument { index: 2, wide: true }),
    ("getsockopt", "level", Argument { index: 1, wide: false }),
    ("getsockopt", "option", Argument { index: 2, wide: false }),
    ("setsockopt", "level", Argument { index: 1, wide: false }),
    ("setsockopt", "option", Argument { index: 2, wide: false }),
    ("socket", "family", Argument { index: 0, wide: false }),
    ("socket", "type", Argument { index: 1, wide: false }),
    ("socket", "protocol", Argument { index: 2, wide: false }),
    ("seccomp", "op", Argument { index: 0, wide: false }),
    ("tgkill", "signal", Argument { index: 2, wide: false }),
];

macro_rules! constants {
    ($($name:ident)*) => { &[$((stringify!($name), libc::$name.cast_unsigned() as u64)),*] };
}

/// Constants of the C library's headers.
const CONSTANTS: &[(&str, u64)] = constants! {
    AF_INET AF_INET6
    ENOSYS
    FALLOC_FL_KEEP_SIZE FALLOC_FL_PUNCH_HOLE FALLOC_FL_ZERO_RANGE
    F_DUPFD_CLOEXEC F_GETFD F_GETFL F_SETFD F_SETFL
    IPPROTO_TCP
    MADV_DONTNEED MADV_HUGEPAGE
    MAP_ANONYMOUS MAP_FIXED MAP_SHARED
    PROT_EXEC
    PR_SET_DUMPABLE PR_SET_NAME PR_SET_NO_NEW_PRIVS PR_SET_PDEATHSIG PR_SET_VMA
    SIGABRT SIGKILL
    SOCK_DGRAM SOCK_STREAM SOL_SOCKET SO_ERROR SO_KEEPALIVE SO_LINGER
    TCP_KEEPIDLE TCP_NODELAY
};

/// Constants that the C library does not have. Requests of KVM: `include/uapi/linux/kvm.h`.
const MORE_CONSTANTS: &[(&str, u64)] = &[
    ("ARCH_SET_FS", 0x1002),
    ("SECCOMP_SET_MODE_FILTER", 1),
    // What glibc's pthread_create asks for: a thread of this process, in every respect.
    ("PTHREAD_FLAGS", 0x003d_0f00),
    // A copy of this process that shares nothing with it, with a descriptor and SIGCHLD for its end: CLONE_PIDFD.
    ("COPY_FLAGS", 0x1011),
    // The C library's own signal number 34 is ours to use: it keeps 32 and 33.
    ("SIGRTMIN", 34),
    ("FICLONERANGE", 0x4020_940d),
    ("KVM_CHECK_EXTENSION", 0xae03),
    ("KVM_CREATE_IRQCHIP", 0xae60),
    ("KVM_CREATE_VCPU", 0xae41),
    ("KVM_CREATE_VM", 0xae01),
    ("KVM_GET_API_VERSION", 0xae00),
    ("KVM_GET_CLOCK", 0x8030_ae7c),
    ("KVM_GET_DEBUGREGS", 0x8080_aea1),
    ("KVM_GET_DEVICE_ATTR", 0x4018_aee2),
    ("KVM_GET_IRQCHIP", 0xc208_ae62),
    ("KVM_GET_LAPIC", 0x8400_ae8e),
    ("KVM_GET_MP_STATE", 0x8004_ae98),
    ("KVM_GET_MSRS", 0xc008_ae88),
    ("KVM_GET_MSR_INDEX_LIST", 0xc004_ae02),
    ("KVM_GET_REGS", 0x8090_ae81),
    ("KVM_GET_SREGS", 0x8138_ae83),
    ("KVM_GET_SUPPORTED_CPUID", 0xc008_ae05),
    ("KVM_GET_TSC_KHZ", 0xaea3),
    ("KVM_GET_VCPU_EVENTS", 0x8040_ae9f),
    ("KVM_GET_VCPU_MMAP_SIZE", 0xae04),
    ("KVM_GET_XCRS", 0x8188_aea6),
    ("KVM_GET_XSAVE", 0x9000_aea4),
    ("KVM_IOEVENTFD", 0x4040_ae79),
    ("KVM_IRQFD", 0x4020_ae76),
    ("KVM_IRQ_LINE", 0x4008_ae61),
    ("KVM_KVMCLOCK_CTRL", 0xaead),
    ("KVM_RUN", 0xae80),
    ("KVM_SET_CLOCK", 0x4030_ae7b),
    ("KVM_SET_CPUID2", 0x4008_ae90),
    ("KVM_SET_DEBUGREGS", 0x4080_aea2),
    ("KVM_SET_DEVICE_ATTR", 0x4018_aee1),
    ("KVM_SET_IRQCHIP", 0x8208_ae63),
    ("KVM_SET_LAPIC", 0x4400_ae8f),
    ("KVM_SET_MP_STATE", 0x4004_ae99),
    ("KVM_SET_MSRS", 0x4008_ae89),
    ("KVM_SET_REGS", 0x4090_ae82),
    ("KVM_SET_SREGS", 0x4138_ae84),
    ("KVM_SET_TSC_KHZ", 0xaea2),
    ("KVM_SET_TSS_ADDR", 0xae47),
    ("KVM_SET_USER_MEMORY_REGION", 0x4020_ae46),
    ("KVM_SET_VCPU_EVENTS", 0x4040_aea0),
    ("KVM_SET_XCRS", 0x4188_aea7),
    ("KVM_SET_XSAVE", 0x5000_aea5),
];

fn find<T: Copy>(table: &[(&str, T)], name: &str) -> Option<T> {
    table.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
}

/// The number of a system call.
pub(crate) fn number(call: &str) -> Option<i64> {
    find(CALLS, call)
}

/// An argument of a system call.
pub(crate) fn argument(call: &str, name: &str) -> Option<Argument> {
    ARGUMENTS.iter().find(|(of, known, _)| (*of, *known) == (call, name)).map(|(_, _, argument)| *argument)
}

/// A constant's value: a name, or a decimal number.
pub(crate) fn constant(name: &str) -> Option<u64> {
    name.parse().ok().or_else(|| find(CONSTANTS, name)).or_else(|| find(MORE_CONSTANTS, name))
}
