//! What can go wrong with a disk and with the files of a layer.

use std::io;

/// A disk request, or the opening of a disk, that failed. Layers are counted from 0, the bottom.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The request does not begin and end on a block.
    #[error("request of {len} bytes at byte {offset} is not in whole blocks of 4096 bytes")]
    Misaligned {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The request ends beyond the disk.
    #[error("request of {len} bytes at byte {offset} ends beyond the disk's {size} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// The disk's size in bytes.
        size: u64,
    },
    /// A change was asked of a disk opened read-only.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The host has no room. Nothing that was promised is lost; the same request succeeds when there is room.
    #[error("the host has no room left for layer {layer}")]
    HostFull {
        /// The layer.
        layer: usize,
    },
    /// This flush failed, which is final: what the kernel could not write back it may have dropped from its cache.
    #[error("flush failed for good: could not {action} of layer {layer}: {source}")]
    FlushFailed {
        /// What was tried.
        action: &'static str,
        /// The layer.
        layer: usize,
        /// The kernel's reason.
        source: io::Error,
    },
    /// An earlier flush failed, so neither flushes nor changes are accepted any more.
    #[error("an earlier flush failed, so the disk takes no more changes")]
    Failed,
    /// The host refused a read, a write or a hole.
    #[error("could not {action} layer {layer} at byte {offset}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The layer.
        layer: usize,
        /// The byte of the layer's data file.
        offset: u64,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The request's own memory refused.
    #[error("could not fill the request's memory with zeros: {source}")]
    Buffer {
        /// Why.
        source: io::Error,
    },
    /// A layer's data file became shorter than it was when the disk was opened.
    #[error("the data file of layer {layer} ends before byte {offset}, where the map says data is")]
    Truncated {
        /// The layer.
        layer: usize,
        /// The byte that is missing.
        offset: u64,
    },
    /// A disk of no layers, or of too many.
    #[error("a disk has 1 to {max} layers, not {count}", max = super::MAX_LAYERS)]
    LayerCount {
        /// How many were given.
        count: usize,
    },
    /// An image without a map is not at the bottom.
    #[error("layer {layer} has no map, which only the bottom layer may lack")]
    NoMap {
        /// The layer.
        layer: usize,
    },
    /// A writable disk needs a map for its top layer; images are immutable.
    #[error("the top layer is a raw image, which is never written to; put a new layer above it")]
    RawTop,
    /// A layer is smaller than the one below it.
    #[error("layer {layer} has {size} bytes, less than the {below} bytes of the layer below it")]
    Shrinks {
        /// The upper layer.
        layer: usize,
        /// Its size in bytes.
        size: u64,
        /// The size of the layer below.
        below: u64,
    },
    /// A layer for a disk in use has another size than that.
    #[error("layer {layer} has {size} bytes, not the {below} bytes of the disk in use that it is to go on top of")]
    Resizes {
        /// The new layer.
        layer: usize,
        /// Its size in bytes.
        size: u64,
        /// The disk's.
        below: u64,
    },
    /// The files of a layer are not what they should be.
    #[error("layer {layer}: {source}")]
    Layer {
        /// The layer.
        layer: usize,
        /// What is wrong.
        source: LayerError,
    },
}

/// Files of a layer that are not what `docs/formats/disk-layer.md` says.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// The host refused.
    #[error("could not {action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The map is too short for its header.
    #[error("the map has {len} bytes, less than its header")]
    NoHeader {
        /// The file's length.
        len: u64,
    },
    /// Not a map.
    #[error("the map does not begin with the bytes that mark one")]
    Magic,
    /// The header was damaged.
    #[error("the map's header has checksum {found:#018x} but should have {expected:#018x}")]
    Checksum {
        /// What the header says.
        found: u64,
        /// What its bytes give.
        expected: u64,
    },
    /// Written by a newer program.
    #[error("the map has format version {version}, this program reads version {known}", known = super::layer::VERSION)]
    Version {
        /// The version found.
        version: u32,
    },
    /// A block size that is not ours.
    #[error("the map has blocks of {size} bytes, not 4096")]
    BlockSize {
        /// The size found.
        size: u32,
    },
    /// A size that no disk has.
    #[error("{size} bytes is no disk size: it must be 4096 to {max}, in whole blocks", max = super::MAX_SIZE)]
    Size {
        /// The size found.
        size: u64,
    },
    /// The map's length does not fit its size field.
    #[error("the map has {found} bytes, but a disk of {size} bytes needs {expected}")]
    MapLength {
        /// The file's length.
        found: u64,
        /// What it should be.
        expected: u64,
        /// The disk's size from the header.
        size: u64,
    },
    /// A block state that does not exist.
    #[error("the map has state {state} at byte {offset}, which is none")]
    State {
        /// The byte found.
        state: u8,
        /// Where in the map file.
        offset: u64,
    },
    /// The data file ends before a block that the map says it holds.
    #[error("the data file has {found} bytes, but the map says that there is data up to byte {needed}")]
    DataLength {
        /// The file's length.
        found: u64,
        /// The end of the last data block.
        needed: u64,
    },
}

impl LayerError {
    /// For `map_err`: a refusal by the host while `action` was tried.
    pub(super) fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }
}
