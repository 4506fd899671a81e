//! Where things are: the state directory with its images and kernels, and our own program files.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, accessat, open};
use serde::de::DeserializeOwned;

/// Most bytes of a JSON file that we read.
const MAX_JSON: u64 = 4 << 20;

/// What can be wrong with the state directory and what is in it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HomeError {
    /// Neither BULKHEAD_HOME nor HOME.
    #[error("no state directory: neither BULKHEAD_HOME nor HOME is set; set BULKHEAD_HOME")]
    Nowhere,
    /// A file or directory that cannot be used.
    #[error("{path}: {error}", path = path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A directory of ours that we cannot use.
    #[error("{path}: {why}; {next}", path = path.display())]
    Unusable {
        /// Which.
        path: PathBuf,
        /// Why.
        why: String,
        /// The next step.
        next: &'static str,
    },
    /// A file that is not what its name says.
    #[error("{path}: not valid: {error}", path = path.display())]
    Json {
        /// Which.
        path: PathBuf,
        /// Why.
        error: serde_json::Error,
    },
    /// A file over the limit.
    #[error("{path}: over {MAX_JSON} bytes, which no such file has", path = path.display())]
    TooLong {
        /// Which.
        path: PathBuf,
    },
    /// An image or kernel that is not there.
    #[error("{kind} {name:?}: not found in {directory}{hint}", directory = directory.display())]
    Unknown {
        /// `image` or `kernel`.
        kind: &'static str,
        /// What was asked for.
        name: String,
        /// Where it would be.
        directory: PathBuf,
        /// The next step.
        hint: String,
    },
    /// A part of ours that is missing.
    #[error("{name}: not found in {places}; is bulkhead installed as a whole?")]
    NoProgramFile {
        /// The file's name.
        name: &'static str,
        /// Where we looked.
        places: String,
    },
}

/// Attaches a path to an I/O error.
pub(crate) fn at(path: &Path) -> impl FnOnce(io::Error) -> HomeError + use<'_> {
    move |error| HomeError::Io { path: path.to_owned(), error }
}

/// Attaches to an I/O error the directory of ours that it is about, whose it is, and what to do.
pub(crate) fn unusable(path: &Path) -> impl FnOnce(io::Error) -> HomeError + use<'_> {
    const OTHER: &str = "set BULKHEAD_HOME to a directory of yours";
    move |error| {
        // What is to blame may lie above it.
        let there = path.ancestors().filter_map(|above| Some((above, above.metadata().ok()?))).next();
        let (why, next) = match (error.kind(), there) {
            (io::ErrorKind::PermissionDenied, Some((above, found))) => {
                let (owner, user) = (found.uid(), rustix::process::geteuid().as_raw());
                let name = if above == path { "it".to_owned() } else { above.display().to_string() };
                if owner == user {
                    let mode = found.mode() & 0o7777;
                    (format!("permission denied: {name} is yours and has mode {mode:03o}"), "change that (chmod u+rwx)")
                } else {
                    let why = format!("permission denied: {name} belongs to user {owner}, and this is user {user}");
                    (why, "run this as that user, or set BULKHEAD_HOME to a directory of yours")
                }
            }
            (io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory, Some((above, found))) if !found.is_dir() => {
                let name = if above == path { "it".to_owned() } else { above.display().to_string() };
                (format!("{name} is not a directory"), OTHER)
            }
            (io::ErrorKind::AlreadyExists, _) if path.is_symlink() => ("it is a link to nothing".to_owned(), OTHER),
            (io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded, _) => {
                (error.to_string(), "make room, or set BULKHEAD_HOME to where there is some")
            }
            _ => (error.to_string(), OTHER),
        };
        HomeError::Unusable { path: path.to_owned(), why, next }
    }
}

/// Opens a file that the user names. A pipe might never begin, and a device never end.
pub(crate) fn open_file(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(open(path, flags, Mode::empty())?);
    match file.metadata()?.file_type() {
        kind if kind.is_file() => Ok(file),
        kind if kind.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        _ => Err(io::Error::other("it is a pipe, device or socket; write it to a file first")),
    }
}

/// Reads a JSON file of bounded length.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, HomeError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(at(path))?;
    file.take(MAX_JSON + 1).read_to_end(&mut bytes).map_err(at(path))?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > MAX_JSON {
        return Err(HomeError::TooLong { path: path.to_owned() });
    }
    serde_json::from_slice(&bytes).map_err(|error| HomeError::Json { path: path.to_owned(), error })
}

/// The state directory.
#[derive(Debug, Clone)]
pub(crate) struct Home(PathBuf);

