//! What the tests find on this machine: the programs under test, kernels, images, room for files.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use vmm_control::Config;

/// The words that `bulkhead run` gives every kernel, without a console.
pub(crate) const CMDLINE: &str =
    "8250.nr_uarts=0 quiet reboot=t panic=-1 oops=panic pci=off cryptomgr.notests random.trust_cpu=on tsc=reliable";

fn from_environment(name: &str) -> PathBuf {
    PathBuf::from(std::env::var_os(name).unwrap_or_else(|| panic!("{name} is not set; `make test` sets it")))
}

/// The programs under test, laid out as installed.
pub(crate) fn program(name: &str) -> PathBuf {
    from_environment("BULKHEAD_DIST").join(name)
}

/// The client.
pub(crate) fn bulkhead() -> PathBuf {
    program("bin/bulkhead")
}

/// A directory on a real file system, where tests put what they make.
pub(crate) fn scratch() -> PathBuf {
    std::env::var_os("SCRATCH").map_or_else(std::env::temp_dir, PathBuf::from)
}

/// A directory of a test's own, removed afterwards.
pub(crate) fn directory() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("bulkhead-test-").tempdir_in(scratch()).unwrap()
}

/// The kernels, oldest first: (release, directory).
pub(crate) fn kernels() -> Vec<(String, PathBuf)> {
    let record = |path: PathBuf| {
        let record: serde_json::Value = serde_json::from_slice(&fs::read(path.join("kernel.json")).ok()?).unwrap();
        Some((record["release"].as_str().unwrap().to_owned(), path))
    };
    let mut found: Vec<_> = fs::read_dir(from_environment("BULKHEAD_HOME").join("kernels"))
        .unwrap()
        .filter_map(|entry| record(entry.unwrap().path()))
        .collect();
    found.sort_by_key(|(name, _)| name.split(['.', '-', '+']).map(|n| n.parse().unwrap_or(0)).collect::<Vec<u32>>());
    found
}

/// A Debian package of a kernel of this series, as it was fetched.
pub(crate) fn package(series: &str) -> PathBuf {
    from_environment("BULKHEAD_HOME").join(format!("packages/{series}.deb"))
}

/// Another kernel's package, unpacked: `boot/vmlinuz-*` and `lib/modules`. Its ext4 is a module.
pub(crate) fn unpacked() -> PathBuf {
    from_environment("BULKHEAD_HOME").join("packages/unpacked")
}

/// The newest kernel's directory.
pub(crate) fn newest_kernel() -> PathBuf {
    kernels().pop().unwrap().1
}

/// A fresh state directory with the kernels and images of this machine in it.
pub(crate) fn state() -> tempfile::TempDir {
    let home = directory();
    for kind in ["kernels", "images"] {
        let from = from_environment("BULKHEAD_HOME").join(kind);
        std::os::unix::fs::symlink(from, home.path().join(kind)).unwrap();
    }
    home
}

/// The root file system of an image.
pub(crate) fn image(name: &str) -> PathBuf {
    from_environment("BULKHEAD_HOME").join("images/names").join(name).join("root.img")
}

/// An image that one of the usual tools made, or the list of its tree: see `tests/images/sources.sh`.
pub(crate) fn source(name: &str) -> PathBuf {
    from_environment("BULKHEAD_SOURCES").join(name)
}

/// A fresh state directory with the kernels of this machine and no images.
pub(crate) fn state_without_images() -> tempfile::TempDir {
    let home = directory();
    let kernels = from_environment("BULKHEAD_HOME").join("kernels");
    std::os::unix::fs::symlink(kernels, home.path().join("kernels")).unwrap();
    home
}

/// Whether the tests have all the time that they could use.
pub(crate) fn soak() -> bool {
    std::env::var_os("BULKHEAD_SOAK").is_some()
}

/// Opens a file for reading.
pub(crate) fn open(path: &Path) -> File {
    File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A machine without console and disks.
pub(crate) fn config(vcpus: u8, memory: u64, initrds: u8) -> Config {
    Config { vcpus, memory, cmdline: CMDLINE.into(), initrds, disks: Vec::new(), console: false, net: None }
}

/// What has been done already in this run of the suite: in the rig a new boot, after its kernel died, goes on with the rest.
pub(crate) struct Progress(Option<PathBuf>);

impl Progress {
    /// In the rig, what earlier boots of this run noted. Elsewhere there are none.
    pub(crate) fn of_this_run() -> Self {
        Self(std::env::var_os("RIG_OUT").map(|directory| Path::new(&directory).join("passed")))
    }

    /// Whether this was done before.
    pub(crate) fn has(&self, name: &str) -> bool {
        let Self(Some(path)) = self else { return false };
        std::fs::read_to_string(path).is_ok_and(|text| text.lines().any(|line| line == name))
    }

    /// Notes that this is done.
    pub(crate) fn add(&self, name: &str) {
        let Self(Some(path)) = self else { return };
        let mut file = File::options().create(true).append(true).open(path).unwrap();
        std::io::Write::write_all(&mut file, format!("{name}\n").as_bytes()).unwrap();
    }
}
