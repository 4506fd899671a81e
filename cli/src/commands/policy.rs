//! `bulkhead policy`: whether a policy is one, what it says of a destination, another one for a running run, and a draft
//! from what a run was denied.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};

use clap::{Args, Subcommand};
use netfilter_control::{MAX_POLICY, Policy, Record};
use netfilter_policy::{Argument, Compiler, MAX_TEXT, PolicyError, classify_argument, draft, explain};
use serde_json::Value;

use super::{open_store, order, print};
use crate::events::LOG;
use crate::frame::Request;
use crate::home::open_file;

/// `bulkhead policy`
#[derive(Debug, Subcommand)]
pub(crate) enum PolicyCommand {
    /// Check that a policy is right, and print what it comes to
    Check(Check),
    /// Say whether a destination may be reached, and which rule decides
    #[command(
        after_help = "Exit status: 0 if it is allowed, 1 if it is denied, 125 if the policy or the destination is wrong."
    )]
    Explain(Explain),
    /// Put another policy in force in a running run
    #[command(
        after_help = "Connections that the new policy does not allow are reset. Without any option everything is denied."
    )]
    Set(Set),
    /// Draft a policy file that would allow what a run was denied
    Learn(Learn),
}

/// A policy, as the options of a run give it. Several add up.
#[derive(Debug, Args)]
#[command(next_help_heading = "Network")]
pub(crate) struct Given {
    /// deny-all, deny-egress-except=HOST[:PORT][,…] or @FILE; may be repeated
    #[arg(long, value_name = "POLICY")]
    network_policy: Vec<String>,
    /// One more rule, HOST[:PORT]; may be repeated
    #[arg(long, value_name = "RULE")]
    allow: Vec<String>,
    /// Let rules pass that open more than 16 million addresses
    #[arg(long)]
    i_accept_open_egress: bool,
}

impl Given {
    /// Whether any option says what may be reached.
    pub(crate) fn is_given(&self) -> bool {
        !self.network_policy.is_empty() || !self.allow.is_empty()
    }

    /// What it comes to. Without any option everything is denied.
    pub(crate) fn compile(&self) -> Result<Policy, String> {
        const OPTION: &str = "--network-policy";
        let said = |error: PolicyError| error.to_string();
        let mut compiler = Compiler::default();
        if self.i_accept_open_egress {
            compiler = compiler.accept_open_egress();
        }
        for text in &self.network_policy {
            match classify_argument(OPTION, text).map_err(said)? {
                Argument::File(path) => compiler.file(path, &read(path)?).map_err(said)?,
                _ => compiler.argument(OPTION, text).map_err(said)?,
            }
        }
        for text in &self.allow {
            compiler.rules("--allow", text).map_err(said)?;
        }
        let policy = compiler.finish().map_err(said)?;
        let length = serde_json::to_vec(&policy).map_err(|error| error.to_string())?.len();
        if length > MAX_POLICY {
            return Err(format!(
                "{OPTION}: {length} bytes when compiled, over {MAX_POLICY}; write wildcards, or fewer rules"
            ));
        }
        Ok(policy)
    }
}

/// The text of a policy file. The compiler refuses one that is too long by its length.
fn read(path: &str) -> Result<String, String> {
    let wrong = |why: String| format!("--network-policy: @{path}: {why}");
    let file = open_file(path.as_ref()).map_err(|error| wrong(error.to_string()))?;
    let mut bytes = Vec::new();
    let most = u64::try_from(MAX_TEXT).unwrap_or(u64::MAX).saturating_add(1);
    file.take(most).read_to_end(&mut bytes).map_err(|error| wrong(error.to_string()))?;
    String::from_utf8(bytes).map_err(|error| {
        wrong(format!(
            "not UTF-8 from byte {} on; a policy is text, see docs/egress.md",
            error.utf8_error().valid_up_to()
        ))
    })
}

/// `bulkhead policy check`
#[derive(Debug, Args)]
pub(crate) struct Check {
    #[command(flatten)]
    given: Given,
    /// How to print it
    #[arg(long, value_name = "FORMAT", default_value = "text", value_parser = ["text", "json"])]
    format: String,
}

