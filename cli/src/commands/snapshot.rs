//! `bulkhead snapshot`: saved machines and disks.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, IsTerminal};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use guest::message::printable;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat};
use rustix::io::Errno;
use serde_json::{Value, json};
use snapshot::store::{Depth, Snapshot, Snapshots, Status};

use super::{Bar, Format, dial, print, table};
use crate::client::{ClientError, unexpected};
use crate::clock;
use crate::frame::{Frame, Request};
use crate::home::Home;
use crate::image::progress::Progress;
use crate::say;
use crate::units::show_size;

/// `bulkhead snapshot`
#[derive(Debug, Subcommand)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub(crate) enum SnapshotCommand {
    /// Save a running run's machine, memory and disk, while it goes on
    Create(Create),
    /// List snapshots
    #[command(visible_alias = "ls")]
    List(List),
    /// Print everything about snapshots, as JSON
    Inspect(Which),
    /// Hash every file of snapshots, and of those that they stand on
    Verify(Which),
    /// Make a snapshot that stands on no other
    Flatten(One),
    /// Remove snapshots on which nothing stands
    Rm(Which),
    /// Write a snapshot, with all that it stands on but the image, into one file
    Export(Export),
    /// Take a snapshot from a file that export wrote
    Import(Import),
}

/// `bulkhead snapshot create`
#[derive(Debug, Args)]
pub(crate) struct Create {
    /// A name for the snapshot
    #[arg(long, value_parser = super::run::run_name)]
    name: Option<String>,
    /// Have the run stand still until its memory is written, which takes no memory for what it would change meanwhile
    #[arg(long)]
    stop: bool,
    /// Say nothing but results and errors
    #[arg(short, long)]
    quiet: bool,
    /// Id, unique beginning of an id, or name of the run
    run: String,
}

