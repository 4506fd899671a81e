//! `bulkhead image`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::SystemTime;

use clap::{Args, Subcommand, ValueEnum};
use serde_json::json;
use snapshot::store::{Dependent, Snapshot, Snapshots};

use super::disk::MIN_SIZE;
use super::import::{Order, import};
use super::name;
use super::source::Pick;
use super::store::{Images, short};
use crate::commands::{self, jail::Jail};
use crate::home::{Home, read_json};
use crate::spec::Spec;
use crate::store::Store;
use crate::units::{parse_size, show_size};
use crate::{clock, say};

/// The size of an image's file system unless said otherwise: the disk of the usual run.
const DEFAULT_SIZE: &str = "10G";

/// `bulkhead image`
#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// Make an image of a root file system or of a container image
    Import(Import),
    /// List images
    #[command(visible_alias = "ls")]
    List(List),
    /// Print what is known of images, as JSON
    Inspect(Inspect),
    /// Remove images, or names of images that have others
    Rm {
        /// Names, ids, or unique beginnings of ids
        #[arg(value_name = "IMAGE", required = true)]
        images: Vec<String>,
    },
}

/// `bulkhead image import`
#[derive(Debug, Args)]
#[command(
    after_help = "SOURCE is a tar of a root file system (plain, gzip, zstd or xz), an OCI layout as a directory or a tar, what \
                  docker save\nor podman save writes, or - for a tar of a root file system on standard input. It is unpacked in a \
                  microVM.\nPrints the image's id. Without --name the image is called what its source or its file is called."
)]
pub(crate) struct Import {
    /// A name for the image, taken from another that has it
    #[arg(long, value_name = "NAME", value_parser = name::check)]
    name: Option<String>,
    /// Which image, if the source holds several: its name, tag or digest
    #[arg(long, value_name = "NAME")]
    r#ref: Option<String>,
    /// Size of the image's file system, which is sparse
    #[arg(long, value_name = "SIZE", default_value = DEFAULT_SIZE, value_parser = size)]
    disk: u64,
    /// Kernel of the microVM that unpacks it [default: the newest]
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// Record that microVM's serial console, whose end errors then quote; slow
    #[arg(long, hide = true)]
    console: bool,
    /// How the VMM is confined.
    #[command(flatten)]
    jail: Jail,
    /// Say nothing but the id and errors
    #[arg(short, long)]
    quiet: bool,
    /// A file, a directory, or -
    #[arg(value_name = "SOURCE")]
    source: PathBuf,
}

/// `bulkhead image list`
#[derive(Debug, Args)]
pub(crate) struct List {
    /// Ids alone
    #[arg(short, long, conflicts_with = "format")]
    quiet: bool,
    /// How
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

/// `bulkhead image inspect`
#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// Read the image's file and compare it with the hash in its record
    #[arg(long)]
    verify: bool,
    /// Names, ids, or unique beginnings of ids
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Table,
    Json,
}

fn size(text: &str) -> Result<u64, String> {
    let size = parse_size(text).map_err(|error| error.to_string())?;
    if size < MIN_SIZE {
        return Err(format!("an image's file system has at least {}", show_size(MIN_SIZE)));
    }
    if size > snapshot::disk::MAX_SIZE {
        return Err(format!("a disk has at most {}", show_size(snapshot::disk::MAX_SIZE)));
    }
    Ok(size.next_multiple_of(snapshot::disk::BLOCK))
}

/// Does what was asked for: returns the exit status.
pub(crate) fn run(command: &ImageCommand) -> Result<u8, String> {
    let home = Home::find().map_err(|error| error.to_string())?;
    match command {
        ImageCommand::Import(args) => do_import(&home, args),
        ImageCommand::List(args) => list(&home, args),
        ImageCommand::Inspect(args) => inspect(&home, args),
        ImageCommand::Rm { images } => remove(&home, images),
    }
}

