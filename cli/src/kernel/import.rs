//! From a kernel's files to a kernel of the store.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::cpio;
use super::deb::{self, DebError};
use super::modules::{ModulesError, Tree};
use super::store::{
    MODULES, Part, Record, Store, StoreError, TREE, Unfinished, VERSION, VMLINUX, hash, hex, sync_file, write_synced,
};
use super::tree::{self, TreeError};
use super::vmlinuz::{self, Vmlinux, VmlinuzError};
use crate::home::at;
use crate::image::progress::Progress;

/// Largest kernel file; those of distributions are below 100 MiB.
const MAX_FILE: u64 = 1 << 30;

/// Why an import failed. Nothing of it is left then.
#[derive(Debug, thiserror::Error)]
pub(super) enum ImportError {
    /// The kernel's file.
    #[error("{path}: {error}", path = path.display())]
    Kernel {
        /// Which.
        path: PathBuf,
        /// Why.
        error: VmlinuzError,
    },
    /// A package.
    #[error("{path}: {error}", path = path.display())]
    Package {
        /// Which.
        path: PathBuf,
        /// Why.
        error: DebError,
    },
    /// Packages that are not all of a kernel, or of more than one.
    #[error("{packages}: {what}")]
    Content {
        /// Which.
        packages: String,
        /// What they have or lack.
        what: String,
    },
    /// A file that is too large to be a kernel.
    #[error("{path}: over {MAX_FILE} bytes, which no kernel has", path = path.display())]
    TooLarge {
        /// Which.
        path: PathBuf,
    },
    /// A kernel without its modules.
    #[error("{path}: no --modules; name the directory of its modules, such as /lib/modules/{release}", path = path.display())]
    NoModules {
        /// The kernel.
        path: PathBuf,
        /// Its release.
        release: String,
    },
    /// Modules for a package, which has its own; or several files that are no packages.
    #[error("{0}")]
    Usage(String),
    /// The modules.
    #[error(transparent)]
    Modules(#[from] ModulesError),
    /// The file system of all modules.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// The store, or a file that cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Any of these, told by what the user knows.
    #[error("{0}")]
    Told(String),
}

/// An error with the places where an import works replaced by what the user knows: a package for where it was unpacked, the
/// store for what is made for it. Names in it are a package's, and fit to print.
fn told(error: &ImportError, request: &Request<'_>, made: &Path, staging: &Path, store: &Path) -> ImportError {
    let sources: Vec<String> = request.sources.iter().map(|path| path.display().to_string()).collect();
    // What is staged came from the packages, or from the directory of modules.
    let origin = request.modules.map_or_else(|| sources.join(", "), |modules| modules.display().to_string());
    let (made, staging) = (made.display().to_string(), staging.display().to_string());
    let text = error.to_string();
    let text = text.replace(&format!("{staging}/"), &format!("{origin}: ")).replace(&staging, &origin);
    let text = text.replace(&made, &store.display().to_string());
    ImportError::Told(text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect())
}

/// What is imported.
#[derive(Debug)]
pub(super) struct Request<'a> {
    /// A kernel, or packages.
    pub(super) sources: &'a [PathBuf],
    /// The modules of the kernel.
    pub(super) modules: Option<&'a Path>,
    /// Whether all modules are wanted.
    pub(super) full: bool,
    /// Whether nothing is told of how far it is.
    pub(super) quiet: bool,
}

/// Imports a kernel: its record, and whether it is new here.
pub(super) fn import(store: &Store, request: &Request<'_>) -> Result<(Record, bool), ImportError> {
    let made = store.begin()?;
    let staging = made.path.join("staging");
    let record = prepare(request, &made, &staging);
    let removed = match std::fs::remove_dir_all(&staging) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    let told = |error| told(&error, request, &made.path, &staging, store.path());
    let record = record.map_err(told)?;
    removed.map_err(|error| told(StoreError::from(at(&staging)(error)).into()))?;
    // One that is here with all of its modules is the same and more.
    let same = |other: &Record| record.files.iter().all(|(name, part)| other.files.get(name) == Some(part));
    if let Some(here) = store.records()?.into_iter().rev().find(|other| same(other) && store.verify(other).is_ok()) {
        return Ok((here, false));
    }
    let new = store.publish(&made, &record)?;
    Ok((record, new))
}

