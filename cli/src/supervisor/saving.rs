//! Saving a run's machine as a snapshot.
//!
//! The files are made and the layer that is about to be frozen is taken in while the machine still runs. It is then stopped while
//! its state is taken and its disk is cut; it goes on while its memory is written, or stands still until that is done. What follows, up
//! to the hashes, happens while it goes on in any case. The run's disk is at every moment what its chain says.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use guest::message::printable;
use rustix::fs::OFlags;
use serde_json::{Value, json};
use snapshot::store::{Chain, ChainLayer, Kind, Meta, Pending, Snapshot, Snapshots};
use vmm_control::{Event, MAX_LAYERS, Request, Standstill};

use super::Happening;
use super::begin::{STREAMS, Streams};
use super::epochs::LOOK;
use super::layers::{self, own};
use super::machine::open_plainly;
use super::serve::Shared;
use crate::clock;
use crate::frame::Stage;
use crate::store::RunDirectory;

/// How the machine is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Manner {
    /// It goes on while its memory is written. One that is paused stands still, as it does.
    Live,
    /// It stands still until its memory is written.
    Still,
    /// It stands still, and ends.
    Ends,
}

/// Why nothing was saved.
type Failed = String;

/// What a machine is about to be written to.
struct Prepared<'a> {
    pending: Pending,
    layer: NewLayer<'a>,
    files: [File; 5],
    network: File,
}

/// A layer that the disk will go on in. Dropped before it does, it leaves the disk as it was.
struct NewLayer<'a> {
    run: &'a RunDirectory,
    before: Chain,
    /// The chain with the new layer.
    chain: Chain,
    /// The layer that is frozen then.
    frozen: String,
    /// The new layer's data.
    live: PathBuf,
    /// Whether the disk goes on in it, or may.
    used: bool,
}

impl Drop for NewLayer<'_> {
    fn drop(&mut self) {
        // An empty layer more would not change the disk.
        if !self.used && self.before.write(&self.run.chain()).is_ok() {
            remove_layer(&self.live);
        }
    }
}

/// How long something stood still, and in detail where that is known.
struct Stops {
    guest: Duration,
    workload: Duration,
    parts: Option<Standstill>,
}

impl Stops {
    fn json(&self, snapshot: &str) -> Value {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let (guest, workload) = (micros(self.guest), micros(self.workload));
        let mut data = json!({ "snapshot": snapshot, "guest_stop_us": guest, "workload_stop_us": workload });
        if let (Some(data), Some(parts)) = (data.as_object_mut(), self.parts) {
            data.insert("guest_stop_ns".into(), json!(parts));
        }
        data
    }
}

impl Shared {
    /// Saves the machine and gives the snapshot's id. It then goes on, if it did before. `tell` hears how far it is.
    pub(super) fn save(&self, name: Option<&str>, manner: Manner, tell: &dyn Fn(Stage)) -> Result<String, Failed> {
        let _turn = self.epochs.turn()?;
        self.save_in_turn(name, manner, tell)
    }

    fn save_in_turn(&self, name: Option<&str>, manner: Manner, tell: &dyn Fn(Stage)) -> Result<String, Failed> {
        // Nothing could go on from what has not begun.
        self.main_exec().ok_or("its command has not started yet; try again in a moment")?;
        let text = |error: snapshot::store::StoreError| error.to_string();
        let snapshots = Snapshots::open(self.run.home()).map_err(text)?;
        let settled = settle(&snapshots, &self.run, &self.spec_now()?, |below| self.meta(Kind::Disk, below));
        settled.map_err(|error| format!("what an earlier save has left: {error}"))?;
        let was_paused = self.epochs.is_paused();
        let prepared = self.prepare(&snapshots, name)?;
        let (snapshot, went_on) = if manner == Manner::Live && !was_paused {
            self.save_live(prepared, tell)?
        } else {
            self.save_still(prepared, was_paused, manner == Manner::Ends, tell)?
        };
        // What was to end with its snapshot goes on without one, and is not left standing.
        let or_go_on = |why| if manner != Manner::Ends || was_paused { why } else { self.go_on_after(why) };
        let id = snapshot.id().to_owned();
        let (mut done, mut told) = (0u64, Instant::now());
        let sealed = snapshot.seal(&mut |bytes| {
            done = done.saturating_add(bytes);
            if told.elapsed() >= LOOK {
                told = Instant::now();
                tell(Stage::Hashing { done });
            }
        });
        sealed.map_err(text).map_err(or_go_on)?;
        self.events.add("snapshot.saved", json!({ "snapshot": id }));
        went_on.map_err(|why| format!("saved as snapshot {id}, but {why}"))?;
        Ok(id)
    }

