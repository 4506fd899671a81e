//! Saving a run's machine as a snapshot.
//!
//! The machine is stopped while its state and memory are written and its disk is cut; what follows, from the hard links
//! of the frozen layer to the hashes, happens while it goes on. The run's disk is at every moment what its chain says.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use guest::message::printable;
use serde_json::json;
use snapshot::store::{Chain, ChainLayer, Kind, Meta, Pending, Snapshot, Snapshots};
use vmm_control::{Event, MAX_LAYERS, Request};

use super::Happening;
use super::begin::{STREAMS, Streams};
use super::layers::{self, own};
use super::serve::Shared;
use crate::clock;
use crate::store::RunDirectory;

/// What a machine was written to, before anyone may use it.
struct Written {
    pending: Pending,
    streams: Streams,
    /// The chain with the new live layer.
    chain: Chain,
    /// The layer that is frozen now.
    frozen: String,
}

/// Why the machine was not written; it is as it was.
type Failed = String;

impl Shared {
    /// Saves the machine and gives the snapshot's id. It then goes on, if it did before.
    pub(super) fn save(&self, name: Option<&str>) -> Result<String, Failed> {
        let _turn = self.epochs.turn()?;
        self.save_in_turn(name, true)
    }

    fn save_in_turn(&self, name: Option<&str>, goes_on: bool) -> Result<String, Failed> {
        // Nothing could go on from what has not begun.
        self.main_exec().ok_or("its command has not started yet; try again in a moment")?;
        let text = |error: snapshot::store::StoreError| error.to_string();
        let snapshots = Snapshots::open(self.run.home()).map_err(text)?;
        let settled = settle(&snapshots, &self.run, &self.spec_now()?, |below| self.meta(Kind::Disk, below));
        settled.map_err(|error| format!("what an earlier save has left: {error}"))?;
        let was_paused = self.epochs.is_paused();
        let begun = Instant::now();
        let passing = (goes_on && !was_paused).then(|| self.epochs.pass());
        if !was_paused {
            self.stop_machine()?;
        }
        let stopped = Instant::now();
        let written = self.write(&snapshots, name);
        let guest_stop = stopped.elapsed();
        let (written, went_on) = match written {
            Err(why) if was_paused => return Err(why),
            Err(why) => return Err(self.go_on_after(why)),
            Ok(written) if goes_on && !was_paused => (written, self.start_machine(self.epochs.number())),
            Ok(written) => (written, Ok(())),
        };
        drop(passing);
        let workload_stop = begun.elapsed();
        // What was to end with its snapshot goes on without one, and is not left standing.
        let or_go_on = |why| if goes_on || was_paused { why } else { self.go_on_after(why) };
        let snapshot = self.publish(written).map_err(or_go_on)?;
        let id = snapshot.id().to_owned();
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let times =
            json!({ "snapshot": id, "guest_stop_us": micros(guest_stop), "workload_stop_us": micros(workload_stop) });
        self.events.add("snapshot.published", times);
        snapshot.seal(&mut |_| ()).map_err(text).map_err(or_go_on)?;
        self.events.add("snapshot.saved", json!({ "snapshot": id }));
        went_on.map_err(|why| format!("saved as snapshot {id}, but {why}"))?;
        Ok(id)
    }

    /// Saves the machine again and again, until it has ended. One that fails is in the event log; the next one is tried.
    pub(super) fn save_every(&self, time: Duration) {
        loop {
            std::thread::sleep(time);
            if self.epochs.has_ended() {
                return;
            }
            // One that stands still has been saved as it is, or can be.
            if !self.epochs.is_paused()
                && let Err(why) = self.save(None)
                && !self.epochs.has_ended()
            {
                self.events.add("snapshot.failed", json!({ "why": why }));
            }
        }
    }

    /// Saves the machine, and ends the run's processes: it goes on from the snapshot.
    pub(super) fn save_and_end(&self, name: Option<&str>) -> Result<String, Failed> {
        // Until the end is under way: resumed in between, it would run past what was saved.
        let _turn = self.epochs.turn()?;
        let id = self.save_in_turn(name, false)?;
        self.tell_main(|done| Happening::Saved { snapshot: id.clone(), done })?;
        Ok(id)
    }

