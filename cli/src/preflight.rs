//! What must hold before a run starts, each checked once, with one clear error.
//!
//! The decisions are pure, on facts that are gathered first, so that each of them is tested without a
//! host that has the fault.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::kernel::Kernel;
use crate::units::show_size;

/// Why a run cannot start on this host.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PreflightError {
    /// No KVM.
    #[error(
        "/dev/kvm: not there; load the module (modprobe kvm_intel or kvm_amd), switch virtualisation on in the \
         firmware, or, in a container or VM, have the host pass it on"
    )]
    NoKvm,
    /// KVM, but not for us.
    #[error("/dev/kvm: permission denied; {0}")]
    NoRights(String),
    /// KVM could not be opened for another reason.
    #[error("/dev/kvm: {0}")]
    BadKvm(io::Error),
    /// Something that answers as KVM but emulates.
    #[error(
        "/dev/kvm: this host's KVM only emulates: its CPU shows neither vmx nor svm, and a stock kernel does not run \
         on such a KVM; use a host with hardware virtualisation (or nested virtualisation switched on)"
    )]
    EmulatingKvm,
    /// Less than a guest starts with.
    #[error("memory: asked {asked}, a guest needs at least {least}; {}", larger(*asked), asked = show_size(*asked),
            least = show_size(vmm_control::MIN_MEMORY))]
    TooLittleMemory {
        /// In bytes.
        asked: u64,
    },
    /// More than the host has.
    #[error("memory: asked {asked}, host has {free} free; use a smaller -m or stop a run (bulkhead list)",
            asked = show_size(*asked), free = show_size(*free))]
    HostMemory {
        /// In bytes.
        asked: u64,
        /// In bytes.
        free: u64,
    },
    /// A disk on which the image does not fit.
    #[error("disk: asked {asked}, image {image:?} has {size}; use a larger --disk, or none for the image's own size",
            asked = show_size(*asked), size = show_size(*size))]
    SmallDisk {
        /// In bytes.
        asked: u64,
        /// The image's name.
        image: String,
        /// The image's size in bytes.
        size: u64,
    },
    /// A limit on files that the disk could run into.
    #[error("{what}: {size} could grow over the largest file that this process may write, {limit} (ulimit -f); raise it, or \
             use a smaller --{what}", size = show_size(*size), limit = show_size(*limit))]
    FileLimit {
        /// The disk, or the memory, of which a snapshot has an image.
        what: &'static str,
        /// In bytes.
        size: u64,
        /// In bytes.
        limit: u64,
    },
    /// A limit on descriptors that a busy guest would run into.
    #[error(
        "descriptors: this process may have {limit} at most (ulimit -Hn), and a run needs up to {}; raise the limit",
        DESCRIPTORS
    )]
    DescriptorLimit {
        /// The hard limit.
        limit: u64,
    },
    /// A disk that no layer can hold.
    #[error("disk: asked {asked}, the largest is {most}", asked = show_size(*asked), most = show_size(MAX_DISK))]
    LargeDisk {
        /// In bytes.
        asked: u64,
    },
    /// A file of the kernel that cannot be read.
    #[error("kernel {name:?}: {path}: {error}", path = path.display())]
    KernelFile {
        /// The kernel's name.
        name: String,
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A kernel that is none.
    #[error(
        "kernel {name:?}: {path} is no 64-bit x86 ELF kernel ({why}); bulkhead kernel import makes one of a vmlinuz",
        path = path.display()
    )]
    NotAKernel {
        /// The kernel's name.
        name: String,
        /// The file.
        path: PathBuf,
        /// What it is instead.
        why: &'static str,
    },
}

/// What to do about too little memory. Who writes a small number alone means another unit, as docker would not either.
fn larger(asked: u64) -> String {
    if asked < 1 << 20 {
        format!("a number alone is bytes: did you mean -m {asked}M?")
    } else {
        "use a larger -m".to_owned()
    }
}

/// Largest disk.
const MAX_DISK: u64 = 16 << 40;

/// Descriptors of a busy run: 1,024 connections to the guest, and what it has besides.
const DESCRIPTORS: u64 = 1_280;