    /// Saves a machine that goes on while its memory is written: whether it did comes beside the snapshot.
    fn save_live(
        &self,
        prepared: Prepared<'_>,
        tell: &dyn Fn(Stage),
    ) -> Result<(Snapshot, Result<(), String>), Failed> {
        let Prepared { pending, mut layer, files, network } = prepared;
        let [_, memory, ..] = &files;
        let room = self.epochs.make_room(&self.spec.machine, memory)?;
        let begun = Instant::now();
        let passing = self.epochs.pass();
        self.stop_machine()?;
        // The agent that is saved has not sent more than it is asked for when it goes on, and has let go of no more: while it stands still,
        // nothing of either reaches it.
        let streams = self.streams();
        // While the guest stands still: what its connections have come to is part of what is saved.
        let taken = self.network.save(network.as_fd()).and_then(|()| {
            let _put_forward = self.epochs.put_forward()?;
            let asked = self.epochs.begin_to_ask(&Request::SaveLive, &files.each_ref().map(File::as_fd))?;
            // Until it is known that the disk does not go on in the new layer, it may.
            layer.used = true;
            let taken = asked.wait_for_save(
                || (),
                |event| match event {
                    Event::Taken(parts) => Some(Ok(parts)),
                    Event::SaveFailed { error } => Some(Err(printable(&error))),
                    _ => None,
                },
            )?;
            layer.used = taken.is_ok();
            Ok((asked, taken?))
        });
        let (asked, parts) = match taken {
            Ok(taken) => taken,
            Err(why) => return Err(self.go_on_after(why)),
        };
        let went_on = self.thaw(self.epochs.number());
        drop(passing);
        let stops = Stops { guest: Duration::from_nanos(parts.total()), workload: begun.elapsed(), parts: Some(parts) };
        self.events.add("snapshot.taken", stops.json(pending.id()));
        let written = asked.wait_for_save(|| self.tell_written(&files, tell), of_the_save);
        let written = written.and_then(|written| written);
        drop((asked, files));
        let snapshot = match written {
            Ok(()) => self.publish(pending, &streams, &layer),
            Err(why) => {
                drop(pending);
                // What the kernel may have killed was the copy.
                if let Some(limit) = self.epochs.limit.as_ref().filter(|_| !self.epochs.has_ended()) {
                    limit.excuse_killings();
                }
                Err(why)
            }
        };
        // When what was written is on the medium, or gone: what is not takes room.
        drop(room);
        let snapshot = snapshot.map_err(|why| match &went_on {
            Ok(()) => why,
            Err(also) => format!("{why}; and {also}"),
        })?;
        self.events.add("snapshot.published", stops.json(snapshot.id()));
        Ok((snapshot, went_on))
    }

