//! The disk of a builder machine: an empty file system at first, at the end the file of an image.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::digest::{Digest, Hasher};
use crate::home::{HomeError, at};

/// The smallest file system: below it a journal of this size leaves no room.
pub(super) const MIN_SIZE: u64 = 256 << 20;

/// A block of the file system, and of the file's hash.
const BLOCK: u64 = 4096;
const BLOCK_LEN: usize = 4096;
/// Blocks that are read at once.
const BATCH: usize = 256;

/// What ext4 has that stock kernels from 6.1 know: nothing is left to the host's mke2fs.conf.
const FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,\
                        large_file,huge_file,dir_nlink,extra_isize,metadata_csum";

/// What can go wrong with the disk.
#[derive(Debug, thiserror::Error)]
pub(super) enum DiskError {
    /// A file.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// No mke2fs.
    #[error("mke2fs: not found in PATH, /usr/sbin or /sbin; install it (apt-get install e2fsprogs)")]
    NoMke2fs,
    /// It did not do it.
    #[error("mke2fs: {0}")]
    Mke2fs(String),
    /// The layer could not be made part of the file.
    #[error("disk of the builder: {0}")]
    Layer(#[from] snapshot::disk::LayerError),
    /// What the builder left is no whole file system.
    #[error("the builder left no clean file system: {0}")]
    Unclean(&'static str),
}

/// Makes an empty file system of `size` bytes in a new file.
pub(super) fn make_empty(path: &Path, size: u64) -> Result<(), DiskError> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(at(path))?;
    file.set_len(size).map_err(at(path))?;
    drop(file);
    let program = find_mke2fs(std::env::var_os("PATH")).ok_or(DiskError::NoMke2fs)?;
    let mut command = Command::new(program);
    command.env_clear().env("MKE2FS_CONFIG", "/dev/null").stdin(Stdio::null()).stdout(Stdio::null());
    command.args(["-q", "-F", "-b", "4096", "-I", "256", "-i", "8192", "-m", "0", "-J", "size=64", "-O", FEATURES]);
    command.args(["-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0"]).arg(path);
    let output = command.output().map_err(|error| DiskError::Mke2fs(error.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    Err(DiskError::Mke2fs(guest::message::printable(&format!("{}: {}", output.status, said.join("; ")))))
}

/// Users do not have the administrator's directories in their PATH.
fn find_mke2fs(path: Option<OsString>) -> Option<PathBuf> {
    let path = path.unwrap_or_default();
    let places = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    places.map(|place| place.join("mke2fs")).find(|file| file.is_file())
}

/// What a file holds: its hash, and how many bytes are not in blocks of zeros.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Contents {
    pub(super) hash: Digest,
    pub(super) used: u64,
}

/// Hashes a file as `docs/formats/image-store.md` says. `progress` is told how many bytes were read.
pub(super) fn hash(file: &File, mut progress: impl FnMut(u64)) -> io::Result<Contents> {
    let size = file.metadata()?.len();
    let mut hasher = Hasher::default();
    let mut used: u64 = 0;
    let mut buffer = vec![0; BLOCK_LEN.saturating_mul(BATCH)];
    let mut offset = 0;
    while let Some(data) = next_data(file, offset)?.filter(|data| *data < size) {
        offset = data / BLOCK * BLOCK;
        let end = next_hole(file, data)?.next_multiple_of(BLOCK).min(size);
        let want = usize::try_from(end.saturating_sub(offset)).unwrap_or(usize::MAX).min(buffer.len());
        let batch = buffer.get_mut(..want).unwrap_or_default();
        file.read_exact_at(batch, offset)?;
        progress(u64::try_from(want).unwrap_or(u64::MAX));
        for block in batch.chunks(BLOCK_LEN) {
            if block.iter().any(|byte| *byte != 0) {
                hasher.update(&(offset / BLOCK).to_le_bytes());
                hasher.update(block);
                used = used.saturating_add(BLOCK);
            }
            offset = offset.saturating_add(BLOCK);
        }
    }
    hasher.update(&size.to_le_bytes());
    Ok(Contents { hash: hasher.finish(), used })
}

fn next_hole(file: &File, offset: u64) -> io::Result<u64> {
    match seek(file, SeekFrom::Hole(offset)) {
        Ok(hole) => Ok(hole),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(u64::MAX / BLOCK * BLOCK),
        Err(error) => Err(error.into()),
    }
}

fn next_data(file: &File, offset: u64) -> io::Result<Option<u64>> {
    match seek(file, SeekFrom::Data(offset)) {
        Ok(data) => Ok(Some(data)),
        Err(Errno::NXIO) => Ok(None),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(Some(offset)),
        Err(error) => Err(error.into()),
    }
}

/// Makes one file of the builder's layer and the empty file system below it. Returns its path.
pub(super) fn join(base: &Path, layer: &Path) -> Result<PathBuf, DiskError> {
    let map = layer.with_extension("map");
    let open = |path: &Path| OpenOptions::new().read(true).write(true).open(path).map_err(at(path));
    let data = open(layer)?;
    snapshot::disk::flatten(&open(base)?, &data, &open(&map)?)?;
    check_clean(&data)?;
    // Read-only for everybody: no program writes to it again.
    data.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o400)).map_err(at(layer))?;
    data.sync_all().map_err(at(layer))?;
    Ok(layer.to_owned())
}