/// A disk's granularity: sizes are rounded up to it.
const BLOCK: u64 = 4096;

/// Opens `/dev/kvm`, or says why not.
pub(crate) fn open_kvm() -> Result<File, PreflightError> {
    let path = Path::new("/dev/kvm");
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(file) => {
            let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
            if emulates(&cpus) { Err(PreflightError::EmulatingKvm) } else { Ok(file) }
        }
        Err(error) => Err(match error.kind() {
            io::ErrorKind::NotFound => PreflightError::NoKvm,
            io::ErrorKind::PermissionDenied => PreflightError::NoRights(rights(&Rights::gather(path))),
            _ => match error.raw_os_error() {
                // The node is there, but no driver is behind it.
                Some(libc::ENXIO | libc::ENODEV) => PreflightError::NoKvm,
                _ => PreflightError::BadKvm(error),
            },
        }),
    }
}

/// Whether a KVM on CPUs with these flags has no hardware to use. No flags at all says nothing.
fn emulates(cpuinfo: &str) -> bool {
    let mut flags = cpuinfo.lines().filter(|line| line.starts_with("flags")).peekable();
    flags.peek().is_some()
        && !flags.any(|line| line.split_ascii_whitespace().any(|flag| flag == "vmx" || flag == "svm"))
}

/// What decides who may open a device.
#[derive(Debug, Default)]
struct Rights {
    /// The device's group, by name, and its number.
    group: Option<(String, u32)>,
    /// Whether the group may read and write.
    group_may: bool,
    /// Our user's name.
    user: String,
    /// Whether the group's entry lists our user, or it is our user's own group.
    user_in_group: bool,
    /// Whether this process has the group.
    process_in_group: bool,
}

impl Rights {
    /// Reads the files that say.
    fn gather(device: &Path) -> Self {
        let Ok(metadata) = device.metadata() else { return Self::default() };
        let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
        let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        let own_gid = rustix::process::getegid().as_raw();
        let own = rustix::process::getgroups().unwrap_or_default();
        let process_in_group = own_gid == metadata.gid() || own.iter().any(|gid| gid.as_raw() == metadata.gid());
        let group_may = metadata.mode() & 0o060 == 0o060;
        let uid = rustix::process::geteuid().as_raw();
        Self { process_in_group, group_may, ..Self::from_files(&groups, &users, metadata.gid(), uid) }
    }

    /// The part that the user database says.
    fn from_files(groups: &str, users: &str, device_gid: u32, uid: u32) -> Self {
        let field = |line: &str, at: usize| line.split(':').nth(at).unwrap_or("").to_owned();
        let user = users.lines().find(|line| field(line, 2) == uid.to_string());
        let own_gid = user.map(|line| field(line, 3));
        let user = user.map_or_else(|| uid.to_string(), |line| field(line, 0));
        let group = groups.lines().find(|line| field(line, 2) == device_gid.to_string());
        let listed = group.is_some_and(|line| field(line, 3).split(',').any(|member| member == user));
        Self {
            user_in_group: listed || own_gid == Some(device_gid.to_string()),
            group: group.map(|line| (field(line, 0), device_gid)),
            user,
            ..Self::default()
        }
    }
}

/// The reason and the next step.
fn rights(of: &Rights) -> String {
    let Some((name, number)) = of.group.as_ref().filter(|(_, gid)| of.group_may && *gid != 0) else {
        return "no group has the right to it; give one (chgrp kvm /dev/kvm; chmod 660 /dev/kvm) and join it"
            .to_owned();
    };
    let user = &of.user;
    if of.process_in_group {
        format!("this process has its group {name} ({number}), so something else forbids it: a container or a policy")
    } else if of.user_in_group {
        format!(
            "user {user} is in its group {name}, but this process does not have the group: log in anew, or run \
             newgrp {name}"
        )
    } else {
        format!("it belongs to group {name}: sudo usermod -aG {name} {user}, then log in anew")
    }
}

/// Checks the memory that was asked for against the least.
pub(crate) fn check_least_memory(asked: u64) -> Result<(), PreflightError> {
    if asked < vmm_control::MIN_MEMORY { Err(PreflightError::TooLittleMemory { asked }) } else { Ok(()) }
}

