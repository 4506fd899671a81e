//! The thread of one queue of a disk: requests of the guest against the layers' files.
#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use snapshot::disk::DiskError;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vmm_control::StopReason;
use vmm_sys_util::eventfd::EventFd;

use super::batch::Batch;
use super::block::{Backing, Command, add};
use super::chain::Chain;
use super::notify::wants_interrupt;
use super::request::{Outcome, Request, io_error};
use crate::confine::{Program, confine};
use crate::mailbox::Message;
use crate::memory::Ram;

/// Most time that is spent looking for more requests before the guest has to kick again.
const MOST_LOOKING: Duration = Duration::from_micros(500);
/// How often a full host is asked again.
const FULL_RETRY: Duration = Duration::from_secs(1);

/// One queue's thread.
pub(super) struct Server {
    /// Which queue.
    index: usize,
    backing: Backing,
    kick: EventFd,
    inbox: Receiver<Command>,
    queue: Option<Box<Queue>>,
    write_through: bool,
    batch: Batch,
}

/// Why serving stopped before the queue was empty.
enum Pause {
    /// The guest broke the ring.
    Broken,
    /// The event loop wants the queue, or the thread, back. The queue is as if what was not answered had not been looked at.
    Told(Command),
}

impl Server {
    pub(super) fn new(index: usize, backing: Backing, kick: EventFd, inbox: Receiver<Command>) -> Self {
        Self { index, backing, kick, inbox, queue: None, write_through: false, batch: Batch::new() }
    }

    pub(super) fn run(mut self) {
        if let Err(error) = confine(Program::Disk) {
            let reason = StopReason::StorageFailed { disk: self.backing.index, error: format!("seccomp: {error}") };
            self.backing.mailbox.send(Message::Stop(reason));
            return;
        }
        // One blocking read for each wake-up, for kicks and commands alike.
        while self.kick.read().is_ok() {
            add(&self.backing.counters.wakeups, 1);
            let mut told = None;
            loop {
                while let Some(command) = told.take().or_else(|| self.inbox.try_recv().ok()) {
                    match command {
                        Command::Serve { queue, disk, write_through } => {
                            self.queue = Some(queue);
                            self.backing.disk = disk;
                            self.write_through = write_through;
                            self.batch = Batch::new();
                        }
                        Command::Pause => {
                            let (device, queue) = (self.backing.device, self.queue.take());
                            self.backing.mailbox.send(Message::QueuePaused { device, index: self.index, queue });
                        }
                        Command::Release => {
                            self.queue = None;
                            self.backing.mailbox.send(Message::QueueReleased { device: self.backing.device });
                        }
                        Command::End => return,
                    }
                }
                let Some(mut queue) = self.queue.take() else { break };
                match self.serve(&mut queue) {
                    Ok(()) => {
                        self.queue = Some(queue);
                        break;
                    }
                    // Left alone from here on; the driver has to reset the device.
                    Err(Pause::Broken) => {
                        self.backing.mailbox.send(Message::QueueBroken { device: self.backing.device });
                        break;
                    }
                    Err(Pause::Told(command)) => {
                        self.queue = Some(queue);
                        told = Some(command);
                    }
                }
            }
        }
    }

    /// Serves requests until there are none. The guest need not kick while we look, and we look a little longer: a kick
    /// costs the guest an exit and us a wake-up, often more than the request itself.
    ///
    /// The guest hears of half of what waits, then of half of what waits by then, and so on: it reaps the first half
    /// and adds to the queue while we serve the second. One interrupt for each request costs too much; one for all
    /// leaves each side waiting for the other. Where we are faster than it, little ever waits, and [`Batch`] says how many
    /// to hold back, and for how long. Nothing that can wait for the host's disk holds back what is done already.
    fn serve(&mut self, queue: &mut Queue) -> Result<(), Pause> {
        let ram = &self.backing.ram.clone();
        let (mut untold, mut told) = (0u16, Instant::now());
        loop {
            queue.disable_notification(ram).map_err(|_| Pause::Broken)?;
            let begun = Instant::now();
            let mut batch = half_of_waiting(ram, queue)?.max(self.batch.target());
            while let Some(chain) = queue.iter(ram).map_err(|_| Pause::Broken)?.next() {
                let head = chain.head_index();
                let request = Request::parse(Chain::new(ram, queue, head), ram);
                if untold > 0 && request.as_ref().is_some_and(|request| self.may_take_long(request)) {
                    self.tell_guest(queue)?;
                    untold = 0;
                }
                let length = match self.answer(request, queue) {
                    Ok(length) => length,
                    Err(stop) => {
                        queue.go_to_previous_position();
                        if untold > 0 {
                            self.tell_guest(queue)?;
                        }
                        return Err(stop);
                    }
                };
                queue.add_used(ram, head, length).map_err(|_| Pause::Broken)?;
                untold = untold.saturating_add(1);
                if untold >= batch {
                    self.tell_guest(queue)?;
                    let more = half_of_waiting(ram, queue)?;
                    self.batch.reached(untold, told.elapsed(), more > 0);
                    (untold, told) = (0, Instant::now());
                    batch = more.max(self.batch.target());
                } else if told.elapsed() >= Batch::LONGEST {
                    // What could not wait was done in between, and says nothing about the pace.
                    self.tell_guest(queue)?;
                    (untold, told) = (0, Instant::now());
                }
            }
            let served = begun.elapsed();
            if untold > 0 {
                if look_for_more(ram, queue, served)? || self.wait_for_more(queue)? {
                    continue;
                }
                self.tell_guest(queue)?;
                self.batch.fell_short(untold, told.elapsed());
                (untold, told) = (0, Instant::now());
            }
            if look_for_more(ram, queue, served)? {
                continue;
            }
            if !queue.enable_notification(ram).map_err(|_| Pause::Broken)? {
                return Ok(());
            }
        }
    }