fn do_import(home: &Home, args: &Import) -> Result<u8, String> {
    let order = Order {
        pick: Pick { path: &args.source, reference: args.r#ref.as_deref() },
        name: args.name.as_deref(),
        size: args.disk,
        kernel: args.kernel.as_deref(),
        console: args.console,
        jail: &args.jail,
        quiet: args.quiet,
    };
    let done = import(home, &order).map_err(|error| format!("cannot import {}: {error}", args.source.display()))?;
    if !args.quiet {
        let name = done.name.as_ref().map(|name| format!(" as {name}")).unwrap_or_default();
        if done.known {
            say(&format!("this image is there already{name}"));
        }
        if done.without_acl > 0 {
            let without = done.without_acl;
            say(&format!(
                "warning: access control lists of {without} files were left out: they are in star's textual form"
            ));
        }
    }
    print(&format!("{}\n", done.id))
}

/// An image as it is listed.
struct Row {
    id: Option<String>,
    names: Vec<String>,
    size: u64,
    imported: Option<SystemTime>,
}

fn list(home: &Home, args: &List) -> Result<u8, String> {
    let images = Images::open(home).map_err(|error| error.to_string())?;
    images.sweep().map_err(|error| error.to_string())?;
    let mut names = BTreeMap::<String, Vec<String>>::new();
    for (name, id) in images.names().map_err(|error| error.to_string())? {
        names.entry(id).or_default().push(name);
    }
    let mut rows: Vec<Row> = Vec::new();
    for id in images.ids().map_err(|error| error.to_string())? {
        // One that is damaged is listed all the same: whoever uses it is told.
        let record = images.record(&id).ok();
        rows.push(Row {
            names: names.remove(&id).unwrap_or_default(),
            size: record.as_ref().map_or(0, |record| record.used),
            imported: record.and_then(|record| clock::read(&record.imported)),
            id: Some(id),
        });
    }
    for name in images.by_hand_names().map_err(|error| error.to_string())? {
        let used = images.find(&name).ok().and_then(|image| std::fs::metadata(&image.root).ok());
        let size = used.map_or(0, |found| std::os::unix::fs::MetadataExt::blocks(&found).saturating_mul(512));
        rows.push(Row { id: None, names: vec![name], size, imported: None });
    }
    rows.sort_by(|a, b| (a.names.is_empty(), &a.names, &a.id).cmp(&(b.names.is_empty(), &b.names, &b.id)));
    if args.quiet {
        return print(&rows.iter().filter_map(|row| row.id.as_ref()).map(|id| format!("{id}\n")).collect::<String>());
    }
    match args.format {
        Format::Json => print_json(
            &rows
                .iter()
                .map(|row| {
                    let imported = row.imported.map(clock::show);
                    json!({ "id": row.id, "names": row.names, "used": row.size, "imported": imported })
                })
                .collect(),
        ),
        Format::Table => print(&table(&rows, SystemTime::now())),
    }
}

fn table(rows: &[Row], now: SystemTime) -> String {
    let mut cells = vec![["NAME", "ID", "SIZE", "AGE"].map(str::to_owned)];
    for row in rows {
        let id = row.id.as_deref().map_or("-", short);
        let age = row.imported.map_or_else(|| "-".to_owned(), |imported| clock::age(imported, now));
        let names = if row.names.is_empty() { vec!["-".to_owned()] } else { row.names.clone() };
        cells.extend(names.into_iter().map(|name| [name, id.to_owned(), show_size(row.size), age.clone()]));
    }
    let mut widths = [0; 4];
    for row in &cells {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.len().max(*width);
        }
    }
    let line = |row: &[String; 4]| {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    cells.iter().map(line).collect()
}

fn inspect(home: &Home, args: &Inspect) -> Result<u8, String> {
    let images = Images::of(home);
    let names = images.names().map_err(|error| error.to_string())?;
    let mut all = Vec::new();
    for given in &args.images {
        let image = images.find(given).map_err(|error| error.to_string())?;
        let record = image.record.as_ref();
        let names: Vec<&str> =
            names.iter().filter(|(_, id)| record.is_some_and(|r| r.id == *id)).map(|(name, _)| name.as_str()).collect();
        if args.verify {
            if record.is_none() {
                return Err(format!("image {given:?}: it was put there by hand, and has no hash"));
            }
            image.hash(false).map_err(|error| error.to_string())?;
        }
        all.push(match record {
            Some(record) => json!({ "names": names, "file": image.root, "record": record }),
            None => json!({ "names": [given], "file": image.root, "size": image.size, "config": image.config }),
        });
    }
    print_json(&all)
}

fn remove(home: &Home, given: &[String]) -> Result<u8, String> {
    let images = Images::open(home).map_err(|error| error.to_string())?;
    images.sweep().map_err(|error| error.to_string())?;
    let runs = Store::open(home).and_then(|store| store.all()).map_err(|error| error.to_string())?;
    let mut needed: Vec<_> =
        runs.into_iter().map(|run| (run.spec.machine.image_file, Dependent::Run(run.spec.id))).collect();
    needed.extend(of_snapshots(home)?);
    let user = |directory: &std::path::Path| {
        needed.iter().find(|(file, _)| file.starts_with(directory)).map(|(_, user)| user.clone())
    };
    for one in given {
        images.remove(one, user).map_err(|error| error.to_string())?;
        print(&format!("{one}\n"))?;
    }
    Ok(0)
}

/// The images that snapshots were made with, whose runs may be gone. A damaged one is of no use with its image either.
fn of_snapshots(home: &Home) -> Result<Vec<(PathBuf, Dependent)>, String> {
    let all = Snapshots::open(home.path()).and_then(|all| all.list()).map_err(|error| error.to_string())?;
    let image = |snapshot: Snapshot| {
        let spec: Spec = read_json(&snapshot.path("spec.json")).ok()?;
        Some((spec.machine.image_file, Dependent::Snapshot(snapshot.id().to_owned())))
    };
    Ok(all.into_iter().filter_map(image).collect())
}

fn print(text: &str) -> Result<u8, String> {
    commands::print(text)?;
    Ok(0)
}

fn print_json(values: &Vec<serde_json::Value>) -> Result<u8, String> {
    let text = serde_json::to_string_pretty(values).map_err(|error| error.to_string())?;
    print(&format!("{text}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_needs_its_image() {
        let place = tempfile::tempdir().unwrap();
        let home = Home::at(place.path().to_owned());
        let pending = Snapshots::open(home.path()).unwrap().begin(None).unwrap();
        let spec = crate::spec::test::spec();
        for (file, bytes) in
            [("disk.data", vec![0]), ("disk.map", vec![0]), ("spec.json", serde_json::to_vec(&spec).unwrap())]
        {
            pending.write(file, &bytes).unwrap();
        }
        let (created, origin, image) = ("2026-12-01T00:00:00.000Z".into(), "8fc20000".into(), "busybox".into());
        let (kind, layers, epoch, vcpus) = (snapshot::store::Kind::Disk, Vec::new(), 1, 1);
        let meta = snapshot::store::Meta {
            created,
            kind,
            origin,
            epoch,
            image,
            layers,
            disk_bytes: 1,
            memory_bytes: 1,
            vcpus,
        };
        let made = pending.publish(meta).unwrap();
        let needed = of_snapshots(&home).unwrap();
        assert_eq!(needed, [(spec.machine.image_file, Dependent::Snapshot(made.id().to_owned()))]);
        assert_eq!(needed[0].1.removal(), format!("snapshot rm {}", made.id()));
    }

    #[test]
    fn sizes_have_bounds() {
        assert_eq!(size(DEFAULT_SIZE), Ok(10 << 30));
        assert_eq!(size("300000001"), Ok(300_003_328));
        assert!(size("1M").unwrap_err().contains("at least 256.0 MiB"));
        assert!(size("17T").unwrap_err().contains("at most 16.0 TiB"));
    }

    #[test]
    fn a_table_has_a_line_for_each_name() {
        let imported = Some(SystemTime::UNIX_EPOCH);
        let row = |id: Option<&str>, names: &[&str]| Row {
            id: id.map(|id| id.repeat(64)),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            size: 3 << 20,
            imported: imported.filter(|_| id.is_some()),
        };
        let rows = [row(Some("a"), &["debian", "debian:12"]), row(Some("b"), &[]), row(None, &["by-hand"])];
        let now = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(120);
        let want = "NAME       ID            SIZE     AGE\n\
                    debian     aaaaaaaaaaaa  3.0 MiB  2m\n\
                    debian:12  aaaaaaaaaaaa  3.0 MiB  2m\n\
                    -          bbbbbbbbbbbb  3.0 MiB  2m\n\
                    by-hand    -             3.0 MiB  -\n";
        assert_eq!(table(&rows, now), want);
    }
}
