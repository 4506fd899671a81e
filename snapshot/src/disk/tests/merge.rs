//! Layers made one read as they did, over the image that they were made for and over any other.

use std::fs::File;

use super::super::{BLOCK, Bytes, Disk, DiskError, HostFile, LayerError, LayerFiles, create_layer, merge};
use super::{BLOCKS, Random, clear, new_layer, write};

fn file() -> File {
    tempfile::tempfile().unwrap()
}

fn again(layers: &[LayerFiles]) -> Vec<LayerFiles> {
    let copy = |file: &File| file.try_clone().unwrap();
    layers.iter().map(|files| LayerFiles { data: copy(&files.data), map: files.map.as_ref().map(copy) }).collect()
}

/// The whole disk that `layers` make over `base`.
fn whole(base: &File, layers: &[LayerFiles]) -> Vec<u8> {
    let mut all = vec![LayerFiles { data: base.try_clone().unwrap(), map: None }];
    all.extend(again(layers));
    let disk = Disk::open(all, true).unwrap();
    let buffer = Bytes::new(vec![0xa5; usize::try_from(disk.size()).unwrap()]);
    disk.read(0, &buffer).unwrap();
    buffer.into_inner()
}

#[test]
fn one_layer_reads_as_many_did() {
    for seed in 0..6 {
        let mut random = Random(seed);
        let [full, bare] = [file(), file()];
        full.write_at(&vec![7; BLOCKS * BLOCK as usize], 0).unwrap();
        bare.set_size(BLOCK).unwrap();
        let mut layers: Vec<LayerFiles> = Vec::new();
        for depth in 0..4 {
            // Each may be larger than the one below.
            layers.push(new_layer(file(), file(), BLOCKS + depth));
            let mut below = vec![LayerFiles { data: full.try_clone().unwrap(), map: None }];
            below.extend(again(&layers));
            let disk = Disk::open(below, false).unwrap();
            for step in 1..30 {
                let blocks = random.blocks();
                if random.one_in(3) {
                    clear(&disk, blocks, random.one_in(2)).unwrap();
                } else {
                    write(&disk, blocks.start, blocks.map(|_| step)).unwrap();
                }
            }
            disk.flush().unwrap();
        }
        let merged = LayerFiles { data: file(), map: Some(file()) };
        let mut copied = 0;
        merge(&layers, &merged.data, merged.map.as_ref().unwrap(), &mut |bytes| copied += bytes).unwrap();
        let merged = [merged];
        for base in [&full, &bare] {
            assert!(whole(base, &layers) == whole(base, &merged), "seed {seed}");
        }
        assert!(copied > 0 && copied < BLOCKS as u64 * BLOCK);
        assert_eq!(merged[0].data.metadata().unwrap().len(), (BLOCKS as u64 + 3) * BLOCK);
    }
}

#[test]
fn what_cannot_be_merged_is_named() {
    let mut never = |_| ();
    let none: [LayerFiles; 0] = [];
    assert!(matches!(merge(&none, &file(), &file(), &mut never), Err(DiskError::LayerCount { count: 0 })));
    let (large, small) = (new_layer(file(), file(), 9), new_layer(file(), file(), 8));
    let shrinks = merge(&[large, small], &file(), &file(), &mut never);
    assert!(matches!(shrinks, Err(DiskError::Shrinks { layer: 1, .. })));
    // A map that claims data which its file has not.
    let (data, map) = (file(), file());
    create_layer(&data, &map, 8 * BLOCK).unwrap();
    map.write_at(&[1], 4096 + 7).unwrap();
    data.set_size(7 * BLOCK).unwrap();
    let short = merge(&[LayerFiles { data, map: Some(map) }], &file(), &file(), &mut never);
    assert!(matches!(short, Err(DiskError::Layer { layer: 0, source: LayerError::DataLength { .. } })), "{short:?}");
}
