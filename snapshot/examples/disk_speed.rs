//! Measures the layered disk without a guest: `cargo run --release -p snapshot --example disk_speed [DIRECTORY]`.
//!
//! It prints the time of sequential and random requests through chains of 1 and 8 layers beside the same requests on
//! a plain file, and of opening a full chain. The files are in the page cache, so the difference is our own work.

use std::error::Error;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use snapshot::disk::{BLOCK, Bytes, Disk, HostFile, LayerFiles, create_layer};

const SIZE: u64 = 1 << 30;
const LARGE: u64 = 1 << 20;
const SMALL_REQUESTS: u64 = 100_000;

fn layer(directory: &Path, size: u64) -> Result<LayerFiles, Box<dyn Error>> {
    let (data, map) = (tempfile::tempfile_in(directory)?, tempfile::tempfile_in(directory)?);
    create_layer(&data, &map, size)?;
    Ok(LayerFiles { data, map: Some(map) })
}

fn again(layers: &[LayerFiles]) -> std::io::Result<Vec<LayerFiles>> {
    let again = |layer: &LayerFiles| {
        Ok(LayerFiles { data: layer.data.try_clone()?, map: layer.map.as_ref().map(File::try_clone).transpose()? })
    };
    layers.iter().map(again).collect()
}

/// The best of three: the rest is what else the machine does.
fn best(mut f: impl FnMut() -> Result<(), Box<dyn Error>>) -> Result<Duration, Box<dyn Error>> {
    let mut best = Duration::MAX;
    for _ in 0..3 {
        let start = Instant::now();
        f()?;
        best = best.min(start.elapsed());
    }
    Ok(best)
}

/// The offsets of small requests: all over the disk, the same each time.
fn scattered() -> impl Iterator<Item = u64> {
    (0..SMALL_REQUESTS).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (SIZE / BLOCK) * BLOCK)
}

fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, Into::into);
    let (large, small) = (vec![7; 1 << 20], vec![7; 4096]);

    let plain = tempfile::tempfile_in(&directory)?;
    for offset in (0..SIZE).step_by(1 << 20) {
        plain.write_at(&large, offset)?;
    }
    let mut bytes = large.clone();
    let sequential = best(|| {
        for offset in (0..SIZE).step_by(1 << 20) {
            HostFile::read_at(&plain, &mut bytes, offset)?;
        }
        Ok(())
    })?;
    let mut bytes = small.clone();
    let random = best(|| {
        for offset in scattered() {
            HostFile::read_at(&plain, &mut bytes, offset)?;
        }
        Ok(())
    })?;
    println!("plain file: read 1 MiB {:?}, 4 KiB {:?}", sequential / 1024, random / 100_000);

    for depth in [1, 8] {
        let mut layers = Vec::new();
        for number in 0..depth {
            layers.push(layer(&directory, SIZE)?);
            let disk: Disk = Disk::open(again(&layers)?, false)?;
            // Each layer has stripes of its own, so that a chain is read from all of its layers.
            for offset in (0..SIZE).step_by(1 << 20).filter(|offset| offset / LARGE % depth == number) {
                disk.write(offset, &Bytes::new(large.clone()))?;
            }
            disk.flush()?;
        }
        let opening = best(|| {
            Disk::open(again(&layers)?, false)?;
            Ok(())
        })?;
        layers.push(layer(&directory, SIZE)?);
        let disk: Disk = Disk::open(again(&layers)?, false)?;
        let (big, little) = (Bytes::new(large.clone()), Bytes::new(small.clone()));
        let sequential = best(|| (0..SIZE).step_by(1 << 20).try_for_each(|at| Ok(disk.read(at, &big)?)))?;
        let random = best(|| scattered().try_for_each(|at| Ok(disk.read(at, &little)?)))?;
        println!("{depth} layers: read 1 MiB {:?}, 4 KiB {:?}; open {opening:?}", sequential / 1024, random / 100_000);
        let sequential = best(|| (0..SIZE).step_by(1 << 20).try_for_each(|at| Ok(disk.write(at, &big)?)))?;
        let random = best(|| scattered().try_for_each(|at| Ok(disk.write(at, &little)?)))?;
        println!("{depth} layers: write 1 MiB {:?}, 4 KiB {:?}", sequential / 1024, random / 100_000);
    }
    Ok(())
}
