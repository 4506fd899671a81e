//! Where images lie: `docs/formats/image-store.md`.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use serde::Deserialize;
use snapshot::store::Dependent;

use super::name;
use super::record::{Config, Record, VERSION};
use crate::home::{Home, HomeError, all_entries, at, entries, is_file, make_directory, read_json, unusable};
use crate::store::sync_directory;

/// Begins the names of what is half made or half removed.
const TEMPORARY: &str = ".tmp-";
/// The record, in an image's directory.
const RECORD: &str = "image.json";
/// The file system, in an image's directory.
const ROOT: &str = "root.img";

/// What can be wrong with images that are there.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// A file or directory.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// A beginning of several ids.
    #[error("image {given:?}: {} ids begin so: {}", ids.len(), ids.join(", "))]
    Ambiguous {
        /// What was given.
        given: String,
        /// The candidates, shortened.
        ids: Vec<String>,
    },
    /// What lies there is not what was put there.
    #[error("image {id}: {why}; remove it (bulkhead image rm {id}) and import it again")]
    Damaged {
        /// Its id, shortened.
        id: String,
        /// What is wrong.
        why: String,
    },
    /// An image that a run or a snapshot needs.
    #[error("image {image:?}: {user} is made of it; remove that first (bulkhead {})", user.removal())]
    InUse {
        /// What was given.
        image: String,
        /// What needs it.
        user: Dependent,
    },
    /// An image that is no import.
    #[error("image {0:?}: it was put there by hand; remove its directory")]
    ByHand(String),
}

/// An image, ready to be run.
#[derive(Debug)]
pub(crate) struct Image {
    /// What it was asked for as.
    pub(crate) name: String,
    /// The root file system: a raw ext4 image.
    pub(crate) root: PathBuf,
    /// The root file system's size in bytes.
    pub(crate) size: u64,
    /// What a command in it runs with unless told otherwise.
    pub(crate) config: Config,
    /// Its record, unless it was put there by hand.
    pub(crate) record: Option<Record>,
}

/// The directory of images.
#[derive(Debug)]
pub(crate) struct Images(PathBuf);

/// A directory in which an image is being made. Dropping it removes it.
#[derive(Debug)]
pub(super) struct Workplace {
    path: PathBuf,
    _lock: File,
}

/// What there is when an import begins.
#[derive(Debug)]
pub(super) enum Begun {
    /// The image is there already.
    There,
    /// Nobody else is making it.
    Here(Workplace),
}

/// What the record of an image that was put there by hand may have.
#[derive(Deserialize)]
struct ByHand {
    #[serde(default)]
    config: Config,
}

impl Images {
    /// The images of a state directory.
    pub(crate) fn open(home: &Home) -> Result<Self, HomeError> {
        let directory = home.path().join("images");
        make_directory(&directory)?;
        Ok(Self(directory))
    }

    /// The images of a state directory, which need not be there.
    pub(crate) fn of(home: &Home) -> Self {
        Self(home.path().join("images"))
    }

    /// An image by name, id, or unique beginning of an id.
    pub(crate) fn find(&self, given: &str) -> Result<Image, StoreError> {
        for name in [given, &format!("{given}:latest")] {
            if let Some(id) = self.named(name)? {
                return self.load(&id, given);
            }
        }
        let digits = given.strip_prefix("sha256:").unwrap_or(given);
        let mut ids = self.ids()?;
        ids.retain(|id| !digits.is_empty() && id.starts_with(digits));
        match ids.as_slice() {
            [id] => self.load(id, given),
            [] => self.by_hand(given),
            many => {
                let ids = many.iter().take(8).map(|id| short(id).to_owned()).collect();
                Err(StoreError::Ambiguous { given: given.to_owned(), ids })
            }
        }
    }

    /// The ids of all images.
    pub(crate) fn ids(&self) -> Result<Vec<String>, HomeError> {
        self.with_record(|name| super::digest::Digest::from_hex(name).is_some())
    }

    /// The names of images that were put there by hand.
    pub(crate) fn by_hand_names(&self) -> Result<Vec<String>, HomeError> {
        self.with_record(|name| name != "names" && super::digest::Digest::from_hex(name).is_none())
    }

