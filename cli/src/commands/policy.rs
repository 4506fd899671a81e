//! `bulkhead policy`: whether a policy is one, and what it says of a destination. Nothing is started and nothing asked.

use std::fs::File;
use std::io::Read;

use clap::{Args, Subcommand};
use netfilter_control::Policy;
use netfilter_policy::{Argument, Compiler, MAX_TEXT, PolicyError, classify_argument, explain};

use super::print;

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
}

/// A policy, as the options of a run give it. Several add up.
#[derive(Debug, Args)]
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
        compiler.finish().map_err(said)
    }
}

/// The text of a policy file. The compiler refuses one that is too long by its length.
fn read(path: &str) -> Result<String, String> {
    let wrong = |why: String| format!("--network-policy: @{path}: {why}");
    let file = File::open(path).map_err(|error| wrong(error.to_string()))?;
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
    }
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
