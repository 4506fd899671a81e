//! Sudden death between any two host calls: what was flushed is there, what was not is one of the things the block
//! has held since.

use std::io::ErrorKind;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::super::{Disk, DiskError, LayerFiles};
use super::sim::{Call, Host, Image, SimFile, Survive};
use super::{BLOCKS, Random, Stamps, ZONES, clear, new_layer, read, seeds, write};

/// A change that has begun: at which position of the journal, of which block, to what.
struct Change {
    position: usize,
    block: usize,
    stamp: u64,
}

/// A flush that returned: at which position, what was there when it began, and how many changes had begun by then.
struct Flush {
    position: usize,
    then: Vec<Stamps>,
    changes: usize,
}

struct Model {
    now: Vec<Stamps>,
    stamp: u64,
    changes: Vec<Change>,
    flushes: Vec<Flush>,
}

#[derive(Clone, Debug)]
enum Op {
    Write(Range<usize>),
    Clear(Range<usize>, bool),
}

impl Op {
    fn random(random: &mut Random) -> Self {
        match random.below(5) {
            0..3 => Self::Write(random.blocks()),
            3 => Self::Clear(random.blocks(), true),
            _ => Self::Clear(random.blocks(), random.one_in(2)),
        }
    }

    fn blocks(&self) -> Range<usize> {
        match self {
            Self::Write(blocks) | Self::Clear(blocks, _) => blocks.clone(),
        }
    }
}

/// A disk on a simulated host, with what it should hold.
#[derive(Clone)]
struct Bench {
    host: Host,
    disk: Arc<Disk<SimFile>>,
    model: Arc<Mutex<Model>>,
    data: usize,
    map: usize,
}

fn is_map(file: usize) -> bool {
    file.is_multiple_of(2)
}

/// File 0 is a raw image; then a data file (odd) and a map (even) for each layer.
fn open(host: &Host, files: usize) -> Result<Disk<SimFile>, DiskError> {
    let mut layers = vec![LayerFiles { data: host.file(0), map: None }];
    layers
        .extend((1..files).step_by(2).map(|data| LayerFiles { data: host.file(data), map: Some(host.file(data + 1)) }));
    Disk::open(layers, false)
}

fn read_zones(disk: &Disk<SimFile>) -> Vec<(usize, Stamps)> {
    let zone = |zone: &Range<usize>| zone.clone().zip(read(disk, zone.clone()).unwrap()).collect::<Vec<_>>();
    ZONES.iter().flat_map(zone).collect()
}

impl Bench {
    /// A chain of random depth with something in every layer.
    fn new(random: &mut Random) -> Self {
        let host = Host::new(vec![Image::default()]);
        let layers = 1 + if random.one_in(8) { 8 } else { random.below(3) };
        // The image ends in the middle of a block, and of the disk.
        let image = LayerFiles { data: host.file(0), map: None };
        let blocks = 4096 + random.below(4);
        let bytes = super::stamped((0..blocks as u64).map(|block| if block % 3 == 2 { 0 } else { 1 }));
        let kept = |at: &u64| ZONES.iter().any(|zone| zone.contains(&((*at / 4096) as usize)));
        for at in (0..bytes.len() as u64).step_by(4096).filter(kept) {
            super::super::HostFile::write_at(&image.data, &bytes[at as usize..at as usize + 4096], at).unwrap();
        }
        super::super::HostFile::set_size(&image.data, bytes.len() as u64).unwrap();
        let mut files = 1;
        let mut stamp = 10;
        for layer in 0..layers {
            new_layer(host.add(), host.add(), BLOCKS);
            files += 2;
            let disk = open(&host, files).unwrap();
            for _ in 0..if layer + 1 < layers { 4 } else { 0 } {
                let blocks = random.blocks();
                if random.one_in(3) {
                    clear(&disk, blocks, true).unwrap();
                } else {
                    stamp += 1;
                    write(&disk, blocks.start, vec![stamp; blocks.len()]).unwrap();
                }
            }
            disk.flush().unwrap();
        }
        host.settle();
        Self::start(host, files, stamp)
    }

