//! What is known of an image: `image.json`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::digest::{Digest, Hasher};

/// The record's version.
pub(super) const VERSION: u32 = 1;

/// An image's record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    /// The format's version: 1.
    pub(crate) version: u32,
    /// 64 hexadecimal digits.
    pub(crate) id: String,
    /// What it was made of.
    pub(crate) source: Origin,
    /// The builder's version.
    pub(crate) builder: u32,
    /// When, in RFC 3339.
    pub(crate) imported: String,
    /// Length of the file in bytes.
    pub(crate) size: u64,
    /// Bytes of it that are not zeros, in blocks.
    pub(crate) used: u64,
    /// The file's hash.
    pub(crate) root: String,
    /// What commands in it run with.
    pub(crate) config: Config,
}

/// What an image was made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Origin {
    /// In which form it came.
    pub(crate) kind: Kind,
    /// `sha256:` and 64 digits.
    pub(crate) digest: String,
    /// What it calls itself.
    pub(crate) reference: Option<String>,
}

/// The forms that images come in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    /// One archive of a root file system.
    Tar,
    /// An OCI layout, as a directory or an archive.
    Oci,
    /// What `docker save` writes.
    Docker,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Tar => "tar",
            Self::Oci => "oci",
            Self::Docker => "docker",
        }
    }

    /// The id of the image that a source becomes.
    pub(super) fn image_id(self, source: &Digest, size: u64) -> String {
        let version = guest::build::BUILDER_VERSION;
        let mut hasher = Hasher::default();
        let kind = self.name();
        hasher.update(format!("bulkhead image\n{kind}\n{}\nbuilder {version}\nsize {size}\n", source.hex()).as_bytes());
        hasher.finish().hex().to_owned()
    }
}

/// The part of an image's configuration that `run` honours; the names are OCI's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Config {
    /// What goes before every command.
    pub(crate) entrypoint: Vec<String>,
    /// The arguments, or the command where there is no entry point.
    pub(crate) cmd: Vec<String>,
    /// Variables.
    pub(crate) env: Vec<String>,
    /// User.
    pub(crate) user: Option<String>,
    /// Working directory.
    pub(crate) workdir: Option<String>,
    /// What its maker wrote on it.
    pub(crate) labels: BTreeMap<String, String>,
}
