//! Snapshots go from host to host in one file.
//!
//! An archive holds a snapshot and, before it, all those that it stands on, from the bottom; the image is named and not
//! held. An import stages all of them, checks every file against its manifest's hash, and only then takes them in.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;

use super::archive::{ArchiveError, PIECE, PIECE_BYTES, Piece, Place, Reader, Writer, piece_length};
use super::error::{StoreError, at};
use super::hash::next_data;
use super::manifest::Manifest;
use super::pending::Pending;
use super::{Depth, Snapshot, Snapshots, Status, clear, sync_directory};

/// How many pieces an export remembers to find them again: those of 64 GiB, in some 80 MiB.
const MAX_KNOWN: usize = 1 << 20;
/// What a file system hands out: less than that of zeros is not worth a hole.
const BLOCK: usize = 4096;

/// What came of an import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// The snapshot that was exported.
    pub id: String,
    /// The image that it needs.
    pub image: String,
    /// Snapshots that have no name here, because another one has theirs: id and that name.
    pub unnamed: Vec<(String, String)>,
}

impl Snapshots {
    /// Writes a snapshot, with all that it stands on but the image, into one file. What is alike in it is held once.
    ///
    /// # Errors
    /// It is not sealed or damaged, or what is written to.
    pub fn export(
        &self,
        snapshot: &Snapshot,
        out: impl Write,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), StoreError> {
        let mut all = snapshot.below()?;
        all.push(snapshot.clone());
        if let Some(early) = all.iter().find(|one| one.status() != Status::Sealed) {
            let why =
                "its files are not hashed yet; when snapshot list shows it as saved it can be exported".to_owned();
            return Err(StoreError::Unfit { id: early.id().to_owned(), why });
        }
        // All of each: also of those below more is in the archive than their disks.
        all.iter().try_for_each(|one| one.verify(Depth::IfNeeded, progress))?;
        let manifests: Result<Vec<Vec<u8>>, _> = all.iter().map(|one| serde_json::to_vec(one.manifest())).collect();
        let manifests = manifests.map_err(|error| archive(io::Error::from(error)))?;
        let mut writer = Writer::new(out, &manifests).map_err(archive)?;
        let mut known = HashMap::new();
        let mut piece = vec![0; PIECE];
        for (number, one) in (0u8..).zip(&all) {
            for (file, record) in (0u8..).zip(&one.manifest().files) {
                let path = one.path(&record.name);
                let open = File::open(&path).map_err(at(&path))?;
                let mut from = 0;
                while let Some(data) = next_data(&open, from, record.length).map_err(at(&path))? {
                    let place = Place { snapshot: number, file, piece: data / PIECE_BYTES };
                    let start = place.piece.saturating_mul(PIECE_BYTES);
                    from = start.saturating_add(PIECE_BYTES);
                    let bytes = piece.get_mut(..piece_length(record.length, place.piece)).unwrap_or_default();
                    open.read_exact_at(bytes, start).map_err(at(&path))?;
                    progress(bytes.len() as u64);
                    if bytes.iter().all(|byte| *byte == 0) {
                        continue;
                    }
                    // Pieces of different lengths have different hashes.
                    let earlier = known.entry(*blake3::hash(bytes).as_bytes());
                    let written = match earlier {
                        std::collections::hash_map::Entry::Occupied(earlier) => {
                            writer.piece(&Piece::Same(place.piece, *earlier.get()))
                        }
                        std::collections::hash_map::Entry::Vacant(vacant) => {
                            let written = writer.piece(&Piece::Bytes(place.piece, bytes));
                            vacant.insert(place);
                            written
                        }
                    };
                    written.map_err(archive)?;
                    if known.len() >= MAX_KNOWN {
                        known.clear();
                    }
                }
                writer.end_file().map_err(archive)?;
            }
        }
        writer.finish().map_err(archive)
    }

    /// Takes the snapshots of an archive in: all of them, or none. Those that are here already stay as they are.
    ///
    /// # Errors
    /// It is no whole and right archive, another snapshot has an id of it, or the medium's. Nothing of it is left then.
    pub fn import(&self, from: impl Read, progress: &mut dyn FnMut(u64)) -> Result<Imported, StoreError> {
        let (mut reader, texts) = Reader::new(from).map_err(archive)?;
        let manifests = read_manifests(&reader, &texts).map_err(archive)?;
        manifests.iter().try_for_each(|manifest| self.is_here(manifest).map(drop))?;
        let mut staged = Vec::new();
        for (number, manifest) in (0u8..).zip(&manifests) {
            staged.push(self.stage(manifest)?);
            for (file, _) in (0u8..).zip(&manifest.files) {
                unpack(&mut reader, &manifests, &staged, (number, file), progress)?;
            }
        }
        reader.finish().map_err(archive)?;
        for pending in &staged {
            pending.check(progress)?;
        }
        self.take_in(staged, &manifests)
    }