    /// On a host that has just come up: what is on the disk now is what was flushed.
    fn start(host: Host, files: usize, stamp: u64) -> Self {
        let disk = open(&host, files).unwrap();
        let mut now = vec![[0; 8]; BLOCKS];
        for (block, stamps) in read_zones(&disk) {
            now[block] = stamps;
        }
        let flushes = vec![Flush { position: 0, then: now.clone(), changes: 0 }];
        let model = Model { now, stamp, changes: Vec::new(), flushes };
        Self { host, disk: Arc::new(disk), model: Arc::new(Mutex::new(model)), data: files - 2, map: files - 1 }
    }

    /// Notes that `op` begins; returns what it will leave in its blocks.
    fn begin(&self, op: &Op) -> u64 {
        let mut model = self.model.lock().unwrap();
        model.stamp += 1;
        let stamp = if matches!(op, Op::Write(_)) { model.stamp } else { 0 };
        let position = self.host.position();
        model.changes.extend(op.blocks().map(|block| Change { position, block, stamp }));
        stamp
    }

    fn run(&self, op: &Op, stamp: u64) -> Result<(), DiskError> {
        match op {
            Op::Write(blocks) => write(&self.disk, blocks.start, vec![stamp; blocks.len()]),
            Op::Clear(blocks, may_unmap) => clear(&self.disk, blocks.clone(), *may_unmap),
        }
    }

    fn step(&self, op: &Op) {
        let stamp = self.begin(op);
        self.run(op, stamp).unwrap();
        self.model.lock().unwrap().now[op.blocks()].fill([stamp; 8]);
    }

    /// `outer`, with `inner` from another queue somewhere in its middle: in a block of both, either may win.
    fn race(&self, outer: &Op, inner: &Op, call: Call, before: bool) {
        let outer_stamp = self.begin(outer);
        let inner_stamp = Arc::new(Mutex::new(None));
        let (bench, op, done) = (self.clone(), inner.clone(), inner_stamp.clone());
        self.host.interrupt(self.data, call, before, move || {
            let stamp = bench.begin(&op);
            bench.run(&op, stamp).unwrap();
            *done.lock().unwrap() = Some(stamp);
        });
        self.run(outer, outer_stamp).unwrap();
        self.host.uninterrupt();
        let inner_stamp = *inner_stamp.lock().unwrap();
        for (block, stamps) in read_zones(&self.disk) {
            let mut model = self.model.lock().unwrap();
            let mut allowed = Vec::new();
            allowed.extend(outer.blocks().contains(&block).then_some(outer_stamp));
            allowed.extend(inner_stamp.filter(|_| inner.blocks().contains(&block)));
            assert!(
                allowed.iter().any(|stamp| stamps == [*stamp; 8]) || allowed.is_empty() && stamps == model.now[block],
                "block {block} holds {stamps:?} after {outer:?} and {inner:?} {before} {call:?}, not {allowed:?}"
            );
            model.now[block] = stamps;
        }
    }

    /// `op`, with a flush from another queue in its middle, which covers what was there before.
    fn flush_within(&self, op: &Op, call: Call, before: bool) {
        let changes = self.model.lock().unwrap().changes.len();
        let stamp = self.begin(op);
        let bench = self.clone();
        self.host.interrupt(self.data, call, before, move || bench.flush_since(changes).unwrap());
        self.run(op, stamp).unwrap();
        self.host.uninterrupt();
        self.model.lock().unwrap().now[op.blocks()].fill([stamp; 8]);
    }

    fn flush(&self) -> Result<(), DiskError> {
        let changes = self.model.lock().unwrap().changes.len();
        self.flush_since(changes)
    }

    /// A flush that owes nothing to the changes from number `changes` on.
    fn flush_since(&self, changes: usize) -> Result<(), DiskError> {
        let then = self.model.lock().unwrap().now.clone();
        self.disk.flush()?;
        let position = self.host.position();
        self.model.lock().unwrap().flushes.push(Flush { position, then, changes });
        Ok(())
    }

