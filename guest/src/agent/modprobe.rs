//! Modules that the kernel asks for by itself: a file system that is mounted, a kind of network device, a rule of a packet
//! filter. It starts `/sbin/modprobe` for that, in the agent's root, where there is none and where no modules are. So that
//! name is the agent's program there, which goes on as the image's own `modprobe` in the workload's files.

use crate::sys;
use rustix::{
    process::{Pid, PidfdFlags, pidfd_open},
    thread::{ThreadNameSpaceType, move_into_thread_name_spaces},
};
use std::{
    ffi::{CString, OsString},
    fs,
    os::{fd::AsFd, unix::ffi::OsStringExt},
};

/// What the kernel starts (`CONFIG_MODPROBE_PATH` of every distribution, and the default).
pub const MODPROBE: &str = "/sbin/modprobe";

/// Where the number of the workload's first process stands.
const WORKLOAD: &str = "/workload";

/// Where images have it.
const PLACES: [&str; 4] = [MODPROBE, "/usr/sbin/modprobe", "/bin/modprobe", "/usr/bin/modprobe"];

/// Makes the kernel's requests come here, for a workload whose first process has this number.
pub(super) fn answer(workload: u32) -> std::io::Result<()> {
    fs::write(WORKLOAD, workload.to_string())?;
    let _ = fs::create_dir("/sbin");
    std::os::unix::fs::symlink("/init", MODPROBE)
}

/// Becomes the image's `modprobe`, with what the kernel gave. Returns if there is none: the kernel then does without.
pub fn modprobe(args: Vec<OsString>) -> i32 {
    let number = fs::read_to_string(WORKLOAD).ok().and_then(|text| text.parse().ok()).and_then(Pid::from_raw);
    let Some(workload) = number.and_then(|number| pidfd_open(number, PidfdFlags::empty()).ok()) else { return 1 };
    if move_into_thread_name_spaces(workload.as_fd(), ThreadNameSpaceType::MOUNT).is_err() {
        return 1;
    }
    let args: Vec<CString> = args.into_iter().filter_map(|arg| CString::new(arg.into_vec()).ok()).collect();
    let env = [c"HOME=/".to_owned(), c"PATH=/sbin:/usr/sbin:/bin:/usr/bin".to_owned()];
    for place in PLACES {
        if let Ok(place) = CString::new(place) {
            // Returns only if it is not there.
            let _ = sys::execute(&place, &args, &env);
        }
    }
    1
}
