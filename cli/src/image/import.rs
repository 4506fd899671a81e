//! From a source to an image: `docs/formats/image-store.md` has the steps.

use std::path::Path;

use super::builder::{self, BuilderError};
use super::disk::{self, DiskError};
use super::progress::Progress;
use super::record::{Origin, Record, VERSION};
use super::source::{self, LayerStream, Pick, Source, SourceError};
use super::store::{Begun, Images, Workplace};
use crate::clock;
use crate::commands::jail::{self, Jail};
use crate::home::{Home, HomeError, ProgramFiles, at};
use crate::preflight::{PreflightError, check_kernel, check_memory, open_kvm};
use crate::spec::Machine;

/// Memory of a builder: the names of a large layer, a decompressor's dictionary, and the guest's page cache.
const MEMORY: u64 = 768 << 20;

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub(super) enum ImportError {
    /// The builder's kernel.
    #[error(transparent)]
    Kernel(#[from] crate::kernel::StoreError),
    /// The state directory.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The host.
    #[error(transparent)]
    Preflight(#[from] PreflightError),
    /// The source.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The machine that unpacks it.
    #[error(transparent)]
    Builder(#[from] BuilderError),
    /// Its disk.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// What is wanted.
#[derive(Debug)]
pub(super) struct Order<'a> {
    pub(super) pick: Pick<'a>,
    /// A name, if one was given.
    pub(super) name: Option<&'a str>,
    /// Size of the file system.
    pub(super) size: u64,
    pub(super) kernel: Option<&'a str>,
    pub(super) console: bool,
    /// How the builder's VMM is confined.
    pub(super) jail: &'a Jail,
    pub(super) quiet: bool,
}

/// What was done.
#[derive(Debug)]
pub(super) struct Imported {
    pub(super) id: String,
    pub(super) name: Option<String>,
    /// It was there before.
    pub(super) known: bool,
    /// Files whose access control lists are missing.
    pub(super) without_acl: u64,
}

/// Imports an image. Call it on the main thread: the builder ends with the thread that started it.
pub(super) fn import(home: &Home, order: &Order<'_>) -> Result<Imported, ImportError> {
    let images = Images::open(home)?;
    images.sweep()?;
    let source = {
        let length =
            std::fs::metadata(order.pick.path).ok().filter(std::fs::Metadata::is_file).map(|found| found.len());
        let mut progress = Progress::new("reading", length, order.quiet);
        source::open(order.pick, &mut |bytes| progress.add(bytes))?
    };
    let name = order.name.map(str::to_owned).or_else(|| source.name.clone());
    let id = source.digest.as_ref().map(|digest| source.kind.image_id(digest, order.size));
    let waiting = || {
        if !order.quiet {
            crate::say("waiting: another import makes this image");
        }
    };
    let begun = match &id {
        Some(id) => images.begin(id, waiting)?,
        None => Begun::Here(images.begin_unknown()?),
    };
    let mut done = Imported { id: id.unwrap_or_default(), name, known: true, without_acl: 0 };
    if let Begun::Here(workplace) = begun {
        let record = make(home, &images, workplace, source, order, &mut done.without_acl)?;
        (done.id, done.known) = (record.id, false);
    }
    if let Some(name) = &done.name {
        images.give_name(name, &done.id)?;
    }
    Ok(done)
}

fn make(
    home: &Home,
    images: &Images,
    workplace: Workplace,
    source: Source,
    order: &Order<'_>,
    without_acl: &mut u64,
) -> Result<Record, ImportError> {
    let machine = machine(home, &workplace, order)?;
    disk::make_empty(&machine.image_file, order.size)?;
    let mut progress = Progress::new("unpacking", source.length(), order.quiet);
    progress.say("starting the builder");
    let layered = source.is_layered();
    let Source { kind, digest, reference, config, layers, .. } = source;
    let read = {
        let mut add = |bytes| progress.add(bytes);
        let mut stream = LayerStream::new(layers, &mut add);
        *without_acl = builder::build(&workplace, &machine, layered, &mut stream)?.without_acl;
        stream.digest().cloned()
    };
    // Of a pipe, the digest is that of what was read.
    let missing = || BuilderError::Broken("it ended before it had read everything".to_owned());
    let digest = digest.or(read).ok_or_else(missing)?;
    progress.say("finishing");
    let root = disk::join(&machine.image_file, &workplace.path().join("disk/1.data"))?;
    let file = std::fs::File::open(&root).map_err(at(&root))?;
    let contents = disk::hash(&file, |_| ()).map_err(at(&root))?;
    let record = Record {
        version: VERSION,
        id: kind.image_id(&digest, order.size),
        source: Origin { kind, digest: digest.to_string(), reference },
        builder: guest::build::BUILDER_VERSION,
        imported: clock::now(),
        size: order.size,
        used: contents.used,
        root: contents.hash.to_string(),
        config,
    };
    images.commit(workplace, &root, &record)?;
    Ok(record)
}

/// The builder. Everything is checked before anything is made.
fn machine(home: &Home, workplace: &Workplace, order: &Order<'_>) -> Result<Machine, ImportError> {
    let kernel = crate::kernel::Store::of(home).kernel(order.kernel)?;
    let files = ProgramFiles::find()?;
    check_kernel(&kernel)?;
    check_memory(MEMORY, &std::fs::read_to_string("/proc/meminfo").unwrap_or_default())?;
    open_kvm()?;
    let canonical = |path: &Path| path.canonicalize().map_err(at(path));
    let layers = workplace.path().join("disk");
    crate::home::make_directory(&layers)?;
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(2);
    Ok(Machine {
        image: "builder".to_owned(),
        image_file: canonical(workplace.path())?.join("empty.img"),
        kernel_file: canonical(&kernel.vmlinux)?,
        initrds: vec![canonical(&kernel.modules)?, canonical(&files.agent)?],
        kernel: kernel.name,
        modules: None,
        vmm: canonical(&files.vmm)?,
        jail: jail::resolve(order.jail, None, canonical(&files.jailer)?),
        cpus: u8::try_from(cpus).unwrap_or(1),
        memory: MEMORY,
        disk: order.size,
        disk_layers: 1,
        console: order.console,
        cmdline_extra: builder::cmdline(),
    })
}