    /// Whether this snapshot is here.
    fn is_here(&self, manifest: &Manifest) -> Result<bool, StoreError> {
        match self.load(&manifest.id) {
            Ok(here) if here.manifest().is_same(manifest) => Ok(true),
            Ok(_) => Err(StoreError::Exists { id: manifest.id.clone() }),
            Err(StoreError::Unknown(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Gives those that are not here yet their place, all or none.
    fn take_in(&self, staged: Vec<Pending>, manifests: &[Manifest]) -> Result<Imported, StoreError> {
        let Some(last) = manifests.last() else { return Err(archive(ArchiveError::Short)) };
        let mut imported = Imported { id: last.id.clone(), image: last.image.clone(), unnamed: Vec::new() };
        let _held = self.lock()?;
        let mut placed: Vec<&Manifest> = Vec::new();
        let mut place = |pending: Pending, manifest| {
            if self.is_here(manifest)? {
                return Ok(());
            }
            let named = pending.place()?;
            placed.push(manifest);
            if let (None, Some(name)) = (named, &manifest.name) {
                imported.unnamed.push((manifest.id.clone(), name.clone()));
            }
            Ok(())
        };
        let done = staged.into_iter().zip(manifests).try_for_each(|(pending, manifest)| place(pending, manifest));
        match done.and_then(|()| sync_directory(&self.directory)) {
            Ok(()) => Ok(imported),
            Err(error) => {
                // The lock is held, so nothing stands on them yet.
                for manifest in placed {
                    let _ = self.discard(&manifest.id).and_then(|gone| clear(&gone));
                }
                Err(error)
            }
        }
    }
}

/// Checks that the manifests are those of a snapshot and of all that it stands on.
fn read_manifests<R: Read>(reader: &Reader<R>, texts: &[Vec<u8>]) -> Result<Vec<Manifest>, ArchiveError> {
    let mut all: Vec<Manifest> = Vec::new();
    for text in texts {
        let manifest = Manifest::read(text).map_err(|why| reader.wrong(format!("a manifest: {why}")))?;
        if !manifest.is_sealed() {
            return Err(reader.wrong(format!("snapshot {} has no hashes", manifest.id)));
        }
        if !manifest.layers.iter().eq(all.iter().map(|below| &below.id)) {
            return Err(reader.wrong(format!("snapshot {} does not stand on those before it", manifest.id)));
        }
        if all.iter().any(|below| below.image != manifest.image) {
            return Err(reader.wrong(format!("snapshot {} is of another image than what it stands on", manifest.id)));
        }
        all.push(manifest);
    }
    Ok(all)
}

/// Writes one file of the archive into the last of the staged snapshots.
fn unpack<R: Read>(
    reader: &mut Reader<R>,
    manifests: &[Manifest],
    staged: &[Pending],
    (snapshot, file): (u8, u8),
    progress: &mut dyn FnMut(u64),
) -> Result<(), StoreError> {
    let record = |snapshot: u8, file: u8| manifests.get(usize::from(snapshot))?.files.get(usize::from(file));
    let (Some(pending), Some(own)) = (staged.last(), record(snapshot, file)) else { return Ok(()) };
    let to = pending.create(&own.name)?;
    let path = pending.path(&own.name);
    to.set_len(own.length).map_err(at(&path))?;
    let mut last = None;
    let mut copy = vec![0; PIECE];
    loop {
        let number = match reader.next(own.length, last).map_err(archive)? {
            None => break,
            Some(Piece::Bytes(number, bytes)) => {
                write_sparse(&to, bytes, number.saturating_mul(PIECE_BYTES)).map_err(at(&path))?;
                number
            }
            Some(Piece::Same(number, from)) => {
                let there = record(from.snapshot, from.file);
                let length = there.map_or(0, |there| piece_length(there.length, from.piece));
                let earlier = (from.snapshot, from.file, from.piece) < (snapshot, file, number);
                let (Some(there), Some(of), true) = (there, staged.get(usize::from(from.snapshot)), earlier) else {
                    return Err(archive(reader.wrong(format!("{from:?} is no earlier place"))));
                };
                if length != piece_length(own.length, number) {
                    return Err(archive(reader.wrong(format!("{from:?} is of another length"))));
                }
                let bytes = copy.get_mut(..length).unwrap_or_default();
                let there = of.path(&there.name);
                let start = from.piece.saturating_mul(PIECE_BYTES);
                File::open(&there).and_then(|file| file.read_exact_at(bytes, start)).map_err(at(&there))?;
                write_sparse(&to, bytes, number.saturating_mul(PIECE_BYTES)).map_err(at(&path))?;
                number
            }
        };
        progress(PIECE_BYTES);
        last = Some(number);
    }
    to.sync_all().map_err(at(&path))
}

/// Writes what is not zeros.
fn write_sparse(file: &File, bytes: &[u8], start: u64) -> io::Result<()> {
    let mut at = start;
    for run in bytes.chunks(BLOCK).collect::<Vec<_>>().chunk_by(|a, b| is_zero(a) == is_zero(b)) {
        let run = run.concat();
        if !is_zero(&run) {
            file.write_all_at(&run, at)?;
        }
        at = at.saturating_add(run.len() as u64);
    }
    Ok(())
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

fn archive(error: impl Into<ArchiveError>) -> StoreError {
    StoreError::Archive(error.into())
}