/// `bulkhead snapshot list`
#[derive(Debug, Args)]
pub(crate) struct List {
    /// Ids alone
    #[arg(short, long, conflicts_with = "format")]
    quiet: bool,
    /// How to print them
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

/// Some snapshots.
#[derive(Debug, Args)]
pub(crate) struct Which {
    /// Say nothing but results and errors
    #[arg(short, long)]
    quiet: bool,
    /// Ids, unique beginnings of ids, or names
    #[arg(required = true, value_name = "SNAPSHOT")]
    snapshots: Vec<String>,
}

/// A snapshot.
#[derive(Debug, Args)]
pub(crate) struct One {
    /// Say nothing but results and errors
    #[arg(short, long)]
    quiet: bool,
    /// Id, unique beginning of an id, or name
    snapshot: String,
}

/// `bulkhead snapshot export`
#[derive(Debug, Args)]
pub(crate) struct Export {
    /// Say nothing but results and errors
    #[arg(short, long)]
    quiet: bool,
    /// Id, unique beginning of an id, or name
    snapshot: String,
    /// The file, which must not be there yet; - for standard output
    file: PathBuf,
}

/// `bulkhead snapshot import`
#[derive(Debug, Args)]
pub(crate) struct Import {
    /// Say nothing but results and errors
    #[arg(short, long)]
    quiet: bool,
    /// The file; - for standard input
    file: PathBuf,
}

/// `bulkhead snapshot`: returns the exit status.
pub(crate) fn snapshot(command: &SnapshotCommand) -> Result<u8, String> {
    match command {
        SnapshotCommand::Create(args) => {
            let id = ask_for_snapshot(&args.run, args.name.clone(), args.stop, args.quiet)?;
            print(&format!("{id}\n"))?;
            Ok(0)
        }
        SnapshotCommand::List(args) => list(args),
        SnapshotCommand::Inspect(args) => inspect(args),
        SnapshotCommand::Verify(args) => each(args, |given| {
            let snapshot = open()?.find(given).map_err(|error| error.to_string())?;
            let mut progress = Progress::new("verifying", None, args.quiet);
            snapshot.verify(Depth::Always, &mut |bytes| progress.add(bytes)).map_err(|error| error.to_string())?;
            Ok(snapshot.id().to_owned())
        }),
        SnapshotCommand::Rm(args) => {
            let snapshots = open()?;
            each(args, |given| {
                let id = snapshots.id_of(given).map_err(|error| error.to_string())?;
                snapshots.remove(&id).map_err(|error| error.to_string())?;
                Ok(id)
            })
        }
        SnapshotCommand::Flatten(args) => {
            let snapshots = open()?;
            let mut progress = Progress::new("flattening", None, args.quiet);
            let from = snapshots.find(&args.snapshot).map_err(|error| error.to_string())?;
            let flat = snapshots
                .flatten(&from, clock::now(), &mut |bytes| progress.add(bytes))
                .map_err(|error| error.to_string())?;
            print(&format!("{}\n", flat.id()))?;
            Ok(0)
        }
        SnapshotCommand::Export(args) => export(args),
        SnapshotCommand::Import(args) => import(args),
    }
}

fn open() -> Result<Snapshots, String> {
    let home = Home::find().map_err(|error| error.to_string())?;
    Snapshots::open(home.path()).map_err(|error| error.to_string())
}

/// Has a run's supervisor save it; gives the snapshot's id.
pub(super) fn ask_for_snapshot(run: &str, name: Option<String>, stop: bool, quiet: bool) -> Result<String, String> {
    let (listed, mut connection) = dial(run)?;
    let failed = |error: &dyn std::fmt::Display| format!("run {}: {error}", listed.spec.id);
    Frame::Request(Request::Snapshot { name, stop }).write(&mut connection).map_err(|error| failed(&error))?;
    let (mut id, mut bar) = (String::new(), Bar::new(quiet));
    loop {
        match Frame::read(&mut connection).map_err(|error| failed(&error))? {
            Some(Frame::Stdout(bytes)) => id.push_str(String::from_utf8_lossy(&bytes).trim_end()),
            Some(Frame::Progress(stage)) => bar.show(stage),
            Some(Frame::Exit(exit)) => {
                drop(bar);
                exit.notes.iter().for_each(|note| say(note));
                return exit.error.map_or(Ok(id), Err);
            }
            Some(other) => return Err(failed(&unexpected(&other))),
            None => return Err(failed(&ClientError::Lost)),
        }
    }
}

/// Does something with each, and prints its id; the first that fails does not keep it from the others.
fn each(args: &Which, mut what: impl FnMut(&str) -> Result<String, String>) -> Result<u8, String> {
    let mut code = 0;
    for given in &args.snapshots {
        if let Err(error) = what(given).and_then(|id| print(&format!("{id}\n"))) {
            say(&error);
            code = crate::FAILED;
        }
    }
    Ok(code)
}

fn list(args: &List) -> Result<u8, String> {
    let snapshots = open()?;
    let all = snapshots.list().map_err(|error| error.to_string())?;
    let text = match args.format {
        _ if args.quiet => all.iter().map(|snapshot| format!("{}\n", snapshot.id())).collect(),
        Format::Table => {
            let head = ["ID", "NAME", "KIND", "RUN", "IMAGE", "STATE", "CREATED", "SIZE"].map(str::to_owned).to_vec();
            table(&std::iter::once(head).chain(all.iter().map(row)).collect::<Vec<_>>())
        }
        Format::Json => {
            let all: Vec<Value> = all.iter().map(object).collect();
            let text = serde_json::to_string_pretty(&all).map_err(|error| error.to_string())?;
            format!("{text}\n")
        }
    };
    print(&text)?;
    // That there is more is not passed over.
    let damaged = snapshots.broken().map_err(|error| error.to_string())?;
    damaged.iter().for_each(|(_, error)| say(&error.to_string()));
    Ok(if damaged.is_empty() { 0 } else { crate::FAILED })
}

fn state(snapshot: &Snapshot) -> &'static str {
    match snapshot.status() {
        Status::Sealed => "saved",
        Status::Sealing => "sealing",
        Status::NeverSealed => "damaged (never sealed)",
    }
}

fn row(snapshot: &Snapshot) -> Vec<String> {
    let manifest = snapshot.manifest();
    vec![
        snapshot.id().to_owned(),
        manifest.name.clone().unwrap_or_default(),
        manifest.kind.to_string(),
        printable(&manifest.origin),
        printable(&manifest.image),
        state(snapshot).to_owned(),
        printable(&manifest.created),
        show_size(snapshot.bytes()),
    ]
}

