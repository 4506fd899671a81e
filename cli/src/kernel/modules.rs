//! A directory of modules, and those of them that our devices need.
//!
//! What depends on what is read from the modules themselves (`.modinfo`: `depends=`, `softdep=`), so a tree needs no
//! `modules.dep`, and a stale one does no harm.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::compression::{UnpackError, unpack};
use super::elf::{ElfError, section};

/// What a machine of ours needs, in the order of loading, with a word on what for. The agent listens as soon as vsock is
/// in, long before the transport, so a host that connects once the device is up always finds the listener. What comes after the
/// transport, the agent loads while the disk is mounted.
const WANTED: [(&str, &str); 7] = [
    ("vsock", "the connection to the guest agent"),
    ("virtio_mmio", "all devices"),
    ("virtio_blk", "the disk"),
    ("virtio_rng", "entropy"),
    ("ext4", "the disk's file system"),
    ("vmw_vsock_virtio_transport", "the connection to the guest agent"),
    ("virtio_net", "the network"),
];
/// Largest module, unpacked, and all together that are picked, which every machine gets into its memory; those of
/// distributions stay below 20 MiB.
const MAX_MODULE: u64 = 128 << 20;
/// Most files of a module tree. Distributions have 5,000.
const MAX_FILES: usize = 100_000;
/// Deepest directory of one.
const MAX_DEPTH: usize = 16;
/// Most modules that are picked: dependencies of the seven are fewer than twenty.
const MAX_PICKED: usize = 64;
/// Suffixes of module files.
const SUFFIXES: [&str; 5] = [".ko", ".ko.xz", ".ko.zst", ".ko.gz", ".ko.lz4"];

/// What can be wrong with a directory of modules.
#[derive(Debug, thiserror::Error)]
pub(super) enum ModulesError {
    /// A file or directory.
    #[error("{path}: {error}", path = path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// No directory of modules there.
    #[error(
        "{directory}: no modules for {release}; name the directory that has them, such as /lib/modules/{release}",
        directory = directory.display()
    )]
    NotFound {
        /// What was named.
        directory: PathBuf,
        /// The kernel's release.
        release: String,
    },
    /// One that machines need is neither there nor in the kernel.
    #[error(
        "module {name} ({purpose}): not in {directory} and not built into the kernel{by}; use a kernel that has it, such \
         as Debian's linux-image-amd64",
        directory = directory.display()
    )]
    Missing {
        /// Its name.
        name: String,
        /// What it is for, or that another needs it.
        purpose: String,
        /// How we know what is built in.
        by: &'static str,
        /// Where it would be.
        directory: PathBuf,
    },
    /// A module that is damaged.
    #[error("{path}: {error}", path = path.display())]
    Packed {
        /// Its file.
        path: PathBuf,
        /// Why.
        error: UnpackError,
    },
    /// A module that is none.
    #[error("{path}: not a module: {error}", path = path.display())]
    NotAModule {
        /// Its file.
        path: PathBuf,
        /// Why.
        error: ElfError,
    },
    /// Of another kernel.
    #[error("{path}: it is of kernel {of}, and the kernel is {release}; name the modules that came with it", path = path.display())]
    OfAnother {
        /// Its file.
        path: PathBuf,
        /// The release that it names.
        of: String,
        /// The kernel's.
        release: String,
    },
    /// More files, or a deeper tree, than any has.
    #[error("{directory}: over {MAX_FILES} files or deeper than {MAX_DEPTH}, which no module tree is", directory = directory.display())]
    TooMuch {
        /// Where.
        directory: PathBuf,
    },
    /// Dependencies without end.
    #[error("{directory}: the modules needed depend on over {MAX_PICKED} others, or have over {MAX_MODULE} bytes, which is not so with any kernel", directory = directory.display())]
    TooManyNeeded {
        /// Where.
        directory: PathBuf,
    },
}

/// A module, unpacked.
#[derive(Debug)]
pub(super) struct Module {
    /// Its name, with underscores.
    pub(super) name: String,
    /// Its ELF file.
    pub(super) content: Vec<u8>,
}

