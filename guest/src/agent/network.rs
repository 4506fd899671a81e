//! The machine's network: one interface with fixed addresses. A machine that has none gets nothing.

use crate::{
    link::{ADDRESS, GATEWAY, NETMASK},
    sys,
};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::{fs, io, path::Path};

/// The kernel's name of the first Ethernet interface.
const INTERFACE: &str = "eth0";

/// Where programs read whom to ask for names.
const RESOLVERS: &str = "/etc/resolv.conf";

/// Sets the interface up, if there is one. What the kernel does with IPv6 by itself nobody would answer.
pub(super) fn bring_up() -> io::Result<()> {
    if !sys::interface_exists(INTERFACE)? {
        return Ok(());
    }
    if let Err(error) = without_ipv6() {
        // A kernel without IPv6 has nothing to switch off.
        if error.kind() != io::ErrorKind::NotFound {
            return Err(error);
        }
    }
    sys::interface_up(INTERFACE, ADDRESS, NETMASK, GATEWAY)
}

/// The agent's own root has no `/proc` but now.
fn without_ipv6() -> io::Result<()> {
    const AT: &str = "/proc";
    let _ = fs::create_dir(AT);
    mount("proc", AT, "proc", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, None::<&std::ffi::CStr>)?;
    let written = fs::write(format!("{AT}/sys/net/ipv6/conf/{INTERFACE}/disable_ipv6"), "1");
    unmount(AT, UnmountFlags::DETACH)?;
    written
}

/// Names the gateway as name server in an image that names none. The link may lead nowhere: most images have one to a file
/// that a program makes which does not run here.
pub(super) fn name_server() -> io::Result<()> {
    let path = Path::new(RESOLVERS);
    match fs::metadata(path) {
        Ok(metadata) if metadata.len() > 0 => return Ok(()),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // Present all the same if it is such a link.
            let _ = fs::remove_file(path);
            match fs::create_dir("/etc") {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        Err(error) => return Err(error),
    }
    fs::write(path, format!("nameserver {GATEWAY}\n"))
}
