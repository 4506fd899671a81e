//! The file system, mounts and namespaces.

use libc::{AT_FDCWD, CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUSER, O_CREAT, O_RDWR};

use crate::{Attempt, args, attempt, n, t};

pub(crate) const ATTEMPTS: &[Attempt] = &[
    attempt("read a file", libc::SYS_open, |_| args(&[t(c"/etc/passwd")])),
    attempt("read a file of the host, from a directory", libc::SYS_openat, |_| {
        args(&[n(AT_FDCWD), t(c"/etc/hostname")])
    }),
    attempt("read a file, the new way", libc::SYS_openat2, |s| {
        args(&[n(AT_FDCWD), t(c"/etc/passwd"), s.room(), n(24)])
    }),
    attempt("make a file", libc::SYS_open, |_| args(&[t(c"probe-file"), n(O_CREAT | O_RDWR), n(0o600)])),
    attempt("make a file, the old way", libc::SYS_creat, |_| args(&[t(c"probe-file"), n(0o600)])),
    attempt("write its own memory through /proc", libc::SYS_open, |_| args(&[t(c"/proc/self/mem"), n(O_RDWR)])),
    attempt("write the memory of process 1", libc::SYS_open, |_| args(&[t(c"/proc/1/mem"), n(O_RDWR)])),
    attempt("change what runs at a crash", libc::SYS_open, |_| args(&[t(c"/proc/sys/kernel/core_pattern"), n(O_RDWR)])),
    attempt("leave its cgroup", libc::SYS_open, |_| args(&[t(c"/sys/fs/cgroup/cgroup.procs"), n(O_RDWR)])),
    attempt("open KVM itself", libc::SYS_open, |_| args(&[t(c"/dev/kvm"), n(O_RDWR)])),
    attempt("open a terminal", libc::SYS_open, |_| args(&[t(c"/dev/ptmx"), n(O_RDWR)])),
    attempt("open memory", libc::SYS_open, |_| args(&[t(c"/dev/mem"), n(O_RDWR)])),
    attempt("open the root directory", libc::SYS_open, |_| args(&[t(c"/")])),
    attempt("look at a file", libc::SYS_newfstatat, |s| args(&[n(AT_FDCWD), t(c"/etc/passwd"), s.room()])),
    attempt("look at a file, the old way", libc::SYS_stat, |s| args(&[t(c"/etc/passwd"), s.room()])),
    attempt("look at a file, the new way", libc::SYS_statx, |s| {
        args(&[n(AT_FDCWD), t(c"/etc/passwd"), n(0), n(0x7ff), s.room()])
    })
    .or(&[libc::ENOENT]),
    attempt("ask for rights to a file", libc::SYS_access, |_| args(&[t(c"/etc/passwd"), n(4)])),
    attempt("read a symbolic link", libc::SYS_readlink, |s| args(&[t(c"/proc/self/exe"), s.room(), n(64)]))
        .or(&[libc::ENOENT]),
    attempt("make a directory", libc::SYS_mkdir, |_| args(&[t(c"probe-directory"), n(0o700)])),
    attempt("remove a directory", libc::SYS_rmdir, |_| args(&[t(c"probe-directory")])),
    attempt("make a symbolic link", libc::SYS_symlink, |_| args(&[t(c"/"), t(c"probe-link")])),
    attempt("remove a file", libc::SYS_unlink, |_| args(&[t(c"probe-link")])),
    attempt("rename a file", libc::SYS_rename, |_| args(&[t(c"probe-none"), t(c"probe-other")])),
    attempt("change a file's rights", libc::SYS_chmod, |_| args(&[t(c"probe-none"), n(0o777)])),
    attempt("change a file's owner", libc::SYS_chown, |_| args(&[t(c"probe-none")])),
    attempt("make a device", libc::SYS_mknod, |_| args(&[t(c"probe-none/device"), n(0o020666), n(0x0103)])),
    attempt("cut a file", libc::SYS_truncate, |_| args(&[t(c"probe-none")])),
    attempt("ask about a file system", libc::SYS_statfs, |s| args(&[t(c"/"), s.room()])),
    attempt("go elsewhere", libc::SYS_chdir, |_| args(&[t(c"/")])),
    attempt("make another root", libc::SYS_chroot, |_| args(&[t(c"/")])),
    attempt("find a file by handle", libc::SYS_name_to_handle_at, |s| {
        args(&[n(AT_FDCWD), t(c"/"), s.room(), s.room()])
    }),
    attempt("watch files", libc::SYS_inotify_init1, |_| args(&[n(0)])),
    attempt("watch all files", libc::SYS_fanotify_init, |_| args(&[n(0)])),
    attempt("mount", libc::SYS_mount, |_| args(&[t(c"none"), t(c"probe-none"), t(c"tmpfs")])),
    attempt("unmount", libc::SYS_umount2, |_| args(&[t(c"probe-none")])),
    attempt("turn the root", libc::SYS_pivot_root, |_| args(&[t(c"."), t(c".")])),
    attempt("take a tree of mounts", libc::SYS_open_tree, |_| args(&[n(AT_FDCWD), t(c"/")])),
    attempt("make a file system", libc::SYS_fsopen, |_| args(&[t(c"tmpfs")])),
    attempt("make a user namespace", libc::SYS_unshare, |_| args(&[n(CLONE_NEWUSER)])),
    attempt("make a mount namespace", libc::SYS_unshare, |_| args(&[n(CLONE_NEWNS)])),
    attempt("make a network", libc::SYS_unshare, |_| args(&[n(CLONE_NEWNET)])),
    attempt("enter a namespace", libc::SYS_setns, |_| args(&[n(0)])),
];