/// The modules of one release.
#[derive(Debug)]
pub(super) struct Tree {
    directory: PathBuf,
    /// Files by module name.
    files: BTreeMap<String, PathBuf>,
    /// Names of what the kernel has built in.
    builtin: BTreeSet<String>,
}

impl Tree {
    /// Reads the names in `directory`, or in what lies below it for this release.
    pub(super) fn read(directory: &Path, release: &str) -> Result<Self, ModulesError> {
        let below = [
            PathBuf::new(),
            release.into(),
            Path::new("lib/modules").join(release),
            Path::new("usr/lib/modules").join(release),
        ];
        let is_tree =
            |path: &PathBuf| ["kernel", "modules.order", "modules.builtin"].iter().any(|name| path.join(name).exists());
        fs::metadata(directory).map_err(at(directory))?;
        let found = below
            .iter()
            .map(|below| directory.join(below))
            .find(is_tree)
            .ok_or_else(|| ModulesError::NotFound { directory: directory.to_owned(), release: release.to_owned() })?;
        let mut tree = Self { builtin: builtin(&found)?, files: BTreeMap::new(), directory: found };
        for path in walk(&tree.directory)? {
            if let Some(name) = path.file_name().and_then(|name| module_name(name.to_str()?)) {
                // Updates come before what the kernel shipped with, as depmod has it.
                let update = path.strip_prefix(&tree.directory).is_ok_and(|below| below.starts_with("updates"));
                if update || !tree.files.contains_key(&name) {
                    tree.files.insert(name, path);
                }
            }
        }
        Ok(tree)
    }

    /// The directory that has the modules of the release.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The modules that our devices need and what these depend on, in the order of loading.
    pub(super) fn pick(&self, release: &str) -> Result<Vec<Module>, ModulesError> {
        let mut picked = Vec::new();
        let mut seen = BTreeSet::new();
        let mut room = MAX_MODULE;
        for (name, purpose) in WANTED {
            self.add(name, purpose, release, &mut seen, &mut picked, &mut room)?;
        }
        Ok(picked)
    }

    fn add(
        &self,
        name: &str,
        purpose: &str,
        release: &str,
        seen: &mut BTreeSet<String>,
        picked: &mut Vec<Module>,
        room: &mut u64,
    ) -> Result<(), ModulesError> {
        // Before what it depends on: a circle ends here.
        if self.builtin.contains(name) || !seen.insert(name.to_owned()) {
            return Ok(());
        }
        if seen.len() > MAX_PICKED {
            return Err(ModulesError::TooManyNeeded { directory: self.directory.clone() });
        }
        let path = self.files.get(name).ok_or_else(|| ModulesError::Missing {
            name: name.to_owned(),
            purpose: purpose.to_owned(),
            by: if self.builtin.is_empty() { " (there is no modules.builtin that would say so)" } else { "" },
            directory: self.directory.clone(),
        })?;
        let packed = read_bounded(path)?;
        let content =
            unpack(&packed, MAX_MODULE).map_err(|error| ModulesError::Packed { path: path.clone(), error })?;
        let info = Info::of(&content).map_err(|error| ModulesError::NotAModule { path: path.clone(), error })?;
        let length = u64::try_from(content.len()).unwrap_or(u64::MAX);
        let too_many = || ModulesError::TooManyNeeded { directory: self.directory.clone() };
        *room = room.checked_sub(length).ok_or_else(too_many)?;
        if info.release != release {
            let (of, release) = (info.release, release.to_owned());
            return Err(ModulesError::OfAnother { path: path.clone(), of, release });
        }
        for needed in &info.depends {
            self.add(needed, &format!("{name} needs it"), release, seen, picked, room)?;
        }
        for wished in &info.softdeps {
            // A wish may be for an alias. The one that matters is "crypto-crc32c", with which ext4 asks for a checksum whose
            // plain implementation is the module crc32c_generic.
            let algorithm = wished.strip_prefix("crypto_").unwrap_or(wished);
            let known = [wished.clone(), format!("{algorithm}_generic")];
            if let Some(wished) = known.iter().find(|name| self.files.contains_key(*name)) {
                self.add(wished, &format!("{name} wishes it"), release, seen, picked, room)?;
            }
        }
        picked.push(Module { name: name.to_owned(), content });
        Ok(())
    }
}

