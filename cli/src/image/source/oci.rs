//! OCI layouts: from `index.json` over a manifest to a configuration and layers, each named by its digest.

use super::blobs::{Blobs, blob};
use super::json::{Descriptor, ImageFile, Index, MAX_LAYERS, Manifest, parse};
use super::stream::Layer;
use super::{Source, SourceError};
use crate::image::digest::Digest;
use crate::image::name;
use crate::image::record::Kind;

/// Indexes within indexes.
const MAX_DEPTH: usize = 4;
/// Manifests that are looked at.
const MAX_MANIFESTS: usize = 1024;

/// What annotations call an image: containerd's is whole, the OCI's often only a tag.
const NAMES: [&str; 2] = ["io.containerd.image.name", "org.opencontainers.image.ref.name"];

/// An image that could be meant.
#[derive(Debug, Clone)]
struct Candidate {
    descriptor: Descriptor,
    digest: Digest,
    /// What it and the indexes above it call it.
    names: Vec<String>,
}

/// Finds the image that is meant.
pub(super) fn open(blobs: &Blobs, wanted: Option<&str>) -> Result<Source, SourceError> {
    let mut found = Vec::new();
    let index: Index = parse("index.json", &blobs.read("index.json")?)?;
    let mut looked_at = 0;
    collect(blobs, index, &[], 0, &mut looked_at, &mut found)?;
    let chosen = choose(blobs, found, wanted)?;
    read(blobs, &chosen)
}

fn collect(
    blobs: &Blobs,
    index: Index,
    above: &[String],
    depth: usize,
    looked_at: &mut usize,
    found: &mut Vec<Candidate>,
) -> Result<(), SourceError> {
    for descriptor in index.manifests {
        *looked_at = looked_at.saturating_add(1);
        if *looked_at > MAX_MANIFESTS {
            return Err(SourceError::part("index.json", format!("more than {MAX_MANIFESTS} manifests")));
        }
        let digest = digest(&descriptor)?;
        let own = NAMES.iter().filter_map(|key| descriptor.annotations.get(*key)).cloned();
        let names: Vec<String> = own.chain(above.iter().cloned()).collect();
        if descriptor.media_type.ends_with(".image.index.v1+json")
            || descriptor.media_type.ends_with(".manifest.list.v2+json")
        {
            if depth >= MAX_DEPTH {
                return Err(SourceError::part(blob(&digest), "indexes within indexes without end"));
            }
            let inner: Index = parse(&blob(&digest), &read_checked(blobs, &descriptor, &digest)?)?;
            collect(blobs, inner, &names, depth.saturating_add(1), looked_at, found)?;
        } else {
            found.push(Candidate { descriptor, digest, names });
        }
    }
    Ok(())
}

fn choose(blobs: &Blobs, mut found: Vec<Candidate>, wanted: Option<&str>) -> Result<Candidate, SourceError> {
    let path = || blobs.path().to_owned();
    let all: Vec<String> = found.iter().map(show).collect();
    let none = |wanted: String| SourceError::NoSuch {
        path: path(),
        wanted,
        found: if all.is_empty() { vec!["none".to_owned()] } else { all.iter().take(16).cloned().collect() },
    };
    if let Some(wanted) = wanted {
        found.retain(|candidate| {
            candidate.names.iter().any(|name| fits(name, wanted)) || candidate.digest.to_string() == wanted
        });
        if found.is_empty() {
            return Err(none(format!("{wanted:?}")));
        }
    }
    found.retain(|candidate| candidate.descriptor.platform.as_ref().is_none_or(super::json::Platform::fits));
    // Signatures and the like are manifests as well, of no platform.
    found.sort_by(|a, b| a.digest.cmp(&b.digest));
    found.dedup_by(|a, b| a.digest == b.digest);
    match found.as_slice() {
        [] => Err(none("for linux/amd64".to_owned())),
        [one] => Ok(one.clone()),
        many => Err(SourceError::Several { path: path(), refs: many.iter().take(16).map(show).collect() }),
    }
}

/// Whether a name is the one that was asked for: whole, without docker's registry, or its tag alone.
fn fits(name: &str, wanted: &str) -> bool {
    name == wanted
        || name::suggest(name).as_deref() == Some(wanted)
        || name.rsplit_once(':').is_some_and(|(_, tag)| tag == wanted)
}

fn show(candidate: &Candidate) -> String {
    let name = candidate.names.first().map(|name| guest::message::printable(name));
    let name = name.unwrap_or_else(|| candidate.digest.to_string());
    match &candidate.descriptor.platform {
        Some(platform) if !platform.fits() => format!("{name} ({platform})"),
        _ => name,
    }
}

fn read(blobs: &Blobs, chosen: &Candidate) -> Result<Source, SourceError> {
    let part = blob(&chosen.digest);
    let manifest: Manifest = parse(&part, &read_checked(blobs, &chosen.descriptor, &chosen.digest)?)?;
    let kind = manifest.config.media_type.as_str();
    if !matches!(
        kind,
        "application/vnd.oci.image.config.v1+json" | "application/vnd.docker.container.image.v1+json" | ""
    ) {
        return Err(SourceError::part(part, format!("it is no container image: its configuration is {kind:?}")));
    }
    if manifest.layers.len() > MAX_LAYERS {
        return Err(SourceError::part(part, format!("{} layers; at most {MAX_LAYERS}", manifest.layers.len())));
    }
    let config_digest = digest(&manifest.config)?;
    let config_part = blob(&config_digest);
    let config: ImageFile = parse(&config_part, &read_checked(blobs, &manifest.config, &config_digest)?)?;
    if !config.platform.fits() {
        return Err(SourceError::part(
            config_part,
            format!("the image is for {}, not for linux/amd64", config.platform),
        ));
    }
    let mut layers = Vec::new();
    for layer in &manifest.layers {
        let digest = digest(layer)?;
        let part = blob(&digest);
        if layer.media_type.ends_with("+encrypted")
            || !layer.media_type.contains(".tar") && !layer.media_type.contains("layer")
        {
            return Err(SourceError::part(part, format!("a layer of type {:?}", layer.media_type)));
        }
        let content = blobs.open(&part)?;
        if content.length() != layer.size {
            return Err(SourceError::part(part, format!("it has {} bytes, not {}", content.length(), layer.size)));
        }
        layers.push(Layer::of(part, content, digest));
    }
    let reference = chosen.names.first().cloned();
    Ok(Source {
        kind: Kind::Oci,
        digest: Some(chosen.digest.clone()),
        // A tag alone names nothing.
        name: reference.as_deref().filter(|name| name.contains(['/', ':'])).and_then(name::suggest),
        reference,
        config: config.config(&config_part)?,
        layers,
    })
}

fn digest(descriptor: &Descriptor) -> Result<Digest, SourceError> {
    Digest::parse(&descriptor.digest)
        .ok_or_else(|| SourceError::part(format!("digest {:?}", descriptor.digest), "not a sha256 digest"))
}

fn read_checked(blobs: &Blobs, descriptor: &Descriptor, digest: &Digest) -> Result<Vec<u8>, SourceError> {
    let bytes = blobs.read_blob(digest)?;
    if u64::try_from(bytes.len()).ok() != Some(descriptor.size) {
        return Err(SourceError::part(blob(digest), format!("it has {} bytes, not {}", bytes.len(), descriptor.size)));
    }
    Ok(bytes)
}
