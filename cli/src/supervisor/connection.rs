//! One client's connection, and the relay between it and a command.
//!
//! Two threads belong to each connection. The reader takes frames and never waits for anything but the
//! socket: a client's death is noticed however long the guest is silent. The writer takes frames from a
//! short queue: when the client is slow, the queue is full, the pumps wait, the agent is not read, and in
//! the end the command waits. Nothing is stored without bound anywhere.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

use guest::host::{AgentError, Exec};
use guest::message::ExitRecord;

use crate::frame::{Exit, Frame, MAX_PAYLOAD, STDIN_WINDOW, Size, Stage};

/// Frames that wait for the client. Two pumps share it.
const OUTPUT_QUEUE: usize = 4;
/// Signals and sizes that wait for the agent. More are dropped: nobody sends so many in earnest.
const ORDER_QUEUE: usize = 64;
/// SIGKILL.
const KILL: i32 = 9;

/// What a client sends for a command, besides its input.
#[derive(Debug)]
enum Order {
    Signal(u8),
    Resize(Size),
}

/// A client's connection after its request.
#[derive(Debug)]
pub(super) struct Connection {
    output: SyncSender<Frame>,
    writer: JoinHandle<()>,
    /// Ends the command's input when nothing follows it.
    end_of_input: Sender<Option<Vec<u8>>>,
    /// What the pumps take: once.
    input: Mutex<Option<Input>>,
    orders: Mutex<Option<Receiver<Order>>>,
    go: Mutex<Option<Receiver<()>>>,
}

impl Connection {
    /// Takes a connection whose request was read. `gone` is called once, when the client has closed its
    /// end or has broken the protocol.
    pub(super) fn start(stream: UnixStream, gone: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let (output, queue) = sync_channel(OUTPUT_QUEUE);
        let (input_sender, input_queue) = channel();
        let (order_sender, orders) = sync_channel(ORDER_QUEUE);
        let (go_sender, go) = sync_channel(1);
        let outstanding = Arc::new(AtomicUsize::new(0));
        let input = Input {
            queue: input_queue,
            pending: VecDeque::new(),
            outstanding: Arc::clone(&outstanding),
            credit: output.clone(),
        };
        let end_of_input = input_sender.clone();

        let mut to = stream.try_clone()?;
        let writer = Builder::new().name("to-client".into()).spawn(move || write_frames(&queue, &mut to))?;
        let mut from = stream;
        Builder::new().name("from-client".into()).spawn(move || {
            let to = Inbound { input: &input_sender, orders: &order_sender, go: &go_sender, outstanding: &outstanding };
            read_frames(&mut from, &to);
            drop((order_sender, go_sender));
            // Output has nowhere to go: let the writer find out.
            let _ = from.shutdown(std::net::Shutdown::Both);
            gone();
        })?;
        let (input, orders, go) = (Mutex::new(Some(input)), Mutex::new(Some(orders)), Mutex::new(Some(go)));
        Ok(Self { output, writer, end_of_input, input, orders, go })
    }

    /// Tells the client that the guest is ready, and waits for its word. False if it went away instead.
    pub(super) fn hold(&self) -> bool {
        self.output.send(Frame::Ready).is_ok() && take(&self.go).is_some_and(|go| go.recv().is_ok())
    }