/// What a module says of itself.
#[derive(Debug, Default, PartialEq, Eq)]
struct Info {
    /// The kernel that it was built for.
    release: String,
    /// Modules that must be loaded before it.
    depends: Vec<String>,
    /// Modules that had better be.
    softdeps: Vec<String>,
}

impl Info {
    fn of(content: &[u8]) -> Result<Self, ElfError> {
        let mut info = Self::default();
        let section = section(content, ".modinfo")?.ok_or(ElfError::CutShort("section .modinfo"))?;
        for line in section.split(|byte| *byte == 0) {
            let Some((key, value)) = std::str::from_utf8(line).ok().and_then(|line| line.split_once('=')) else {
                continue;
            };
            match key {
                "vermagic" => info.release = value.split(' ').next().unwrap_or("").to_owned(),
                "depends" => info.depends.extend(value.split(',').filter(|name| !name.is_empty()).map(plain_name)),
                // "pre: a b post: c"
                "softdep" => {
                    let words = value.split_ascii_whitespace();
                    let before = words.skip_while(|word| *word != "pre:").skip(1).take_while(|word| *word != "post:");
                    info.softdeps.extend(before.map(plain_name));
                }
                _ => {}
            }
        }
        Ok(info)
    }
}

/// Dashes and underscores are the same in names of modules.
fn plain_name(name: &str) -> String {
    name.replace('-', "_")
}

/// The name of the module in a file of this name, if it is one.
fn module_name(file: &str) -> Option<String> {
    SUFFIXES.iter().find_map(|suffix| file.strip_suffix(suffix)).filter(|name| !name.is_empty()).map(plain_name)
}

/// The names in `modules.builtin`; none if there is no such file.
fn builtin(directory: &Path) -> Result<BTreeSet<String>, ModulesError> {
    let path = directory.join("modules.builtin");
    if !path.exists() {
        return Ok(BTreeSet::new());
    }
    let text = String::from_utf8_lossy(&read_bounded(&path)?).into_owned();
    Ok(text.lines().filter_map(|line| module_name(line.rsplit('/').next()?)).collect())
}

/// All plain files below a directory, sorted. Symbolic links are not followed: `build` and `source` lead to elsewhere.
pub(super) fn walk(directory: &Path) -> Result<Vec<PathBuf>, ModulesError> {
    let mut files = Vec::new();
    let mut waiting = vec![(directory.to_owned(), 0_usize)];
    while let Some((path, depth)) = waiting.pop() {
        for entry in fs::read_dir(&path).map_err(at(&path))? {
            let entry = entry.map_err(at(&path))?;
            let kind = entry.file_type().map_err(at(&path))?;
            if kind.is_dir() {
                waiting.push((entry.path(), depth.saturating_add(1)));
            } else if kind.is_file() {
                files.push(entry.path());
            }
            if depth > MAX_DEPTH || files.len().saturating_add(waiting.len()) > MAX_FILES {
                return Err(ModulesError::TooMuch { directory: directory.to_owned() });
            }
        }
    }
    files.sort();
    Ok(files)
}

fn read_bounded(path: &Path) -> Result<Vec<u8>, ModulesError> {
    let mut content = Vec::new();
    // What is no file might never end, or never begin.
    let file =
        File::options().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path).map_err(at(path))?;
    if !file.metadata().map_err(at(path))?.is_file() {
        return Err(at(path)(io::Error::other("not a regular file")));
    }
    file.take(MAX_MODULE.saturating_add(1)).read_to_end(&mut content).map_err(at(path))?;
    if u64::try_from(content.len()).unwrap_or(u64::MAX) > MAX_MODULE {
        return Err(ModulesError::Packed { path: path.to_owned(), error: UnpackError::TooLarge { limit: MAX_MODULE } });
    }
    Ok(content)
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> ModulesError + use<'_> {
    move |error| ModulesError::Io { path: path.to_owned(), error }
}

