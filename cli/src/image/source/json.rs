//! The JSON of images, as far as we read it. What is not known is passed over, as the formats want it.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use super::SourceError;
use crate::image::record::Config;

/// Longest JSON text: the OCI's own recommendation for registries.
pub(super) const MAX_JSON: u64 = 4 << 20;

/// Most layers. Other tools stop at 127.
pub(super) const MAX_LAYERS: usize = 512;

/// Longest list or map of a configuration, and longest text in one, that is taken.
const MAX_LIST: usize = 4096;
const MAX_TEXT: usize = 64 << 10;

/// `index.json`, or an index among the blobs.
#[derive(Debug, Deserialize)]
pub(super) struct Index {
    #[serde(default, deserialize_with = "or_default")]
    pub(super) manifests: Vec<Descriptor>,
}

/// What names a blob.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Descriptor {
    #[serde(default, deserialize_with = "or_default")]
    pub(super) media_type: String,
    pub(super) digest: String,
    pub(super) size: u64,
    #[serde(default)]
    pub(super) platform: Option<Platform>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) annotations: BTreeMap<String, String>,
}

/// What a manifest is for.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Platform {
    #[serde(default, deserialize_with = "or_default")]
    pub(super) architecture: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) os: String,
}

/// A manifest.
#[derive(Debug, Deserialize)]
pub(super) struct Manifest {
    pub(super) config: Descriptor,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) layers: Vec<Descriptor>,
}

/// One entry of docker's `manifest.json`.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct DockerImage {
    pub(super) config: String,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) repo_tags: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) layers: Vec<String>,
}

/// An image's configuration.
#[derive(Debug, Deserialize)]
pub(super) struct ImageFile {
    #[serde(flatten)]
    pub(super) platform: Platform,
    #[serde(default, deserialize_with = "or_default")]
    config: Container,
    #[serde(default)]
    pub(super) rootfs: Rootfs,
}

/// The digests of the layers before compression.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Rootfs {
    #[serde(default, deserialize_with = "or_default")]
    pub(super) diff_ids: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Container {
    #[serde(deserialize_with = "or_default")]
    entrypoint: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    cmd: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    env: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    user: String,
    #[serde(deserialize_with = "or_default")]
    working_dir: String,
    #[serde(deserialize_with = "or_default")]
    labels: BTreeMap<String, String>,
}

/// `null` is what some writers have for nothing.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// Parses bytes that were read within [`MAX_JSON`].
pub(super) fn parse<T: DeserializeOwned>(part: &str, bytes: &[u8]) -> Result<T, SourceError> {
    serde_json::from_slice(bytes).map_err(|error| SourceError::part(part, format!("not valid: {error}")))
}

impl ImageFile {
    /// What commands run with; refused where no process could be given it.
    pub(super) fn config(&self, part: &str) -> Result<Config, SourceError> {
        let Container { entrypoint, cmd, env, user, working_dir, labels } = &self.config;
        let fine = |text: &String| text.len() <= MAX_TEXT && !text.contains('\0');
        let wrong = |what: &str| SourceError::part(part, format!("{what}: too long, or with a NUL byte"));
        for (what, list) in [("Entrypoint", entrypoint), ("Cmd", cmd), ("Env", env)] {
            if list.len() > MAX_LIST || !list.iter().all(fine) {
                return Err(wrong(what));
            }
        }
        if labels.len() > MAX_LIST || !labels.iter().all(|(key, value)| fine(key) && fine(value)) {
            return Err(wrong("Labels"));
        }
        if !fine(user) || !fine(working_dir) {
            return Err(wrong("User or WorkingDir"));
        }
        if let Some(bad) = env.iter().find(|entry| entry.find('=').is_none_or(|at| at == 0)) {
            return Err(SourceError::part(part, format!("Env {bad:?}: not NAME=VALUE")));
        }
        // A directory that is not absolute counts from the root.
        let workdir = match working_dir.as_str() {
            "" => None,
            path if path.starts_with('/') => Some(path.to_owned()),
            path => Some(format!("/{path}")),
        };
        Ok(Config {
            entrypoint: entrypoint.clone(),
            cmd: cmd.clone(),
            env: env.clone(),
            user: Some(user.clone()).filter(|user| !user.is_empty()),
            workdir,
            labels: labels.clone(),
        })
    }
}

impl Platform {
    /// Whether it is for the machines that we make. One that does not say is taken at its word.
    pub(super) fn fits(&self) -> bool {
        matches!(self.os.as_str(), "linux" | "") && matches!(self.architecture.as_str(), "amd64" | "")
    }
}

impl std::fmt::Display for Platform {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let known = |text: &str| if text.is_empty() { "unknown".to_owned() } else { guest::message::printable(text) };
        write!(f, "{}/{}", known(&self.os), known(&self.architecture))
    }
}
