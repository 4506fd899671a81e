//! What a builder machine and its host say to each other: the stream of layers, how it ends, what was made.
//!
//! The builder's exec is [`ExecKind::BuildImage`](crate::message::ExecKind::BuildImage). On its stdin come the layers, the
//! lowest first: chunks of at most [`MAX_CHUNK`] bytes, each after its length (u32, little-endian); [`END_OF_LAYER`] in
//! place of a length ends a layer, and [`END_OF_IMAGE`] in place of a layer's first length ends everything.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use serde::{Deserialize, Serialize};

/// The word on the kernel's command line, after `--`, that makes a machine a builder.
pub const BUILDER_WORD: &str = "build";

/// Raised whenever the same source would become another tree.
pub const BUILDER_VERSION: u32 = 1;

/// Longest chunk.
pub const MAX_CHUNK: usize = 1 << 20;

/// In place of a chunk's length: the layer ends here.
pub const END_OF_LAYER: u32 = 0;

/// In place of a layer's first length: there are no more.
pub const END_OF_IMAGE: u32 = u32::MAX;

/// How a build ended. With [`DONE`](status::DONE) a [`BuildReport`] is on stdout, else the reason on stderr.
pub mod status {
    /// All is unpacked, and on the disk.
    pub const DONE: u8 = 0;
    /// The archive is damaged, or holds what cannot be made.
    pub const ARCHIVE: u8 = 1;
    /// It does not fit.
    pub const FULL: u8 = 2;
    /// The disk or the stream failed.
    pub const IO: u8 = 3;
}

/// What was unpacked.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BuildReport {
    /// Members of all layers.
    pub members: u64,
    /// Bytes of all layers, decompressed.
    pub bytes: u64,
    /// Members whose access control lists were left out, because they are in a form that is not understood.
    pub without_acl: u64,
}