    /// The directories that are called so and have a record.
    fn with_record(&self, wanted: impl Fn(&str) -> bool) -> Result<Vec<String>, HomeError> {
        let mut names = Vec::new();
        for name in entries(&self.0)?.into_iter().filter(|name| wanted(name)) {
            if is_file(&self.0.join(&name).join(RECORD))? {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// All names, each with the id that it stands for.
    pub(crate) fn names(&self) -> Result<Vec<(String, String)>, HomeError> {
        let mut names = Vec::new();
        for name in entries(&self.0.join("names"))?.iter().filter_map(|file| name::from_file(file)) {
            names.extend(self.named(&name)?.map(|id| (name, id)));
        }
        Ok(names)
    }

    /// The id that a name stands for.
    fn named(&self, given: &str) -> Result<Option<String>, HomeError> {
        if name::check(given).is_err() {
            return Ok(None);
        }
        let names = self.0.join("names");
        let target = match std::fs::read_link(names.join(name::to_file(given))) {
            Ok(target) => target,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(unusable(&names)(error)),
            // Nothing, or no link.
            Err(_) => return Ok(None),
        };
        let id = target.strip_prefix("..").ok().and_then(Path::to_str).map(str::to_owned);
        match id.filter(|id| super::digest::Digest::from_hex(id).is_some()) {
            Some(id) if is_file(&self.0.join(&id).join(RECORD))? => Ok(Some(id)),
            _ => Ok(None),
        }
    }

    /// The record of an image.
    pub(crate) fn record(&self, id: &str) -> Result<Record, StoreError> {
        let damaged = |why: String| StoreError::Damaged { id: short(id).to_owned(), why };
        let record: Record = read_json(&self.0.join(id).join(RECORD)).map_err(|error| damaged(error.to_string()))?;
        if record.version != VERSION || record.id != id {
            return Err(damaged(format!("its record is of version {} and for id {}", record.version, record.id)));
        }
        Ok(record)
    }

    /// The file of an image.
    pub(crate) fn root(&self, id: &str) -> PathBuf {
        self.0.join(id).join(ROOT)
    }

    fn load(&self, id: &str, given: &str) -> Result<Image, StoreError> {
        let record = self.record(id)?;
        let root = self.root(id);
        let size = std::fs::metadata(&root).map_err(at(&root))?.len();
        if size != record.size {
            let why = format!("its file has {size} bytes, not {}", record.size);
            return Err(StoreError::Damaged { id: short(id).to_owned(), why });
        }
        Ok(Image { name: given.to_owned(), root, size, config: record.config.clone(), record: Some(record) })
    }

    fn by_hand(&self, given: &str) -> Result<Image, StoreError> {
        let by_hand = self.by_hand_names()?;
        if !by_hand.iter().any(|name| name == given) {
            let mut known: Vec<String> = self.names()?.into_iter().map(|(name, _)| name).collect();
            known.extend(by_hand);
            return Err(crate::home::unknown("image", &self.0, given, &known).into());
        }
        let own = self.0.join(given);
        let root = own.join(ROOT);
        let size = std::fs::metadata(&root).map_err(at(&root))?.len();
        let config = read_json::<ByHand>(&own.join(RECORD))?.config;
        Ok(Image { name: given.to_owned(), root, size, config, record: None })
    }

    /// Removes what imports and removals left that died.
    pub(super) fn sweep(&self) -> Result<(), HomeError> {
        let _guard = self.guard()?;
        for name in all_entries(&self.0)?.iter().filter(|name| name.starts_with(TEMPORARY)) {
            let path = self.0.join(name);
            if open_lock(&path, false).is_none_or(|lock| flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok())
            {
                // What cannot be removed is in nobody's way.
                let _ = std::fs::remove_dir_all(&path);
            }
        }
        Ok(())
    }

    /// Begins to make an image, unless it is there. Someone else who makes it is waited for; `waiting` says so.
    pub(super) fn begin(&self, id: &str, waiting: impl Fn()) -> Result<Begun, HomeError> {
        let path = self.0.join(format!("{TEMPORARY}{id}"));
        loop {
            let theirs = {
                let _guard = self.guard()?;
                if self.0.join(id).join(RECORD).is_file() {
                    return Ok(Begun::There);
                }
                match open_lock(&path, false) {
                    Some(lock) if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() => lock,
                    _ => {
                        if path.exists() {
                            std::fs::remove_dir_all(&path).map_err(at(&path))?;
                        }
                        return self.workplace(path).map(Begun::Here);
                    }
                }
            };
            waiting();
            flock(&theirs, FlockOperation::LockExclusive).map_err(|error| at(&path)(error.into()))?;
        }
    }

    /// Begins to make an image whose id is not known yet.
    pub(super) fn begin_unknown(&self) -> Result<Workplace, HomeError> {
        let _guard = self.guard()?;
        let mut bytes = [0; 8];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| at(&self.0)(error.into()))?;
        self.workplace(self.0.join(format!("{TEMPORARY}{:016x}", u64::from_le_bytes(bytes))))
    }

    fn workplace(&self, path: PathBuf) -> Result<Workplace, HomeError> {
        make_directory(&path)?;
        let lock = open_lock(&path, true).ok_or_else(|| at(&path)(io::Error::other("cannot make its lock")))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|error| at(&path)(error.into()))?;
        Ok(Workplace { path, _lock: lock })
    }

    /// Makes `root` an image with this record, unless there is one of its id already.
    pub(super) fn commit(&self, workplace: Workplace, root: &Path, record: &Record) -> Result<(), HomeError> {
        let made = workplace.path.join("image");
        make_directory(&made)?;
        std::fs::rename(root, made.join(ROOT)).map_err(at(root))?;
        let path = made.join(RECORD);
        let mut text =
            serde_json::to_vec_pretty(record).map_err(|error| HomeError::Json { path: path.clone(), error })?;
        text.push(b'\n');
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).map_err(at(&path))?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(at(&path))?;
        sync_directory(&made)?;
        let place = self.0.join(&record.id);
        let guard = self.guard()?;
        match renameat_with(CWD, &made, CWD, &place, RenameFlags::NOREPLACE) {
            // Another import from a pipe was quicker.
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(at(&place)(error.into())),
        }
        drop(guard);
        sync_directory(&self.0)?;
        drop(workplace);
        Ok(())
    }