    /// Relays between the client and a command until the command has ended and its output was passed on
    /// to the writer. When the client goes away first, the command is killed, with all that it started.
    /// `from`: how much of its output another client has had.
    pub(super) fn relay(&self, exec: &Arc<Exec>, from: (u64, u64)) -> Result<ExitRecord, AgentError> {
        let ended = Arc::new(AtomicBool::new(false));
        // A client that is gone has no writer: the pumps will find out, and the orders end.
        let _ = self.output.send(Frame::Started);
        if let Some(orders) = take(&self.orders) {
            let (exec, ended) = (Arc::clone(exec), Arc::clone(&ended));
            spawn("orders", move || follow(&orders, &exec, &ended))?;
        }
        if let Some(mut input) = take(&self.input) {
            let exec = Arc::clone(exec);
            // An input that fails is one that the command has closed, or whose machine is gone.
            spawn("stdin", move || drop(exec.copy_stdin(&mut input)))?;
        }
        type Pump = fn(&Exec, u64, &mut dyn Write) -> Result<u64, AgentError>;
        let pump = |name, make: fn(Vec<u8>) -> Frame, have, copy: Pump| {
            let exec = Arc::clone(exec);
            let mut to = Output { queue: self.output.clone(), make };
            spawn(name, move || copy(&exec, have, &mut to))
        };
        let stdout = pump("stdout", Frame::Stdout, from.0, |exec, have, to| exec.copy_stdout_from(have, to))?;
        let stderr = pump("stderr", Frame::Stderr, from.1, |exec, have, to| exec.copy_stderr_from(have, to))?;

        let record = exec.wait();
        ended.store(true, Ordering::Release);
        // The reader may be gone, and the pump with it.
        let _ = self.end_of_input.send(None);
        for pump in [stdout, stderr] {
            match pump.join() {
                // The client is gone: what it missed, it did not want.
                Ok(Err(AgentError::Sink(_)) | Ok(_)) => {}
                Ok(Err(error)) => return record.and(Err(error)),
                Err(_) => return record.and(Err(AgentError::Gone)),
            }
        }
        record
    }

    /// Tells the client how far something is. One that does not read is told less.
    pub(super) fn tell(&self, stage: Stage) {
        let _ = self.output.try_send(Frame::Progress(stage));
    }

    /// Sends the last frame, waits until the client has it or is gone, and ends the connection.
    pub(super) fn finish(self, last: Frame) {
        let _ = self.output.send(last);
        let _ = self.writer.join();
    }

    /// Ends with a result: what the client prints.
    pub(super) fn result(self, output: Vec<u8>) {
        let _ = self.output.send(Frame::Stdout(output));
        self.finish(Frame::Exit(Exit::default()));
    }

    /// Ends with an error of ours.
    pub(super) fn refuse(self, error: String) {
        self.finish(Frame::Exit(Exit { code: 125, error: Some(error), ..Exit::default() }));
    }
}

fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>, AgentError> {
    Builder::new().name(name.into()).spawn(body).map_err(AgentError::Thread)
}

fn take<T>(from: &Mutex<Option<T>>) -> Option<T> {
    from.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// The writer: until a last frame, or until the client is gone.
fn write_frames(queue: &Receiver<Frame>, to: &mut UnixStream) {
    while let Ok(frame) = queue.recv() {
        let last = matches!(frame, Frame::Exit(_) | Frame::Stats(_));
        if frame.write(to).is_err() || last {
            break;
        }
    }
    // What is in the socket already still reaches the client.
    let _ = to.shutdown(std::net::Shutdown::Both);
}

/// Where the reader puts what comes.
struct Inbound<'a> {
    input: &'a Sender<Option<Vec<u8>>>,
    orders: &'a SyncSender<Order>,
    go: &'a SyncSender<()>,
    outstanding: &'a AtomicUsize,
}

/// The reader: until the client's end, or its first mistake.
fn read_frames(from: &mut UnixStream, to: &Inbound<'_>) {
    while let Ok(Some(frame)) = Frame::read(from) {
        match frame {
            Frame::Stdin(bytes) => {
                let before = to.outstanding.fetch_add(bytes.len(), Ordering::Relaxed);
                if before.saturating_add(bytes.len()) > STDIN_WINDOW {
                    return;
                }
                // A command that has ended takes no more: what comes late is dropped.
                let _ = to.input.send(Some(bytes));
            }
            Frame::StdinEof => drop(to.input.send(None)),
            Frame::Resize(size) => drop(to.orders.try_send(Order::Resize(size))),
            Frame::Signal(number) => drop(to.orders.try_send(Order::Signal(number))),
            Frame::Go => drop(to.go.try_send(())),
            _ => return,
        }
    }
}

/// Passes on signals and sizes; kills the command when its client goes away before its end.
fn follow(orders: &Receiver<Order>, exec: &Exec, ended: &AtomicBool) {
    // What fails here fails because the command or the machine is gone.
    while let Ok(order) = orders.recv() {
        if ended.load(Ordering::Acquire) {
            return;
        }
        let _ = match order {
            Order::Signal(number) => exec.signal(i32::from(number), false),
            Order::Resize(size) => exec.resize(size.rows, size.columns),
        };
    }
    if !ended.load(Ordering::Acquire) {
        let _ = exec.signal(KILL, true);
    }
}

