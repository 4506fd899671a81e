//! What `docker save` writes (and podman): `manifest.json` names a configuration and layers by their paths.

use super::blobs::Blobs;
use super::json::{DockerImage, ImageFile, MAX_LAYERS, parse};
use super::stream::Layer;
use super::{Source, SourceError};
use crate::image::digest::{Digest, Hasher};
use crate::image::name;
use crate::image::record::Kind;

/// Finds the image that is meant. `progress` is told how many bytes were hashed: here nothing names layers by digest but
/// the configuration, and that by those before compression.
pub(super) fn open(blobs: &Blobs, wanted: Option<&str>, progress: &mut dyn FnMut(u64)) -> Result<Source, SourceError> {
    let mut images: Vec<DockerImage> = parse("manifest.json", &blobs.read("manifest.json")?)?;
    let refs: Vec<String> = images
        .iter()
        .map(|image| image.repo_tags.first().unwrap_or(&image.config))
        .map(|text| guest::message::printable(text))
        .collect();
    if let Some(wanted) = wanted {
        let fits = |tag: &String| tag == wanted || name::suggest(tag).as_deref() == Some(wanted);
        images.retain(|image| image.repo_tags.iter().any(fits) || image.config.starts_with(wanted));
    }
    let [image] = images.as_slice() else {
        let (path, refs) = (blobs.path().to_owned(), refs.into_iter().take(16).collect());
        return Err(match wanted {
            Some(wanted) if images.is_empty() => {
                SourceError::NoSuch { path, wanted: format!("{wanted:?}"), found: refs }
            }
            _ => SourceError::Several { path, refs },
        });
    };
    if image.layers.len() > MAX_LAYERS {
        return Err(SourceError::part("manifest.json", format!("{} layers; at most {MAX_LAYERS}", image.layers.len())));
    }
    let bytes = blobs.read(&image.config)?;
    let config: ImageFile = parse(&image.config, &bytes)?;
    if !config.platform.fits() {
        return Err(SourceError::part(
            &image.config,
            format!("the image is for {}, not for linux/amd64", config.platform),
        ));
    }
    let plain = &config.rootfs.diff_ids;
    if plain.len() != image.layers.len() {
        let why = format!("{} layers, but its configuration names {}", image.layers.len(), plain.len());
        return Err(SourceError::part("manifest.json", why));
    }
    let mut identity = Hasher::default();
    let mut layers = Vec::new();
    identity.update(format!("{}\n", Digest::of(&bytes).hex()).as_bytes());
    for (path, plain) in image.layers.iter().zip(plain) {
        let part = blobs.open(path)?;
        let (digest, compressed) = Layer::hash(path, &part, progress)?;
        let plain =
            Digest::parse(plain).ok_or_else(|| SourceError::part(&image.config, "diff_ids: no sha256 digests"))?;
        if !compressed && digest != plain {
            return Err(SourceError::Digest { part: path.clone(), found: digest, expected: plain });
        }
        identity.update(format!("{}\n", digest.hex()).as_bytes());
        layers.push(Layer::of(path.clone(), part, digest));
    }
    let reference = image.repo_tags.first().cloned();
    Ok(Source {
        kind: Kind::Docker,
        digest: Some(identity.finish()),
        name: reference.as_deref().and_then(name::suggest),
        reference,
        config: config.config(&image.config)?,
        layers,
    })
}
