//! What a request asks of the host, what it refuses, and what it leaves behind when the host refuses.

use std::io::ErrorKind;
use std::sync::Arc;

use super::super::{BLOCK, Bytes, Disk, DiskError, HostFile, LayerFiles, MAX_LAYERS};
use super::sim::{Call, Host, SimFile};
use super::{BLOCKS, Random, clear, new_layer, read, write};

const MIB: usize = 256;

/// Layers of nothing on a new host; layer n has its data in file 2n and its map in file 2n + 1.
fn layers(count: usize) -> (Host, Vec<LayerFiles<SimFile>>) {
    let host = Host::new(Vec::new());
    let layers = (0..count).map(|_| new_layer(host.add(), host.add(), BLOCKS)).collect();
    (host, layers)
}

fn again(layers: &[LayerFiles<SimFile>]) -> Vec<LayerFiles<SimFile>> {
    layers.iter().map(|layer| LayerFiles { data: layer.data.clone(), map: layer.map.clone() }).collect()
}

fn open(count: usize) -> (Host, Disk<SimFile>) {
    let (host, layers) = layers(count);
    let disk = Disk::open(layers, false).unwrap();
    host.settle();
    (host, disk)
}

#[test]
fn a_request_is_one_host_call_through_any_number_of_layers() {
    let (host, files) = layers(8);
    let bottom = Disk::open(again(&files[..1]), false).unwrap();
    write(&bottom, 4000, vec![1; MIB]).unwrap();
    bottom.flush().unwrap();
    let disk = Disk::open(files, false).unwrap();
    host.settle();

    read(&disk, 4000..4000 + MIB).unwrap();
    assert_eq!(host.calls(), [(0, Call::Read)]);
    read(&disk, 0..MIB).unwrap();
    assert_eq!(host.calls(), [], "zeros come from nowhere");
    write(&disk, 4000, vec![2; MIB]).unwrap();
    assert_eq!(host.calls(), [(14, Call::Write)]);
    read(&disk, 4000..4000 + MIB).unwrap();
    assert_eq!(host.calls(), [(14, Call::Read)]);
    let hole = (14, Call::Punch);
    clear(&disk, 4000..4000 + MIB, true).unwrap();
    assert_eq!(host.calls(), [hole, hole], "one hole on each side of the chunk's end");
    clear(&disk, 4000..4000 + MIB, true).unwrap();
    clear(&disk, 0..MIB, true).unwrap();
    assert_eq!(host.calls(), [], "nothing to discard");
}

#[test]
fn a_discard_masks_what_is_below_and_only_that() {
    let (host, files) = layers(2);
    let bottom = Disk::open(again(&files[..1]), false).unwrap();
    write(&bottom, 1, [1]).unwrap();
    bottom.flush().unwrap();
    let disk = Disk::open(again(&files), false).unwrap();
    write(&disk, 2, [2]).unwrap();
    disk.flush().unwrap();
    host.calls();
    clear(&disk, 0..2, true).unwrap();
    assert_eq!(host.calls(), [], "a lower layer's data has no room to give back");
    clear(&disk, 2..3, true).unwrap();
    disk.flush().unwrap();
    let mut states = [9; 4];
    files[1].map.as_ref().unwrap().read_at(&mut states, 4096).unwrap();
    assert_eq!(states, [0, 2, 0, 0], "zero over data, absent over nothing");
}

#[test]
fn a_block_shows_its_old_content_until_its_write_is_done() {
    let (host, files) = layers(2);
    let bottom = Disk::open(again(&files[..1]), false).unwrap();
    write(&bottom, 1, [1, 1]).unwrap();
    bottom.flush().unwrap();
    let disk = Arc::new(Disk::open(files, false).unwrap());
    let reader = disk.clone();
    host.interrupt(2, Call::Write, true, move || assert_eq!(read(&*reader, 1..3).unwrap(), [[1; 8], [1; 8]]));
    host.fail(2, Call::Write, 1, ErrorKind::StorageFull);
    assert!(matches!(write(&*disk, 1, [2, 2]), Err(DiskError::HostFull { .. })));
    assert!(!host.uninterrupt());
    assert_eq!(read(&*disk, 1..3).unwrap(), [[1; 8], [1; 8]]);
}

