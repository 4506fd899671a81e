//! Commands with a deadline, and what came of them.

use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Long enough for a guest under emulation on a loaded machine; a test that hangs ends here.
const DEADLINE: Duration = Duration::from_secs(180);

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
    stdout: Option<JoinHandle<Vec<u8>>>,
    stderr: Option<JoinHandle<Vec<u8>>>,
    ended: bool,
}

fn collect(mut from: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        bytes
    })
}

impl Running {
    /// Starts it, with all of its output collected.
    pub(crate) fn start(command: &mut Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let stdout = child.stdout.take().map(collect);
        let stderr = child.stderr.take().map(collect);
        Self { child, stdout, stderr, ended: false }
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Writes to its standard input and leaves it open.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.child.stdin.as_mut().unwrap().write_all(bytes).unwrap();
    }

    /// Ends its standard input and waits for it.
    pub(crate) fn finish(mut self) -> Output {
        drop(self.child.stdin.take());
        let status = self.wait();
        let text = |thread: Option<JoinHandle<Vec<u8>>>| {
            String::from_utf8_lossy(&thread.unwrap().join().unwrap()).into_owned()
        };
        Output { code: code(status), stdout: text(self.stdout.take()), stderr: text(self.stderr.take()) }
    }

    fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                self.ended = true;
                return status;
            }
            assert!(Instant::now() < deadline, "process {} did not end in {DEADLINE:?}", self.child.id());
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

fn code(status: ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Runs a command with this standard input to its end.
pub(crate) fn output(command: &mut Command, input: &[u8]) -> Output {
    let mut running = Running::start(command);
    let mut stdin = running.child.stdin.take().unwrap();
    let input = input.to_vec();
    // A command that does not read its input ends all the same.
    let writer = std::thread::spawn(move || {
        let _ = stdin.write_all(&input);
    });
    let output = running.finish();
    let _ = writer.join();
    output
}

/// Waits until `condition` holds.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not within {DEADLINE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