fn object(snapshot: &Snapshot) -> Value {
    let manifest = snapshot.manifest();
    json!({
        "id": snapshot.id(),
        "state": state(snapshot),
        "bytes": snapshot.bytes(),
        "manifest": manifest,
    })
}

fn inspect(args: &Which) -> Result<u8, String> {
    let snapshots = open()?;
    let mut all = Vec::new();
    for given in &args.snapshots {
        let snapshot = snapshots.find(given).map_err(|error| error.to_string())?;
        let mut object = object(&snapshot);
        let dependents = snapshots.dependents(snapshot.id()).map_err(|error| error.to_string())?;
        let dependents: Vec<String> = dependents.iter().map(ToString::to_string).collect();
        if let Some(map) = object.as_object_mut() {
            map.insert("dependents".to_owned(), json!(dependents));
        }
        all.push(object);
    }
    let text = serde_json::to_string_pretty(&all).map_err(|error| error.to_string())?;
    print(&format!("{text}\n"))?;
    Ok(0)
}

fn export(args: &Export) -> Result<u8, String> {
    let snapshots = open()?;
    let snapshot = snapshots.find(&args.snapshot).map_err(|error| error.to_string())?;
    let mut progress = Progress::new("exporting", None, args.quiet);
    let mut progress = |bytes| progress.add(bytes);
    if args.file.as_os_str() == "-" {
        if io::stdout().is_terminal() {
            return Err("standard output is a terminal; name a file, or send it into one".to_owned());
        }
        let out = BufWriter::new(io::stdout().lock());
        snapshots.export(&snapshot, out, &mut progress).map_err(|error| error.to_string())?;
        return Ok(0);
    }
    let failed = |error: io::Error| format!("{}: {error}", args.file.display());
    let (mut file, named) = create(&args.file).map_err(failed)?;
    let written =
        snapshots.export(&snapshot, BufWriter::new(&mut file), &mut progress).map_err(|error| error.to_string());
    let written = written.and_then(|()| file.sync_all().map_err(failed));
    match &written {
        // Half of it is of no use to anyone.
        Err(_) if named => drop(std::fs::remove_file(&args.file)),
        Ok(()) if !named => give_name(&file, &args.file).map_err(failed)?,
        _ => {}
    }
    written.map(|()| 0)
}

/// Makes a file that is not there yet. It has no name until it is whole, if the file system can do that: then nothing is left of one
/// whose writer is killed.
fn create(path: &Path) -> io::Result<(File, bool)> {
    if path.symlink_metadata().is_ok() {
        return Err(Errno::EXIST.into());
    }
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    match rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => Ok((file.into(), false)),
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
            Ok((OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?, true))
        }
        Err(error) => Err(error.into()),
    }
}

/// Fails where the name has been given to something else meanwhile.
fn give_name(file: &File, path: &Path) -> io::Result<()> {
    let it = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(linkat(CWD, it, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

fn import(args: &Import) -> Result<u8, String> {
    let home = Home::find().map_err(|error| error.to_string())?;
    let snapshots = Snapshots::open(home.path()).map_err(|error| error.to_string())?;
    let mut progress = Progress::new("importing", None, args.quiet);
    let mut progress = |bytes| progress.add(bytes);
    let imported = if args.file.as_os_str() == "-" {
        snapshots.import(io::stdin().lock(), &mut progress)
    } else {
        let file = File::open(&args.file).map_err(|error| format!("{}: {error}", args.file.display()))?;
        snapshots.import(BufReader::new(file), &mut progress)
    };
    let imported = imported.map_err(|error| format!("{}: {error}", args.file.display()))?;
    for (id, name) in &imported.unnamed {
        say(&format!("snapshot {id} has no name here: another one is called {name:?}"));
    }
    let id = imported.id;
    let snapshot = snapshots.find(&id).map_err(|error| error.to_string())?;
    if let Some(image) = super::saved_spec::missing_image(&home, &snapshot) {
        say(&format!(
            "snapshot {id} needs the image {:?}, which is not here: import the same one before bulkhead fork",
            printable(&image)
        ));
    }
    print(&format!("{id}\n"))?;
    Ok(0)
}
