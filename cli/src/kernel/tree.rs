//! The whole module tree of a kernel as a file system, which machines get as a read-only disk.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use super::modules::{ModulesError, walk};
use super::store::{hash, hex};

/// Where programs of the system are, for users whose PATH lacks them too.
const PROGRAMS: &str = "/usr/sbin:/usr/bin:/sbin:/bin";
/// A block of the file system.
const BLOCK: u64 = 4096;
/// What a file costs besides its blocks: its inode.
const INODE: u64 = 256;
/// Room for what the file system has of its own, at the least.
const SLACK: u64 = 4 << 20;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub(super) enum TreeError {
    /// Reading the tree.
    #[error(transparent)]
    Modules(#[from] ModulesError),
    /// A file or directory.
    #[error("{path}: {error}", path = path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A program that is not there.
    #[error("{program}: {error}; --full-modules needs it: install {package}")]
    NoProgram {
        /// Its name.
        program: &'static str,
        /// Whose it is.
        package: &'static str,
        /// Why it did not start.
        error: io::Error,
    },
    /// A program that failed.
    #[error("{program}: {said}")]
    Program {
        /// Its name.
        program: &'static str,
        /// Its last words.
        said: String,
    },
}

/// Copies the tree of a release to `staging/lib/modules/RELEASE`: plain files alone.
pub(super) fn copy(from: &Path, release: &str, staging: &Path) -> Result<(), TreeError> {
    let to = staging.join("lib/modules").join(release);
    for path in walk(from)? {
        let Ok(below) = path.strip_prefix(from) else { continue };
        let target = to.join(below);
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(at(parent))?;
        }
        fs::copy(&path, &target).map_err(at(&path))?;
    }
    Ok(())
}

/// What the tree at `staging/lib/modules/RELEASE` is known by: a hash of its modules' names and contents. What depmod makes
/// of them does not count.
pub(super) fn digest(staging: &Path, release: &str) -> Result<String, TreeError> {
    let root = staging.join("lib/modules").join(release);
    let mut listing = Sha256::new();
    for path in walk(&root)? {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or("");
        if name.ends_with(".ko")
            || name.contains(".ko.")
            || name.starts_with("modules.builtin") && !name.ends_with(".bin")
        {
            let part = fs::File::open(&path).and_then(hash).map_err(at(&path))?;
            let below = path.strip_prefix(&root).unwrap_or(&path);
            listing.update(format!("{} {} {}\n", part.sha256, part.size, below.display()));
        }
    }
    Ok(hex(&listing.finalize()))
}

/// Makes a file system of `staging/lib/modules`, with what modprobe looks things up in.
pub(super) fn build(staging: &Path, release: &str, image: &Path) -> Result<(), TreeError> {
    let root = staging.join("lib/modules");
    if !root.join(release).join("modules.dep.bin").exists() {
        // Packages come without: it is made when they are installed.
        let arguments = ["-b".as_ref(), staging.as_os_str(), release.as_ref()];
        run("depmod", "kmod", &arguments)?;
    }
    let (mut blocks, mut files) = (0_u64, 0_u64);
    for path in walk(&root)? {
        let length = fs::metadata(&path).map_err(at(&path))?.len();
        blocks = blocks.saturating_add(length.div_ceil(BLOCK));
        files = files.saturating_add(1);
        // Whoever imports it, in the guest everyone may read it.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).map_err(at(&path))?;
    }
    // Directories are fewer than files. Large files have blocks that list their blocks.
    let inodes = files.saturating_mul(2).saturating_add(64);
    let size = blocks.saturating_mul(BLOCK).saturating_add(inodes.saturating_mul(INODE.saturating_add(BLOCK / 2)));
    let size = size.saturating_add(size / 32).saturating_add(SLACK).next_multiple_of(BLOCK);
    let file = fs::File::create_new(image).map_err(at(image))?;
    file.set_len(size).map_err(at(image))?;
    let inodes = inodes.to_string();
    let arguments = [
        "-q",
        "-F",
        "-t",
        "ext4",
        "-b",
        "4096",
        "-m",
        "0",
        "-L",
        "modules",
        "-N",
        &inodes,
        "-O",
        // Nothing is ever written to it.
        "^has_journal,^resize_inode",
        "-E",
        "root_owner=0:0,lazy_itable_init=1,nodiscard",
        "-d",
    ];
    let mut arguments: Vec<&OsStr> = arguments.iter().map(AsRef::as_ref).collect();
    arguments.extend([root.as_os_str(), image.as_os_str()]);
    run("mke2fs", "e2fsprogs", &arguments)
}

fn run(program: &'static str, package: &'static str, arguments: &[&OsStr]) -> Result<(), TreeError> {
    let mut command = Command::new("env");
    command.env_clear().env("PATH", PROGRAMS).env("LC_ALL", "C").arg(program).args(arguments);
    let output = command.output().map_err(|error| TreeError::NoProgram { program, package, error })?;
    match output.status.code() {
        Some(0) => Ok(()),
        Some(127) => Err(TreeError::NoProgram { program, package, error: io::ErrorKind::NotFound.into() }),
        _ => {
            let said = String::from_utf8_lossy(&output.stderr);
            let lines: Vec<&str> = said.lines().filter(|line| !line.is_empty()).collect();
            let last = lines.get(lines.len().saturating_sub(3)..).unwrap_or_default().join("; ");
            Err(TreeError::Program {
                program,
                said: format!("{} ({})", guest::message::printable(&last), output.status),
            })
        }
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> TreeError + use<'_> {
    move |error| TreeError::Io { path: path.to_owned(), error }
}
