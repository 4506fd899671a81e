use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::generation;
use crate::memory::{fresh, saved};

const MEMORY: u64 = 64 << 20;

fn job(memory: File) -> Job {
    // So long that whoever writes it can be stopped before it comes to the memory.
    let state = (vec![9; 64 << 20], tempfile::tempfile().unwrap());
    Job { state, memory, pagemap: File::open("/proc/self/pagemap").unwrap() }
}

fn machine() -> Memory {
    let memory = fresh(MEMORY).unwrap();
    generation::renew(&memory.ram).unwrap();
    for at in (0..MEMORY).step_by(1 << 20) {
        memory.ram.write_obj(at + 1, GuestAddress(at + 8)).unwrap();
    }
    memory
}

fn outcome(writer: &Writer) -> Result<Saved, WriterError> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(outcome) = writer.outcome() {
            return outcome;
        }
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What a file that was written goes on as.
fn again(file: &File) -> Memory {
    saved(MEMORY, &[file.try_clone().unwrap()]).unwrap()
}

fn read(memory: &Memory, at: u64) -> u64 {
    memory.ram.read_obj(GuestAddress(at + 8)).unwrap()
}

/// So much memory that to look through it takes long.
fn large() -> Memory {
    let memory = fresh(256 << 30).unwrap();
    generation::renew(&memory.ram).unwrap();
    memory
}

#[test]
fn what_is_written_is_of_one_moment() {
    let memory = machine();
    let file = tempfile::tempfile().unwrap();
    let job = job(file.try_clone().unwrap());
    let writer = Writer::start(&job, &memory).unwrap();
    rustix::process::pidfd_send_signal(&writer.process, Signal::STOP).unwrap();
    assert!(writer.outcome().is_none());
    for at in (0..MEMORY).step_by(4096) {
        memory.ram.write_obj(7u64, GuestAddress(at + 8)).unwrap();
    }
    rustix::process::pidfd_send_signal(&writer.process, Signal::CONT).unwrap();
    let saved = outcome(&writer).unwrap();
    assert_eq!((saved.state_bytes, saved.memory_bytes), (64 << 20, 65 * 4096), "64 pages and the generation id");
    let image = again(&file);
    for at in (0..MEMORY).step_by(1 << 20) {
        assert_eq!(read(&image, at), at + 1);
        assert_eq!(read(&image, at + 4096), 0, "did not exist then");
    }
    let mut state = vec![0; 64 << 20];
    job.state.1.read_exact_at(&mut state, 0).unwrap();
    assert!(state == job.state.0);

    // Of a machine that goes on from an image, what it has not touched is there as well.
    let job = super::Job { memory: tempfile::tempfile().unwrap(), ..job };
    generation::renew(&image.ram).unwrap();
    image.ram.write_obj(9u64, GuestAddress(8)).unwrap();
    let writer = Writer::start(&job, &image).unwrap();
    rustix::process::pidfd_send_signal(&writer.process, Signal::STOP).unwrap();
    image.ram.write_obj(10u64, GuestAddress(8)).unwrap();
    rustix::process::pidfd_send_signal(&writer.process, Signal::CONT).unwrap();
    outcome(&writer).unwrap();
    let third = again(&job.memory);
    assert_eq!((read(&third, 0), read(&third, 5 << 20)), (9, (5 << 20) + 1));
}

#[test]
fn it_keeps_no_descriptor_of_anyone_elses() {
    let (mut reader, ours) = std::io::pipe().unwrap();
    let writer = Writer::start(&job(tempfile::tempfile().unwrap()), &large()).unwrap();
    drop(ours);
    // Were it still open there, this would wait for the end.
    assert_eq!(std::io::Read::read(&mut reader, &mut [0]).unwrap(), 0);
    assert!(writer.outcome().is_none(), "it is still at work");
    rustix::process::pidfd_send_signal(&writer.process, Signal::KILL).unwrap();
    let error = outcome(&writer).unwrap_err().to_string();
    assert!(error.contains("was killed by signal 9 (somebody's, or the kernel's"), "{error}");
}

#[test]
fn a_write_that_fails_is_told() {
    let memory = machine();
    let read_only = File::open("/dev/null").unwrap();
    let error = outcome(&Writer::start(&job(read_only), &memory).unwrap()).unwrap_err().to_string();
    assert!(error.starts_with("memory file: "), "{error}");
    let pagemap = tempfile::tempfile().unwrap();
    let job = Job { pagemap, ..job(tempfile::tempfile().unwrap()) };
    let error = outcome(&Writer::start(&job, &memory).unwrap()).unwrap_err().to_string();
    assert_eq!(error, "pagemap of this process: it ended early");
}