/// Checks the memory that was asked for against the least, and against what the host has.
pub(crate) fn check_memory(asked: u64, meminfo: &str) -> Result<(), PreflightError> {
    check_least_memory(asked)?;
    let free = meminfo.lines().find_map(|line| {
        let kib = line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim();
        kib.parse::<u64>().ok()?.checked_mul(1024)
    });
    match free {
        Some(free) if asked > free => Err(PreflightError::HostMemory { asked, free }),
        _ => Ok(()),
    }
}

/// The size of a run's disk: what was asked for, or the image's, in whole blocks.
pub(crate) fn disk_size(asked: Option<u64>, image: &str, size: u64) -> Result<u64, PreflightError> {
    let chosen = asked.unwrap_or(size);
    if chosen < size {
        return Err(PreflightError::SmallDisk { asked: chosen, image: image.to_owned(), size });
    }
    if chosen > MAX_DISK {
        return Err(PreflightError::LargeDisk { asked: chosen });
    }
    Ok(chosen.div_ceil(BLOCK).saturating_mul(BLOCK))
}

/// Checks the limits that were inherited: what does not fit is refused, and not found out when it is too late.
pub(crate) fn check_limits(
    disk: u64,
    memory: u64,
    largest_file: Option<u64>,
    descriptors: Option<u64>,
) -> Result<(), PreflightError> {
    match (largest_file, descriptors) {
        (Some(limit), _) if limit < disk => Err(PreflightError::FileLimit { what: "disk", size: disk, limit }),
        (Some(limit), _) if limit < memory => Err(PreflightError::FileLimit { what: "memory", size: memory, limit }),
        (_, Some(limit)) if limit < DESCRIPTORS => Err(PreflightError::DescriptorLimit { limit }),
        _ => Ok(()),
    }
}

/// Checks that the kernel's files are there and that it is one.
pub(crate) fn check_kernel(kernel: &Kernel) -> Result<(), PreflightError> {
    let open = |path: &Path| {
        File::open(path).map_err(|error| PreflightError::KernelFile {
            name: kernel.name.clone(),
            path: path.to_owned(),
            error,
        })
    };
    open(&kernel.modules)?;
    let mut head = Vec::new();
    open(&kernel.vmlinux)?.take(64).read_to_end(&mut head).map_err(|error| PreflightError::KernelFile {
        name: kernel.name.clone(),
        path: kernel.vmlinux.clone(),
        error,
    })?;
    match not_a_kernel(&head) {
        Some(why) => Err(PreflightError::NotAKernel { name: kernel.name.clone(), path: kernel.vmlinux.clone(), why }),
        None => Ok(()),
    }
}

