//! `bulkhead list`.

use std::time::SystemTime;

use clap::Args;
use guest::message::printable;
use serde_json::{Value, json};

use super::{Format, open_store, print, table};
use crate::clock;
use crate::spec::Phase;
use crate::store::Listed;
use crate::units::show_size;

/// `bulkhead list`
#[derive(Debug, Args)]
pub(crate) struct List {
    /// Ended runs too
    #[arg(short, long)]
    all: bool,
    /// Ids alone
    #[arg(short, long, conflicts_with = "format")]
    quiet: bool,
    /// How to print them
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
}

/// `bulkhead list`
pub(crate) fn list(args: &List) -> Result<u8, String> {
    let (mut runs, closed) = open_store()?.readable().map_err(|error| error.to_string())?;
    runs.retain(|run| args.all || run.state.is_live() || run.state.state == Phase::Paused);
    let text = match args.format {
        _ if args.quiet => runs.iter().map(|run| format!("{}\n", run.spec.id)).collect(),
        Format::Table => {
            let head = ["ID", "NAME", "IMAGE", "STATE", "AGE", "CPU", "MEM"].map(str::to_owned).to_vec();
            let now = SystemTime::now();
            table(&std::iter::once(head).chain(runs.iter().map(|run| row(run, now))).collect::<Vec<_>>())
        }
        Format::Json => {
            let all: Vec<Value> = runs.iter().map(object).collect();
            let text = serde_json::to_string_pretty(&all).map_err(|error| error.to_string())?;
            format!("{text}\n")
        }
    };
    print(&text)?;
    // That there may be more is not passed over.
    closed.map_or(Ok(0), |error| Err(error.to_string()))
}

fn row(run: &Listed, now: SystemTime) -> Vec<String> {
    let state = match &run.state.reason {
        Some(reason) => format!("{} ({})", run.state.state, printable(reason)),
        None => run.state.state.to_string(),
    };
    let age = clock::read(&run.spec.created).map_or_else(String::new, |created| clock::age(created, now));
    let machine = &run.spec.machine;
    let name = run.spec.name.clone().unwrap_or_default();
    let (cpus, memory) = (machine.cpus.to_string(), show_size(machine.memory));
    vec![run.spec.id.clone(), name, printable(&machine.image), state, age, cpus, memory]
}

/// A run in short, for programs.
fn object(run: &Listed) -> Value {
    json!({
        "id": run.spec.id,
        "name": run.spec.name,
        "image": run.spec.machine.image,
        "state": run.state.state,
        "reason": run.state.reason,
        "exit_code": run.state.exit_code,
        "saved": run.state.saved,
        "created": run.spec.created,
        "started": run.state.started,
        "ended": run.state.ended,
        "cpus": run.spec.machine.cpus,
        "memory": run.spec.machine.memory,
        "labels": run.spec.labels,
    })
}
