//! A layer over an image, made one file, reads as the two did.

use std::fs::File;

use super::super::{BLOCK, Bytes, Disk, HostFile, LayerError, LayerFiles, create_layer, flatten};
use super::{BLOCKS, Random, clear, write};

fn whole<F: HostFile>(disk: &Disk<F>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for block in 0..BLOCKS as u64 {
        let buffer = Bytes::new(vec![0xa5; BLOCK as usize]);
        disk.read(block * BLOCK, &buffer).unwrap();
        bytes.extend(buffer.into_inner());
    }
    bytes
}

#[test]
fn one_file_reads_as_the_two_did() {
    for seed in 0..8 {
        let mut random = Random(seed);
        let [base, data, map]: [File; 3] = std::array::from_fn(|_| tempfile::tempfile().unwrap());
        // Sparse, with an end that is no whole block, and shorter than the disk or not.
        for _ in 0..30 {
            let block = random.below(BLOCKS) as u64;
            base.write_at(&[seed as u8 + 1; 4096], block * BLOCK).unwrap();
        }
        base.set_size(if seed % 2 == 0 { 5000 * BLOCK + 100 } else { BLOCKS as u64 * BLOCK }).unwrap();
        create_layer(&data, &map, BLOCKS as u64 * BLOCK).unwrap();
        let files = || {
            let [base, data, map] = [&base, &data, &map].map(|file| file.try_clone().unwrap());
            vec![LayerFiles { data: base, map: None }, LayerFiles { data, map: Some(map) }]
        };
        let disk = Disk::open(files(), false).unwrap();
        for step in 1..60 {
            let blocks = random.blocks();
            if random.one_in(3) {
                clear(&disk, blocks, true).unwrap();
            } else {
                write(&disk, blocks.start, blocks.map(|_| step)).unwrap();
            }
        }
        disk.flush().unwrap();
        let before = whole(&disk);
        drop(disk);
        // As a crash may leave it: bytes that no map speaks of.
        data.write_at(&[0xee; 4096], 6000 * BLOCK).unwrap();
        flatten(&base, &data, &map).unwrap();
        let after = Disk::open(vec![LayerFiles { data: data.try_clone().unwrap(), map: None }], true).unwrap();
        assert_eq!(after.size(), BLOCKS as u64 * BLOCK);
        let after = whole(&after);
        let differing = (0..BLOCKS).find(|n| before[n * 4096..][..4096] != after[n * 4096..][..4096]);
        assert_eq!(differing, None, "seed {seed}");
    }
}

#[test]
fn a_map_that_is_none_is_refused() {
    let [base, data, map]: [File; 3] = std::array::from_fn(|_| tempfile::tempfile().unwrap());
    assert!(matches!(flatten(&base, &data, &map), Err(LayerError::NoHeader { .. })));
}
