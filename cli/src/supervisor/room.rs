//! Room for a save of a machine that goes on: while its memory is being written, each page that the guest writes to is there twice.
//!
//! It is made before the machine is stopped, or the save is refused. A kernel that finds no memory all the same kills what writes,
//! and not the machine.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use jailer::cgroup::Raised;

use super::epochs::Epochs;
use super::jail::with_page_tables;
use crate::spec::Machine;
use crate::units::show_size;

/// What a save takes beside copies.
const REST: u64 = 16 << 20;
/// The kernel kills a process with this score before any other.
const KILLED_FIRST: &str = "1000";

impl Epochs {
    /// Sees to it that there is room for `image`, and memory for a copy of every page that the machine has. Until what comes back is
    /// dropped, its cgroup may hold them.
    pub(super) fn make_room(&self, machine: &Machine, image: &File) -> Result<Option<Raised<'_>>, String> {
        if !self.contained {
            return Err(
                "without a cgroup or namespaces, nothing would end the process that writes its memory, were its VMM \
                        killed; bulkhead snapshot create --stop needs none"
                    .to_owned(),
            );
        }
        let own = self.pages.own_memory().map_err(|error| format!("its VMM's memory: {error}"))?;
        let disk = rustix::fs::fstatvfs(image).map_err(|error| format!("the snapshot's file system: {error}"))?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if free < own {
            return Err(format!(
                "its memory may take {} on the disk of the state directory, which has {} left; remove a snapshot that is not \
                 needed (bulkhead snapshot list)",
                show_size(own),
                show_size(free)
            ));
        }
        let needed = with_page_tables(own).saturating_add(REST);
        let host = ("this host", available()?);
        let above = self.limit.as_ref().and_then(|limit| limit.room_above());
        let places = [Some(host), above.map(|room| ("the cgroup that its own is in", room))];
        for (place, room) in places.into_iter().flatten() {
            if room < needed {
                return Err(format!(
                    "to go on while its memory is written, it may need {} of memory more, and {place} has {}; bulkhead \
                     snapshot create --stop has it stand still instead",
                    show_size(needed),
                    show_size(room)
                ));
            }
        }
        let more = with_page_tables(machine.memory).saturating_add(REST);
        let raised = self.limit.as_ref().map(|limit| limit.raise(more)).transpose();
        raised.map_err(|error| error.to_string())
    }

    /// Has what the VMM becomes two of until what comes back is dropped be what the kernel kills first.
    pub(super) fn put_forward(&self) -> Result<impl Drop + use<>, String> {
        let put = || {
            let mut file = self.pages.oom_score()?;
            let mut before = String::new();
            file.read_to_string(&mut before)?;
            file.write_all_at(KILLED_FIRST.as_bytes(), 0)?;
            Ok(PutForward(file, before))
        };
        put().map_err(|error: io::Error| format!("its VMM's oom_score_adj: {error}"))
    }
}

struct PutForward(File, String);

impl Drop for PutForward {
    fn drop(&mut self) {
        // A VMM that is not there any more needs no score.
        let _ = self.0.write_all_at(self.1.as_bytes(), 0);
    }
}

/// Bytes that this host can give without swapping.
fn available() -> Result<u64, String> {
    let text = fs::read_to_string("/proc/meminfo").map_err(|error| format!("/proc/meminfo: {error}"))?;
    kibibytes(&text, "MemAvailable:").ok_or_else(|| "/proc/meminfo: it does not say what is available".to_owned())
}

fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_available_is_read() {
        let text = "MemTotal:       24684084 kB\nMemFree:          812 kB\nMemAvailable:   23068672 kB\n";
        assert_eq!(kibibytes(text, "MemAvailable:"), Some(22 << 30));
        assert_eq!(kibibytes("MemTotal: 1 kB\n", "MemAvailable:"), None);
        assert!(available().unwrap() > 0);
    }
}
