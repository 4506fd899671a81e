//! `bulkhead list`.

use std::io::{self, Write};

use clap::Args;

use super::quietly;
use crate::home::Home;
use crate::store::{Listed, Store};

/// `bulkhead list`
#[derive(Debug, Args)]
pub(crate) struct List {
    /// Ended runs too
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Ids alone
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// `bulkhead list`
pub(crate) fn list(args: &List) -> Result<u8, String> {
    let home = Home::find().map_err(|error| error.to_string())?;
    let store = Store::open(&home).map_err(|error| error.to_string())?;
    store.sweep().map_err(|error| error.to_string())?;
    let mut runs = store.all();
    runs.retain(|run| args.all || run.state.state.is_live());
    let text = if args.quiet { runs.iter().map(|run| format!("{}\n", run.spec.id)).collect() } else { table(&runs) };
    quietly(io::stdout().write_all(text.as_bytes()))?;
    Ok(0)
}

/// Runs as a table whose columns are as wide as they need.
fn table(runs: &[Listed]) -> String {
    let mut rows = vec![["ID", "NAME", "IMAGE", "STATE"].map(str::to_owned)];
    rows.extend(runs.iter().map(|run| {
        let state = match &run.state.reason {
            Some(reason) => format!("{} ({})", run.state.state, guest::message::printable(reason)),
            None => run.state.state.to_string(),
        };
        [run.spec.id.clone(), run.spec.name.clone().unwrap_or_default(), run.spec.machine.image.clone(), state]
    }));
    let mut widths = [0; 4];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let line = |row: &[String; 4]| {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}