/// A command's standard input, as the client sends it.
#[derive(Debug)]
struct Input {
    queue: Receiver<Option<Vec<u8>>>,
    pending: VecDeque<u8>,
    outstanding: Arc<AtomicUsize>,
    credit: SyncSender<Frame>,
}

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.pending.is_empty() {
            match self.queue.recv() {
                Ok(Some(bytes)) => self.pending = bytes.into(),
                Ok(None) | Err(_) => return Ok(0),
            }
        }
        let n = self.pending.read(buffer)?;
        self.outstanding.fetch_sub(n, Ordering::Relaxed);
        if let Ok(room) = u32::try_from(n) {
            // Without a client nobody needs the credit.
            let _ = self.credit.send(Frame::StdinRoom(room));
        }
        Ok(n)
    }
}

/// Where a pump writes: into the queue of frames.
struct Output {
    queue: SyncSender<Frame>,
    make: fn(Vec<u8>) -> Frame,
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let now = bytes.get(..MAX_PAYLOAD).unwrap_or(bytes);
        if !now.is_empty() {
            self.queue.send((self.make)(now.to_vec())).map_err(|_| io::ErrorKind::BrokenPipe)?;
        }
        Ok(now.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    fn connection() -> (UnixStream, Connection, mpsc::Receiver<()>) {
        let (client, ours) = UnixStream::pair().unwrap();
        let (gone, told) = mpsc::channel();
        let connection = Connection::start(ours, move || gone.send(()).unwrap_or_default()).unwrap();
        (client, connection, told)
    }

    #[test]
    fn a_client_that_closes_is_noticed() {
        let (client, _connection, told) = connection();
        drop(client);
        told.recv_timeout(SOON).unwrap();
    }

    #[test]
    fn input_beyond_the_window_ends_the_connection() {
        let (mut client, _connection, told) = connection();
        for _ in 0..STDIN_WINDOW / MAX_PAYLOAD {
            Frame::Stdin(vec![0; MAX_PAYLOAD]).write(&mut client).unwrap();
        }
        assert!(told.recv_timeout(Duration::from_millis(50)).is_err());
        Frame::Stdin(vec![0]).write(&mut client).unwrap();
        told.recv_timeout(SOON).unwrap();
    }

    #[test]
    fn what_was_passed_on_is_credited() {
        let (mut client, connection, _told) = connection();
        Frame::Stdin(b"hello".to_vec()).write(&mut client).unwrap();
        Frame::StdinEof.write(&mut client).unwrap();
        let mut text = String::new();
        take(&connection.input).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello");
        assert_eq!(Frame::read(&mut client).unwrap(), Some(Frame::StdinRoom(5)));
    }

    #[test]
    fn a_slow_client_holds_up_the_pump_and_loses_nothing() {
        let (mut client, connection, _told) = connection();
        let mut output = Output { queue: connection.output.clone(), make: Frame::Stdout };
        let total: usize = 4 << 20;
        let pump = std::thread::spawn(move || {
            let bytes: Vec<u8> = (0..total).map(|n| u8::try_from(n % 251).unwrap()).collect();
            output.write_all(&bytes)
        });
        std::thread::sleep(Duration::from_millis(50));
        assert!(!pump.is_finished());
        let mut seen: usize = 0;
        while seen < total {
            let Some(Frame::Stdout(bytes)) = Frame::read(&mut client).unwrap() else { panic!("cut short") };
            for byte in bytes {
                assert_eq!(usize::from(byte), seen % 251);
                seen += 1;
            }
        }
        pump.join().unwrap().unwrap();
        connection.finish(Frame::Exit(Exit::default()));
        assert_eq!(Frame::read(&mut client).unwrap(), Some(Frame::Exit(Exit::default())));
        assert_eq!(Frame::read(&mut client).unwrap(), None);
    }

    #[test]
    fn output_for_a_client_that_is_gone_is_a_broken_pipe() {
        let (client, connection, told) = connection();
        drop(client);
        told.recv_timeout(SOON).unwrap();
        let mut output = Output { queue: connection.output.clone(), make: Frame::Stderr };
        let error = std::iter::repeat_with(|| output.write_all(b"x")).find_map(Result::err).unwrap();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        connection.finish(Frame::Exit(Exit::default()));
    }
}
