//! What a source is.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::blobs::{Blobs, Found, Part, begins_as_image, look};
use super::stream::{Layer, is_compressed};
use super::{Source, SourceError, docker, oci};
use crate::image::record::{Config, Kind};
use crate::image::{digest::Digest, name};

/// What the user said about a source.
#[derive(Debug, Clone, Copy)]
pub(in crate::image) struct Pick<'a> {
    /// A path, or `-` for standard input.
    pub(in crate::image) path: &'a Path,
    /// Which image of several.
    pub(in crate::image) reference: Option<&'a str>,
}

/// Opens a source and finds out what it is. `progress` is told how many bytes were hashed, and first how many there are.
pub(in crate::image) fn open(pick: Pick<'_>, progress: &mut dyn FnMut(u64)) -> Result<Source, SourceError> {
    let path = pick.path;
    let failed = |error| SourceError::Io { path: path.to_owned(), error };
    if path == Path::new("-") {
        if io::stdin().is_terminal() {
            let why = "standard input is a terminal; redirect an archive to it".to_owned();
            return Err(SourceError::Form { path: path.to_owned(), why });
        }
        let stdin = rustix::stdio::stdin().try_clone_to_owned().map_err(failed)?;
        return of_file(File::from(stdin), Path::new("standard input"), None, pick.reference, progress);
    }
    let file = File::open(path).map_err(failed)?;
    if file.metadata().map_err(failed)?.is_dir() {
        return of_directory(file, path, pick.reference, progress);
    }
    of_file(file, path, name::from_path(path), pick.reference, progress)
}

fn of_directory(
    directory: File,
    path: &Path,
    reference: Option<&str>,
    progress: &mut dyn FnMut(u64),
) -> Result<Source, SourceError> {
    let mut source = of_blobs(&Blobs::Directory(path.to_owned(), directory.into()), reference, progress)?;
    source.name = source.name.or_else(|| name::from_path(path));
    Ok(source)
}

fn of_blobs(blobs: &Blobs, reference: Option<&str>, progress: &mut dyn FnMut(u64)) -> Result<Source, SourceError> {
    if blobs.has("oci-layout")? && blobs.has("index.json")? {
        oci::open(blobs, reference)
    } else if blobs.has("manifest.json")? {
        docker::open(blobs, reference, progress)
    } else {
        let path = blobs.path();
        let tar = match blobs {
            Blobs::Directory(..) => {
                format!("; for a root file system: tar -C {} -c . | bulkhead image import -", path.display())
            }
            Blobs::Archive(..) => String::new(),
        };
        let why = format!("it is no image: there is no oci-layout with an index.json, and no manifest.json{tar}");
        Err(SourceError::Form { path: path.to_owned(), why })
    }
}

fn of_file(
    file: File,
    path: &Path,
    name: Option<String>,
    reference: Option<&str>,
    progress: &mut dyn FnMut(u64),
) -> Result<Source, SourceError> {
    let failed = |error| SourceError::Io { path: path.to_owned(), error };
    let found = file.metadata().map_err(failed)?;
    if !found.is_file() {
        return of_pipe(file, path, name, reference);
    }
    let length = found.len();
    let mut head = vec![0; usize::try_from(length).unwrap_or(usize::MAX).min(512)];
    file.read_exact_at(&mut head, 0).map_err(failed)?;
    let file = Arc::new(file);
    if !is_compressed(&head) {
        match look(&file, length).map_err(failed)? {
            Found::Nothing(why) => return Err(no_archive(path, &head, &why)),
            Found::Blobs(members) => {
                let mut source = of_blobs(&Blobs::Archive(path.to_owned(), file, members), reference, progress)?;
                source.name = source.name.or(name);
                return Ok(source);
            }
            Found::Other => {}
        }
    }
    refuse_reference(path, reference)?;
    let part = Part::new(file, 0, length);
    let (digest, _) = Layer::hash(&path.display().to_string(), &part, progress)?;
    Ok(root(Some(digest.clone()), name, Layer::of(path.display().to_string(), part, digest)))
}

/// A pipe is read once, so nothing in it can be looked for: it is a root file system, and must not be an image.
fn of_pipe(mut pipe: File, path: &Path, name: Option<String>, reference: Option<&str>) -> Result<Source, SourceError> {
    refuse_reference(path, reference)?;
    let failed = |error| SourceError::Io { path: path.to_owned(), error };
    let mut head = Vec::new();
    (&mut pipe).take(512).read_to_end(&mut head).map_err(failed)?;
    if !is_compressed(&head) {
        match begins_as_image(&head) {
            Err(why) => return Err(no_archive(path, &head, &why)),
            Ok(true) => {
                let why = "it holds an image, whose parts cannot be looked for in a pipe; write it to a file first"
                    .to_owned();
                return Err(SourceError::Form { path: path.to_owned(), why });
            }
            Ok(false) => {}
        }
    }
    let layer = Layer::pipe(path.display().to_string(), head, pipe);
    Ok(root(None, name, layer))
}

fn root(digest: Option<Digest>, name: Option<String>, layer: Layer) -> Source {
    Source { kind: Kind::Tar, digest, reference: None, name, config: Config::default(), layers: vec![layer] }
}

fn refuse_reference(path: &Path, reference: Option<&str>) -> Result<(), SourceError> {
    match reference {
        Some(reference) => Err(SourceError::Form {
            path: path.to_owned(),
            why: format!("--ref {reference}: it holds one root file system, not images"),
        }),
        None => Ok(()),
    }
}

fn no_archive(path: &Path, head: &[u8], why: &str) -> SourceError {
    let why = match head {
        [] => "it is empty".to_owned(),
        [b'B', b'Z', b'h', ..] => "it is compressed with bzip2; use gzip, zstd or xz".to_owned(),
        [0x7f, b'E', b'L', b'F', ..] => "it is a program".to_owned(),
        [b'P', b'K', 3, 4, ..] => "it is a zip archive".to_owned(),
        [b'Q', b'F', b'I', 0xfb, ..] => "it is a qcow2 disk image".to_owned(),
        [b'h', b's', b'q', b's', ..] => "it is a squashfs".to_owned(),
        _ => format!("it is no tar archive ({why})"),
    };
    SourceError::Form {
        path: path.to_owned(),
        why: format!(
            "{why}; give a tar of a root file system (plain, gz, zst or xz), an OCI layout or archive, or what docker save writes"
        ),
    }
}