/// Our own parts.
#[derive(Debug)]
pub(crate) struct ProgramFiles {
    /// The VMM.
    pub(crate) vmm: PathBuf,
    /// The network filter.
    pub(crate) netfilter: PathBuf,
    /// What confines them.
    pub(crate) jailer: PathBuf,
    /// The initramfs archive of the guest agent.
    pub(crate) agent: PathBuf,
}

impl Home {
    /// The state directory that the environment says, made if it is missing.
    pub(crate) fn find() -> Result<Self, HomeError> {
        let root = rustix::process::geteuid().is_root();
        let path = choose(root, |name| std::env::var_os(name)).ok_or(HomeError::Nowhere)?;
        make_directory(&path)?;
        // Absolute, because the supervisor works elsewhere.
        let path = path.canonicalize().map_err(unusable(&path))?;
        // What is asked for here is not told as missing there.
        let access = Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK;
        accessat(CWD, &path, access, AtFlags::EACCESS).map_err(|error| unusable(&path)(error.into()))?;
        Ok(Self(path))
    }

    /// Takes a directory as it is.
    #[cfg(test)]
    pub(crate) fn at(path: PathBuf) -> Self {
        Self(path)
    }

    /// The directory itself.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl ProgramFiles {
    /// Finds our parts from where this program lies: installed (`bin` beside `lib/bulkhead`), or all in
    /// one directory.
    pub(crate) fn find() -> Result<Self, HomeError> {
        let own = Path::new("/proc/self/exe");
        let own = own.read_link().map_err(at(own))?;
        let beside = own.parent().unwrap_or(Path::new("/")).to_owned();
        let library = beside.parent().unwrap_or(Path::new("/")).join("lib/bulkhead");
        let find = |name: &'static str| {
            [&library, &beside].into_iter().map(|place| place.join(name)).find(|path| path.is_file()).ok_or_else(|| {
                let places = format!("{} and {}", library.display(), beside.display());
                HomeError::NoProgramFile { name, places }
            })
        };
        Ok(Self {
            vmm: find("bulkhead-vmm")?,
            netfilter: find("bulkhead-netfilter")?,
            jailer: find("bulkhead-jailer")?,
            agent: find("agent.cpio")?,
        })
    }
}

/// Makes a directory that only we may enter, and those above it.
pub(crate) fn make_directory(path: &Path) -> Result<(), HomeError> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(unusable(path))
}

/// The state directory by the rules; nothing if no rule applies.
fn choose(root: bool, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(home) = set("BULKHEAD_HOME") {
        return Some(home);
    }
    if root {
        return Some(PathBuf::from("/var/lib/bulkhead"));
    }
    // The XDG rules say that a relative path is to be ignored.
    let state = set("XDG_STATE_HOME").filter(|path| path.is_absolute());
    state.or_else(|| set("HOME").map(|home| home.join(".local/state"))).map(|state| state.join("bulkhead"))
}

/// The names of what is in a directory of ours, sorted; none if it is not there.
pub(crate) fn all_entries(directory: &Path) -> Result<Vec<String>, HomeError> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(unusable(directory))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        // A name that is no text is none of ours.
        names.extend(entry.map_err(unusable(directory))?.file_name().into_string().ok());
    }
    names.sort();
    Ok(names)
}

/// The same, without those that begin with a dot: these mean nothing.
pub(crate) fn entries(directory: &Path) -> Result<Vec<String>, HomeError> {
    let mut names = all_entries(directory)?;
    names.retain(|name| !name.starts_with('.'));
    Ok(names)
}

/// Whether there is a file of ours. One that cannot be looked for is not taken for missing.
pub(crate) fn is_file(path: &Path) -> Result<bool, HomeError> {
    match path.metadata() {
        Ok(found) => Ok(found.is_file()),
        Err(error) if is_missing(&error) => Ok(false),
        Err(error) => Err(unusable(path)(error)),
    }
}

/// Whether nothing stands there, or something else than a directory above it.
pub(crate) fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// What to say of an image or kernel that is not there: what comes near.
pub(crate) fn unknown(kind: &'static str, directory: &Path, name: &str, known: &[String]) -> HomeError {
    let near = nearest(name, known);
    let hint = match (near.as_slice(), known) {
        (_, []) => format!("; there is no {kind} yet"),
        ([], known) => format!("; there are: {}", known.iter().take(8).cloned().collect::<Vec<_>>().join(", ")),
        (near, _) => format!("; did you mean {}?", near.join(" or ")),
    };
    HomeError::Unknown { kind, name: name.to_owned(), directory: directory.to_owned(), hint }
}