fn prepare(request: &Request<'_>, made: &Unfinished, staging: &Path) -> Result<Record, ImportError> {
    let (kernel_file, modules) = open_sources(request, staging)?;
    let Vmlinux { elf, release } = read_kernel(&kernel_file)?;
    let Some(modules) = modules else { return Err(ImportError::NoModules { path: kernel_file, release }) };
    let tree = Tree::read(&modules, &release)?;
    let picked = tree.pick(&release)?;
    let names = picked.iter().map(|module| module.name.clone()).collect();
    let files: Vec<(String, Vec<u8>)> =
        picked.into_iter().map(|module| (format!("{}.ko", module.name), module.content)).collect();

    let mut files_of_record = vec![(VMLINUX, elf), (MODULES, cpio::archive(&files))]
        .into_iter()
        .map(|(name, content)| Ok((name.to_owned(), write_synced(&made.path.join(name), &content)?)))
        .collect::<Result<std::collections::BTreeMap<String, Part>, StoreError>>()?;
    let mut identity = String::from("bulkhead kernel\n");
    for (name, part) in &files_of_record {
        identity.push_str(&format!("{name} {}\n", part.sha256));
    }
    if request.full {
        if !tree.directory().starts_with(staging) {
            tree::copy(tree.directory(), &release, staging)?;
        }
        identity.push_str(&format!("tree {}\n", tree::digest(staging, &release)?));
        let image = made.path.join(TREE);
        tree::build(staging, &release, &image)?;
        sync_file(&image).map_err(StoreError::from)?;
        let part = File::open(&image).and_then(hash).map_err(at(&image)).map_err(StoreError::from)?;
        files_of_record.insert(TREE.to_owned(), part);
    }
    Ok(Record {
        version: VERSION,
        id: hex(&Sha256::digest(identity)),
        release,
        source: request.sources.iter().map(|path| file_name(path)).collect(),
        imported: crate::clock::now(),
        files: files_of_record,
        modules: names,
    })
}

/// The kernel's file and the directory of its modules; those of packages are unpacked first.
fn open_sources(request: &Request<'_>, staging: &Path) -> Result<(PathBuf, Option<PathBuf>), ImportError> {
    let mut packages = Vec::new();
    for path in request.sources {
        let mut file = open(path)?;
        let mut head = [0; 8];
        let read = file.read(&mut head).map_err(at(path)).map_err(StoreError::from)?;
        file.rewind().map_err(at(path)).map_err(StoreError::from)?;
        packages.push(deb::is_package(head.get(..read).unwrap_or_default()).then_some(file));
    }
    if let ([path], [None]) = (request.sources, packages.as_slice()) {
        return Ok((path.clone(), request.modules.map(Path::to_owned)));
    }
    if let Some((path, _)) = request.sources.iter().zip(&packages).find(|(_, package)| package.is_none()) {
        let path = path.display();
        return Err(ImportError::Usage(format!("{path}: not a Debian package; only packages may be several")));
    }
    if let Some(modules) = request.modules {
        let modules = modules.display();
        return Err(ImportError::Usage(format!("--modules {modules}: a package brings its modules; leave it out")));
    }
    for (path, package) in request.sources.iter().zip(packages.into_iter().flatten()) {
        let length = package.metadata().map_or(0, |data| data.len());
        let mut package = Told(package, Progress::new("unpacking", Some(length), request.quiet));
        deb::unpack(&mut package, staging).map_err(|error| ImportError::Package { path: path.clone(), error })?;
    }
    let packages: Vec<String> = request.sources.iter().map(|path| path.display().to_string()).collect();
    let content = |what: String| ImportError::Content { packages: packages.join(", "), what };
    let kernels = crate::home::entries(&staging.join("boot")).map_err(StoreError::from)?;
    let [kernel] = kernels.as_slice() else {
        return Err(content(match kernels.as_slice() {
            [] => {
                "no kernel (boot/vmlinuz-*) in it; the package is called linux-image-RELEASE, and its dependency-only \
                   namesakes hold nothing"
                    .to_owned()
            }
            many => format!("several kernels: {}; import them one by one", many.join(", ")),
        }));
    };
    let modules = staging.join("lib/modules");
    if crate::home::entries(&modules).map_err(StoreError::from)?.is_empty() {
        return Err(content(
            "no modules (lib/modules) in it; where they have a package of their own (linux-modules-RELEASE), name both"
                .to_owned(),
        ));
    }
    Ok((staging.join("boot").join(kernel), Some(modules)))
}

/// What is read here is told to the user.
struct Told(File, Progress);

impl Read for Told {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(buffer)?;
        self.1.add(u64::try_from(read).unwrap_or(0));
        Ok(read)
    }
}

fn read_kernel(path: &Path) -> Result<Vmlinux, ImportError> {
    let mut bytes = Vec::new();
    open(path)?.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(at(path)).map_err(StoreError::from)?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > MAX_FILE {
        return Err(ImportError::TooLarge { path: path.to_owned() });
    }
    vmlinuz::read(bytes).map_err(|error| ImportError::Kernel { path: path.to_owned(), error })
}

