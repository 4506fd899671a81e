//! The spec that lies in a snapshot, which says what goes on in it, and is believed no further than that.
//!
//! A path in it is never opened: programs are those of this installation, kernel and image those of this state directory. If
//! the snapshot came from an archive, anybody may have written it, so that nothing in it says how the run is confined, what it
//! may reach or what this host offers it: that is as if nothing had been asked for.

use std::path::Path;

use jailer::users;
use netfilter_control::Policy;
use snapshot::store::{Kind, Snapshot};

use crate::home::{Home, ProgramFiles, read_json};
use crate::image::Images;
use crate::spec::{Jail, Spec};
use crate::{clock, kernel};

/// The version of specs.
const VERSION: u32 = 1;
/// Longest time that one asks for, in milliseconds: a hundred years.
const LONGEST: u64 = 100 * 365 * 24 * 3_600_000;
/// Longest time that an imported one has to boot, in milliseconds.
const LONGEST_START: u64 = 600_000;

/// What a run that goes on from a snapshot is.
pub(super) fn spec_from(home: &Home, snapshot: &Snapshot, name: Option<String>) -> Result<Spec, String> {
    let text = |error: &dyn std::fmt::Display| format!("snapshot {}: {error}", snapshot.id());
    let spec: Spec = read_json(&snapshot.path("spec.json")).map_err(|error| text(&error))?;
    check(&spec, snapshot).map_err(|error| text(&error))?;
    let mut spec = if snapshot.is_imported() { tamed(spec) } else { spec };
    own_files(home, &mut spec).map_err(|error| text(&error))?;
    spec.ephemeral = name.is_none();
    spec.name = name;
    spec.created = clock::now();
    spec.from = Some(snapshot.id().to_owned());
    spec.another_command = false;
    (spec.ports, spec.inputs, spec.artifacts, spec.snapshot_every_ms) = (Vec::new(), Vec::new(), None, None);
    Ok(spec)
}

/// Whether it is the spec of the machine that the snapshot's manifest describes.
fn check(spec: &Spec, snapshot: &Snapshot) -> Result<(), String> {
    let (machine, manifest) = (&spec.machine, snapshot.manifest());
    if spec.version != VERSION {
        return Err(format!("its spec is of version {}, and this program knows version {VERSION}", spec.version));
    }
    if machine.cpus == 0 || machine.cpus > vmm_control::MAX_VCPUS {
        return Err(format!("its spec has {} CPUs; 1 to {} are possible", machine.cpus, vmm_control::MAX_VCPUS));
    }
    let same = manifest.kind == Kind::Disk || (machine.cpus, machine.memory) == (manifest.vcpus, manifest.memory_bytes);
    if !same || machine.disk != manifest.disk_bytes {
        return Err("its spec and its manifest are of different machines".to_owned());
    }
    let plain = |text: &str| text.chars().all(|c| c == ' ' || c.is_ascii_graphic());
    if ![&machine.image, &machine.kernel, &machine.cmdline_extra].into_iter().all(|text| plain(text)) {
        return Err("a text in its spec is not printable ASCII".to_owned());
    }
    if spec.start_timeout_ms > LONGEST || spec.timeout_ms.is_some_and(|ms| ms > LONGEST) {
        return Err("a time in its spec is longer than any".to_owned());
    }
    Ok(())
}

/// One that anybody may have written, without what only the host's owner may ask for.
fn tamed(mut spec: Spec) -> Spec {
    spec.network.policy = Policy::default();
    spec.machine.jail = Jail {
        jailer: spec.machine.jail.jailer,
        users: users::DEFAULT.to_string(),
        require_cgroup: rustix::process::geteuid().is_root(),
        cpu: None,
        io_max: None,
        allow_unenforced: Vec::new(),
    };
    spec.start_timeout_ms = spec.start_timeout_ms.min(LONGEST_START);
    // They are shown, and looked for, as its owner's.
    spec.labels.clear();
    spec
}

/// Puts the files of this host in the place of those that it names.
fn own_files(home: &Home, spec: &mut Spec) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let own = |path: &Path| path.canonicalize().map_err(|error| format!("{}: {error}", path.display()));
    let machine = &mut spec.machine;
    // A name may stand for another image or kernel by now; the directory's name does not.
    let image =
        Images::of(home).find(&id_in(&machine.image_file)).map_err(|error| missing("image", &machine.image, &error))?;
    image.verify(true).map_err(|error| text(&error))?;
    machine.image_file = own(&image.root)?;
    let kernel = kernel::Store::of(home).kernel(Some(&id_in(&machine.kernel_file)));
    let kernel = kernel.map_err(|error| missing("kernel", &machine.kernel, &error))?;
    let files = ProgramFiles::find().map_err(|error| text(&error))?;
    machine.vmm = own(&files.vmm)?;
    machine.jail.jailer = own(&files.jailer)?;
    spec.network.netfilter = own(&files.netfilter)?;
    machine.kernel_file = own(&kernel.vmlinux)?;
    machine.initrds = vec![own(&kernel.modules)?, own(&files.agent)?];
    if machine.modules.is_some() {
        machine.modules = Some(own(&kernel.tree().map_err(|error| text(&error))?)?);
    }
    Ok(())
}

fn missing(what: &str, name: &str, error: &dyn std::fmt::Display) -> String {
    format!("it needs the {what} {name:?}, the very one that it was made with: {error}")
}

/// What the directory of an image's or a kernel's file is called.
fn id_in(file: &Path) -> String {
    file.parent().and_then(Path::file_name).and_then(|name| name.to_str()).unwrap_or_default().to_owned()
}

/// The image that a snapshot needs and that is not here, by the name that it had, if that is so.
pub(super) fn missing_image(home: &Home, snapshot: &Snapshot) -> Option<String> {
    let spec: Spec = read_json(&snapshot.path("spec.json")).ok()?;
    let here = Images::of(home).find(&id_in(&spec.machine.image_file)).is_ok();
    (!here).then(|| snapshot.manifest().image.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::test::spec;

    #[test]
    fn an_imported_spec_asks_for_nothing_of_the_host() {
        let mut hostile = spec();
        hostile.machine.jail.allow_unenforced = vec!["namespaces".into(), "landlock".into(), "cgroup".into()];
        hostile.machine.jail.users = "0-0".into();
        hostile.machine.jail.io_max = Some("rbps=1".into());
        let mut open = netfilter_policy::Compiler::default();
        open.rules("--allow", "example.com").unwrap();
        hostile.network.policy = open.finish().unwrap();
        hostile.labels.insert("owner".into(), "root".into());
        hostile.start_timeout_ms = u64::MAX;
        let tame = tamed(hostile);
        assert!(tame.machine.jail.allow_unenforced.is_empty() && tame.machine.jail.io_max.is_none());
        assert_eq!(tame.machine.jail.users, users::DEFAULT.to_string());
        assert_eq!(tame.machine.jail.require_cgroup, rustix::process::geteuid().is_root());
        assert_eq!(tame.network.policy, Policy::default());
        assert!(tame.labels.is_empty() && tame.start_timeout_ms == LONGEST_START);
    }

    #[test]
    fn a_path_in_a_spec_is_a_name_at_most() {
        for (path, id) in
            [("/x/images/abc/root.ext4", "abc"), ("/etc/shadow", "etc"), ("/x/../shadow", ""), ("/", ""), ("", "")]
        {
            assert_eq!(id_in(Path::new(path)), id, "{path}");
        }
    }
}
