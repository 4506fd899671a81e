//! A simulated host: files in memory that journal every change, can lose what was not synced, and can be interrupted.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use super::super::HostFile;
use super::Random;

pub(super) const SECTOR: u64 = 512;
type Sector = [u8; SECTOR as usize];
/// Sectors that are not here are holes.
pub(super) type Content = BTreeMap<u64, Sector>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Read,
    Write,
    Punch,
    Zero,
    Sync,
    Seek,
}

/// One change of a file, by sectors; `None` is a hole.
pub(super) enum Event {
    Change { file: usize, sectors: Vec<(u64, Option<Sector>)> },
    Sync { file: usize },
}

#[derive(Clone, Default)]
pub(super) struct Image {
    pub(super) size: u64,
    pub(super) content: Content,
}

type Hook = (usize, Call, bool, Box<dyn FnOnce() + Send>);

#[derive(Default)]
struct Inner {
    files: Vec<Image>,
    start: Vec<Image>,
    journal: Vec<Event>,
    calls: Vec<(usize, Call)>,
    hook: Option<Hook>,
    /// The next such calls fail: how many, and how.
    fault: Option<(usize, Call, usize, io::ErrorKind)>,
    longest: usize,
}

/// The host that the files are on.
#[derive(Clone)]
pub(super) struct Host(Arc<Mutex<Inner>>);

impl Host {
    /// A host that has just come up with these files.
    pub(super) fn new(files: Vec<Image>) -> Self {
        let inner = Inner { files: files.clone(), start: files, longest: usize::MAX, ..Inner::default() };
        Self(Arc::new(Mutex::new(inner)))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap()
    }

    pub(super) fn file(&self, file: usize) -> SimFile {
        SimFile { host: self.clone(), file }
    }

    pub(super) fn add(&self) -> SimFile {
        let mut inner = self.lock();
        inner.files.push(Image::default());
        inner.start.push(Image::default());
        let file = inner.files.len() - 1;
        drop(inner);
        self.file(file)
    }

    /// Makes everything durable that there is, and begins a new journal.
    pub(super) fn settle(&self) {
        let mut inner = self.lock();
        inner.start = inner.files.clone();
        inner.journal.clear();
        inner.calls.clear();
    }

    /// How many changes and syncs there have been.
    pub(super) fn position(&self) -> usize {
        self.lock().journal.len()
    }

    /// The calls since the last time, seeks apart.
    pub(super) fn calls(&self) -> Vec<(usize, Call)> {
        std::mem::take(&mut self.lock().calls).into_iter().filter(|(_, call)| *call != Call::Seek).collect()
    }

    /// Runs `f` once, before (or after) the next such call on a file.
    pub(super) fn interrupt(&self, file: usize, call: Call, before: bool, f: impl FnOnce() + Send + 'static) {
        self.lock().hook = Some((file, call, before, Box::new(f)));
    }

    /// Takes back an interruption that did not happen; whether there was one.
    pub(super) fn uninterrupt(&self) -> bool {
        self.lock().hook.take().is_some()
    }

    /// Makes the next `count` such calls fail.
    pub(super) fn fail(&self, file: usize, call: Call, count: usize, kind: io::ErrorKind) {
        self.lock().fault = Some((file, call, count, kind));
    }

    /// Moves at most so many bytes in a call.
    pub(super) fn shorten(&self, longest: usize) {
        self.lock().longest = longest;
    }

    /// What is on the disk after a power cut behind each of the journal's events, made by `f` from a [`Cut`].
    pub(super) fn each_cut(&self, mut f: impl FnMut(usize, &Cut)) {
        let inner = self.lock();
        let mut cut = Cut { durable: inner.start.clone(), unsynced: vec![BTreeMap::new(); inner.start.len()] };
        f(0, &cut);
        for (position, event) in inner.journal.iter().enumerate() {
            cut.step(event);
            f(position + 1, &cut);
        }
    }

    fn around(&self, file: usize, call: Call, before: bool) {
        let mut inner = self.lock();
        if inner.hook.as_ref().is_some_and(|hook| (hook.0, hook.1, hook.2) == (file, call, before)) {
            let hook = inner.hook.take();
            drop(inner);
            hook.unwrap().3();
        }
    }

    fn call<T>(&self, file: usize, call: Call, f: impl FnOnce(&mut Inner) -> T) -> io::Result<T> {
        self.around(file, call, true);
        let mut inner = self.lock();
        inner.calls.push((file, call));
        if let Some((_, _, count, kind)) = inner.fault.as_mut().filter(|fault| (fault.0, fault.1) == (file, call))
            && *count > 0
        {
            *count -= 1;
            return Err((*kind).into());
        }
        let result = f(&mut inner);
        drop(inner);
        self.around(file, call, false);
        Ok(result)
    }
}

/// The state of the disk at a power cut: what was synced, and each version that a sector had since.
pub(super) struct Cut {
    durable: Vec<Image>,
    unsynced: Vec<BTreeMap<u64, Vec<Option<Sector>>>>,
}

/// Which of the unsynced versions survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Survive {
    Nothing,
    Everything,
    /// Any version of each 4 KiB block of the data files.
    Blocks,
    /// Any version of each sector.
    Sectors,
}

