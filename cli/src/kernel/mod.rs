//! Guest kernels: `bulkhead kernel` and the store.
//!
//! A kernel is the distribution's own, made ready once: the ELF file that is entered by PVH, an archive of the modules
//! that our devices need, and, if asked for, a file system of all its modules.

mod compression;
mod cpio;
mod deb;
mod elf;
pub(crate) mod host;
mod import;
mod modules;
mod store;
mod tree;
mod vmlinuz;

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use serde_json::json;

use crate::commands;
use crate::home::Home;
use crate::say;
use crate::units::show_size;
use import::Request;
pub(crate) use store::{Kernel, Store, StoreError};
use store::{Record, TREE, short};

/// What there is to do with kernels.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make a distribution's kernel a guest kernel; prints its id
    Import(Import),
    /// List kernels, the newest last
    #[command(visible_alias = "ls")]
    List(List),
    /// Print what is known of kernels, as JSON, and verify them
    Inspect {
        /// Name, id, or unique beginning of an id
        #[arg(required = true)]
        kernels: Vec<String>,
    },
    /// Remove kernels that no run needs
    #[command(visible_alias = "remove")]
    Rm {
        /// Name, id, or unique beginning of an id
        #[arg(required = true)]
        kernels: Vec<String>,
    },
}

/// `bulkhead kernel import`
#[derive(Debug, Args)]
#[command(
    override_usage = "bulkhead kernel import [OPTIONS] VMLINUZ --modules DIR\n       bulkhead kernel import [OPTIONS] PACKAGE.deb...",
    after_help = "The kernel is an x86-64 bzImage (gzip, zstd, xz or lz4) or a vmlinux, with CONFIG_PVH, Linux 5.14 or \
                  later.\nThe same kernel imported again is recognised."
)]
pub(crate) struct Import {
    /// A kernel, or the Debian packages that hold it and its modules
    #[arg(value_name = "VMLINUZ|PACKAGE.deb", required = true)]
    sources: Vec<PathBuf>,
    /// The kernel's modules, such as /lib/modules/RELEASE
    #[arg(long, value_name = "DIR")]
    modules: Option<PathBuf>,
    /// A name for it [default: its release]
    #[arg(long, value_parser = name)]
    name: Option<String>,
    /// Keep all its modules too, for run --modules
    #[arg(long)]
    full_modules: bool,
    /// Say nothing but the id and errors
    #[arg(short, long)]
    quiet: bool,
}

/// `bulkhead kernel list`
#[derive(Debug, Args)]
pub(crate) struct List {
    /// Ids alone
    #[arg(short, long)]
    quiet: bool,
    /// As a table, or as JSON
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Table,
    Json,
}

/// `bulkhead kernel`
pub(crate) fn command(command: &Command) -> Result<u8, String> {
    let home = Home::find().map_err(|error| error.to_string())?;
    let store = Store::of(&home);
    match command {
        Command::Import(args) => import_kernel(&store, args),
        Command::List(args) => list(&store, args),
        Command::Inspect { kernels } => inspect(&store, kernels),
        Command::Rm { kernels } => remove(&home, &store, kernels),
    }
}

fn import_kernel(store: &Store, args: &Import) -> Result<u8, String> {
    let failed = |error: &dyn std::fmt::Display| format!("cannot import kernel: {error}");
    let (modules, full, quiet) = (args.modules.as_deref(), args.full_modules, args.quiet);
    let request = Request { sources: &args.sources, modules, full, quiet };
    let (record, new) = import::import(store, &request).map_err(|error| failed(&error))?;
    let name = args.name.as_ref().unwrap_or(&record.release);
    let before = store.name(name, &record.id).map_err(|error| failed(&error))?;
    if !args.quiet {
        let what = if new { "imported" } else { "was here already" };
        let size = show_size(record.files.values().map(|part| part.size).sum());
        if rustix::termios::isatty(rustix::stdio::stderr()) {
            say(&format!("kernel {name}: {what}, {size}, {} modules needed", record.modules.len()));
        }
        if let Some(before) = before {
            say(&format!("the name {name} was kernel {}'s; it stays under its id", short(&before)));
        }
    }
    print(&format!("{}\n", record.id))
}

