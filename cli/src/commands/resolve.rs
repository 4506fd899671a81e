//! From what was asked for to a run's spec: everything resolved and checked before anything is made.

use std::path::{Path, PathBuf};

use super::run::Run;
use crate::home::{Home, ProgramFiles};
use crate::image::{Image, Images};
use crate::preflight::{check_kernel, check_memory, disk_size, open_kvm};
use crate::spec::{Machine, Process, Spec};
use crate::{environment, kernel, terminal};

/// Memory is given in these pieces.
const PAGE: u64 = 4096;

/// Everything that was asked for, resolved and checked.
pub(super) fn make_spec(
    args: &Run,
    home: &Home,
    image: &str,
    command: &[String],
) -> Result<Spec, Box<dyn std::error::Error>> {
    let env = environment::resolve(&args.process.env, |name| std::env::var_os(name))?;
    let image = Images::of(home).find(image)?;
    let kernel = kernel::Store::of(home).kernel(args.kernel.as_deref())?;
    let modules = if args.modules { Some(canonical(&kernel.tree()?)?) } else { None };
    let files = ProgramFiles::find()?;
    check_kernel(&kernel)?;
    let disk = disk_size(args.disk, &image.name, image.size)?;
    check_memory(args.memory, &std::fs::read_to_string("/proc/meminfo").unwrap_or_default())?;
    open_kvm()?;
    let command = command_in(&image, command)?;
    Ok(Spec {
        version: 1,
        id: String::new(),
        name: args.name.clone(),
        ephemeral: args.rm || args.name.is_none(),
        machine: Machine {
            image_file: canonical(&image.root)?,
            image: image.name,
            kernel_file: canonical(&kernel.vmlinux)?,
            initrds: vec![canonical(&kernel.modules)?, canonical(&files.agent)?],
            kernel: kernel.name,
            modules,
            vmm: canonical(&files.vmm)?,
            cpus: args.cpus,
            memory: args.memory.next_multiple_of(PAGE),
            disk,
            disk_layers: args.disk_layers,
            console: args.console,
            cmdline_extra: args.cmdline_extra.clone(),
        },
        process: Process {
            command,
            env: environment::merge(&image.config.env, &env),
            workdir: args.process.workdir.clone().or_else(|| non_empty(image.config.workdir)),
            user: args.process.user.clone().or_else(|| non_empty(image.config.user)),
            stdin: args.process.interactive,
            tty: args.process.tty,
            term: terminal::kind(),
        },
        start_timeout_ms: millis(args.start_timeout),
        timeout_ms: args.timeout.map(millis),
    })
}

/// The command line that runs: the image's entry point, then what was asked for or what the image says.
fn command_in(image: &Image, command: &[String]) -> Result<Vec<String>, String> {
    let arguments = if command.is_empty() { &image.config.cmd } else { command };
    let whole: Vec<String> = image.config.entrypoint.iter().chain(arguments).cloned().collect();
    match whole.first() {
        Some(first) if !first.is_empty() => Ok(whole),
        Some(_) => Err("the command is empty".to_owned()),
        None => Err(format!("image {:?} has no command of its own; give one after its name", image.name)),
    }
}

fn canonical(path: &Path) -> Result<PathBuf, String> {
    path.canonicalize().map_err(|error| format!("{}: {error}", path.display()))
}

fn non_empty(text: Option<String>) -> Option<String> {
    text.filter(|text| !text.is_empty())
}

fn millis(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::Config as ImageConfig;

    fn image(entrypoint: &[&str], cmd: &[&str]) -> Image {
        let list = |of: &[&str]| of.iter().map(|s| (*s).to_owned()).collect();
        let config = ImageConfig { entrypoint: list(entrypoint), cmd: list(cmd), ..ImageConfig::default() };
        Image { name: "x".into(), root: "/r".into(), size: 0, config, record: None }
    }

    #[test]
    fn the_entry_point_goes_before_every_command() {
        let asked = ["ls".to_owned()];
        assert_eq!(command_in(&image(&[], &["sh"]), &[]).unwrap(), ["sh"]);
        assert_eq!(command_in(&image(&[], &["sh"]), &asked).unwrap(), ["ls"]);
        assert_eq!(command_in(&image(&["tini", "--"], &["sh"]), &asked).unwrap(), ["tini", "--", "ls"]);
        assert!(command_in(&image(&[], &[]), &[]).unwrap_err().contains("no command of its own"));
        assert!(command_in(&image(&[], &[]), &[String::new()]).is_err());
    }
}