/// The known names that a typing mistake or a missing part away from `name`, best first, three at most.
fn nearest<'a>(name: &str, known: &'a [String]) -> Vec<&'a str> {
    let limit = name.chars().count().max(3) / 3;
    let mut scored: Vec<(usize, &str)> = known
        .iter()
        .map(|have| {
            let part = !name.is_empty() && (have.starts_with(name) || name.starts_with(have.as_str()));
            (if part { 1 } else { distance(name, have) }, have.as_str())
        })
        .filter(|(score, _)| *score <= limit)
        .collect();
    scored.sort_unstable();
    scored.into_iter().take(3).map(|(_, have)| have).collect()
}

/// Levenshtein's distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, to) in b.iter().enumerate() {
            let change = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = change.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// What names with versions sort by: runs of digits compare as numbers.
pub(crate) fn version_key(name: &str) -> Vec<(u64, String)> {
    let mut parts = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let (number, tail) = rest.split_at(digits);
        let word = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (word, tail) = tail.split_at(word);
        parts.push((number.parse().unwrap_or(u64::MAX), word.to_owned()));
        rest = tail;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(of: &[&str]) -> Vec<String> {
        of.iter().map(|s| (*s).to_owned()).collect()
    }

    #[test]
    fn the_state_directory_follows_the_rules() {
        let with = |root, set: &'static [(&str, &str)]| {
            choose(root, |name| set.iter().find(|(have, _)| *have == name).map(|(_, value)| value.into()))
        };
        assert_eq!(with(true, &[("BULKHEAD_HOME", "/x")]), Some("/x".into()));
        assert_eq!(with(true, &[("HOME", "/root")]), Some("/var/lib/bulkhead".into()));
        assert_eq!(with(false, &[("HOME", "/home/a")]), Some("/home/a/.local/state/bulkhead".into()));
        assert_eq!(with(false, &[("HOME", "/home/a"), ("XDG_STATE_HOME", "/s")]), Some("/s/bulkhead".into()));
        assert_eq!(
            with(false, &[("HOME", "/h"), ("XDG_STATE_HOME", "relative")]),
            Some("/h/.local/state/bulkhead".into())
        );
        assert_eq!(with(false, &[]), None);
    }

    #[test]
    fn what_cannot_be_used_is_told_with_the_reason_and_the_next_step() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("file");
        std::fs::write(&file, "").unwrap();
        let below = file.join("below");
        let told = |error: HomeError| error.to_string().replace(place.path().to_str().unwrap(), "");
        let next = "set BULKHEAD_HOME to a directory of yours";
        assert_eq!(told(make_directory(&file).unwrap_err()), format!("/file: it is not a directory; {next}"));
        let error = make_directory(&below).unwrap_err();
        let at = place.path().join("file");
        assert_eq!(error.to_string(), format!("{}: {} is not a directory; {next}", below.display(), at.display()));
        assert_eq!(told(entries(&file).unwrap_err()), format!("/file: it is not a directory; {next}"));
        assert_eq!(entries(&place.path().join("none")).unwrap(), [""; 0]);
        let dangling = place.path().join("dangling");
        std::os::unix::fs::symlink("nowhere", &dangling).unwrap();
        assert_eq!(told(make_directory(&dangling).unwrap_err()), format!("/dangling: it is a link to nothing; {next}"));
        let full = unusable(&file)(io::ErrorKind::StorageFull.into()).to_string();
        assert!(full.ends_with("; make room, or set BULKHEAD_HOME to where there is some"), "{full}");
        assert!(is_file(&file).unwrap() && !is_file(&below).unwrap());
        let user = rustix::process::geteuid().as_raw();
        let denied = |path: &Path| unusable(path)(io::ErrorKind::PermissionDenied.into()).to_string();
        assert!(
            denied(&file).ends_with("it is yours and has mode 644; change that (chmod u+rwx)"),
            "{}",
            denied(&file)
        );
        let owner = Path::new("/proc/1").metadata().unwrap().uid();
        if owner != user {
            assert!(
                denied("/proc/1/none".as_ref()).contains(&format!("/proc/1 belongs to user {owner}, and this is user"))
            );
        }
    }

    #[test]
    fn the_newest_kernel_has_the_highest_numbers() {
        let of = |list: &[&str]| names(list).into_iter().max_by_key(|name| version_key(name));
        assert_eq!(of(&["6.1.0-9-cloud", "6.12.43-cloud", "6.1.0-40-cloud"]).as_deref(), Some("6.12.43-cloud"));
        assert_eq!(of(&["6.9", "6.10"]).as_deref(), Some("6.10"));
    }

    #[test]
    fn an_unknown_name_is_answered_with_what_is_near() {
        let known = names(&["busybox", "debian-12", "fio"]);
        assert_eq!(nearest("busybx", &known), ["busybox"]);
        assert_eq!(nearest("debian", &known), ["debian-12"]);
        assert!(nearest("nothing-like-it", &known).is_empty());
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