    /// Gives an image a name, which it takes from another that had it.
    pub(super) fn give_name(&self, given: &str, id: &str) -> Result<(), HomeError> {
        let names = self.0.join("names");
        make_directory(&names)?;
        let _guard = self.guard()?;
        let temporary = names.join(".new");
        let place = names.join(name::to_file(given));
        match std::fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(&temporary)(error)),
            _ => {}
        }
        symlink(Path::new("..").join(id), &temporary).map_err(at(&temporary))?;
        std::fs::rename(&temporary, &place).map_err(at(&place))?;
        sync_directory(&names)
    }

    /// Takes a name away, or an image with all of its names. `user` gives a run that needs an image's file.
    pub(super) fn remove(&self, given: &str, user: impl Fn(&Path) -> Option<Dependent>) -> Result<(), StoreError> {
        let guard = self.guard()?;
        let names = self.names()?;
        // A name alone, if the image has others.
        let known_as = [given.to_owned(), format!("{given}:latest")];
        let by_name = names.iter().find(|(name, _)| known_as.contains(name));
        let unlink = |name: &str| {
            let path = self.0.join("names").join(name::to_file(name));
            std::fs::remove_file(&path).map_err(at(&path))
        };
        if let Some((name, id)) = by_name
            && names.iter().filter(|(_, other)| other == id).count() > 1
        {
            return Ok(unlink(name)?);
        }
        let id = match by_name {
            Some((_, id)) => id.clone(),
            None => match self.find(given) {
                Ok(Image { record: Some(record), .. }) => record.id,
                Ok(_) => return Err(StoreError::ByHand(given.to_owned())),
                // A damaged one can be removed by its whole id.
                Err(StoreError::Damaged { .. }) => {
                    let digits = given.strip_prefix("sha256:").unwrap_or(given);
                    self.ids()?.into_iter().find(|id| id.starts_with(digits)).unwrap_or_default()
                }
                Err(error) => return Err(error),
            },
        };
        let directory = self.0.join(&id);
        if let Some(user) = user(&directory) {
            return Err(StoreError::InUse { image: given.to_owned(), user });
        }
        for (name, _) in names.iter().filter(|(_, other)| *other == id) {
            unlink(name)?;
        }
        let gone = self.0.join(format!("{TEMPORARY}gone-{id}"));
        std::fs::rename(&directory, &gone).map_err(at(&directory))?;
        drop(guard);
        match std::fs::remove_dir_all(&gone) {
            // Another command was there first.
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(&gone)(error).into()),
            _ => Ok(()),
        }
    }

    fn guard(&self) -> Result<File, HomeError> {
        let path = self.0.join(".lock");
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = file.map_err(unusable(&path))?;
        flock(&file, FlockOperation::LockExclusive).map_err(|error| at(&path)(error.into()))?;
        Ok(file)
    }
}

impl Workplace {
    /// Its directory.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Workplace {
    fn drop(&mut self) {
        // What cannot be removed the next import removes.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// An id as people read it.
pub(crate) fn short(id: &str) -> &str {
    id.get(..12).unwrap_or(id)
}

fn open_lock(directory: &Path, create: bool) -> Option<File> {
    let path = directory.join("lock");
    OpenOptions::new().read(true).write(true).create(create).truncate(false).mode(0o600).open(path).ok()
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
