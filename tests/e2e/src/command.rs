//! Commands with a deadline, and what came of them.

use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::host;
use crate::processes::what_they_do;

/// Long enough for a guest under emulation on a loaded machine; a test that hangs ends here.
fn deadline() -> Duration {
    Duration::from_secs(if host::soak() { 3600 } else { 300 })
}

/// What a command printed, and how it ended.
#[derive(Debug)]
pub(crate) struct Output {
    /// Its status; a signal N is 128+N.
    pub(crate) code: i32,
    /// Standard output.
    pub(crate) stdout: String,
    /// Standard error.
    pub(crate) stderr: String,
}

impl Output {
    /// The output of a command that must have ended with `code` and said nothing on standard error.
    pub(crate) fn expect(self, code: i32) -> String {
        assert_eq!((self.code, self.stderr.as_str()), (code, ""), "standard output: {}", self.stdout);
        self.stdout
    }

    /// What a command said that must have ended well.
    pub(crate) fn done(self) -> Self {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    /// The standard error of a command that must have ended with `code`.
    pub(crate) fn refused(self, code: i32) -> String {
        assert_eq!(self.code, code, "{self:?}");
        self.stderr
    }
}

/// A command that runs beside the test. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    stdout: Collected,
    stderr: Collected,
    ended: bool,
}

/// What a stream has brought until now, and the thread that reads it.
#[derive(Debug)]
struct Collected {
    bytes: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
}

impl Collected {
    fn from(mut stream: impl Read + Send + 'static) -> Self {
        let bytes = Arc::<Mutex<Vec<u8>>>::default();
        let into = Arc::clone(&bytes);
        let reader = std::thread::spawn(move || {
            let mut buffer = vec![0; 64 << 10];
            while let Ok(n @ 1..) = stream.read(&mut buffer) {
                into.lock().unwrap().extend(&buffer[..n]);
            }
        });
        Self { bytes, reader: Some(reader) }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes.lock().unwrap()).into_owned()
    }

    fn whole(&mut self) -> String {
        self.reader.take().unwrap().join().unwrap();
        self.text()
    }
}

impl Running {
    /// Starts it, with all of its output collected.
    pub(crate) fn start(command: &mut Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let stdout = Collected::from(child.stdout.take().unwrap());
        let stderr = Collected::from(child.stderr.take().unwrap());
        Self { child, stdout, stderr, ended: false }
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits until it has printed this to standard output.
    pub(crate) fn until_printed(&mut self, text: &str) {
        until(&format!("{text:?} on standard output"), || {
            let ended = self.child.try_wait().unwrap();
            // Read after the end was seen: what came before it counts.
            let printed = self.stdout.text().contains(text);
            assert!(printed || ended.is_none(), "it ended ({ended:?}) without {text:?}: {}", self.stderr.text());
            printed
        });
    }

    /// What it has printed to standard output until now.
    pub(crate) fn printed(&self) -> String {
        self.stdout.text()
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Ends its standard input and waits for it.
    pub(crate) fn finish(mut self) -> Output {
        drop(self.child.stdin.take());
        let status = self.wait();
        Output { code: code(status), stdout: self.stdout.whole(), stderr: self.stderr.whole() }
    }

    fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + deadline();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                self.ended = true;
                return status;
            }
            let (id, limit) = (self.child.id(), self::deadline());
            assert!(Instant::now() < deadline, "process {id} did not end in {limit:?}: {}", what_they_do());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// A status as a shell has it: a signal N is 128+N.
pub(crate) fn code(status: ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Runs a command with this standard input to its end.
pub(crate) fn output(command: &mut Command, input: &[u8]) -> Output {
    let input = input.to_vec();
    output_written(command, move |stdin| stdin.write_all(&input))
}

/// Runs a command to its end, with what this writes as its standard input.
pub(crate) fn output_written(
    command: &mut Command,
    write: impl FnOnce(&mut dyn Write) -> std::io::Result<()> + Send + 'static,
) -> Output {
    let mut running = Running::start(command);
    let mut stdin = running.child.stdin.take().unwrap();
    // A command that does not read its input ends all the same.
    let writer = std::thread::spawn(move || {
        let _ = write(&mut stdin);
    });
    let output = running.finish();
    let _ = writer.join();
    output
}

/// Waits until `condition` holds.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + deadline();
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not within {:?}: {}", self::deadline(), what_they_do());
        std::thread::sleep(Duration::from_millis(20));
    }
}