impl Cut {
    fn step(&mut self, event: &Event) {
        match event {
            Event::Change { file, sectors } => {
                for (number, sector) in sectors {
                    self.unsynced[*file].entry(*number).or_default().push(*sector);
                }
            }
            Event::Sync { file } => {
                for (number, versions) in std::mem::take(&mut self.unsynced[*file]) {
                    set(&mut self.durable[*file].content, number, *versions.last().unwrap());
                }
            }
        }
    }

    /// Whether everything was synced.
    pub(super) fn is_clean(&self) -> bool {
        self.unsynced.iter().all(BTreeMap::is_empty)
    }

    /// The files after the power cut. In the files for which `bytewise` holds, any version of each *byte* survives.
    pub(super) fn files(&self, survive: Survive, random: &mut Random, bytewise: impl Fn(usize) -> bool) -> Vec<Image> {
        let mut files = self.durable.clone();
        for (file, image) in files.iter_mut().enumerate() {
            let (mut block, mut dice) = (u64::MAX, 0);
            for (number, versions) in &self.unsynced[file] {
                let mut all = vec![image.content.get(number).copied()];
                all.extend(versions);
                if survive != Survive::Blocks || number / 8 != block {
                    (block, dice) = (number / 8, random.next());
                }
                let pick = match survive {
                    Survive::Nothing => 0,
                    Survive::Everything => all.len() - 1,
                    Survive::Blocks | Survive::Sectors => (dice as usize) % all.len(),
                };
                let mut sector = all[pick];
                if bytewise(file) && matches!(survive, Survive::Blocks | Survive::Sectors) {
                    sector =
                        Some(std::array::from_fn(|at| all[random.below(all.len())].map_or(0, |version| version[at])));
                }
                set(&mut image.content, *number, sector);
            }
        }
        files
    }
}

fn set(content: &mut Content, number: u64, sector: Option<Sector>) {
    match sector {
        Some(sector) => content.insert(number, sector),
        None => content.remove(&number),
    };
}

/// A file on a simulated host.
#[derive(Clone)]
pub(super) struct SimFile {
    host: Host,
    pub(super) file: usize,
}

impl SimFile {
    /// Whether a range has no hole.
    pub(super) fn allocated(&self, offset: u64, len: u64) -> bool {
        let inner = self.host.lock();
        (offset / SECTOR..(offset + len) / SECTOR).all(|number| inner.files[self.file].content.contains_key(&number))
    }

    fn change(&self, inner: &mut Inner, sectors: Vec<(u64, Option<Sector>)>) {
        for (number, sector) in &sectors {
            set(&mut inner.files[self.file].content, *number, *sector);
        }
        inner.journal.push(Event::Change { file: self.file, sectors });
    }
}

impl HostFile for SimFile {
    fn size(&self) -> io::Result<u64> {
        Ok(self.host.lock().files[self.file].size)
    }

    // Done before anything counts, so it is durable at once.
    fn set_size(&self, size: u64) -> io::Result<()> {
        let mut inner = self.host.lock();
        inner.files[self.file].size = size;
        inner.start[self.file].size = size;
        Ok(())
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        self.host.call(self.file, Call::Read, |inner| {
            let image = &inner.files[self.file];
            let len = bytes.len().min(image.size.saturating_sub(offset) as usize).min(inner.longest);
            let mut at = 0;
            while at < len {
                let position = offset + at as u64;
                let within = (position % SECTOR) as usize;
                let part = (len - at).min(SECTOR as usize - within);
                match image.content.get(&(position / SECTOR)) {
                    Some(sector) => bytes[at..at + part].copy_from_slice(&sector[within..within + part]),
                    None => bytes[at..at + part].fill(0),
                }
                at += part;
            }
            len
        })
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.host.call(self.file, Call::Write, |inner| {
            let bytes = &bytes[..bytes.len().min(inner.longest)];
            let end = offset + bytes.len() as u64;
            let mut sectors = Vec::new();
            for number in offset / SECTOR..end.div_ceil(SECTOR) {
                let mut sector = inner.files[self.file].content.get(&number).copied().unwrap_or([0; 512]);
                let start = number * SECTOR;
                let (from, to) = (start.max(offset), (start + SECTOR).min(end));
                sector[(from - start) as usize..(to - start) as usize]
                    .copy_from_slice(&bytes[(from - offset) as usize..(to - offset) as usize]);
                sectors.push((number, Some(sector)));
            }
            self.change(inner, sectors);
            let image = &mut inner.files[self.file];
            image.size = image.size.max(end);
            bytes.len()
        })
    }

    fn sync_data(&self) -> io::Result<()> {
        self.host.call(self.file, Call::Sync, |inner| inner.journal.push(Event::Sync { file: self.file }))
    }

    fn punch_hole(&self, offset: u64, len: u64) -> io::Result<()> {
        self.host.call(self.file, Call::Punch, |inner| {
            let sectors = (offset / SECTOR..(offset + len) / SECTOR).map(|number| (number, None)).collect();
            self.change(inner, sectors);
        })
    }

    fn zero_range(&self, offset: u64, len: u64) -> io::Result<()> {
        self.host.call(self.file, Call::Zero, |inner| {
            let sectors = (offset / SECTOR..(offset + len) / SECTOR).map(|number| (number, Some([0; 512]))).collect();
            self.change(inner, sectors);
        })
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<u64>> {
        self.host.call(self.file, Call::Seek, |inner| {
            let next = inner.files[self.file].content.range(offset / SECTOR..).next();
            next.map(|(number, _)| (number * SECTOR).max(offset))
        })
    }
}

impl std::fmt::Debug for SimFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "file {}", self.file)
    }
}