    /// Saves a machine that stands still until its memory is written.
    fn save_still(
        &self,
        prepared: Prepared<'_>,
        was_paused: bool,
        ends: bool,
        tell: &dyn Fn(Stage),
    ) -> Result<(Snapshot, Result<(), String>), Failed> {
        let Prepared { pending, mut layer, files, network } = prepared;
        let begun = Instant::now();
        let passing = (!ends && !was_paused).then(|| self.epochs.pass());
        if !was_paused {
            self.stop_machine()?;
        }
        let stopped = Instant::now();
        let written = self.network.save(network.as_fd()).and_then(|()| {
            let asked = self.epochs.begin_to_ask(&Request::Save, &files.each_ref().map(File::as_fd))?;
            // Until it is known that the disk does not go on in the new layer, it may.
            layer.used = true;
            let written = asked.wait_for_save(|| self.tell_written(&files, tell), of_the_save)?;
            layer.used = written.is_ok();
            written
        });
        let guest = stopped.elapsed();
        let went_on = match written {
            Err(why) if was_paused => return Err(why),
            Err(why) => return Err(self.go_on_after(why)),
            Ok(()) => {
                if was_paused || ends {
                    None
                } else {
                    Some(())
                }
            }
        };
        // After the machine: what its guest was told to have arrived is surely counted.
        let streams = self.streams();
        let went_on = went_on.map_or(Ok(()), |()| self.start_machine(self.epochs.number()));
        drop(passing);
        let stops = Stops { guest, workload: begun.elapsed(), parts: None };
        let snapshot = self.publish(pending, &streams, &layer);
        let snapshot = snapshot.map_err(|why| if ends && !was_paused { self.go_on_after(why) } else { why })?;
        self.events.add("snapshot.published", stops.json(snapshot.id()));
        Ok((snapshot, went_on))
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
                && let Err(why) = self.save(None, Manner::Live, &|_| ())
                && !self.epochs.has_ended()
            {
                self.events.add("snapshot.failed", json!({ "why": why }));
            }
        }
    }

    /// Saves the machine, and ends the run's processes: it goes on from the snapshot.
    pub(super) fn save_and_end(&self, name: Option<&str>, tell: &dyn Fn(Stage)) -> Result<String, Failed> {
        // Until the end is under way: resumed in between, it would run past what was saved.
        let _turn = self.epochs.turn()?;
        let id = self.save_in_turn(name, Manner::Ends, tell)?;
        self.tell_main(|done| Happening::Saved { snapshot: id.clone(), done })?;
        Ok(id)
    }

    /// Tells how much of the machine's state and memory is in their files.
    fn tell_written(&self, files: &[File], tell: &dyn Fn(Stage)) {
        let blocks = |file: &File| file.metadata().map_or(0, |meta| meta.blocks());
        let done = files.iter().take(2).map(blocks).fold(0, u64::saturating_add).saturating_mul(512);
        tell(Stage::Writing { done, total: self.spec.machine.memory });
    }

    /// Makes what the machine is about to be written to.
    fn prepare(&self, snapshots: &Snapshots, name: Option<&str>) -> Result<Prepared<'_>, Failed> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let before = Chain::read(&self.run.chain()).map_err(|error| text(&error))?;
        let Some((ChainLayer::Own(frozen), below)) = before.layers.split_last() else {
            return Err("its disk has no layer of its own".to_owned());
        };
        if below.iter().any(|layer| matches!(layer, ChainLayer::Own(_))) {
            return Err("its disk has more than one layer of its own, which a snapshot cannot hold".to_owned());
        }
        if before.layers.len().saturating_add(2) >= MAX_LAYERS {
            return Err(format!(
                "its disk has {} layers, as many as may be; flatten the snapshot that it began with (bulkhead snapshot \
                 flatten), and start from that",
                before.layers.len()
            ));
        }
        let frozen = frozen.clone();
        let pending = snapshots.begin(name).map_err(|error| text(&error))?;
        let create = |name| pending.create(name).map_err(|error| text(&error));
        let (state, memory, network) = (create("state")?, create("memory")?, create("net.json")?);
        pending.write("spec.json", &self.spec_now()?).map_err(|error| text(&error))?;
        // The layer that is about to be frozen: where it cannot be taken in, nothing is cut.
        let data = own(self.run.path(), &frozen);
        pending.link_disk(&data, &data.with_extension("map")).map_err(|error| text(&error))?;
        // What is on its way to the medium now is not when the machine stands still.
        let synced = open_plainly(&data, OFlags::RDONLY).and_then(|file| File::from(file).sync_data());
        synced.map_err(|error| format!("{}: {error}", data.display()))?;
        let pagemap = self.epochs.pages.open().map_err(|error| format!("its VMM's page map: {error}"))?;
        let stem = frozen.parse::<u64>().unwrap_or(0).saturating_add(1).to_string();
        let live = own(self.run.path(), &stem);
        let durable = !self.spec.ephemeral;
        let (data, map) = layers::make(&live, self.spec.machine.disk, durable).map_err(|error| text(&error))?;
        let mut chain = before.clone();
        chain.layers.push(ChainLayer::Own(stem));
        let layer = NewLayer { run: &self.run, before, chain, frozen, live, used: false };
        layer.chain.write(&self.run.chain()).map_err(|error| text(&error))?;
        Ok(Prepared { pending, layer, files: [state, memory, pagemap, data, map], network })
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
    fn publish(&self, pending: Pending, streams: &Streams, layer: &NewLayer<'_>) -> Result<Snapshot, Failed> {
        let text = |error: snapshot::store::StoreError| error.to_string();
        let NewLayer { chain, frozen, .. } = layer;
        let streams = serde_json::to_vec(streams).map_err(|error| error.to_string())?;
        pending.write(STREAMS, &streams).map_err(text)?;
        let below = chain.layers.iter().filter_map(|layer| match layer {
            ChainLayer::Snapshot(id) => Some(id.clone()),
            ChainLayer::Own(_) => None,
        });
        let snapshot = pending.publish(self.meta(Kind::Full, below.collect())).map_err(text)?;
        // The run's disk now stands on the snapshot's layer, which is the same file.
        let moved = |layer: &ChainLayer| match layer {
            ChainLayer::Own(stem) if stem == frozen => ChainLayer::Snapshot(snapshot.id().to_owned()),
            other => other.clone(),
        };
        let chain = Chain { layers: chain.layers.iter().map(moved).collect() };
        if chain.write(&self.run.chain()).is_ok() {
            remove_layer(&own(self.run.path(), frozen));
        }
        Ok(snapshot)
    }
}

/// What the VMM says of a save at its end.
fn of_the_save(event: Event) -> Option<Result<(), Failed>> {
    match event {
        Event::Saved(_) => Some(Ok(())),
        Event::SaveFailed { error } => Some(Err(printable(&error))),
        _ => None,
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

fn remove_layer(data: &Path) {
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