/// Trees made up, for the tests of this and of the import.
#[cfg(test)]
#[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
pub(super) mod make {
    use super::super::compression::Compression;
    use super::super::compression::pack::pack;
    use super::super::elf::make::module;
    use super::*;

    /// What a usual kernel has: file, what it depends on, further lines.
    pub(in crate::kernel) const USUAL: &[(&str, &str, &[&str])] = &[
        ("net/vmw_vsock/vsock.ko", "", &[]),
        ("net/vmw_vsock/vmw_vsock_virtio_transport.ko", "vmw_vsock_virtio_transport_common,virtio,vsock", &[]),
        ("net/vmw_vsock/vmw_vsock_virtio_transport_common.ko", "vsock", &[]),
        ("drivers/virtio/virtio.ko", "virtio_ring", &[]),
        ("drivers/virtio/virtio_ring.ko", "", &[]),
        ("drivers/virtio/virtio_mmio.ko", "virtio,virtio_ring", &[]),
        ("drivers/block/virtio_blk.ko", "virtio", &[]),
        ("drivers/char/hw_random/virtio-rng.ko", "virtio", &[]),
        ("drivers/net/virtio_net.ko", "net_failover,virtio", &[]),
        ("drivers/net/net_failover.ko", "failover", &[]),
        ("net/core/failover.ko", "", &[]),
        ("fs/ext4/ext4.ko", "jbd2,mbcache", &["softdep=pre: crypto-crc32c post: nothing"]),
        ("fs/jbd2/jbd2.ko", "", &[]),
        ("fs/mbcache.ko", "", &[]),
        ("crypto/crc32c_generic.ko", "", &["alias=crc32c"]),
        ("fs/fuse/fuse.ko", "", &[]),
    ];

    /// Writes a tree of modules; which is packed with what takes turns.
    pub(in crate::kernel) fn tree(directory: &Path, release: &str, files: &[(&str, &str, &[&str])]) {
        let packed = [
            (Compression::None, ""),
            (Compression::Xz, ".xz"),
            (Compression::Zstd, ".zst"),
            (Compression::Gzip, ".gz"),
        ];
        for (index, (path, depends, more)) in files.iter().enumerate() {
            let mut lines = vec!["license=GPL".to_owned(), format!("depends={depends}")];
            lines.extend(more.iter().map(|line| (*line).to_owned()));
            lines.push(format!("vermagic={release} SMP preempt mod_unload "));
            let (compression, suffix) = packed[index % packed.len()];
            let path = directory.join("kernel").join(format!("{path}{suffix}"));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, pack(&module(&lines), compression)).unwrap();
        }
        fs::write(directory.join("modules.builtin"), "kernel/lib/crc16.ko\nkernel/net/sched/sch-fq.ko\n").unwrap();
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
mod tests {
    use super::make::{USUAL, tree};
    use super::*;

    const RELEASE: &str = "6.12.3-cloud";

