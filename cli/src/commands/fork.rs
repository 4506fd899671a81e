//! `bulkhead fork` and the continuation of a run that was saved: machines go on from snapshots.

use std::fs::File;

use clap::Args;
use serde_json::json;
use snapshot::store::{Chain, ChainLayer, Depth, Snapshot, Snapshots};

use super::Format;
use super::launch::{Outcome, take_part, watch};
use super::resolve::check_host;
use super::run::Run;
use super::saved_spec::spec_from;
use super::snapshot::ask_for_snapshot;
use crate::events::Events;
use crate::home::Home;
use crate::image::progress::Progress;
use crate::spec::Spec;
use crate::store::{RunDirectory, Store, StoreError};
use crate::{FAILED, say};

/// `bulkhead fork`
#[derive(Debug, Args)]
#[command(
    after_help = "A run that is forked is saved first, and goes on. A copy has an id, a host name, a machine-id, random numbers \
                        and\nnetwork connections of its own; its command goes on where the other one was."
)]
pub(crate) struct Fork {
    /// A name for the new run, which is then kept when it ends; with -n, what the names begin with
    #[arg(long, value_parser = super::run::run_name)]
    name: Option<String>,
    /// Go on from what is good where the snapshot is damaged: its disk alone, or the snapshot before
    #[arg(long, value_enum, value_name = "WHAT")]
    fallback: Option<Fallback>,
    /// How many
    #[arg(short, long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u8).range(1..=64))]
    number: u8,
    /// Say nothing but results and errors
    #[arg(short, long)]
    quiet: bool,
    /// Id, unique beginning of an id, or name of a run or a snapshot
    #[arg(value_name = "RUN|SNAPSHOT")]
    from: String,
}

/// `bulkhead fork`: returns the exit status.
pub(crate) fn fork(args: &Fork) -> Result<u8, String> {
    let home = Home::find().map_err(|error| error.to_string())?;
    let store = Store::open(&home).map_err(|error| error.to_string())?;
    store.sweep().map_err(|error| error.to_string())?;
    let snapshots = Snapshots::open(home.path()).map_err(|error| error.to_string())?;
    let snapshot = snapshot_of(&store, &snapshots, &args.from, args.quiet)?;
    let Sound { snapshot, cold, instead } = sound(snapshot, args.fallback, args.quiet)?;
    if let Some(why) = &instead {
        say(&format!("{why}; going on from {}", if cold { "its disk" } else { snapshot.id() }));
    }
    if snapshot.is_imported() && !args.quiet {
        say(&format!(
            "snapshot {}: it was imported, so it reaches nothing here; bulkhead run --from with --allow gives it what it may",
            snapshot.id()
        ));
    }
    let make = |number| {
        let name =
            args.name.as_ref().map(|name| if args.number == 1 { name.clone() } else { format!("{name}-{number}") });
        let mut spec = spec_from(&home, &snapshot, name)?;
        check_host(&spec).map_err(|error| format!("cannot fork {}: {error}", args.from))?;
        let (directory, lock) = create(&store, &snapshots, &snapshot, &mut spec)?;
        note_fallback(&directory, &spec, &snapshot, cold, instead.as_deref());
        Ok(Created { directory, lock, spec })
    };
    let mut runs = Vec::new();
    for number in 1..=args.number {
        match make(number) {
            Ok(run) => runs.push(run),
            Err(error) => {
                // None of them has started: what remains of them says nothing to anyone.
                runs.iter().for_each(|run: &Created| drop(run.directory.remove()));
                return Err(error);
            }
        }
    }
    match <[Created; 1]>::try_from(runs) {
        Ok([run]) => {
            let mut outcome = Outcome { name: run.spec.name.clone(), ..Outcome::default() };
            if let Err(error) = take_part(&store, &run.directory, &run.spec, run.lock, cold, &mut outcome) {
                (outcome.exit_code, outcome.error) = (FAILED, Some(error));
            }
            outcome.tell(Format::Table, args.quiet)
        }
        Err(many) => together(&store, many, cold),
    }
}

/// Writes into a run's log that it does not go on from what was meant.
pub(super) fn note_fallback(
    directory: &RunDirectory,
    spec: &Spec,
    snapshot: &Snapshot,
    cold: bool,
    instead: Option<&str>,
) {
    let Some(why) = instead else { return };
    let event = json!({ "why": why, "snapshot": snapshot.id(), "disk_alone": cold });
    if let Ok(events) = Events::open(directory.path(), !spec.ephemeral) {
        events.add("snapshot.fallback", event);
    }
}

/// A run that has a directory.
struct Created {
    directory: RunDirectory,
    lock: File,
    spec: Spec,
}

/// Takes part in several runs at once: each line of theirs says whose it is. The exit status is the greatest.
fn together(store: &Store, runs: Vec<Created>, cold: bool) -> Result<u8, String> {
    std::thread::scope(|scope| {
        let watch = |run: Created| {
            move || match watch(store, &run.directory, &run.spec, run.lock, cold) {
                Ok(exit) => {
                    exit.error.iter().chain(&exit.notes).for_each(|text| say(text));
                    exit.code
                }
                Err(error) => {
                    say(&error);
                    FAILED
                }
            }
        };
        let threads: Vec<_> = runs.into_iter().map(|run| scope.spawn(watch(run))).collect();
        let codes = threads.into_iter().map(|thread| thread.join().unwrap_or(FAILED));
        Ok(codes.max().unwrap_or(FAILED))
    })
}

