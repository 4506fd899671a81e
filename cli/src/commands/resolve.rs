//! From what was asked for to a run's spec: everything resolved and checked before anything is made.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};

use super::run::Run;
use crate::home::{Home, ProgramFiles};
use crate::image::{Image, Images};
use crate::preflight::{check_kernel, check_least_memory, check_limits, check_memory, disk_size, open_kvm};
use crate::spec::{Artifacts, Input, Machine, Network, Process, Spec};
use crate::{clock, environment, kernel, terminal};

/// Memory is given in these pieces.
const PAGE: u64 = 4096;

/// Everything that was asked for, resolved.
pub(super) fn make_spec(args: &Run, home: &Home, image: &str, command: &[String]) -> Result<Spec, Box<dyn Error>> {
    // As it was written: further on it is rounded up.
    check_least_memory(args.memory)?;
    let env = args.process.environment()?;
    let image = Images::of(home).find(image)?;
    let command = command_in(&image, args.entrypoint.as_deref(), command)?;
    let workdir = args.process.workdir.clone().or_else(|| non_empty(image.config.workdir.clone()));
    let beside = beside(args, workdir.as_deref())?;
    let policy = args.network.compile()?;
    let kernel = kernel::Store::of(home).kernel(args.kernel.as_deref())?;
    let modules = if args.modules { Some(canonical(&kernel.tree()?)?) } else { None };
    let files = ProgramFiles::find()?;
    check_kernel(&kernel)?;
    let disk = disk_size(args.disk, &image.name, image.size)?;
    if !args.dry_run {
        image.verify(args.quiet)?;
    }
    Ok(Spec {
        version: 1,
        id: String::new(),
        name: args.name.clone(),
        created: clock::now(),
        labels: labels_of(image.config.labels, &args.labels),
        ephemeral: args.rm || args.name.is_none(),
        from: None,
        another_command: false,
        machine: Machine {
            image_file: canonical(&image.root)?,
            image: image.name,
            kernel_file: canonical(&kernel.vmlinux)?,
            initrds: vec![canonical(&kernel.modules)?, canonical(&files.agent)?],
            kernel: kernel.name,
            modules,
            vmm: canonical(&files.vmm)?,
            jail: super::jail::resolve(&args.jail, args.cpus.thousandths, canonical(&files.jailer)?),
            cpus: args.cpus.count,
            memory: args.memory.next_multiple_of(PAGE),
            disk,
            disk_layers: args.disk_layers,
            console: args.console,
            cmdline_extra: args.cmdline_extra.clone(),
        },
        ports: args.ports.clone(),
        network: Network { netfilter: canonical(&files.netfilter)?, policy },
        process: Process {
            command,
            env: environment::merge(&image.config.env, &env),
            workdir,
            user: args.process.user.clone().or_else(|| non_empty(image.config.user)),
            stdin: args.process.interactive,
            tty: args.process.tty,
            term: terminal::kind(),
        },
        start_timeout_ms: beside.start_timeout_ms,
        timeout_ms: beside.timeout_ms,
        snapshot_every_ms: beside.snapshot_every_ms,
        inputs: beside.inputs,
        artifacts: beside.artifacts,
    })
}

/// What was asked for beside the machine and its command.
pub(super) struct Beside {
    pub(super) start_timeout_ms: u64,
    pub(super) timeout_ms: Option<u64>,
    pub(super) snapshot_every_ms: Option<u64>,
    pub(super) inputs: Vec<Input>,
    pub(super) artifacts: Option<Artifacts>,
}

/// Resolves it, for a command with this working directory.
pub(super) fn beside(args: &Run, workdir: Option<&str>) -> Result<Beside, String> {
    Ok(Beside {
        start_timeout_ms: millis(args.start_timeout),
        timeout_ms: args.timeout.map(millis),
        snapshot_every_ms: args.snapshot_every.map(millis),
        inputs: args.inputs.iter().map(|input| resolve_input(input)).collect::<Result<_, _>>()?,
        artifacts: resolve_artifacts(args, workdir)?,
    })
}

/// The image's labels, with those of the command line over them.
fn labels_of(image: BTreeMap<String, String>, asked: &[(String, String)]) -> BTreeMap<String, String> {
    image.into_iter().chain(asked.iter().cloned()).collect()
}

/// Whether this host can run it.
pub(super) fn check_host(spec: &Spec) -> Result<(), Box<dyn Error>> {
    let limits = [Resource::Fsize, Resource::Nofile].map(getrlimit);
    let [largest_file, descriptors] = limits;
    check_limits(spec.machine.disk, spec.machine.memory, largest_file.current, descriptors.maximum)?;
    check_memory(spec.machine.memory, &std::fs::read_to_string("/proc/meminfo").unwrap_or_default())?;
    open_kvm()?;
    Ok(())
}