    /// Writes the stopped machine's state and memory, and cuts its disk.
    fn write(&self, snapshots: &Snapshots, name: Option<&str>) -> Result<Written, Failed> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let chain = Chain::read(&self.run.chain()).map_err(|error| text(&error))?;
        let Some((ChainLayer::Own(frozen), below)) = chain.layers.split_last() else {
            return Err("its disk has no layer of its own".to_owned());
        };
        if below.iter().any(|layer| matches!(layer, ChainLayer::Own(_))) {
            return Err("its disk has more than one layer of its own, which a snapshot cannot hold".to_owned());
        }
        if chain.layers.len().saturating_add(2) >= MAX_LAYERS {
            return Err(format!(
                "its disk has {} layers, as many as may be; flatten the snapshot that it began with (bulkhead snapshot \
                 flatten), and start from that",
                chain.layers.len()
            ));
        }
        let frozen = frozen.clone();
        let pending = snapshots.begin(name).map_err(|error| text(&error))?;
        let stem = frozen.parse::<u64>().unwrap_or(0).saturating_add(1).to_string();
        let live = own(self.run.path(), &stem);
        let durable = !self.spec.ephemeral;
        let layer = layers::make(&live, self.spec.machine.disk, durable).map_err(|error| text(&error))?;
        let mut longer = chain.clone();
        longer.layers.push(ChainLayer::Own(stem));
        let saved = longer
            .write(&self.run.chain())
            .map_err(|error| text(&error))
            .and_then(|()| self.write_files(&pending, &own(self.run.path(), &frozen), &layer));
        match saved {
            // After the machine: what its guest was told to have arrived is surely counted.
            Ok(()) => Ok(Written { pending, streams: self.streams(), chain: longer, frozen }),
            Err(why) => {
                // An empty layer more would not change the disk.
                if chain.write(&self.run.chain()).is_ok() {
                    remove_layer(&live);
                }
                Err(why)
            }
        }
    }

    /// The machine last: whatever fails before, its disk is not cut, and the new layer is of no use. After it nothing may fail,
    /// for the disk goes on in that layer.
    fn write_files(&self, pending: &Pending, frozen: &Path, layer: &(File, File)) -> Result<(), Failed> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let create = |name| pending.create(name).map_err(|error| text(&error));
        let (state, memory, network) = (create("state")?, create("memory")?, create("net.json")?);
        self.network.save(network.as_fd())?;
        pending.write("spec.json", &self.spec_now()?).map_err(|error| text(&error))?;
        // The layer that is about to be frozen: where it cannot be taken in, nothing is cut.
        pending.link_disk(frozen, &frozen.with_extension("map")).map_err(|error| text(&error))?;
        let pagemap = self.epochs.pagemap().map_err(|error| format!("its VMM's page map: {error}"))?;
        let files: [BorrowedFd<'_>; 5] =
            [state.as_fd(), memory.as_fd(), pagemap.as_fd(), layer.0.as_fd(), layer.1.as_fd()];
        self.epochs.ask(&Request::Save, &files, None, |event| match event {
            Event::Saved(_) => Some(Ok(())),
            Event::SaveFailed { error } => Some(Err(printable(&error))),
            _ => None,
        })?
    }

    /// The spec with the policy that is in force.
    fn spec_now(&self) -> Result<Vec<u8>, Failed> {
        let mut spec = self.spec.clone();
        if let Some(set) = self.run.policy().map_err(|error| error.to_string())? {
            spec.network.policy = set.policy;
        }
        serde_json::to_vec_pretty(&spec).map_err(|error| error.to_string())
    }

    /// Of a snapshot that is taken now, on the disk layers of others.
    fn meta(&self, kind: Kind, layers: Vec<String>) -> Meta {
        let machine = &self.spec.machine;
        Meta {
            created: clock::now(),
            kind,
            origin: self.spec.id.clone(),
            epoch: self.epochs.number(),
            image: machine.image.clone(),
            layers,
            disk_bytes: machine.disk,
            memory_bytes: machine.memory,
            vcpus: machine.cpus,
        }
    }

    /// What the clients have of the execs' output.
    pub(super) fn streams(&self) -> Streams {
        let main = self.main_exec();
        let (stdout, stderr) = main.as_ref().map_or((0, 0), |exec| exec.passed());
        let main = main.map_or_else(String::new, |exec| exec.id().to_owned());
        Streams { main, stdout, stderr, others: self.opened(), snapshot: None }
    }

    /// Makes a snapshot of what was written, and has the run's disk stand on it.
    fn publish(&self, written: Written) -> Result<Snapshot, Failed> {
        let text = |error: snapshot::store::StoreError| error.to_string();
        let Written { pending, streams, chain, frozen } = written;
        let data = own(self.run.path(), &frozen);
        let streams = serde_json::to_vec(&streams).map_err(|error| error.to_string())?;
        pending.write(STREAMS, &streams).map_err(text)?;
        let below = chain.layers.iter().filter_map(|layer| match layer {
            ChainLayer::Snapshot(id) => Some(id.clone()),
            ChainLayer::Own(_) => None,
        });
        let snapshot = pending.publish(self.meta(Kind::Full, below.collect())).map_err(text)?;
        // The run's disk now stands on the snapshot's layer, which is the same file.
        let moved = |layer: ChainLayer| match layer {
            ChainLayer::Own(stem) if stem == frozen => ChainLayer::Snapshot(snapshot.id().to_owned()),
            other => other,
        };
        let chain = Chain { layers: chain.layers.into_iter().map(moved).collect() };
        if chain.write(&self.run.chain()).is_ok() {
            remove_layer(&data);
        }
        Ok(snapshot)
    }
}

