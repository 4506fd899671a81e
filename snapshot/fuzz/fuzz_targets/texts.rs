//! Manifests and chains: what passes names nothing but snapshots and files that there can be.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use snapshot::store::{Chain, ChainLayer, Manifest};

static PLACE: LazyLock<(tempfile::TempDir, PathBuf)> = LazyLock::new(|| {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("chain.json");
    (directory, path)
});

fn is_id(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fuzz_target!(|bytes: &[u8]| {
    // With a sum that is right, so that what is behind it is tried.
    let summed = serde_json::from_slice::<Manifest>(bytes).ok().and_then(|manifest| manifest.summed().ok());
    let summed = summed.and_then(|manifest| serde_json::to_vec(&manifest).ok());
    for text in [Some(bytes), summed.as_deref()].into_iter().flatten() {
        let Ok(manifest) = Manifest::read(text) else { continue };
        assert!(is_id(&manifest.id) && manifest.layers.iter().all(|layer| is_id(layer) && *layer != manifest.id));
        assert!(manifest.files.iter().all(|file| !file.name.contains('/') && file.length <= 16 << 40));
        assert_eq!(Manifest::read(&serde_json::to_vec(&manifest).unwrap()), Ok(manifest));
    }
    let (_, path) = &*PLACE;
    std::fs::write(path, bytes).unwrap();
    if let Ok(chain) = Chain::read(path) {
        for layer in &chain.layers {
            let (ChainLayer::Snapshot(name) | ChainLayer::Own(name)) = layer;
            assert!(name.bytes().all(|byte| byte.is_ascii_hexdigit()));
        }
        chain.write(path).unwrap();
        assert_eq!(Chain::read(path).unwrap(), chain);
    }
});