/// The snapshot that is meant: one, or that of a run that was saved, or one that is taken now of a run that goes on.
fn snapshot_of(store: &Store, snapshots: &Snapshots, given: &str, quiet: bool) -> Result<Snapshot, String> {
    let run = match store.find(given) {
        Ok(run) => run,
        Err(StoreError::Unknown(_)) => {
            return snapshots.find(given).map_err(|error| format!("{given:?} is no run; {error}"));
        }
        Err(error) => return Err(error.to_string()),
    };
    let id = match &run.state.saved {
        Some(id) => id.clone(),
        None if run.state.is_live() => ask_for_snapshot(given, None, false, quiet)?,
        None => {
            let why = "it ended, and was not saved; fork one of its snapshots (bulkhead snapshot list)";
            return Err(format!("run {}: {why}", run.spec.id));
        }
    };
    snapshots.find(&id).map_err(|error| error.to_string())
}

/// Hashes what was not hashed yet.
pub(super) fn verify(snapshot: &Snapshot, quiet: bool) -> Result<(), String> {
    let mut progress = Progress::new("verifying", None, quiet);
    snapshot.verify(Depth::IfNeeded, &mut |bytes| progress.add(bytes)).map_err(|error| error.to_string())
}

/// What to go on from when a snapshot is damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Fallback {
    // The saved disk, booted afresh: what was in memory is lost.
    Disk,
    // The snapshot before: what was done since is lost.
    Parent,
}

/// What a run goes on from.
pub(super) struct Sound {
    pub(super) snapshot: Snapshot,
    /// Whether it boots on the disk.
    pub(super) cold: bool,
    /// What is wrong with the one that was meant, if this is another way.
    pub(super) instead: Option<String>,
}

/// Hashes a snapshot, and falls back on what is good as far as that is allowed.
pub(super) fn sound(snapshot: Snapshot, fallback: Option<Fallback>, quiet: bool) -> Result<Sound, String> {
    let Err(why) = verify(&snapshot, quiet) else { return Ok(Sound { snapshot, cold: false, instead: None }) };
    match fallback {
        None => Err(format!(
            "{why}\n--fallback=disk would boot on its disk, if that is good, and lose what was in memory; \
             --fallback=parent would go on from the snapshot before, if there is a good one, and lose what was done since"
        )),
        Some(Fallback::Disk) => {
            let mut progress = Progress::new("verifying", None, quiet);
            match snapshot.verify_disk(Depth::Always, &mut |bytes| progress.add(bytes)) {
                Ok(()) => Ok(Sound { snapshot, cold: true, instead: Some(why) }),
                Err(error) => Err(format!("{why}; and its disk is no better: {error}")),
            }
        }
        Some(Fallback::Parent) => match snapshot.parent() {
            Ok(Some(parent)) => {
                let parent = sound(parent, fallback, quiet).map_err(|error| format!("{why}; and {error}"))?;
                Ok(Sound { instead: Some(why), ..parent })
            }
            Ok(None) => Err(format!("{why}; and there is no snapshot before it")),
            Err(error) => Err(format!("{why}; and the one before: {error}")),
        },
    }
}

/// Makes the directory of a run that goes on from a snapshot, which from then on cannot be removed.
pub(super) fn create(
    store: &Store,
    snapshots: &Snapshots,
    snapshot: &Snapshot,
    spec: &mut Spec,
) -> Result<(RunDirectory, File), String> {
    let text = |error: &dyn std::fmt::Display| format!("snapshot {}: {error}", snapshot.id());
    let _held = snapshots.hold(snapshot).map_err(|error| text(&error))?;
    let manifest = snapshot.manifest();
    let below = manifest.layers.iter().map(String::as_str).chain([snapshot.id()]);
    let mut layers: Vec<_> = below.map(|id| ChainLayer::Snapshot(id.to_owned())).collect();
    layers.push(ChainLayer::Own("1".to_owned()));
    store.create(spec, &Chain { layers }, manifest.epoch).map_err(|error| text(&error))
}

/// What `run --from` is: the saved machine, with what the command line says beside it.
pub(super) fn run_from(
    args: &Run,
    home: &Home,
    snapshot: &Snapshot,
    command: &[String],
) -> Result<Spec, Box<dyn std::error::Error>> {
    let mut spec = spec_from(home, snapshot, args.name.clone())?;
    let asked = super::resolve::beside(args, spec.process.workdir.as_deref())?;
    spec.ephemeral = args.rm || args.name.is_none();
    spec.labels.extend(args.labels.iter().cloned());
    (spec.ports, spec.inputs, spec.artifacts) = (args.ports.clone(), asked.inputs, asked.artifacts);
    if args.network.is_given() {
        spec.network.policy = args.network.compile()?;
    }
    spec.start_timeout_ms = asked.start_timeout_ms;
    (spec.timeout_ms, spec.snapshot_every_ms) = (asked.timeout_ms, asked.snapshot_every_ms);
    let process = &mut spec.process;
    process.env = crate::environment::merge(&process.env, &args.process.environment()?);
    process.workdir = args.process.workdir.clone().or(process.workdir.take());
    process.user = args.process.user.clone().or(process.user.take());
    if !command.is_empty() || snapshot.machine().is_none() {
        spec.another_command = true;
        (process.stdin, process.tty, process.term) =
            (args.process.interactive, args.process.tty, crate::terminal::kind());
    }
    if !command.is_empty() {
        process.command = command.to_vec();
    }
    if process.command.is_empty() {
        return Err("the snapshot has no command; give one".into());
    }
    Ok(spec)
}