/// `PATH[:DEST]`: DEST is absolute, so a colon in PATH alone does no harm.
fn resolve_input(written: &str) -> Result<Input, String> {
    let (path, destination) = match written.rsplit_once(':') {
        Some((path, destination)) if destination.starts_with('/') => (path, destination),
        _ => (written, ""),
    };
    let failed = |why: &dyn std::fmt::Display| format!("--input {path}: {why}");
    if path.is_empty() {
        return Err(failed(&"no path; write --input PATH or --input PATH:/DEST"));
    }
    std::fs::symlink_metadata(path).map_err(|error| failed(&error))?;
    // Not resolved: what ends in /. means something else.
    let source = std::env::current_dir().map_err(|error| failed(&error))?.as_os_str().to_owned();
    let source = if path.starts_with('/') { path.into() } else { [source, path.into()].join("/".as_ref()) };
    Ok(Input { source: source.into(), destination: destination.to_owned() })
}

fn resolve_artifacts(args: &Run, workdir: Option<&str>) -> Result<Option<Artifacts>, String> {
    if args.artifacts.is_empty() {
        return match &args.artifact_dir {
            Some(_) => Err("--artifact-dir: nothing is copied to it without --artifact".to_owned()),
            None => Ok(None),
        };
    }
    let mut patterns = Vec::new();
    for pattern in &args.artifacts {
        let whole = if pattern.starts_with('/') {
            pattern.clone()
        } else {
            format!("{}/{pattern}", workdir.unwrap_or("/").trim_end_matches('/'))
        };
        guest::message::check_pattern(&whole).map_err(|error| format!("--artifact: {error}"))?;
        patterns.push(whole);
    }
    let (directory, own) = match &args.artifact_dir {
        Some(directory) => (std::path::absolute(directory), false),
        None => (std::env::current_dir(), true),
    };
    let directory = directory.map_err(|error| format!("--artifact-dir: {error}"))?;
    if !own && directory.exists() && !directory.is_dir() {
        return Err(format!("--artifact-dir {}: it is not a directory", directory.display()));
    }
    Ok(Some(Artifacts { patterns, directory, own, limit: args.artifact_limit }))
}

/// The command line that runs: the image's entry point, then what was asked for or what the image says. Another entry
/// point takes the place of both of the image's.
fn command_in(image: &Image, entrypoint: Option<&str>, command: &[String]) -> Result<Vec<String>, String> {
    let whole: Vec<String> = match entrypoint {
        Some(other) => {
            Some(other.to_owned()).filter(|other| !other.is_empty()).into_iter().chain(command.to_vec()).collect()
        }
        None => {
            let arguments = if command.is_empty() { &image.config.cmd } else { command };
            image.config.entrypoint.iter().chain(arguments).cloned().collect()
        }
    };
    match whole.first() {
        Some(first) if !first.is_empty() => Ok(whole),
        Some(_) => Err("the command is empty".to_owned()),
        None if entrypoint.is_some() => {
            Err(format!("--entrypoint \"\" leaves no command of image {:?}; give one after its name", image.name))
        }
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
        assert_eq!(command_in(&image(&[], &["sh"]), None, &[]).unwrap(), ["sh"]);
        assert_eq!(command_in(&image(&[], &["sh"]), None, &asked).unwrap(), ["ls"]);
        assert_eq!(command_in(&image(&["tini", "--"], &["sh"]), None, &asked).unwrap(), ["tini", "--", "ls"]);
        assert!(command_in(&image(&[], &[]), None, &[]).unwrap_err().contains("no command of its own"));
        assert!(command_in(&image(&[], &[]), None, &[String::new()]).is_err());
        // Another entry point leaves the image's command out, as docker does.
        let of = image(&["tini", "--"], &["sh"]);
        assert_eq!(command_in(&of, Some("env"), &[]).unwrap(), ["env"]);
        assert_eq!(command_in(&of, Some("env"), &asked).unwrap(), ["env", "ls"]);
        assert_eq!(command_in(&of, Some(""), &asked).unwrap(), ["ls"]);
        assert!(command_in(&of, Some(""), &[]).is_err());
    }

    #[test]
    fn labels_are_the_images_and_ones_own() {
        let label = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let labels =
            labels_of([label("a", "image"), label("b", "image")].into(), &[label("b", "run"), label("c", "run")]);
        assert_eq!(labels, [label("a", "image"), label("b", "run"), label("c", "run")].into());
    }

    #[test]
    fn an_input_is_a_path_and_where_it_goes() {
        let place = tempfile::tempdir().unwrap();
        let odd = place.path().join("a:b");
        std::fs::write(&odd, "").unwrap();
        let odd = odd.to_str().unwrap();
        let resolved = |text: &str| resolve_input(text).map(|i| (i.source.display().to_string(), i.destination));
        assert_eq!(resolved(odd).unwrap(), (odd.to_owned(), String::new()));
        assert_eq!(resolved(&format!("{odd}:/x")).unwrap(), (odd.to_owned(), "/x".to_owned()));
        let here = std::env::current_dir().unwrap();
        assert_eq!(resolved("./src/.:/w").unwrap().0, format!("{}/./src/.", here.display()));
        assert!(resolved("/no/such:/x").unwrap_err().starts_with("--input /no/such: No such file"));
        assert!(resolved(":/x").is_err());
    }
}