    fn pick(directory: &Path) -> Result<Vec<String>, String> {
        let picked = Tree::read(directory, RELEASE).and_then(|tree| tree.pick(RELEASE));
        picked.map(|all| all.into_iter().map(|module| module.name).collect()).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_needed_is_picked_after_what_it_needs() {
        let directory = tempfile::tempdir().unwrap();
        tree(directory.path(), RELEASE, USUAL);
        // Neither followed nor a trouble.
        std::os::unix::fs::symlink("/", directory.path().join("build")).unwrap();
        let expected = "vsock virtio_ring virtio virtio_mmio virtio_blk virtio_rng jbd2 mbcache crc32c_generic ext4 \
                        vmw_vsock_virtio_transport_common vmw_vsock_virtio_transport failover net_failover virtio_net";
        assert_eq!(pick(directory.path()).unwrap().join(" "), expected);
    }

    #[test]
    fn the_tree_is_found_where_packages_and_users_have_it() {
        let directory = tempfile::tempdir().unwrap();
        let own = directory.path().join("usr/lib/modules").join(RELEASE);
        tree(&own, RELEASE, USUAL);
        for named in ["", "usr/lib/modules", "usr/lib/modules/6.12.3-cloud"] {
            assert_eq!(Tree::read(&directory.path().join(named), RELEASE).unwrap().directory(), own);
        }
        let error = pick(&directory.path().join("usr/lib")).unwrap_err();
        assert!(error.contains("no modules for 6.12.3-cloud; name the directory"), "{error}");
        assert!(pick(&directory.path().join("nowhere")).unwrap_err().contains("nowhere: No such file"));
    }

    #[test]
    fn what_is_built_in_is_not_missed_and_what_is_missing_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let without: Vec<_> = USUAL.iter().copied().filter(|(path, ..)| !path.contains("ext4")).collect();
        tree(directory.path(), RELEASE, &without);
        let error = pick(directory.path()).unwrap_err();
        assert!(
            error.contains("module ext4 (the disk's file system): not in ") && error.contains("not built into"),
            "{error}"
        );
        fs::write(directory.path().join("modules.builtin"), "kernel/fs/ext4/ext4.ko\n").unwrap();
        assert!(!pick(directory.path()).unwrap().join(" ").contains("jbd2"));
        let without: Vec<_> = USUAL.iter().copied().filter(|(path, ..)| !path.contains("virtio_ring")).collect();
        let directory = tempfile::tempdir().unwrap();
        tree(directory.path(), RELEASE, &without);
        let error = pick(directory.path()).unwrap_err();
        assert!(error.contains("module virtio_ring (virtio needs it)"), "{error}");
        fs::remove_file(directory.path().join("modules.builtin")).unwrap();
        assert!(pick(directory.path()).unwrap_err().contains("no modules.builtin that would say"));
    }

    #[test]
    fn updates_come_first() {
        let directory = tempfile::tempdir().unwrap();
        tree(directory.path(), RELEASE, USUAL);
        let update = directory.path().join("updates/dkms");
        fs::create_dir_all(&update).unwrap();
        fs::write(update.join("vsock.ko"), "not one").unwrap();
        let error = pick(directory.path()).unwrap_err();
        assert!(error.contains("updates/dkms/vsock.ko: not a module"), "{error}");
    }

    #[test]
    fn a_module_of_another_kernel_or_a_damaged_one_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        tree(directory.path(), RELEASE, USUAL);
        let other = tempfile::tempdir().unwrap();
        tree(other.path(), "6.12.4-cloud", USUAL);
        let error = pick(other.path()).unwrap_err();
        assert!(error.contains("it is of kernel 6.12.4-cloud, and the kernel is 6.12.3-cloud"), "{error}");
        let packed = directory.path().join("kernel/net/vmw_vsock/vmw_vsock_virtio_transport.ko.xz");
        let whole = fs::read(&packed).unwrap();
        fs::write(&packed, &whole[..whole.len() / 2]).unwrap();
        let error = pick(directory.path()).unwrap_err();
        assert!(error.contains("vmw_vsock_virtio_transport.ko.xz: its xz data is damaged or cut short"), "{error}");
    }

    #[test]
    fn circles_and_endless_dependencies_end() {
        let directory = tempfile::tempdir().unwrap();
        let circle = USUAL
            .iter()
            .map(|&(path, depends, more)| (path, if path.contains("vsock.ko") { "ext4" } else { depends }, more));
        tree(directory.path(), RELEASE, &circle.collect::<Vec<_>>());
        assert_eq!(pick(directory.path()).unwrap().len(), 15);
        let names: Vec<String> = (0..100).map(|n| format!("m{n}")).collect();
        let chain: Vec<(String, String)> = (0..99)
            .map(|n| (format!("{}.ko", names[n]), names[n + 1].clone()))
            .chain([("vsock.ko".into(), "m0".into())])
            .collect();
        let directory = tempfile::tempdir().unwrap();
        tree(
            directory.path(),
            RELEASE,
            &chain.iter().map(|(path, next)| (path.as_str(), next.as_str(), &[][..])).collect::<Vec<_>>(),
        );
        assert!(pick(directory.path()).unwrap_err().contains("depend on over 64 others"));
    }
}