/// `bulkhead policy explain`
#[derive(Debug, Args)]
pub(crate) struct Explain {
    #[command(flatten)]
    given: Given,
    /// A URL, or a host with an optional port
    #[arg(value_name = "URL")]
    url: String,
}

/// `bulkhead policy set`
#[derive(Debug, Args)]
pub(crate) struct Set {
    /// Id, unique beginning of an id, or name
    #[arg(value_name = "RUN")]
    run: String,
    #[command(flatten)]
    given: Given,
}

/// `bulkhead policy learn`
#[derive(Debug, Args)]
#[command(after_help = "Prints to standard output. Nothing in it is allowed until a run is given it; read it first.")]
pub(crate) struct Learn {
    /// Id, unique beginning of an id, or name
    #[arg(value_name = "RUN")]
    run: String,
}

/// `bulkhead policy`
pub(crate) fn policy(command: &PolicyCommand) -> Result<u8, String> {
    match command {
        PolicyCommand::Check(args) => {
            let policy = args.given.compile()?;
            if args.format == "json" {
                let text = serde_json::to_string_pretty(&policy).map_err(|error| error.to_string())?;
                print(&format!("{text}\n"))?;
            } else {
                print(&summary(&policy))?;
            }
            Ok(0)
        }
        PolicyCommand::Explain(args) => {
            let policy = args.given.compile()?;
            let explanation = explain(&policy, &args.url).map_err(|error| format!("{:?}: {error}", args.url))?;
            print(&format!("{explanation}\n"))?;
            Ok(u8::from(!explanation.allowed))
        }
        PolicyCommand::Set(args) => order(&args.run, Request::SetPolicy { policy: args.given.compile()? }),
        PolicyCommand::Learn(args) => learn(&args.run),
    }
}

/// From the run's event log.
fn learn(run: &str) -> Result<u8, String> {
    let listed = open_store()?.find(run).map_err(|error| error.to_string())?;
    let path = listed.directory.path().join(LOG);
    let file = File::open(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let lines = BufReader::new(file).lines().map_while(Result::ok);
    let records: Vec<Record> = lines.filter_map(|line| denied(&line)).collect();
    print(&draft(&records))?;
    Ok(0)
}

/// The record that a line of the event log is, if it is a refusal.
fn denied(line: &str) -> Option<Record> {
    let mut event: Value = serde_json::from_str(line).ok()?;
    let kind = event.get("event").filter(|kind| *kind == "net.dns.denied" || *kind == "net.flow.denied")?.clone();
    let mut data = event.get_mut("data")?.take();
    data.as_object_mut()?.insert("type".to_owned(), kind);
    serde_json::from_value(data).ok()
}

fn summary(policy: &Policy) -> String {
    let mut text = String::from("denied: everything that no rule allows\n");
    for rule in &policy.rules {
        text.push_str(&format!("allowed: {}\n", rule.text));
    }
    for denial in &policy.denials {
        text.push_str(&format!("denied, whatever a rule says: {}\n", denial.text));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_is_no_policy_and_nobody_waits_for_its_writer() {
        let place = tempfile::tempdir().unwrap();
        let pipe = place.path().join("pipe");
        let mode = rustix::fs::Mode::from(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let error = read(pipe.to_str().unwrap()).unwrap_err();
        assert!(error.ends_with("/pipe: it is a pipe, device or socket; write it to a file first"), "{error}");
        let plain = place.path().join("plain");
        std::fs::write(&plain, "x").unwrap();
        assert_eq!(read(plain.to_str().unwrap()).unwrap(), "x");
    }

    #[test]
    fn refusals_are_found_in_an_event_log() {
        let line = r#"{"version":1,"seq":3,"time":"x","event":"net.dns.denied","previous":null,"data":{"name":"a.example.com",
                       "qtype":1,"reason":"no-rule","rule":null,"hint":""}}"#;
        assert!(draft(&denied(line)).contains("\"a.example.com\","));
        for other in ["", "{}", r#"{"event":"run.started","data":{}}"#, r#"{"event":"net.dns.denied","data":3}"#] {
            assert_eq!(denied(other), None, "{other}");
        }
    }
}
