//! How a run's machine begins: it boots, on a disk of its own or on the one that it left, or goes on from what was saved.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use snapshot::store::{Chain, ChainLayer, Snapshot, Snapshots};

use super::layers::{Layers, own};
use super::machine::SavedMachine;
use crate::home::{HomeError, read_json};
use crate::spec::{Phase, Spec};
use crate::store::RunDirectory;

/// In a snapshot, and in the directory of a run that was saved: what its clients have of the execs' output.
pub(crate) const STREAMS: &str = "streams.json";

/// The execs of a machine that was saved.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Streams {
    /// The run's own command.
    pub(crate) main: String,
    /// Bytes of its output that its client has.
    pub(crate) stdout: u64,
    /// Bytes of its error output.
    pub(crate) stderr: u64,
    /// The others, whose clients are gone.
    pub(crate) others: Vec<String>,
    /// In a run's directory: the snapshot that this is true of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) snapshot: Option<String>,
}

/// How a machine begins.
#[derive(Debug)]
pub(super) struct Beginning {
    /// The number of its epoch.
    pub(super) epoch: u64,
    /// Its disk.
    pub(super) layers: Layers,
    /// What it goes on from; else it boots.
    pub(super) saved: Option<Saved>,
}

/// What a machine goes on from.
#[derive(Debug)]
pub(super) struct Saved {
    pub(super) machine: SavedMachine,
    /// What its network filter knew.
    pub(super) network: Option<PathBuf>,
    pub(super) streams: Streams,
    /// Whether another run went on from it, or may yet: this one is a copy.
    pub(super) copy: bool,
}

/// What is wrong with what a run is to go on from.
#[derive(Debug, thiserror::Error)]
pub(super) enum BeginError {
    #[error(transparent)]
    Home(#[from] HomeError),
    #[error(transparent)]
    Snapshot(#[from] snapshot::store::StoreError),
    #[error(transparent)]
    Machine(#[from] super::machine::MachineError),
    #[error(
        "its disk does not stand on snapshot {snapshot}, so that its memory cannot go on with it; --cold boots on the disk"
    )]
    Apart { snapshot: String },
}

impl Beginning {
    /// How this run's machine is to begin. With `cold` it boots, whatever was saved.
    pub(super) fn of(run: &RunDirectory, spec: &Spec, cold: bool) -> Result<Self, BeginError> {
        let state = run.state()?;
        let snapshots = Snapshots::open(run.home())?;
        let chain = Chain::read(&run.chain())?;
        let first = state.state == Phase::Starting;
        let from = if first { spec.from.as_ref() } else { state.saved.as_ref() };
        let saved = match from.filter(|_| !cold) {
            // Memory and disk are of one moment, or the file system in that memory would ruin the one on the disk.
            Some(id) if chain.top_snapshot() != Some(id) => return Err(BeginError::Apart { snapshot: id.clone() }),
            Some(id) => saved(run, &snapshots.find(id)?, first)?,
            None => None,
        };
        // What a start that did not get so far has written above the saved disk does not belong to the saved memory.
        let layers = layers(run, spec, &snapshots, &chain, first || saved.is_some())?;
        Ok(Self { epoch: state.epoch.saturating_add(1), layers, saved })
    }
}

/// The disk's layers. Those of the run's own are made if they are to be fresh.
fn layers(
    run: &RunDirectory,
    spec: &Spec,
    snapshots: &Snapshots,
    chain: &Chain,
    fresh: bool,
) -> Result<Layers, BeginError> {
    let mut there = Vec::new();
    let mut stems = Vec::new();
    for layer in &chain.layers {
        match layer {
            ChainLayer::Snapshot(id) => there.push(snapshots.find(id)?.layer()),
            ChainLayer::Own(stem) if fresh => stems.push(stem.clone()),
            ChainLayer::Own(stem) => there.push(own(run.path(), stem)),
        }
    }
    Ok(Layers::make(run.path(), there, &stems, spec.machine.disk, !spec.ephemeral)?)
}

/// What a snapshot of a machine holds; nothing if it is one of a disk alone.
fn saved(run: &RunDirectory, snapshot: &Snapshot, copy: bool) -> Result<Option<Saved>, BeginError> {
    let Some((state, memory)) = snapshot.machine() else { return Ok(None) };
    Ok(Some(Saved {
        machine: SavedMachine { state, memory },
        network: snapshot.network(),
        streams: streams(run, snapshot, copy)?,
        copy,
    }))
}

/// What clients have of the output of a machine that goes on from a snapshot.
fn streams(run: &RunDirectory, snapshot: &Snapshot, copy: bool) -> Result<Streams, HomeError> {
    // What its own client got after the machine had stopped, the run itself knows; unless it was written down when it was saved
    // another time.
    let own = read_json::<Streams>(&run.path().join(STREAMS));
    match own {
        Ok(own) if !copy && own.snapshot.as_deref() == Some(snapshot.id()) => Ok(own),
        _ => read_json(&snapshot.path(STREAMS)),
    }
}

#[cfg(test)]
mod tests {
    use snapshot::store::{Kind, Meta};

    use super::*;

    #[test]
    fn what_was_noted_of_another_snapshot_does_not_count() {
        let home = tempfile::tempdir().unwrap();
        let snapshots = Snapshots::open(home.path()).unwrap();
        let had = |stdout, snapshot| Streams { main: "main".into(), stdout, snapshot, ..Streams::default() };
        let make = |stdout| {
            let pending = snapshots.begin(None).unwrap();
            for file in ["state", "disk.data", "disk.map", "net.json", "spec.json", "memory"] {
                pending.write(file, b"x").unwrap();
            }
            pending.write(STREAMS, &serde_json::to_vec(&had(stdout, None)).unwrap()).unwrap();
            let (created, origin, image) = ("2026-12-01T00:00:00.000Z".into(), "8fc20000".into(), "busybox".into());
            let (kind, layers, epoch, vcpus) = (Kind::Full, Vec::new(), 1, 1);
            let meta = Meta { created, kind, origin, epoch, image, layers, disk_bytes: 4096, memory_bytes: 1, vcpus };
            pending.publish(meta).unwrap()
        };
        let (first, second) = (make(10), make(20));
        let directory = home.path().join("runs/8fc20000");
        std::fs::create_dir_all(&directory).unwrap();
        let run = RunDirectory::at(directory);
        let of = |snapshot, copy| streams(&run, snapshot, copy).unwrap().stdout;
        assert_eq!((of(&first, false), of(&second, false)), (10, 20));
        // Saved as the second one, its client got five bytes more afterwards. Back at the first one it has no more than there.
        run.write_streams(&had(25, Some(second.id().to_owned()))).unwrap();
        assert_eq!((of(&first, false), of(&second, false), of(&second, true)), (10, 25, 20));
    }
}
