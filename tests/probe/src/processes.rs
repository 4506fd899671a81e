//! Other processes, and this one.

use libc::{AT_FDCWD, CLONE_NEWUSER, SIGCHLD, SIGKILL};

use crate::{Attempt, args, attempt, n, t};

pub(crate) const ATTEMPTS: &[Attempt] = &[
    attempt("fork", libc::SYS_clone, |_| args(&[n(SIGCHLD)])),
    attempt("fork, the old way", libc::SYS_fork, |_| args(&[0])),
    attempt("fork into a user namespace", libc::SYS_clone, |_| args(&[n(CLONE_NEWUSER | SIGCHLD)])),
    attempt("fork, the new way", libc::SYS_clone3, |s| args(&[s.room(), n(64)])),
    attempt("execute a program", libc::SYS_execve, |_| args(&[t(c"/bin/true")])),
    attempt("execute a program from a directory", libc::SYS_execveat, |_| args(&[n(AT_FDCWD), t(c"/bin/true")]))
        .or(&[libc::ENOENT]),
    attempt("make a file in memory, to execute it", libc::SYS_memfd_create, |_| args(&[t(c"probe")])),
    attempt("execute an open file", libc::SYS_execveat, |_| args(&[n(2), t(c""), n(0), n(0), n(libc::AT_EMPTY_PATH)]))
        .or(&[libc::EACCES]),
    attempt("make secret memory", libc::SYS_memfd_secret, |_| args(&[n(0)])),
    attempt("see its parent", libc::SYS_getppid, |_| args(&[0])),
    attempt("see a process", libc::SYS_pidfd_open, |s| args(&[n(s.parent)])),
    attempt("ask whether a process exists", libc::SYS_kill, |s| args(&[n(s.parent)])),
    attempt("signal every process", libc::SYS_kill, |_| args(&[n(-1)])),
    attempt("signal a thread of another", libc::SYS_tgkill, |s| args(&[n(s.parent), n(s.parent)])),
    attempt("abort another process", libc::SYS_tgkill, |s| args(&[n(s.parent), n(1), n(libc::SIGABRT)]))
        .or(&[libc::ESRCH]),
    attempt("signal a thread, the old way", libc::SYS_tkill, |s| args(&[n(s.parent)])),
    attempt("signal with a value", libc::SYS_rt_sigqueueinfo, |s| args(&[n(s.parent), n(0), s.room()])),
    attempt("kill through a descriptor", libc::SYS_pidfd_send_signal, |_| args(&[n(0), n(SIGKILL)])),
    attempt("trace a process", libc::SYS_ptrace, |s| args(&[n(libc::PTRACE_SEIZE), n(s.parent)])),
    attempt("be traced", libc::SYS_ptrace, |_| args(&[n(libc::PTRACE_TRACEME)])),
    attempt("read the parent's memory", libc::SYS_process_vm_readv, |s| {
        args(&[n(s.parent), s.room(), n(1), s.room(), n(1)])
    }),
    attempt("write the parent's memory", libc::SYS_process_vm_writev, |s| {
        args(&[n(s.parent), s.room(), n(1), s.room(), n(1)])
    }),
    attempt("take a descriptor of another", libc::SYS_pidfd_getfd, |_| args(&[n(0)])),
    attempt("compare itself with another", libc::SYS_kcmp, |s| args(&[n(s.parent), n(s.parent)])),
    attempt("change another's limits", libc::SYS_prlimit64, |s| {
        args(&[n(s.parent), n(libc::RLIMIT_NOFILE), n(0), s.room()])
    })
    .or(&[libc::ESRCH, libc::EPERM]),
    attempt("raise a limit", libc::SYS_prlimit64, |s| args(&[n(0), n(libc::RLIMIT_NOFILE), s.room()])),
    attempt("raise a limit, the old way", libc::SYS_setrlimit, |s| args(&[n(libc::RLIMIT_CORE), s.room()])),
    attempt("wait for a process", libc::SYS_wait4, |_| args(&[n(-1), n(0), n(libc::WNOHANG)])),
    attempt("change priorities", libc::SYS_setpriority, |_| args(&[n(0), n(0), n(19)])),
    attempt("choose CPUs", libc::SYS_sched_setaffinity, |s| args(&[n(0), n(8), s.room()])),
    attempt("become root", libc::SYS_setuid, |_| args(&[n(0)])),
    attempt("become root, in every way", libc::SYS_setresuid, |_| args(&[n(0)])),
    attempt("join a group", libc::SYS_setgroups, |_| args(&[n(0)])),
    attempt("take capabilities", libc::SYS_capset, |s| args(&[s.room(), s.room()])),
    attempt("become another kind of process", libc::SYS_personality, |_| args(&[n(0xffff_ffff_u32)])),
    attempt("let itself be looked into", libc::SYS_prctl, |_| args(&[n(libc::PR_SET_DUMPABLE), n(1)])),
    attempt("no longer die with its parent", libc::SYS_prctl, |_| args(&[n(libc::PR_SET_PDEATHSIG)])),
    attempt("let itself be traced", libc::SYS_prctl, |_| args(&[n(libc::PR_SET_PTRACER), n(-1)])),
    attempt("change where it is loaded", libc::SYS_prctl, |_| args(&[n(libc::PR_SET_MM), n(1)])),
    attempt("ask which calls there are", libc::SYS_seccomp, |s| args(&[n(2), n(0), s.room()])),
    attempt("move its thread-local storage", libc::SYS_arch_prctl, |s| args(&[n(0x1001), s.room()])),
    attempt("change segments", libc::SYS_modify_ldt, |s| args(&[n(0), s.room(), n(8)])),
];