/// Why the first bytes are not those of a kernel; nothing if they are. The VMM reads the rest.
fn not_a_kernel(head: &[u8]) -> Option<&'static str> {
    const EM_X86_64: [u8; 2] = 62_u16.to_le_bytes();
    match head {
        [] => Some("it is empty"),
        [0x1f, 0x8b, ..] => Some("it is compressed with gzip"),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some("it is compressed with zstd"),
        [b'M', b'Z', ..] => Some("it is a bzImage"),
        [0x7f, b'E', b'L', b'F', class, order, ..] if head.len() >= 64 => match (class, order, head.get(18..20)) {
            (2, 1, Some(machine)) if machine == EM_X86_64 => None,
            _ => Some("it is an ELF file for another machine"),
        },
        _ => Some("it has no ELF header"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kvm_without_hardware_flags_emulates() {
        assert!(emulates("processor : 0\nflags\t\t: fpu sse2\n"));
        assert!(!emulates("processor : 0\nflags\t\t: fpu vmx sse2\n"));
        assert!(!emulates("flags : fpu\n\nflags : svm\n"));
        assert!(!emulates(""));
    }

    const GROUPS: &str = "root:x:0:\nkvm:x:104:eve,adam\nusers:x:100:\n";
    const USERS: &str = "root:x:0:0::/root:/bin/sh\nadam:x:1000:100::/:/bin/sh\nabel:x:1001:100::/:/bin/sh\n";

    fn for_user(uid: u32, gid: u32) -> Rights {
        Rights { group_may: true, ..Rights::from_files(GROUPS, USERS, gid, uid) }
    }

    #[test]
    fn a_user_outside_the_group_is_told_how_to_join() {
        assert!(rights(&for_user(1001, 104)).contains("sudo usermod -aG kvm abel"));
    }

    #[test]
    fn a_group_that_came_after_the_login_is_told_apart() {
        let message = rights(&for_user(1000, 104));
        assert!(
            message.contains("user adam is in its group kvm, but this process does not have the group"),
            "{message}"
        );
        let message = rights(&Rights { process_in_group: true, ..for_user(1000, 104) });
        assert!(message.contains("something else"), "{message}");
    }

    #[test]
    fn a_device_for_root_alone_needs_a_group_first() {
        assert!(rights(&for_user(1000, 0)).starts_with("no group"));
        assert!(rights(&Rights { group_may: false, ..for_user(1000, 104) }).starts_with("no group"));
        assert!(rights(&Rights::default()).starts_with("no group"));
    }

    #[test]
    fn memory_is_held_against_the_least_and_the_host() {
        let host = "MemTotal: 2000000 kB\nMemAvailable:    1258291 kB\n";
        assert!(check_memory(1 << 30, host).is_ok());
        assert!(check_memory(1 << 40, "").is_ok());
        let error = check_memory(4 << 30, host).unwrap_err().to_string();
        assert!(error.starts_with("memory: asked 4.0 GiB, host has 1.1 GiB free; use a smaller -m"), "{error}");
        let error = check_memory(32 << 20, host).unwrap_err().to_string();
        assert!(error.contains("asked 32.0 MiB, a guest needs at least 64.0 MiB"), "{error}");
    }

    #[test]
    fn a_disk_holds_its_image() {
        assert_eq!(disk_size(None, "x", 10_000).unwrap(), 12_288);
        assert_eq!(disk_size(Some(1 << 30), "x", 10_000).unwrap(), 1 << 30);
        assert!(matches!(disk_size(Some(4096), "x", 10_000), Err(PreflightError::SmallDisk { .. })));
        assert!(matches!(disk_size(Some(1 << 50), "x", 0), Err(PreflightError::LargeDisk { .. })));
    }

    #[test]
    fn limits_that_are_too_low_are_refused() {
        assert!(check_limits(1 << 30, 1, None, None).is_ok());
        assert!(check_limits(1 << 30, 1 << 30, Some(1 << 30), Some(4096)).is_ok());
        let error = check_limits(1 << 30, 1, Some(1 << 20), None).unwrap_err().to_string();
        assert!(error.contains("1.0 GiB") && error.contains("1.0 MiB (ulimit -f)"), "{error}");
        let error = check_limits(1, 1 << 30, Some(1 << 20), None).unwrap_err().to_string();
        assert!(error.starts_with("memory: 1.0 GiB") && error.ends_with("--memory"), "{error}");
        let error = check_limits(1, 1, None, Some(1024)).unwrap_err().to_string();
        assert!(error.contains("1024 at most (ulimit -Hn)") && error.contains("1280"), "{error}");
    }

    #[test]
    fn a_kernel_is_known_by_its_first_bytes() {
        let mut head = [0_u8; 64];
        head[..6].copy_from_slice(b"\x7fELF\x02\x01");
        head[18] = 62;
        assert_eq!(not_a_kernel(&head), None);
        head[18] = 183;
        assert_eq!(not_a_kernel(&head), Some("it is an ELF file for another machine"));
        assert_eq!(not_a_kernel(&head[..40]), Some("it has no ELF header"));
        assert_eq!(not_a_kernel(b"MZ\0\0"), Some("it is a bzImage"));
        assert_eq!(not_a_kernel(b"\x28\xb5\x2f\xfd"), Some("it is compressed with zstd"));
        assert_eq!(not_a_kernel(b"#!/bin/sh"), Some("it has no ELF header"));
        assert_eq!(not_a_kernel(b""), Some("it is empty"));
    }
}
