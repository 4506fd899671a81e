//! `bulkhead completion`.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::print;
use crate::args::Cli;

/// `bulkhead completion`
#[derive(Debug, Args)]
#[command(
    after_help = "For this shell: source <(bulkhead completion bash). For every one: put it where the shell looks, such \
                        as\n/usr/share/bash-completion/completions/bulkhead, a directory of zsh's $fpath as _bulkhead, \
                        or ~/.config/fish/completions/bulkhead.fish."
)]
pub(crate) struct Completion {
    /// Which shell's
    #[arg(value_name = "SHELL", value_parser = ["bash", "zsh", "fish"])]
    shell: String,
}

/// `bulkhead completion`
pub(crate) fn completion(args: &Completion) -> Result<u8, String> {
    let shell = match args.shell.as_str() {
        "zsh" => Shell::Zsh,
        "fish" => Shell::Fish,
        _ => Shell::Bash,
    };
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "bulkhead", &mut text);
    print(&String::from_utf8_lossy(&text))?;
    Ok(0)
}