/// Looks at the superblock, which the guest wrote: that it is one, for all of the file, and of a file system that was left
/// in good order. Whether the rest is sound only a kernel finds out, and that is a guest's.
fn check_clean(file: &File) -> Result<(), DiskError> {
    let mut superblock = [0; 1024];
    let mut read = |offset| file.read_exact_at(&mut superblock, offset);
    read(1024).map_err(|_| DiskError::Unclean("it has no superblock"))?;
    let word =
        |at: usize| superblock.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u16::from_le_bytes(*bytes));
    let long =
        |at: usize| superblock.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u32::from_le_bytes(*bytes));
    if word(0x38) != 0xef53 {
        return Err(DiskError::Unclean("it has no superblock"));
    }
    if word(0x3a) != 1 {
        return Err(DiskError::Unclean("it is not marked as clean"));
    }
    if long(0x60) & 0x4 != 0 {
        return Err(DiskError::Unclean("its journal was not written back"));
    }
    let blocks = u64::from(long(0x4)) | u64::from(long(0x150)) << 32;
    let length = file.metadata().map_err(|_| DiskError::Unclean("its length cannot be seen"))?.len();
    if blocks.checked_mul(BLOCK) != Some(length) {
        return Err(DiskError::Unclean("it is not as long as its file"));
    }
    Ok(())
}

/// Reads a whole small file of bounded length.
pub(super) fn read_bounded(from: impl Read, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > limit {
        return Err(io::Error::other(format!("longer than {limit} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_does_not_depend_on_holes() {
        let [sparse, full]: [File; 2] = std::array::from_fn(|_| tempfile::tempfile().unwrap());
        let size = 3 * 1024 * 1024 + 100;
        sparse.set_len(size).unwrap();
        full.write_all_at(&vec![0; usize::try_from(size).unwrap()], 0).unwrap();
        for file in [&sparse, &full] {
            file.write_all_at(b"something", 2_000_000).unwrap();
            file.write_all_at(b"end", size - 3).unwrap();
        }
        let contents = hash(&sparse, |_| ()).unwrap();
        assert_eq!(contents, hash(&full, |_| ()).unwrap());
        assert_eq!(contents.used, 8192);
        full.write_all_at(b"S", 2_000_000).unwrap();
        assert_ne!(contents.hash, hash(&full, |_| ()).unwrap().hash);
        sparse.set_len(size + 1).unwrap();
        assert_ne!(contents.hash, hash(&sparse, |_| ()).unwrap().hash);
    }

    #[test]
    fn an_empty_file_system_is_clean_and_sparse() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("empty");
        make_empty(&path, 10 << 30).unwrap();
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        check_clean(&file).unwrap();
        assert!(std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) * 512 < 16 << 20);
        for (at, bytes, why) in [
            (1024 + 0x60, &[0xc6][..], "journal"),
            (1024 + 0x3a, &[0], "not marked"),
            (1024 + 0x4, &[1], "as long as"),
            (1024 + 0x38, &[0], "no superblock"),
        ] {
            let mut before = [0];
            file.read_exact_at(&mut before, at).unwrap();
            file.write_all_at(bytes, at).unwrap();
            let error = check_clean(&file).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
            file.write_all_at(&before, at).unwrap();
        }
        assert!(matches!(make_empty(&path, 10 << 30), Err(DiskError::Home(_))), "nothing is written over");
        let small = make_empty(&dir.path().join("small"), 4096).unwrap_err();
        assert!(matches!(small, DiskError::Mke2fs(_)), "{small}");
        make_empty(&dir.path().join("least"), MIN_SIZE).unwrap();
    }
}
