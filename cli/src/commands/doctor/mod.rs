//! `bulkhead doctor`: whether this host can run microVMs.
//!
//! Facts are gathered in [`facts`], then judged here by functions that need no host of that kind to be tested.

mod canary;
mod facts;
mod judge;

use clap::Args;
use serde::Serialize;

use super::{print, table};

/// `bulkhead doctor`
#[derive(Debug, Args)]
#[command(after_help = "Exit status: 0 if a run would start, 1 if not.")]
pub(crate) struct Doctor {
    /// Print the checks as JSON
    #[arg(long)]
    json: bool,
}

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    /// As it should be.
    Ok,
    /// Runs start, and lack something.
    Warning,
    /// No run starts.
    Failed,
}

/// One check.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    verdict: Verdict,
    /// What was found, and what it means.
    found: String,
    /// The command, or the step, that mends it.
    mend: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Ok, found: found.into(), mend: None }
    }

    fn warning(name: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Warning, found: found.into(), mend: Some(mend.into()) }
    }

    fn failed(name: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Failed, found: found.into(), mend: Some(mend.into()) }
    }
}

/// `bulkhead doctor`
pub(crate) fn doctor(args: &Doctor) -> Result<u8, String> {
    let checks = facts::checks();
    let well = checks.iter().all(|check| check.verdict != Verdict::Failed);
    let text = if args.json {
        #[derive(Serialize)]
        struct Report<'a> {
            ok: bool,
            checks: &'a [Check],
        }
        let report = Report { ok: well, checks: &checks };
        format!("{}\n", serde_json::to_string_pretty(&report).map_err(|error| error.to_string())?)
    } else {
        table(&checks.iter().map(row).collect::<Vec<_>>())
    };
    print(&text)?;
    Ok(u8::from(!well))
}

fn row(check: &Check) -> Vec<String> {
    let verdict = match check.verdict {
        Verdict::Ok => "ok",
        Verdict::Warning => "warning",
        Verdict::Failed => "FAILED",
    };
    let mend = check.mend.as_ref().map(|mend| format!("; {mend}")).unwrap_or_default();
    vec![verdict.to_owned(), check.name.to_owned(), format!("{}{mend}", check.found)]
}