    /// One thing that can happen to a disk.
    fn random(&self, random: &mut Random) {
        let before = random.one_in(2);
        match random.below(11) {
            9 => self.flush_within(&Op::random(random), [Call::Write, Call::Punch][random.below(2)], before),
            0..4 => self.step(&Op::random(random)),
            4..6 => {
                let call = [Call::Write, Call::Punch, Call::Zero][random.below(3)];
                self.race(&Op::random(random), &Op::random(random), call, before);
            }
            6 => self.flush().unwrap(),
            7..9 => {
                // Other queues go on during a flush.
                let (file, call) =
                    [(self.data, Call::Sync), (self.map, Call::Write), (self.map, Call::Sync)][random.below(3)];
                let ops: Vec<Op> = (0..1 + random.below(3)).map(|_| Op::random(random)).collect();
                let bench = self.clone();
                self.host.interrupt(file, call, before, move || ops.iter().for_each(|op| bench.step(op)));
                self.flush().unwrap();
                self.host.uninterrupt();
            }
            _ => {
                // The host is full for a moment.
                let op = Op::Write(random.blocks());
                self.host.fail(self.data, Call::Write, 1, ErrorKind::StorageFull);
                let stamp = self.begin(&op);
                assert!(matches!(self.run(&op, stamp), Err(DiskError::HostFull { .. })));
                self.step(&op);
                self.host.fail(self.map, Call::Write, 1, ErrorKind::QuotaExceeded);
                if let Err(error) = self.flush() {
                    assert!(matches!(error, DiskError::HostFull { .. }), "{error}");
                }
                self.host.fail(self.map, Call::Write, 0, ErrorKind::QuotaExceeded);
            }
        }
    }

    /// Checks a disk opened after a power cut at `position`.
    fn check(&self, disk: &Disk<SimFile>, position: usize, survive: Survive) {
        let model = self.model.lock().unwrap();
        let flush = model.flushes.iter().rev().find(|flush| flush.position <= position).unwrap();
        let changes = &model.changes[flush.changes..];
        for (block, stamps) in read_zones(disk) {
            let since =
                |stamp: u64| changes.iter().any(|c| (c.block, c.stamp) == (block, stamp) && c.position < position);
            let then = flush.then[block];
            let good = match survive {
                Survive::Sectors => stamps.iter().zip(then).all(|(stamp, then)| *stamp == then || since(*stamp)),
                _ => stamps == then || stamps == [stamps[0]; 8] && since(stamps[0]),
            };
            assert!(
                good,
                "block {block} holds {stamps:?} after a cut at {position}, {survive:?} surviving; it held {then:?} at \
                 the flush that ended at {}",
                flush.position
            );
        }
    }

    fn check_now(&self, disk: &Disk<SimFile>) {
        let model = self.model.lock().unwrap();
        for (block, stamps) in read_zones(disk) {
            assert_eq!(stamps, model.now[block], "block {block}");
        }
    }
}

fn life(seed: u64) {
    let random = &mut Random(seed);
    let mut bench = Bench::new(random);
    // Each epoch goes on from the ruins of the one before.
    for _ in 0..3 {
        if random.one_in(2) {
            bench.host.shorten(4096 * (1 + random.below(3)));
        }
        for _ in 0..12 {
            bench.random(random);
        }
        bench.check_now(&bench.disk);
        let files = bench.map + 1;
        let mut next = None;
        bench.host.each_cut(|position, cut| {
            let all = [Survive::Nothing, Survive::Everything, Survive::Blocks, Survive::Sectors];
            for survive in all.into_iter().take(if cut.is_clean() { 1 } else { 4 }) {
                let images = cut.files(survive, random, is_map);
                let host = Host::new(images.clone());
                bench.check(&open(&host, files).unwrap(), position, survive);
                if next.is_none() || random.one_in(20) {
                    next = Some(images);
                }
            }
        });
        let stamp = bench.model.lock().unwrap().stamp;
        bench = Bench::start(Host::new(next.unwrap()), files, stamp);
    }
}

#[test]
fn a_power_cut_between_any_two_host_calls_loses_nothing_that_was_flushed() {
    for seed in seeds(24, 10_000) {
        let result = std::panic::catch_unwind(|| life(seed));
        assert!(result.is_ok(), "failed with SEED={seed}");
    }
}
