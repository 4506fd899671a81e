//! A `bulkhead-vmm` of a test's own, without supervisor: for what is measured at the control socket.

use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::Pid;
use vmm_control::{Config, ControlSocket, Event, Request, Restore, Saved, Standstill, Stats, StopReason};

/// A running VMM. Dropping it ends the process.
#[derive(Debug)]
pub(crate) struct Vmm {
    control: ControlSocket,
    process: std::sync::Mutex<Child>,
}

impl Vmm {
    /// Starts a VMM and sends it the start request. `files` are in the order of [`Request::Start`], without KVM.
    pub(crate) fn start(config: Config, files: &[&File]) -> Result<Self, String> {
        Self::with(&Request::Start(config), files, None)
    }

    /// Starts a VMM and has it go on with what was saved. `files` are in the order of [`Request::Restore`], without KVM.
    pub(crate) fn restore(config: Config, files: &[&File]) -> Result<Self, String> {
        Self::with(&Request::Restore(Restore { config, memory_files: 1 }), files, None)
    }

    /// As [`Self::restore`], with every system call noted in `log` by strace.
    pub(crate) fn restore_traced(config: Config, files: &[&File], log: &Path) -> Result<Self, String> {
        Self::with(&Request::Restore(Restore { config, memory_files: 1 }), files, Some(log))
    }

    fn with(request: &Request, files: &[&File], log: Option<&Path>) -> Result<Self, String> {
        let binary = crate::host::program("lib/bulkhead/bulkhead-vmm");
        let (ours, theirs) = ControlSocket::pair().map_err(|error| error.to_string())?;
        let theirs: OwnedFd = theirs.as_fd().try_clone_to_owned().map_err(|error| error.to_string())?;
        let mut command = match log {
            None => Command::new(&binary),
            Some(log) => {
                let mut command = Command::new("/usr/bin/strace");
                command.args(["-f", "-qq", "-e", "signal=none", "-s", "64", "-o"]).arg(log).arg(&binary);
                command
            }
        };
        command.env_clear().stdin(Stdio::null());
        let place = move || {
            // SAFETY: whatever descriptor 3 is in the child is replaced, and is nobody's to close.
            let mut third = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(3) });
            Ok(rustix::io::dup2(&theirs, &mut third)?)
        };
        // SAFETY: between fork and exec there is only dup2, which is async-signal-safe.
        unsafe { command.pre_exec(place) };
        let process = command.spawn().map_err(|error| format!("{}: {error}", binary.display()))?;
        let vmm = Self { control: ours, process: std::sync::Mutex::new(process) };
        let kvm =
            File::options().read(true).write(true).open("/dev/kvm").map_err(|error| format!("/dev/kvm: {error}"))?;
        let descriptors: Vec<BorrowedFd<'_>> =
            std::iter::once(kvm.as_fd()).chain(files.iter().map(|file| file.as_fd())).collect();
        vmm.control.send(request, &descriptors).map_err(|error| error.to_string())?;
        Ok(vmm)
    }

    /// The next event.
    pub(crate) fn event(&self) -> Result<Event, String> {
        self.control.receive().map(|(event, _)| event).map_err(|error| error.to_string())
    }

    /// Waits for the end.
    pub(crate) fn stopped(&self) -> Result<(StopReason, Stats), String> {
        loop {
            match self.event()? {
                Event::Stopped { reason, stats } => return Ok((reason, stats)),
                Event::Refused { error } => return Err(error),
                _ => {}
            }
        }
    }

    /// Sends a request without descriptors.
    pub(crate) fn send(&self, request: &Request) -> Result<(), String> {
        self.control.send(request, &[]).map_err(|error| error.to_string())
    }

    /// The counters now.
    pub(crate) fn stats(&self) -> Result<Stats, String> {
        self.send(&Request::Stats)?;
        loop {
            if let Event::Stats(stats) = self.event()? {
                return Ok(stats);
            }
        }
    }

    /// A connection to a port of the guest.
    pub(crate) fn connect(&self, port: u32) -> Result<UnixStream, String> {
        let (ours, theirs) = UnixStream::pair().map_err(|error| error.to_string())?;
        self.control.send(&Request::Connect { port }, &[theirs.as_fd()]).map_err(|error| error.to_string())?;
        Ok(ours)
    }

    /// Waits for an event; an error is what the VMM says in its place.
    fn wait_for<T>(&self, mut wanted: impl FnMut(&Event) -> Option<T>) -> Result<T, String> {
        loop {
            let event = self.event()?;
            if let Some(found) = wanted(&event) {
                return Ok(found);
            }
            if let Event::Stopped { .. } | Event::Refused { .. } | Event::SaveFailed { .. } = event {
                return Err(format!("{event:?}"));
            }
        }
    }

    /// Has the machine stand still.
    pub(crate) fn pause(&self) -> Result<(), String> {
        self.send(&Request::Pause)?;
        self.wait_for(|event| (*event == Event::Paused).then_some(()))
    }

    /// Has it go on.
    pub(crate) fn resume(&self) -> Result<(), String> {
        self.send(&Request::Resume)?;
        self.wait_for(|event| (*event == Event::Resumed).then_some(()))
    }

    /// Writes the machine out, which stands still. `files` are in the order of [`Request::Save`], without the pagemap.
    pub(crate) fn save(&self, files: &[&File]) -> Result<Saved, String> {
        self.send_save(&Request::Save, files)?;
        self.saved()
    }

    /// Asks for a save, and does not wait.
    pub(crate) fn send_save(&self, request: &Request, files: &[&File]) -> Result<(), String> {
        let pid = self.process.lock().unwrap().id();
        let pagemap = File::open(format!("/proc/{pid}/pagemap")).map_err(|error| format!("pagemap: {error}"))?;
        let mut descriptors: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
        descriptors.insert(2.min(files.len()), pagemap.as_fd());
        self.control.send(request, &descriptors).map_err(|error| error.to_string())
    }

    /// Has the machine, which stands still, go on while a copy of the VMM writes it out; `files` as for [`Self::save`]. What became
    /// of it, [`Self::saved`] says.
    pub(crate) fn save_live(&self, files: &[&File]) -> Result<Standstill, String> {
        self.send_save(&Request::SaveLive, files)?;
        self.wait_for(|event| match event {
            Event::Taken(parts) => Some(*parts),
            _ => None,
        })
    }

    /// Waits until the machine is written out.
    pub(crate) fn saved(&self) -> Result<Saved, String> {
        self.wait_for(|event| match event {
            Event::Saved(saved) => Some(*saved),
            _ => None,
        })
    }

    /// The copy of it that writes the machine out, if there is one now.
    pub(crate) fn writer(&self) -> Option<Pid> {
        let id = self.process.lock().unwrap().id();
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).ok()?;
        Pid::from_raw(children.split_whitespace().next()?.parse().ok()?)
    }

    /// Sets the length that files which it writes may have.
    pub(crate) fn limit_files(&self, limit: &str) {
        let pid = self.process.lock().unwrap().id().to_string();
        let status = Command::new("prlimit").args(["--pid", &pid, &format!("--fsize={limit}")]).status().unwrap();
        assert!(status.success());
    }

    /// Whether the process ended by itself, and as it should.
    pub(crate) fn ended_well(&self) -> bool {
        self.process.lock().unwrap().wait().is_ok_and(|status| status.code() == Some(0))
    }

    /// Ends the process as nobody should.
    pub(crate) fn kill(&self) {
        let mut process = self.process.lock().unwrap();
        let _ = process.kill();
        let _ = process.wait();
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        self.kill();
    }
}
