//! Real threads on real files.

use std::collections::HashSet;
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::super::{BLOCK, Bytes, Disk, LayerFiles};
use super::{Random, clear, new_layer, read, soaking, stamped, write};

const THREADS: usize = 4;
/// Blocks of each thread's own, where it knows what is there, spread so that threads share chunks and words.
const OWN: usize = 3000;
/// Blocks that all threads write and discard at once.
const SHARED: usize = 64;
const IMAGE: u64 = 1;

/// Where a thread's own block lies.
fn own(thread: usize, block: usize) -> usize {
    SHARED + (block / 4 * THREADS + thread) * 4 + block % 4
}

fn again(layers: &[LayerFiles]) -> Vec<LayerFiles> {
    let again = |file: &File| file.try_clone().unwrap();
    layers.iter().map(|layer| LayerFiles { data: again(&layer.data), map: layer.map.as_ref().map(again) }).collect()
}

/// A queue: changes and checks its own blocks, and fights over the shared ones. Returns what its own hold.
fn queue(disk: &Disk, thread: usize, stop: &AtomicBool, written: &AtomicU64) -> Vec<u64> {
    let mut random = Random(thread as u64);
    let mut model = vec![IMAGE; OWN];
    while !stop.load(Ordering::Relaxed) {
        let first = random.below(OWN / 4) * 4;
        let len = 1 + random.below(4);
        let at = own(thread, first);
        match random.below(8) {
            0..3 => {
                for stamp in &mut model[first..first + len] {
                    *stamp = written.fetch_add(1, Ordering::Relaxed);
                }
                write(disk, at, model[first..first + len].iter().copied()).unwrap();
            }
            3 => {
                model[first..first + len].fill(0);
                clear(disk, at..at + len, random.one_in(2)).unwrap();
            }
            4..6 => {
                let expected: Vec<_> = model[first..first + len].iter().map(|stamp| [*stamp; 8]).collect();
                assert_eq!(read(disk, at..at + len).unwrap(), expected);
            }
            6 => {
                let first = random.below(SHARED - 4);
                write(disk, first, vec![written.fetch_add(1, Ordering::Relaxed); len]).unwrap();
            }
            _ => {
                let first = random.below(SHARED - 4);
                clear(disk, first..first + len, random.one_in(2)).unwrap();
                // Half-written sectors are no fault here, since the kernel copies to a reader while another writes; but what
                // a completed write had hidden is.
                let buffer = Bytes::new(vec![0xa5; len * BLOCK as usize]);
                disk.read(first as u64 * BLOCK, &buffer).unwrap();
                let bytes = buffer.into_inner();
                let words = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
                assert_eq!(words.filter(|word| word / 8 == IMAGE).count(), 0, "a lower layer shows through");
            }
        }
    }
    model
}

#[test]
fn queues_that_work_at_once_do_not_disturb_each_other() {
    let blocks = SHARED + THREADS * OWN;
    let image = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(image.path(), stamped(vec![IMAGE; blocks])).unwrap();
    let temp = || tempfile::tempfile().unwrap();
    let mut layers = vec![LayerFiles { data: image.into_file(), map: None }];
    for _ in 0..3 {
        layers.push(new_layer(temp(), temp(), blocks));
    }
    let disk = Disk::open(again(&layers), false).unwrap();
    write(&disk, 0, vec![2; SHARED]).unwrap();
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(10));
    let flushes = AtomicU64::new(0);
    let models: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let (disk, stop, written, flushes) = (&disk, &stop, &written, &flushes);
        let queues: Vec<_> =
            (0..THREADS).map(|thread| scope.spawn(move || queue(disk, thread, stop, written))).collect();
        for _ in 0..2 {
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    disk.flush().unwrap();
                    flushes.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let end = Instant::now() + Duration::from_secs(if soaking() { 120 } else { 2 });
        while Instant::now() < end && queues.iter().all(|queue| !queue.is_finished()) {
            std::thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, Ordering::Relaxed);
        queues.into_iter().map(|queue| queue.join().unwrap()).collect()
    });
    assert!(flushes.into_inner() > 0 && written.into_inner() > 1000);
    disk.flush().unwrap();
    let shared = read(&disk, 0..SHARED).unwrap();
    drop(disk);

    let disk = Disk::open(again(&layers), false).unwrap();
    for (thread, model) in models.iter().enumerate() {
        for (block, stamp) in model.iter().enumerate() {
            let at = own(thread, block);
            assert_eq!(read(&disk, at..at + 1).unwrap(), [[*stamp; 8]], "block {at} of thread {thread}");
        }
    }
    assert_eq!(read(&disk, 0..SHARED).unwrap(), shared);
    let seen: HashSet<u64> = shared.into_iter().flatten().collect();
    assert!(!seen.contains(&IMAGE));
}

#[test]
fn flushes_that_arrive_together_share_one() {
    use super::sim::{Call, Host};
    use std::sync::{Arc, Barrier};
    let host = Host::new(Vec::new());
    let disk = Arc::new(Disk::open(vec![new_layer(host.add(), host.add(), 64)], false).unwrap());
    host.settle();
    // Eight flushes arrive while one is inside its sync: they need one more between them, not eight.
    let arrived = Arc::new(Barrier::new(9));
    let (queue, barrier) = (disk.clone(), arrived.clone());
    let others = Arc::new(std::sync::Mutex::new(Vec::new()));
    let started = others.clone();
    host.interrupt(0, Call::Sync, true, move || {
        let flush = |_| {
            let (queue, barrier) = (queue.clone(), barrier.clone());
            std::thread::spawn(move || {
                barrier.wait();
                queue.flush().unwrap();
            })
        };
        *started.lock().unwrap() = (0..8).map(flush).collect();
        barrier.wait();
        std::thread::sleep(Duration::from_millis(200));
    });
    disk.flush().unwrap();
    for other in std::mem::take(&mut *others.lock().unwrap()) {
        other.join().unwrap();
    }
    assert_eq!(host.calls(), [(0, Call::Sync); 2]);
}