/// Opens a source. A terminal, a pipe or a device would block or never end.
fn open(path: &Path) -> Result<File, ImportError> {
    let metadata = path.metadata().map_err(|error| StoreError::from(at(path)(error)))?;
    if !metadata.is_file() {
        let kind = if metadata.is_dir() { "a directory" } else { "no plain file" };
        return Err(ImportError::Usage(format!(
            "{}: it is {kind}; name a vmlinuz, a vmlinux or a package",
            path.display()
        )));
    }
    Ok(File::open(path).map_err(|error| StoreError::from(at(path)(error)))?)
}

fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::compression::Compression;
    use super::super::{deb, elf, modules, vmlinuz};
    use super::*;
    use crate::home::Home;

    const RELEASE: &str = "6.12.3+deb12-cloud-amd64";

    /// A state directory, and beside it a kernel with its modules.
    struct Place {
        directory: tempfile::TempDir,
        store: Store,
    }

    impl Place {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let kernel = vmlinuz::make::bzimage(&elf::make::kernel(RELEASE), RELEASE, Compression::Zstd);
            fs::write(directory.path().join("vmlinuz"), kernel).unwrap();
            modules::make::tree(&directory.path().join("lib/modules").join(RELEASE), RELEASE, modules::make::USUAL);
            let home = Home::at(directory.path().join("home"));
            fs::create_dir(home.path()).unwrap();
            Self { directory, store: Store::of(&home) }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.directory.path().join(name)
        }

        fn import(&self, sources: &[&str], modules: Option<&str>, full: bool) -> Result<(Record, bool), String> {
            let sources: Vec<PathBuf> = sources.iter().map(|name| self.path(name)).collect();
            let modules = modules.map(|name| self.path(name));
            let request = Request { sources: &sources, modules: modules.as_deref(), full, quiet: true };
            import(&self.store, &request).map_err(|error| error.to_string())
        }

        /// Makes a package of the modules, and of the kernel if there is one.
        fn package(&self, name: &str, kernel: &[&str]) {
            let mut files: Vec<(String, Vec<u8>)> = kernel
                .iter()
                .map(|kernel| (format!("./boot/{kernel}"), fs::read(self.path("vmlinuz")).unwrap()))
                .collect();
            for path in modules::walk(&self.path("lib")).unwrap() {
                let name = path.strip_prefix(self.directory.path()).unwrap();
                files.push((format!("./usr/{}", name.display()), fs::read(&path).unwrap()));
            }
            let files: Vec<(&str, &[u8])> =
                files.iter().map(|(name, content)| (name.as_str(), content.as_slice())).collect();
            fs::write(self.path(name), deb::make::package(&files, Compression::Xz)).unwrap();
        }

        /// What lies in the store, but for its lock.
        fn stored(&self) -> Vec<String> {
            let all = fs::read_dir(self.path("home/kernels")).into_iter().flatten();
            let mut names: Vec<String> = all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.retain(|name| name != ".lock");
            names.sort();
            names
        }
    }

    #[test]
    fn the_same_kernel_is_recognised_however_it_comes() {
        let place = Place::new();
        let (record, new) = place.import(&["vmlinuz"], Some("lib/modules"), false).unwrap();
        assert!(new);
        assert_eq!((record.release.as_str(), record.modules.len()), (RELEASE, 15));
        place.package("kernel.deb", &["vmlinuz-x"]);
        let (again, new) = place.import(&["kernel.deb"], None, false).unwrap();
        assert_eq!((again.id, new), (record.id.clone(), false));
        assert_eq!(place.stored(), [record.id.as_str()]);
        place.store.verify(&record).unwrap();
        // What is in the parts.
        let directory = place.store.directory(&record.id);
        assert!(fs::read(directory.join(VMLINUX)).unwrap() == elf::make::kernel(RELEASE));
        assert!(fs::read(directory.join(MODULES)).unwrap().starts_with(b"070701"));
    }

    #[test]
    fn two_at_once_end_in_one() {
        let place = Place::new();
        let ids: Vec<String> = std::thread::scope(|scope| {
            let import = || place.import(&["vmlinuz"], Some("lib/modules"), false);
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(import)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap().unwrap().0.id).collect()
        });
        assert_eq!(place.stored(), [ids[0].as_str()]);
        assert!(ids.iter().all(|id| *id == ids[0]));
    }

    #[test]
    fn names_move_and_go_with_their_kernel() {
        let place = Place::new();
        let (first, _) = place.import(&["vmlinuz"], Some("lib/modules"), false).unwrap();
        // Another file of one module makes another kernel.
        let module = place.path("lib/modules").join(RELEASE).join("kernel/fs/mbcache.ko.zst");
        let name = fs::read_dir(module.parent().unwrap())
            .unwrap()
            .map(|e| e.unwrap().path())
            .find(|p| p.to_str().unwrap().contains("mbcache"))
            .unwrap();
        let lines = ["depends=".to_owned(), format!("vermagic={RELEASE} x"), "version=2".to_owned()];
        let packed = super::super::compression::pack::pack(&elf::make::module(&lines), Compression::Gzip);
        fs::write(name, packed).unwrap();
        let (second, new) = place.import(&["vmlinuz"], Some("lib/modules"), false).unwrap();
        assert!(new && first.id != second.id);
        assert_eq!(place.store.name("mine", &first.id).unwrap(), None);
        assert_eq!(place.store.name("mine", &first.id).unwrap(), None);
        assert_eq!(place.store.name("other", &first.id).unwrap(), None);
        assert_eq!(place.store.name("mine", &second.id).unwrap(), Some(first.id.clone()));
        assert_eq!(place.store.find("mine").unwrap(), second.id);
        assert_eq!(place.store.find(&first.id[..16]).unwrap(), first.id);
        assert!(place.store.find("").is_err());
        let error = place.store.find("mne").unwrap_err().to_string();
        assert!(error.contains("did you mean mine?"), "{error}");
        // The newest of one release is the one that came last.
        let kernel = place.store.kernel(None).unwrap();
        assert!(kernel.vmlinux.starts_with(place.store.directory(&second.id)));
        place.store.remove(&second.id).unwrap();
        assert_eq!(place.store.names().unwrap().into_keys().collect::<Vec<_>>(), ["other"]);
        assert_eq!(place.store.records().unwrap(), [first]);
    }

    #[test]
    fn a_failed_import_leaves_nothing() {
        let place = Place::new();
        fs::write(place.path("text"), "no kernel").unwrap();
        place.package("empty.deb", &[]);
        place.package("two.deb", &["vmlinuz-a", "vmlinuz-b"]);
        place.package("whole.deb", &["vmlinuz-a"]);
        let whole = fs::read(place.path("whole.deb")).unwrap();
        fs::write(place.path("cut.deb"), &whole[..whole.len() / 2]).unwrap();
        fs::write(
            place.path("kernel.deb"),
            deb::make::package(&[("boot/vmlinuz-a", &fs::read(place.path("vmlinuz")).unwrap())], Compression::Gzip),
        )
        .unwrap();
        let module = format!("lib/modules/{RELEASE}/kernel/fs/fuse/fuse.ko");
        let kernel = fs::read(place.path("vmlinuz")).unwrap();
        for (name, kernel_name, kernel) in
            [("text.deb", "boot/vmlinuz-\x1b[2J", &b"no kernel"[..]), ("few.deb", "boot/vmlinuz-a", &kernel)]
        {
            let package = deb::make::package(&[(kernel_name, kernel), (&module, b"")], Compression::Gzip);
            fs::write(place.path(name), package).unwrap();
        }
        for (sources, modules, said) in [
            (&["text"][..], Some("lib/modules"), "text: it is no kernel: its first bytes are of no known kind"),
            (&["nowhere"], None, "nowhere: No such file"),
            (&["lib"], None, "it is a directory; name a vmlinuz"),
            (
                &["vmlinuz"],
                None,
                "vmlinuz: no --modules; name the directory of its modules, such as /lib/modules/6.12.3+deb12",
            ),
            (&["vmlinuz"], Some("home"), "home: no modules for 6.12.3+deb12"),
            (&["vmlinuz", "text"], Some("lib"), "not a Debian package; only packages may be several"),
            (&["whole.deb"], Some("lib"), "a package brings its modules; leave it out"),
            (&["cut.deb"], None, "cut.deb: not a whole Debian package"),
            (&["empty.deb"], None, "no kernel (boot/vmlinuz-*) in it"),
            (&["two.deb"], None, "several kernels: vmlinuz-a, vmlinuz-b"),
            (&["kernel.deb"], None, "no modules (lib/modules) in it"),
            (&["text.deb"], None, "text.deb: boot/vmlinuz-\u{fffd}[2J: it is no kernel"),
            (&["few.deb"], None, "few.deb: lib/modules/6.12.3+deb12-cloud-amd64 and not built into the kernel"),
        ] {
            let error = place.import(sources, modules, false).unwrap_err();
            assert!(error.contains(said), "{sources:?}: {error}");
            assert!(!error.contains(".tmp-") && !error.contains("staging") && !error.contains('\x1b'), "{error}");
            assert_eq!(place.stored(), [""; 0], "{sources:?}");
        }
        // The kernel and its modules in a package each.
        assert!(place.import(&["kernel.deb", "empty.deb"], None, false).unwrap().1);
    }

    #[test]
    fn what_killed_imports_left_is_removed_and_what_lives_is_not() {
        let place = Place::new();
        let living = place.store.begin().unwrap();
        let left = place.path("home/kernels/.tmp-dead");
        fs::create_dir(&left).unwrap();
        fs::write(left.join(VMLINUX), "half").unwrap();
        let (record, _) = place.import(&["vmlinuz"], Some("lib/modules"), false).unwrap();
        assert!(!left.exists() && living.path.exists());
        // A directory without a record is no kernel, and gives way to one.
        drop(living);
        fs::remove_file(place.store.directory(&record.id).join("kernel.json")).unwrap();
        assert!(place.store.records().unwrap().is_empty());
        assert!(place.import(&["vmlinuz"], Some("lib/modules"), false).unwrap().1);
        assert_eq!(place.store.records().unwrap().len(), 1);
    }

    #[test]
    fn a_kernel_of_an_older_version_goes_whatever_an_earlier_removal_left() {
        let place = Place::new();
        let (record, _) = place.import(&["vmlinuz"], Some("lib/modules"), false).unwrap();
        for remove in [false, true] {
            // Someone is still at work in it.
            let left = place.path("home/kernels").join(format!(".tmp-{}", record.id));
            fs::create_dir_all(left.join("half")).unwrap();
            let lock = File::open(&left).unwrap();
            rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
            if remove {
                place.store.remove(&record.id).unwrap();
            } else {
                let path = place.store.directory(&record.id).join("kernel.json");
                let text = fs::read_to_string(&path).unwrap();
                fs::write(&path, text.replacen(&format!("\"version\": {VERSION}"), "\"version\": 1", 1)).unwrap();
            }
            assert!(place.store.records().unwrap().is_empty());
            assert!(place.import(&["vmlinuz"], Some("lib/modules"), false).unwrap().1);
            assert_eq!(place.store.records().unwrap().len(), 1);
        }
    }

    #[test]
    fn damage_is_noticed() {
        let place = Place::new();
        let (record, _) = place.import(&["vmlinuz"], Some("lib/modules"), false).unwrap();
        let modules = place.store.directory(&record.id).join(MODULES);
        let mut content = fs::read(&modules).unwrap();
        content[200] ^= 1;
        fs::write(&modules, &content).unwrap();
        // The length is looked at when a run starts, the whole when someone asks.
        assert!(place.store.kernel(Some(&record.id)).is_ok());
        assert!(place.store.verify(&record).unwrap_err().to_string().contains("modules.cpio is damaged"));
        fs::write(&modules, "").unwrap();
        let error = place.store.kernel(None).unwrap_err().to_string();
        assert!(error.contains("modules.cpio is damaged: it has 0 bytes"), "{error}");
        // An import mends it.
        assert!(place.import(&["vmlinuz"], Some("lib/modules"), false).unwrap().1);
        place.store.verify(&place.store.record(&record.id).unwrap()).unwrap();
    }

    /// Needs mke2fs, as the option does, and depmod only for trees without its files.
    #[test]
    fn all_modules_become_a_file_system() {
        let place = Place::new();
        let tree = place.path("lib/modules").join(RELEASE);
        fs::write(tree.join("modules.dep.bin"), "made up").unwrap();
        let (few, _) = place.import(&["vmlinuz"], Some("lib/modules"), false).unwrap();
        let (all, new) = place.import(&["vmlinuz"], Some("lib/modules"), true).unwrap();
        assert!(new && all.id != few.id);
        let image = place.store.kernel(Some(&all.id)).unwrap().tree().unwrap();
        let mut magic = [0; 2];
        std::os::unix::fs::FileExt::read_exact_at(&File::open(image).unwrap(), &mut magic, 1080).unwrap();
        assert_eq!(magic, [0x53, 0xef]);
        let error = place.store.kernel(Some(&few.id)).unwrap().tree().unwrap_err().to_string();
        assert!(error.contains("import it again with --full-modules"), "{error}");
        // Without the option, the one that has them is the same and more.
        place.store.remove(&few.id).unwrap();
        assert_eq!(place.import(&["vmlinuz"], Some("lib/modules"), false).unwrap(), (all, false));
        assert_eq!(place.stored().len(), 1);
    }
}
