//! A terminal and a command on it, as a person has them.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};

use rustix::fs::{Mode, OFlags};
use rustix::pty::OpenptFlags;
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::command::{code, until};

/// A command whose controlling terminal is ours.
#[derive(Debug)]
pub(crate) struct Session {
    child: Child,
    ours: File,
    /// Held so that the terminal keeps its settings when the command has gone.
    theirs: OwnedFd,
    shown: Arc<Mutex<Vec<u8>>>,
}

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

impl Session {
    /// Starts it on a terminal of 40 rows and 100 columns.
    pub(crate) fn start(command: &mut Command) -> Self {
        let ours = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        rustix::pty::grantpt(&ours).unwrap();
        rustix::pty::unlockpt(&ours).unwrap();
        let path = rustix::pty::ptsname(&ours, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let theirs = rustix::fs::open(path, flags, Mode::empty()).unwrap();
        tcsetwinsize(&ours, size(40, 100)).unwrap();
        let copy = || theirs.try_clone().unwrap();
        command.stdin(copy()).stdout(copy()).stderr(copy());
        // SAFETY: between fork and exec only two system calls on descriptor 0.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                Ok(rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?)
            });
        }
        let child = command.spawn().unwrap();
        let shown = Arc::<Mutex<Vec<u8>>>::default();
        let ours = File::from(ours);
        let (mut from, into) = (ours.try_clone().unwrap(), Arc::clone(&shown));
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = from.read(&mut buffer) {
                into.lock().unwrap().extend(&buffer[..n]);
            }
        });
        Self { child, ours, theirs, shown }
    }

    /// Everything that was shown until now.
    pub(crate) fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).into_owned()
    }

    /// Waits until this text was shown.
    pub(crate) fn until(&self, text: &str) {
        until(&format!("{text:?} on the terminal"), || {
            let shown = self.shown();
            assert!(!shown.contains("bulkhead: ") || text.contains("bulkhead: "), "{shown}");
            shown.contains(text)
        });
    }

    /// Presses keys.
    pub(crate) fn press(&mut self, keys: &str) {
        self.ours.write_all(keys.as_bytes()).unwrap();
    }

    /// Gives the terminal another size, of which the kernel tells the command.
    pub(crate) fn resize(&self, rows: u16, columns: u16) {
        tcsetwinsize(&self.ours, size(rows, columns)).unwrap();
    }

    /// Whether the terminal passes keys on as they are.
    pub(crate) fn is_raw(&self) -> bool {
        !tcgetattr(&self.theirs).unwrap().local_modes.intersects(LocalModes::ICANON | LocalModes::ECHO)
    }

    /// Waits for the command's end: its status.
    pub(crate) fn finish(&mut self) -> i32 {
        let mut status = None;
        until("the end of the command on the terminal", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        code(status.unwrap())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
