//! What images are made of: an archive of a root file system, or an image in one of its usual forms.
//!
//! The host looks at the outside alone: headers of archives whose members are blobs, and JSON. All of it is bounded, and
//! everything that is streamed on is hashed on its way, and held against what names it.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod blobs;
mod detect;
mod docker;
mod json;
mod oci;
mod stream;

use std::path::PathBuf;

pub(super) use detect::{Pick, open};
pub(super) use stream::{Layer, LayerStream};

use super::digest::Digest;
use super::record::{Config, Kind};

/// What can be wrong with a source.
#[derive(Debug, thiserror::Error)]
pub(super) enum SourceError {
    /// A file that cannot be read.
    #[error("{path}: {error}", path = path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// It is none of the forms.
    #[error("{path}: {why}", path = path.display())]
    Form {
        /// Which.
        path: PathBuf,
        /// Why, and what would be one.
        why: String,
    },
    /// A part of an image that is not as it should be.
    #[error("{part}: {why}")]
    Part {
        /// Which.
        part: String,
        /// What is wrong.
        why: String,
    },
    /// Bytes that are not those that were named.
    #[error("{part}: its digest is {found}, not {expected}: it is damaged, or was changed while it was read")]
    Digest {
        /// Which part.
        part: String,
        /// What it is.
        found: Digest,
        /// What it should be.
        expected: Digest,
    },
    /// Several images in one.
    #[error("{path}: it holds several images: {}; choose one with --ref", refs.join(", "), path = path.display())]
    Several {
        /// Where.
        path: PathBuf,
        /// What they call themselves.
        refs: Vec<String>,
    },
    /// None for this machine, or of this name.
    #[error("{path}: it holds no image {wanted}; there are: {}", found.join(", "), path = path.display())]
    NoSuch {
        /// Where.
        path: PathBuf,
        /// For which platform, or of which name.
        wanted: String,
        /// What there is.
        found: Vec<String>,
    },
}

impl SourceError {
    fn part(part: impl Into<String>, why: impl std::fmt::Display) -> Self {
        Self::Part { part: part.into(), why: guest::message::printable(&why.to_string()) }
    }
}

/// A source that was understood.
#[derive(Debug)]
pub(super) struct Source {
    /// In which form it came.
    pub(super) kind: Kind,
    /// Its digest, unless that is only known when all was read.
    pub(super) digest: Option<Digest>,
    /// What it calls itself.
    pub(super) reference: Option<String>,
    /// A name for the image, if nobody gives one.
    pub(super) name: Option<String>,
    /// What commands run with.
    pub(super) config: Config,
    /// The lowest first.
    pub(super) layers: Vec<Layer>,
}

impl Source {
    /// Whether its layers lie over each other, with whiteouts.
    pub(super) fn is_layered(&self) -> bool {
        self.kind != Kind::Tar
    }

    /// Bytes that will be streamed, if that is known.
    pub(super) fn length(&self) -> Option<u64> {
        self.layers.iter().map(Layer::length).try_fold(0_u64, |total, length| total.checked_add(length?))
    }
}