fn list(store: &Store, args: &List) -> Result<u8, String> {
    let records = store.records().map_err(|error| error.to_string())?;
    let names = store.names().map_err(|error| error.to_string())?;
    let names_of = |record: &Record| -> Vec<String> {
        names.iter().filter(|(_, id)| **id == record.id).map(|(name, _)| name.clone()).collect()
    };
    if args.quiet {
        return print(&records.iter().map(|record| format!("{}\n", record.id)).collect::<String>());
    }
    if args.format == Format::Json {
        let all: Vec<_> = records.iter().map(|record| describe(record, &names_of(record))).collect();
        return print_json(&json!(all));
    }
    let mut rows = vec![["NAME", "ID", "RELEASE", "SIZE", "MODULES"].map(str::to_owned)];
    rows.extend(records.iter().map(|record| {
        let size = record.files.values().map(|part| part.size).sum();
        let modules = if record.files.contains_key(TREE) { "all" } else { "needed" };
        let names = names_of(record).join(",");
        [names, short(&record.id).to_owned(), record.release.clone(), show_size(size), modules.to_owned()]
    }));
    print(&columns(&rows))
}

fn inspect(store: &Store, kernels: &[String]) -> Result<u8, String> {
    let names = store.names().map_err(|error| error.to_string())?;
    let mut all = Vec::new();
    for given in kernels {
        let id = store.find(given).map_err(|error| error.to_string())?;
        let record = store.record(&id).map_err(|error| error.to_string())?;
        store.verify(&record).map_err(|error| error.to_string())?;
        let own: Vec<String> = names.iter().filter(|(_, of)| **of == id).map(|(name, _)| name.clone()).collect();
        let mut described = describe(&record, &own);
        described["directory"] = json!(store.directory(&id));
        all.push(described);
    }
    print_json(&json!(all))
}

fn describe(record: &Record, names: &[String]) -> serde_json::Value {
    let mut all = json!(record);
    all["names"] = json!(names);
    all
}

fn remove(home: &Home, store: &Store, kernels: &[String]) -> Result<u8, String> {
    let runs = crate::store::Store::open(home).and_then(|store| store.all()).map_err(|error| error.to_string())?;
    // All are looked at before the first is removed.
    let mut ids = Vec::new();
    for given in kernels {
        let id = store.find(given).map_err(|error| error.to_string())?;
        let directory = store.directory(&id);
        let directory = directory.canonicalize().map_err(|error| format!("{}: {error}", directory.display()))?;
        if let Some(user) = runs.iter().find(|run| run.spec.machine.kernel_file.starts_with(&directory)) {
            let run = &user.spec.id;
            return Err(format!("kernel {given}: run {run} needs it; remove that run first (bulkhead rm {run})"));
        }
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    for id in ids {
        store.remove(&id).map_err(|error| error.to_string())?;
        print(&format!("{id}\n"))?;
    }
    Ok(0)
}

/// A table whose columns are as wide as they need.
fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let line = |row: &[String; N]| {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

fn print(text: &str) -> Result<u8, String> {
    commands::print(text)?;
    Ok(0)
}

fn print_json(value: &serde_json::Value) -> Result<u8, String> {
    print(&format!("{value:#}\n"))
}

/// A kernel's name: word characters, as a release has them, and not an id.
fn name(text: &str) -> Result<String, String> {
    let word = |c: char| c.is_ascii_alphanumeric() || "._+~-".contains(c);
    if text.len() > 128 {
        return Err("longer than 128 characters".to_owned());
    }
    if !text.starts_with(|c: char| c.is_ascii_alphanumeric()) || !text.chars().all(word) {
        return Err(
            "names begin with a letter or digit and go on with letters, digits, '.', '_', '+', '~' and '-'".to_owned()
        );
    }
    if text.len() == 64 && text.chars().all(|c| c.is_ascii_hexdigit()) {
        return Err("an id cannot be a name".to_owned());
    }
    Ok(text.to_owned())
}
