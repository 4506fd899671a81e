//! `bulkhead inspect`.

use clap::Args;
use serde_json::{Value, json};

use super::{open_store, print};

/// `bulkhead inspect`
#[derive(Debug, Args)]
#[command(
    after_help = "Prints a JSON array with an object for each run: how it is, what was asked for, where its files are."
)]
pub(crate) struct Inspect {
    /// Ids, unique beginnings of ids, or names
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<String>,
    /// The only format there is; accepted as elsewhere
    #[arg(long, value_name = "FORMAT", default_value = "json", value_parser = ["json"])]
    format: String,
}

/// `bulkhead inspect`
pub(crate) fn inspect(args: &Inspect) -> Result<u8, String> {
    let store = open_store()?;
    let mut all = Vec::new();
    for given in &args.runs {
        let run = store.find(given).map_err(|error| error.to_string())?;
        let directory = run.directory.path();
        all.push(json!({
            "id": run.spec.id,
            "name": run.spec.name,
            "state": run.state.state,
            "reason": run.state.reason,
            "exit_code": run.state.exit_code,
            "created": run.spec.created,
            "started": run.state.started,
            "ended": run.state.ended,
            "directory": directory,
            "events": directory.join(crate::events::LOG),
            "spec": run.spec,
        }));
    }
    let text = serde_json::to_string_pretty(&Value::Array(all)).map_err(|error| error.to_string())?;
    print(&format!("{text}\n"))?;
    Ok(0)
}