/// Has each layer of the run's own but the last, which a save that did not come to its end has left frozen, be a snapshot's: a
/// machine is saved with one layer.
fn settle(
    snapshots: &Snapshots,
    run: &RunDirectory,
    spec: &[u8],
    meta: impl Fn(Vec<String>) -> Meta,
) -> Result<(), snapshot::store::StoreError> {
    let mut chain = Chain::read(&run.chain())?;
    let last = chain.layers.len().saturating_sub(1);
    let mut below = Vec::new();
    for position in 0..last {
        let stem = match chain.layers.get(position) {
            Some(ChainLayer::Own(stem)) => stem.clone(),
            Some(ChainLayer::Snapshot(id)) => {
                below.push(id.clone());
                continue;
            }
            None => break,
        };
        let data = own(run.path(), &stem);
        let pending = snapshots.begin(None)?;
        pending.link_disk(&data, &data.with_extension("map"))?;
        pending.write("spec.json", spec)?;
        let snapshot = pending.publish(meta(below.clone()))?;
        snapshot.seal(&mut |_| ())?;
        if let Some(layer) = chain.layers.get_mut(position) {
            *layer = ChainLayer::Snapshot(snapshot.id().to_owned());
        }
        chain.write(&run.chain())?;
        remove_layer(&data);
        below.push(snapshot.id().to_owned());
    }
    Ok(())
}

fn remove_layer(data: &PathBuf) {
    let _ = std::fs::remove_file(data);
    let _ = std::fs::remove_file(data.with_extension("map"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_failed_save_has_frozen_becomes_a_snapshot() {
        let home = tempfile::tempdir().unwrap();
        let snapshots = Snapshots::open(home.path()).unwrap();
        let run = RunDirectory::at(home.path().join("runs/8fc20000"));
        std::fs::create_dir_all(run.path().join("disk")).unwrap();
        let mut layers = Vec::new();
        for stem in ["1", "2", "3"] {
            layers::make(&own(&run.path().canonicalize().unwrap(), stem), 1 << 20, false).unwrap();
            layers.push(ChainLayer::Own(stem.to_owned()));
        }
        Chain { layers }.write(&run.chain()).unwrap();
        let meta = |layers| {
            let (created, origin, image) = ("2026-12-01T00:00:00.000Z".into(), "8fc20000".into(), "busybox".into());
            let (kind, epoch, vcpus) = (Kind::Disk, 1, 1);
            Meta { created, kind, origin, epoch, image, layers, disk_bytes: 1 << 20, memory_bytes: 1, vcpus }
        };
        // Twice: nothing is left to do.
        for _ in 0..2 {
            settle(&snapshots, &run, b"{}", meta).unwrap();
        }
        let chain = Chain::read(&run.chain()).unwrap();
        let [ChainLayer::Snapshot(first), ChainLayer::Snapshot(second), ChainLayer::Own(top)] = chain.layers.as_slice()
        else {
            panic!("{chain:?}")
        };
        assert_eq!((top.as_str(), snapshots.list().unwrap().len()), ("3", 2));
        assert_eq!(snapshots.find(second).unwrap().manifest().layers.as_slice(), std::slice::from_ref(first));
        assert!(!own(run.path(), "1").exists() && !own(run.path(), "2").exists() && own(run.path(), "3").exists());
    }
}
