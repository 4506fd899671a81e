//! Files that are no layer's, or a damaged one's: one clear error each.

use super::super::layer::VERSION;
use super::super::{BLOCK, Disk, DiskError, HostFile, LayerError, LayerFiles, MAX_LAYERS, MAX_SIZE, create_layer};
use super::sim::{Host, SimFile};
use super::{BLOCKS, new_layer, read, write};

fn open(layers: Vec<LayerFiles<SimFile>>) -> Result<Disk<SimFile>, DiskError> {
    Disk::open(layers, false)
}

/// A new layer with its map changed at `at`; `resealed`, so that the checksum is right again.
fn damaged(at: u64, bytes: &[u8], resealed: bool) -> LayerError {
    let host = Host::new(Vec::new());
    let layer = new_layer(host.add(), host.add(), BLOCKS);
    let map = layer.map.clone().unwrap();
    map.write_at(bytes, at).unwrap();
    if resealed {
        let mut header = [0; 4088];
        map.read_at(&mut header, 0).unwrap();
        map.write_at(&super::super::layer::checksum(&header).to_le_bytes(), 4088).unwrap();
    }
    match open(vec![layer]) {
        Err(DiskError::Layer { layer: 0, source }) => source,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_damaged_map_is_named() {
    assert!(matches!(damaged(0, b"QFI\xfb", false), LayerError::Magic));
    assert!(matches!(damaged(16, &[1], false), LayerError::Checksum { .. }));
    assert!(matches!(damaged(2000, &[1], false), LayerError::Checksum { .. }), "reserved bytes are covered");
    assert!(matches!(damaged(8, &[9], true), LayerError::Version { version: 9 }));
    assert!(matches!(damaged(12, &512u32.to_le_bytes(), true), LayerError::BlockSize { size: 512 }));
    for size in [0, 4095, MAX_SIZE + BLOCK, u64::MAX] {
        assert!(matches!(damaged(16, &size.to_le_bytes(), true), LayerError::Size { .. }));
    }
    let size = (BLOCKS as u64 + 1) * BLOCK;
    assert!(matches!(damaged(16, &size.to_le_bytes(), true), LayerError::MapLength { .. }));
    let LayerError::State { state: 3, offset } = damaged(4096 + 4099, &[3], false) else { panic!() };
    assert_eq!(offset, 4096 + 4099);
    assert!(matches!(damaged(4096 + BLOCKS as u64, &[0], false), LayerError::MapLength { .. }));
    assert_eq!(VERSION, 1);
}

#[test]
fn short_files_are_named() {
    let host = Host::new(Vec::new());
    let layer = new_layer(host.add(), host.add(), BLOCKS);
    let LayerFiles { data, map } = LayerFiles { data: layer.data.clone(), map: layer.map.clone() };
    let disk = open(vec![layer]).unwrap();
    write(&disk, 100, [1]).unwrap();
    disk.flush().unwrap();
    data.set_size(100 * BLOCK + 512).unwrap();
    assert!(
        matches!(read(&disk, 100..101), Err(DiskError::Truncated { layer: 0, offset }) if offset == 100 * BLOCK + 512)
    );
    let source = match open(vec![LayerFiles { data, map: map.clone() }]) {
        Err(DiskError::Layer { source, .. }) => source,
        other => panic!("{other:?}"),
    };
    assert!(matches!(source, LayerError::DataLength { needed, .. } if needed == 101 * BLOCK), "{source}");
    map.as_ref().unwrap().set_size(4095).unwrap();
    let short = open(vec![LayerFiles { data: host.add(), map }]);
    assert!(matches!(short, Err(DiskError::Layer { source: LayerError::NoHeader { len: 4095 }, .. })));
}

#[test]
fn an_image_that_shrinks_under_the_disk_is_not_read_as_zeros() {
    let host = Host::new(Vec::new());
    let image = host.add();
    image.write_at(&[1; 10_000], 0).unwrap();
    let layers = vec![LayerFiles { data: image.clone(), map: None }, new_layer(host.add(), host.add(), 3)];
    let disk = open(layers).unwrap();
    let buffer = super::Bytes::new(vec![9; 12288]);
    disk.read(0, &buffer).unwrap();
    assert_eq!(buffer.into_inner(), [[1; 10_000].as_slice(), &[0; 2288]].concat(), "the last block is filled up");
    image.set_size(8192).unwrap();
    assert!(matches!(read(&disk, 2..3), Err(DiskError::Truncated { layer: 0, offset: 8192 })));
}

#[test]
fn a_chain_that_does_not_fit_together_is_refused() {
    let host = Host::new(Vec::new());
    let layer = |blocks| new_layer(host.add(), host.add(), blocks);
    let raw = |size| {
        let data = host.add();
        data.set_size(size).unwrap();
        LayerFiles { data, map: None }
    };
    assert!(matches!(open(vec![]), Err(DiskError::LayerCount { count: 0 })));
    let many = (0..=MAX_LAYERS).map(|_| layer(1)).collect();
    assert!(matches!(open(many), Err(DiskError::LayerCount { count: 65 })));
    assert!(matches!(open(vec![raw(4096)]), Err(DiskError::RawTop)));
    assert!(matches!(open(vec![layer(1), raw(4096), layer(1)]), Err(DiskError::NoMap { layer: 1 })));
    assert!(matches!(open(vec![raw(4097), layer(1)]), Err(DiskError::Shrinks { layer: 1, size: 4096, below: 8192 })));
    for size in [0, MAX_SIZE + 1] {
        assert!(matches!(open(vec![raw(size), layer(1)]), Err(DiskError::Layer { layer: 0, .. })));
    }
    assert!(Disk::open(vec![raw(4097)], true).is_ok_and(|disk| disk.size() == 8192));
    for size in [0, 4095, MAX_SIZE + BLOCK] {
        assert!(matches!(create_layer(&host.add(), &host.add(), size), Err(LayerError::Size { .. })));
    }
    // The largest there is costs little while it is empty.
    let largest = LayerFiles { data: host.add(), map: Some(host.add()) };
    create_layer(&largest.data, largest.map.as_ref().unwrap(), MAX_SIZE).unwrap();
    let disk = open(vec![largest]).unwrap();
    assert_eq!(read(&disk, (MAX_SIZE / BLOCK) as usize - 1..(MAX_SIZE / BLOCK) as usize).unwrap(), [[0; 8]]);
}

#[test]
fn errors_name_the_thing_the_value_and_the_reason() {
    let error = DiskError::Layer { layer: 2, source: damaged(4096 + 7, &[9], false) };
    assert_eq!(error.to_string(), "layer 2: the map has state 9 at byte 4103, which is none");
}