    fn tell_guest(&self, queue: &Queue) -> Result<(), Pause> {
        if wants_interrupt(&self.backing.ram, queue).map_err(|_| Pause::Broken)? {
            add(&self.backing.counters.interrupts, 1);
            self.backing.interrupt.raise();
        }
        Ok(())
    }

    /// Executes a request and completes it, unless the event loop wants the queue back: to serve all that a guest has
    /// offered first could take it minutes. While the host is full, it waits for room.
    fn answer(&self, request: Option<Request<'_>>, queue: &Queue) -> Result<u32, Pause> {
        if let Ok(command) = self.inbox.try_recv() {
            return Err(Pause::Told(command));
        }
        let counters = &self.backing.counters;
        add(&counters.requests, 1);
        let Some(request) = request else {
            add(&counters.failed, 1);
            return Ok(0);
        };
        let mut full = false;
        let outcome = loop {
            match self.execute(&request) {
                Ok(outcome) => break outcome,
                Err(DiskError::HostFull { .. }) => {
                    if !full {
                        full = true;
                        self.tell_full(true);
                        self.tell_guest(queue)?;
                    }
                    let command = match self.inbox.recv_timeout(FULL_RETRY) {
                        Ok(command) => command,
                        Err(RecvTimeoutError::Disconnected) => Command::End,
                        Err(RecvTimeoutError::Timeout) => continue,
                    };
                    // Nobody waits for room any more.
                    self.tell_full(false);
                    return Err(Pause::Told(command));
                }
                Err(error) => {
                    let reason = StopReason::StorageFailed { disk: self.backing.index, error: error.to_string() };
                    self.backing.mailbox.send(Message::Stop(reason));
                    break io_error();
                }
            }
        };
        if full {
            self.tell_full(false);
        }
        add(&counters.failed, u64::from(outcome.status != 0));
        add(&counters.read_bytes, outcome.read);
        add(&counters.written_bytes, outcome.written);
        Ok(request.complete(outcome))
    }

    /// Waits for more requests while the guest was not told of some, without using the CPU.
    fn wait_for_more(&self, queue: &Queue) -> Result<bool, Pause> {
        let (begun, limit) = (Instant::now(), self.batch.wait());
        while begun.elapsed() < limit {
            if let Ok(command) = self.inbox.recv_timeout(self.batch.nap()) {
                self.tell_guest(queue)?;
                return Err(Pause::Told(command));
            }
            if waiting(&self.backing.ram, queue)? > 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn may_take_long(&self, request: &Request<'_>) -> bool {
        request.flushes() || self.write_through && request.changes()
    }

    fn execute(&self, request: &Request<'_>) -> Result<Outcome, DiskError> {
        let Backing { disk, id, .. } = &self.backing;
        let outcome = request.execute(disk, id)?;
        if self.write_through && request.changes() {
            disk.flush()?;
        }
        Ok(outcome)
    }

    /// The first queue to wait is told of, and the last that does not any more.
    fn tell_full(&self, full: bool) {
        let waiting = &self.backing.counters.waiting;
        let others =
            if full { waiting.fetch_add(1, Ordering::Relaxed) } else { waiting.fetch_sub(1, Ordering::Relaxed) };
        if others != u64::from(!full) {
            return;
        }
        self.backing.mailbox.send(Message::DiskFull { disk: self.backing.index, full });
    }
}

/// Requests that wait.
fn waiting(ram: &Ram, queue: &Queue) -> Result<u16, Pause> {
    let offered = queue.avail_idx(ram, Ordering::Acquire).map_err(|_| Pause::Broken)?;
    Ok(offered.0.wrapping_sub(queue.next_avail()))
}

/// Half of the requests that wait, rounded up.
fn half_of_waiting(ram: &Ram, queue: &Queue) -> Result<u16, Pause> {
    Ok(waiting(ram, queue)?.div_ceil(2))
}

/// Looks for new requests, no longer than the last ones took to serve: so a guest can make us spend on looking at most
/// what it makes us spend on work.
fn look_for_more(ram: &Ram, queue: &Queue, served: Duration) -> Result<bool, Pause> {
    let (begun, limit) = (Instant::now(), served.min(MOST_LOOKING));
    while begun.elapsed() < limit {
        if waiting(ram, queue)? > 0 {
            return Ok(true);
        }
        std::hint::spin_loop();
    }
    Ok(false)
}
