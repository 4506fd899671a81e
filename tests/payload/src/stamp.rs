//! Commands that write to memory, and to the disk, for as long as they run: for snapshots that are taken meanwhile.

use std::fs::File;
use std::hint::black_box;
use std::io::{BufRead, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::Instant;

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;
/// So many pages of memory to a block of the disk.
const PAGES_A_BLOCK: usize = 128;

type Page = [u64; WORDS];

/// As direct input and output wants it.
#[repr(align(4096))]
struct Block([u8; PAGE]);

/// Sweeps over memory and a file, each time with another number: every page and every block has to have the number of the sweep
/// before. So memory, disk and this process's place in the sweep are of one moment, or it ends. Prints each sweep's number.
pub(crate) fn stamp(mib: usize) {
    let mut pages: Vec<Page> = vec![[0; WORDS]; (mib << 20) / PAGE];
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT);
    let file = options.open("/stamps").unwrap_or_else(|error| panic!("/stamps: {error}"));
    let blocks = pages.len() / PAGES_A_BLOCK;
    file.set_len((blocks * PAGE) as u64).unwrap_or_else(|error| panic!("/stamps: {error}"));
    for sweep in 1u64.. {
        for index in 0..pages.len() {
            let page = &mut black_box(&mut pages)[index];
            for word in [0, WORDS - 1] {
                let found = std::mem::replace(&mut page[word], sweep);
                if found != sweep - 1 {
                    torn(&format!("page {index} of sweep {sweep} has {found}"));
                }
            }
            if index % PAGES_A_BLOCK == 0 {
                stamp_block(&file, index / PAGES_A_BLOCK, sweep);
            }
        }
        println!("{sweep}");
    }
}

fn stamp_block(file: &File, index: usize, sweep: u64) {
    let (mut block, at) = (Block([0; PAGE]), (index * PAGE) as u64);
    file.read_exact_at(&mut block.0, at).unwrap_or_else(|error| torn(&format!("block {index}: {error}")));
    if block.0.chunks_exact(8).any(|word| word != (sweep - 1).to_le_bytes()) {
        torn(&format!("block {index} of sweep {sweep} has {:?}", &block.0[..8]));
    }
    for word in block.0.chunks_exact_mut(8) {
        word.copy_from_slice(&sweep.to_le_bytes());
    }
    file.write_all_at(&block.0, at).unwrap_or_else(|error| torn(&format!("block {index}: {error}")));
}

fn torn(what: &str) -> ! {
    println!("torn: {what}");
    std::process::exit(1)
}

/// Touches so much memory; then, for each line of input, once more the first `part`, and says how many nanoseconds that took.
pub(crate) fn touch(mib: usize, part: usize) {
    let mut pages: Vec<Page> = vec![[0; WORDS]; (mib << 20) / PAGE];
    let mut pass = |number: u64, length: usize| {
        let start = Instant::now();
        for page in &mut black_box(&mut pages)[..length] {
            black_box(page)[0] = number;
        }
        start.elapsed().as_nanos()
    };
    let part = (part << 20) / PAGE;
    println!("touched in {} ns", pass(1, (mib << 20) / PAGE));
    for (number, line) in (2..).zip(std::io::stdin().lock().lines()) {
        if line.is_err() {
            break;
        }
        println!("pass of {part} pages in {} ns", pass(number, part));
        let _ = std::io::stdout().flush();
    }
}
