//! `bulkhead inspect`.

use clap::Args;
use jailer::{Part, Seen};
use serde_json::{Map, Value, json};

use super::{open_store, print};
use crate::spec::Jailed;
use crate::store::{FILTER_JAIL, Listed, VMM_JAIL};

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
            "epoch": run.state.epoch,
            "saved": run.state.saved,
            "directory": directory,
            "events": directory.join(crate::events::LOG),
            "processes": processes(&run),
            "policy": policy(&run),
            "proxy": proxy(&run),
            "spec": run.spec,
        }));
    }
    let text = serde_json::to_string_pretty(&Value::Array(all)).map_err(|error| error.to_string())?;
    print(&format!("{text}\n"))?;
    Ok(0)
}

/// The jailed processes of a run that lives, as the kernel shows them now.
fn processes(run: &Listed) -> Vec<Value> {
    if !run.state.is_live() {
        return Vec::new();
    }
    let jailed = [("bulkhead-vmm", VMM_JAIL), ("bulkhead-netfilter", FILTER_JAIL)];
    jailed.into_iter().filter_map(|(program, file)| seen(run, program, file)).collect()
}

/// One of them. It may just be starting, or ending.
fn seen(run: &Listed, program: &str, file: &str) -> Option<Value> {
    let jailed = run.directory.jail(file).ok()?;
    let seen = Seen::of(jailed.pid).ok()?;
    let is_it = jailer::started(jailed.pid).is_ok_and(|started| started == jailed.started);
    is_it.then(|| process(program, &jailed, &seen))
}

/// The policy that is in force, or was: its number, and its rules as they were written. An error if that cannot be known.
fn policy(run: &Listed) -> Value {
    let set = match run.directory.policy() {
        Ok(set) => set,
        Err(error) => return json!({ "error": error.to_string() }),
    };
    let (generation, policy) = set.as_ref().map_or((1, &run.spec.network.policy), |set| (set.generation, &set.policy));
    let allow: Vec<&str> = policy.rules.iter().map(|rule| rule.text.as_str()).collect();
    let deny: Vec<&str> = policy.denials.iter().map(|denial| denial.text.as_str()).collect();
    json!({ "generation": generation, "allow": allow, "deny": deny })
}

/// The proxy that all its connections go through, or went; nothing if there is none. An error if that cannot be known.
fn proxy(run: &Listed) -> Value {
    run.directory.proxy().map_or_else(|error| json!({ "error": error.to_string() }), |proxy| json!(proxy))
}

fn process(program: &str, jailed: &Jailed, seen: &Seen) -> Value {
    let missing = |part: Part| jailed.unenforced.iter().find(|(name, _)| name == part.name());
    let threads: Vec<Value> = seen
        .threads
        .iter()
        .map(|thread| {
            let mode = if thread.seccomp_filters > 0 { "filter" } else { "none" };
            json!({ "name": thread.name, "seccomp": mode, "filters": thread.seccomp_filters })
        })
        .collect();
    let limits: Map<String, Value> =
        seen.limits.iter().map(|(name, value)| ((*name).to_owned(), value.as_str().into())).collect();
    let unenforced: Vec<Value> =
        jailed.unenforced.iter().map(|(part, why)| json!({ "part": part, "why": why })).collect();
    json!({
        "program": program,
        "pid": jailed.pid,
        "uid": seen.uid,
        "namespaces": seen.namespaces,
        "mounts": seen.mounts,
        "descriptors": seen.descriptors,
        "capabilities": format!("{:016x}", seen.capabilities),
        "no_new_privs": seen.no_new_privs,
        // The kernel shows it nowhere: this is what the jailer did, which else would have failed.
        "landlock": missing(Part::Landlock).is_none(),
        "threads": threads,
        "cgroup": { "path": seen.cgroup, "ours": jailed.cgroup.is_some(), "limits": limits },
        "unenforced": unenforced,
    })
}