#[test]
fn a_flush_without_new_blocks_is_one_sync() {
    let (host, disk) = open(2);
    disk.flush().unwrap();
    assert_eq!(host.calls(), [(2, Call::Sync)]);
    write(&disk, 10, vec![1; MIB]).unwrap();
    host.calls();
    disk.flush().unwrap();
    assert_eq!(host.calls(), [(2, Call::Sync), (3, Call::Write), (3, Call::Sync)]);
    write(&disk, 10, vec![2; MIB]).unwrap();
    host.calls();
    disk.flush().unwrap();
    assert_eq!(host.calls(), [(2, Call::Sync)], "rewritten blocks are on the map already");
    for block in [1, 5, 3000] {
        write(&disk, block, [3]).unwrap();
    }
    host.calls();
    disk.flush().unwrap();
    let scattered = [(2, Call::Sync), (3, Call::Read), (3, Call::Write), (3, Call::Sync)];
    assert_eq!(host.calls(), scattered, "blocks of one chunk share a write");
}

#[test]
fn a_request_off_the_blocks_or_the_disk_is_refused_before_anything_happens() {
    let (host, disk) = open(1);
    let size = disk.size();
    for (offset, len) in [(512, 4096), (0, 512), (4096, 4097), (u64::MAX, 1)] {
        let buffer = Bytes::new(vec![0; len as usize]);
        assert!(matches!(disk.read(offset, &buffer), Err(DiskError::Misaligned { .. })));
        assert!(matches!(disk.write(offset, &buffer), Err(DiskError::Misaligned { .. })));
        assert!(matches!(disk.discard(offset, len), Err(DiskError::Misaligned { .. })));
    }
    for (offset, len) in [(size, BLOCK), (size - BLOCK, 2 * BLOCK), (u64::MAX - 4095, BLOCK)] {
        let buffer = Bytes::new(vec![0; len as usize]);
        assert!(matches!(disk.read(offset, &buffer), Err(DiskError::OutOfRange { .. })));
        assert!(matches!(disk.write(offset, &buffer), Err(DiskError::OutOfRange { .. })));
        assert!(matches!(disk.discard(offset, len), Err(DiskError::OutOfRange { .. })));
    }
    assert!(matches!(disk.discard(0, u64::MAX - 4095), Err(DiskError::OutOfRange { .. })));
    disk.write(size, &Bytes::new(Vec::new())).unwrap();
    assert_eq!(host.calls(), []);
}

#[test]
fn a_read_only_disk_takes_no_changes() {
    let (_, files) = layers(2);
    let disk = Disk::open(files, true).unwrap();
    assert!(matches!(write(&disk, 0, [1]), Err(DiskError::ReadOnly)));
    assert!(matches!(clear(&disk, 0..1, true), Err(DiskError::ReadOnly)));
    disk.flush().unwrap();
    assert_eq!(read(&disk, 0..1).unwrap(), [[0; 8]]);
}

#[test]
fn a_failed_sync_is_final() {
    for file in [0, 1] {
        let (host, disk) = open(1);
        write(&disk, 0, [1]).unwrap();
        host.fail(file, Call::Sync, 1, ErrorKind::Other);
        assert!(!disk.failed());
        assert!(matches!(disk.flush(), Err(DiskError::FlushFailed { .. })));
        assert!(disk.failed());
        // The host would succeed now.
        assert!(matches!(disk.flush(), Err(DiskError::Failed)));
        assert!(matches!(write(&disk, 0, [2]), Err(DiskError::Failed)));
        assert!(matches!(clear(&disk, 0..1, true), Err(DiskError::Failed)));
        assert_eq!(read(&disk, 0..1).unwrap(), [[1; 8]], "reads still work");
    }
}

#[test]
fn a_full_host_loses_nothing() {
    let (host, files) = layers(2);
    let disk = Disk::open(again(&files), false).unwrap();
    write(&disk, 7, [1]).unwrap();
    host.fail(2, Call::Write, 2, ErrorKind::StorageFull);
    assert!(matches!(write(&disk, 7, [2, 2]), Err(DiskError::HostFull { layer: 1 })));
    assert!(matches!(write(&disk, 7, [2, 2]), Err(DiskError::HostFull { layer: 1 })));
    assert_eq!(read(&disk, 7..9).unwrap(), [[1; 8], [0; 8]]);
    write(&disk, 7, [3, 3]).unwrap();
    host.fail(3, Call::Write, 1, ErrorKind::StorageFull);
    assert!(matches!(disk.flush(), Err(DiskError::HostFull { layer: 1 })));
    assert!(!disk.failed());
    disk.flush().unwrap();
    assert_eq!(read(&Disk::open(files, false).unwrap(), 7..9).unwrap(), [[3; 8], [3; 8]]);
    // A hole that the host has no room to make costs the room, not the discard.
    host.fail(2, Call::Punch, 1, ErrorKind::StorageFull);
    clear(&disk, 7..8, true).unwrap();
    assert_eq!(read(&disk, 7..9).unwrap(), [[0; 8], [3; 8]]);
}

