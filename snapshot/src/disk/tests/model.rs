//! Any sequence of requests against a plain array of blocks, on simulated and on real files.

use std::fs::File;
use std::ops::Range;

use proptest::prelude::*;

use super::super::host::write_full;
use super::super::{BLOCK, Disk, HostFile, LayerFiles, MAX_LAYERS};
use super::sim::{Host, Image, SimFile};
use super::{BLOCKS, ZONES, clear, new_layer, read, stamped, write};

#[derive(Clone, Debug)]
enum Op {
    Read(Range<usize>),
    Write(Range<usize>),
    Clear(Range<usize>, bool),
    Flush,
    /// Flush, close, open.
    Reopen,
    /// The live layer becomes immutable, under a new one that may be larger.
    Stack(usize),
    /// The same without opening anything again; or it comes to nothing, and the disk goes on as it was.
    Cut(bool),
}

fn blocks() -> impl Strategy<Value = Range<usize>> {
    let zone = (0..ZONES.len(), any::<usize>(), any::<usize>()).prop_map(|(zone, first, len)| {
        let zone = ZONES[zone].clone();
        let first = zone.start + first % zone.len();
        first..first + 1 + len % (zone.end - first)
    });
    let anywhere = (0..BLOCKS, 0..300usize).prop_map(|(first, len)| first..(first + len).min(BLOCKS));
    prop_oneof![5 => zone, 1 => anywhere]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => blocks().prop_map(Op::Read),
        8 => blocks().prop_map(Op::Write),
        4 => (blocks(), any::<bool>()).prop_map(|(blocks, may_unmap)| Op::Clear(blocks, may_unmap)),
        2 => Just(Op::Flush),
        1 => Just(Op::Reopen),
        3 => (0..4usize).prop_map(Op::Stack),
        3 => any::<bool>().prop_map(Op::Cut),
    ]
}

/// Runs `ops` on a disk of files from `make`; `again` opens one of them another time.
fn run<F: HostFile>(
    image: usize,
    ops: Vec<Op>,
    make: impl Fn() -> F,
    again: impl Fn(&F) -> F,
) -> Result<(), TestCaseError> {
    let all = |files: &[LayerFiles<F>]| -> Vec<LayerFiles<F>> {
        files.iter().map(|layer| LayerFiles { data: again(&layer.data), map: layer.map.as_ref().map(&again) }).collect()
    };
    // An image of whole blocks and half a block, holes in it.
    let raw = LayerFiles { data: make(), map: None };
    let mut model = vec![0u64; BLOCKS];
    raw.data.set_size(image as u64 * BLOCK - 2048).unwrap();
    for block in (0..image - 1).filter(|block| block % 5 < 3 && (block / 64) % 2 == 0) {
        model[block] = 1 + block as u64;
        write_full(&raw.data, &stamped([model[block]]), block as u64 * BLOCK).unwrap();
    }
    let mut size = BLOCKS - 3;
    let mut files = vec![raw, new_layer(make(), make(), size)];
    let mut disk: Disk<F> = Disk::open(all(&files), false).unwrap();
    let mut stamp = 100_000;
    for op in ops {
        match op {
            Op::Read(blocks) if blocks.end <= size => {
                let expected: Vec<_> = model[blocks.clone()].iter().map(|stamp| [*stamp; 8]).collect();
                prop_assert_eq!(read(&disk, blocks).unwrap(), expected);
            }
            Op::Write(blocks) if blocks.end <= size => {
                for block in blocks.clone() {
                    stamp += 1;
                    model[block] = stamp;
                }
                write(&disk, blocks.start, model[blocks].iter().copied()).unwrap();
            }
            Op::Clear(blocks, may_unmap) if blocks.end <= size => {
                model[blocks.clone()].fill(0);
                clear(&disk, blocks, may_unmap).unwrap();
            }
            Op::Read(blocks) | Op::Write(blocks) | Op::Clear(blocks, _) => {
                prop_assert!(read(&disk, blocks).is_err());
            }
            Op::Flush => disk.flush().unwrap(),
            Op::Reopen => {
                disk.flush().unwrap();
                disk = Disk::open(all(&files), false).unwrap();
            }
            Op::Stack(larger) if files.len() < MAX_LAYERS => {
                disk.flush().unwrap();
                size = BLOCKS.min(size + larger);
                files.push(new_layer(make(), make(), size));
                disk = Disk::open(all(&files), false).unwrap();
            }
            Op::Cut(used) if files.len() < MAX_LAYERS => {
                let layer = new_layer(make(), make(), size);
                let cut = disk.with_layer(all(std::slice::from_ref(&layer)).pop().unwrap()).unwrap();
                if used {
                    files.push(layer);
                    disk = cut;
                }
            }
            Op::Stack(_) | Op::Cut(_) => {}
        }
    }
    disk.flush().unwrap();
    for read_only in [false, true] {
        let disk = Disk::open(all(&files), read_only).unwrap();
        prop_assert_eq!(disk.size(), size as u64 * BLOCK);
        for zone in ZONES.iter().cloned().chain([200..500, 4000..4093]) {
            let zone = zone.start..zone.end.min(size);
            let expected: Vec<_> = model[zone.clone()].iter().map(|stamp| [*stamp; 8]).collect();
            prop_assert_eq!(read(&disk, zone).unwrap(), expected);
        }
    }
    Ok(())
}

fn cases(slice: u32, soak: u32) -> ProptestConfig {
    let cases = if super::soaking() { soak } else { slice };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(80, 20_000))]
    #[test]
    fn a_disk_on_simulated_files_is_a_plain_array(
        image in 2..900usize,
        // Hosts may move less than they were asked to.
        longest in prop_oneof![2 => Just(usize::MAX), 1 => 700..20_000usize],
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let host = Host::new(Vec::new());
        host.shorten(longest);
        run(image, ops, || host.add(), SimFile::clone)?;
    }
}

proptest! {
    #![proptest_config(cases(40, 2_000))]
    #[test]
    fn a_disk_on_real_files_is_a_plain_array(image in 2..900usize, ops in prop::collection::vec(op(), 1..120)) {
        run(image, ops, || tempfile::tempfile().unwrap(), |file: &File| file.try_clone().unwrap())?;
    }
}

#[test]
fn the_deepest_chain_reads_from_every_layer() {
    let host = Host::new(vec![Image::default()]);
    let mut layers = vec![];
    for layer in 0..MAX_LAYERS {
        layers.push(new_layer(host.add(), host.add(), BLOCKS));
        let all = layers.iter().map(|layer| LayerFiles { data: layer.data.clone(), map: layer.map.clone() }).collect();
        let disk = Disk::open(all, false).unwrap();
        write(&disk, 4090 + layer, [1 + layer as u64, 100, 100]).unwrap();
        disk.flush().unwrap();
    }
    let disk = Disk::open(layers, true).unwrap();
    let expected: Vec<_> = (1..=MAX_LAYERS as u64).chain([100, 100, 0]).map(|stamp| [stamp; 8]).collect();
    assert_eq!(read(&disk, 4090..4090 + MAX_LAYERS + 3).unwrap(), expected);
}
