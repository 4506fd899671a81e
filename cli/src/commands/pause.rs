//! `bulkhead pause` and `bulkhead resume`.

use clap::Args;
use snapshot::store::Snapshots;

use super::fork::{Fallback, Sound, note_fallback, sound};
use super::launch::{Outcome, take_part};
use super::process::check_terminal_for;
use super::resolve::check_host;
use super::{Format, open_store, order};
use crate::frame::Request;
use crate::home::Home;
use crate::{FAILED, say};

/// `bulkhead pause`
#[derive(Debug, Args)]
pub(crate) struct Pause {
    /// Save the machine as a snapshot, and free its memory and CPUs
    #[arg(long)]
    save: bool,
    /// A name for the snapshot
    #[arg(long, requires = "save", value_parser = super::run::run_name)]
    name: Option<String>,
    /// Id, unique beginning of an id, or name
    run: String,
}

/// `bulkhead resume`
#[derive(Debug, Args)]
#[command(
    after_help = "A run that was paused goes on exactly where it was. One that was saved (pause --save) does so with this client                         as its\nown. With --cold it boots again, on the disk that it left, and runs its command from the beginning."
)]
pub(crate) struct Resume {
    /// Boot again on the disk that the run left, whether its machine was saved or not
    #[arg(long)]
    cold: bool,
    /// Go on from what is good where the snapshot is damaged: its disk alone, or the snapshot before
    #[arg(long, value_enum, value_name = "WHAT", conflicts_with = "cold")]
    fallback: Option<Fallback>,
    /// Say nothing but results and errors
    #[arg(short, long)]
    quiet: bool,
    /// Id, unique beginning of an id, or name
    run: String,
}

/// `bulkhead pause`: returns the exit status.
pub(crate) fn pause(args: &Pause) -> Result<u8, String> {
    order(&args.run, Request::Pause { save: args.save, name: args.name.clone() })
}

/// `bulkhead resume`: returns the exit status.
pub(crate) fn resume(args: &Resume) -> Result<u8, String> {
    let store = open_store()?;
    let run = store.find(&args.run).map_err(|error| error.to_string())?;
    let id = &run.spec.id;
    if run.state.is_live() {
        return if args.cold {
            Err(format!("run {id}: it is {}; --cold is for a run that has no machine", run.state.state))
        } else {
            order(&args.run, Request::Resume)
        };
    }
    if run.state.epoch == 0 {
        return Err(format!("run {id}: it never started; remove it (bulkhead rm {id})"));
    }
    let sound = match (&run.state.saved, args.cold) {
        (Some(snapshot), false) => {
            let home = Home::find().map_err(|error| error.to_string())?;
            let snapshots = Snapshots::open(home.path()).map_err(|error| error.to_string())?;
            let snapshot = snapshots.find(snapshot).map_err(|error| format!("run {id}: {error}"))?;
            Some(sound(snapshot, args.fallback, args.quiet).map_err(|error| format!("run {id}: {error}"))?)
        }
        (None, false) => {
            let why =
                format!("it is {}, and was not saved; bulkhead resume --cold {id} boots it again", run.state.state);
            return Err(format!("run {id}: {why}"));
        }
        (_, true) => None,
    };
    let failed = |error: &dyn std::fmt::Display| format!("run {id}: {error}");
    check_terminal_for(run.spec.process.tty).map_err(|error| failed(&error))?;
    check_host(&run.spec).map_err(|error| failed(&error))?;
    let lock = run.directory.take().map_err(|error| failed(&error))?;
    // It was looked at before the lock was taken: what it was to go on from may have been used since.
    let now = run.directory.state().map_err(|error| failed(&error))?;
    if (now.epoch, &now.saved) != (run.state.epoch, &run.state.saved) {
        return Err(failed(&"another command has let it go on meanwhile; see how it is (bulkhead inspect)"));
    }
    let mut cold = args.cold;
    if let Some(Sound { snapshot, cold: disk_alone, instead: Some(why) }) = &sound {
        say(&format!("{why}; going on from {}", if *disk_alone { "its disk" } else { snapshot.id() }));
        note_fallback(&run.directory, &run.spec, snapshot, *disk_alone, Some(why));
        run.directory.go_back_to(snapshot, run.spec.machine.disk).map_err(|error| failed(&error))?;
        cold = *disk_alone;
    }
    let mut spec = run.spec.clone();
    if !cold {
        // They are in its memory or on its disk already, and may have been changed there.
        spec.inputs.clear();
    }
    if let Some(artifacts) = spec.artifacts.as_mut().filter(|artifacts| artifacts.directory.is_dir()) {
        // Made when the run began, and not empty.
        artifacts.own = false;
    }
    let mut outcome = Outcome { name: spec.name.clone(), ..Outcome::default() };
    if let Err(error) = take_part(&store, &run.directory, &spec, lock, cold, &mut outcome) {
        (outcome.exit_code, outcome.error) = (FAILED, Some(error));
    }
    outcome.tell(Format::Table, args.quiet)
}