#[test]
fn zeroes_that_may_not_be_unmapped_stay_allocated() {
    let (host, files) = layers(1);
    let data = files[0].data.clone();
    let disk = Disk::open(files, false).unwrap();
    write(&disk, 0, [1, 2, 3]).unwrap();
    clear(&disk, 0..1, false).unwrap();
    clear(&disk, 1..2, true).unwrap();
    assert_eq!(read(&disk, 0..3).unwrap(), [[0; 8], [0; 8], [3; 8]]);
    assert!(data.allocated(0, BLOCK) && !data.allocated(BLOCK, BLOCK));
    // On a file system that cannot, zeros matter more than the room.
    host.fail(0, Call::Zero, 1, ErrorKind::Unsupported);
    clear(&disk, 2..3, false).unwrap();
    assert_eq!(read(&disk, 2..3).unwrap(), [[0; 8]]);
}

#[test]
fn a_discarded_block_keeps_no_room_whatever_write_it_meets() {
    for (file_call, before) in [(Call::Punch, true), (Call::Punch, false)] {
        let (host, files) = layers(1);
        let data = files[0].data.clone();
        let disk = Arc::new(Disk::open(files, false).unwrap());
        write(&*disk, 0, [1]).unwrap();
        let queue = disk.clone();
        host.interrupt(0, file_call, before, move || write(&*queue, 0, [2]).unwrap());
        clear(&*disk, 0..1, true).unwrap();
        assert!(!host.uninterrupt());
        let now = read(&*disk, 0..1).unwrap();
        assert!(now == [[2; 8]] || now == [[0; 8]] && !data.allocated(0, BLOCK), "{now:?}");
    }
}

#[test]
fn a_write_that_another_queue_made_data_is_in_the_next_flush() {
    // Both find the block absent; the first sets it, the second finds it data. Neither return may outrun the map.
    let (host, files) = layers(1);
    let disk = Arc::new(Disk::open(again(&files), false).unwrap());
    let queue = disk.clone();
    host.interrupt(0, Call::Write, false, move || {
        write(&*queue, 0, [2]).unwrap();
        queue.flush().unwrap();
    });
    write(&*disk, 0, [1]).unwrap();
    assert_ne!(read(&Disk::open(files, false).unwrap(), 0..1).unwrap(), [[0; 8]]);
}

#[test]
fn the_index_of_a_large_disk_is_small() {
    let host = Host::new(Vec::new());
    let (image, data, map) = (host.add(), host.add(), host.add());
    let gib = 1u64 << 30;
    image.set_size(20 * gib).unwrap();
    for at in (0..gib).step_by(1 << 20) {
        image.write_at(&[1; 512], at).unwrap();
    }
    let layers = vec![LayerFiles { data: image, map: None }, new_layer(data, map, 20 << 18)];
    let disk = Disk::open(layers, false).unwrap();
    assert!(disk.index.memory() < 32 << 10, "{} bytes before anything is written", disk.index.memory());
    let mut random = Random(1);
    for _ in 0..1000 {
        write(&disk, random.below(1 << 18), [1]).unwrap();
    }
    assert!(disk.index.memory() < (32 + 256) << 10, "{} bytes for a GiB", disk.index.memory());
}

#[test]
fn a_layer_that_does_not_fit_the_disk_in_use_is_refused() {
    let host = Host::new(Vec::new());
    let layer = |blocks| new_layer(host.add(), host.add(), blocks);
    let disk = Disk::open(vec![layer(8)], false).unwrap();
    let refused = |files| disk.with_layer(files).map(drop).unwrap_err();
    assert!(matches!(refused(layer(9)), DiskError::Resizes { layer: 1, .. }));
    assert!(matches!(refused(layer(7)), DiskError::Resizes { .. }));
    assert!(matches!(refused(LayerFiles { data: host.add(), map: None }), DiskError::NoMap { layer: 1 }));
    assert!(matches!(refused(LayerFiles { data: host.add(), map: Some(host.add()) }), DiskError::Layer { .. }));
    let image = Disk::open(vec![layer(8)], true).unwrap();
    assert!(matches!(image.with_layer(layer(8)).unwrap_err(), DiskError::ReadOnly));
    let mut deep = Disk::open(vec![layer(8)], false).unwrap();
    for _ in 1..MAX_LAYERS {
        deep = deep.with_layer(layer(8)).unwrap();
    }
    assert!(matches!(deep.with_layer(layer(8)).unwrap_err(), DiskError::LayerCount { count: 65 }));
}
