//! The environment of a command: the image's, then what `-e` says.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Most bytes of a file of variables.
const MAX_FILE: u64 = 1 << 20;

/// Why a variable was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EnvironmentError {
    /// Nothing before the `=`.
    #[error("-e {0:?}: the name is empty; write -e NAME=VALUE or -e NAME")]
    NoName(String),
    /// A name with a line break or a NUL, which would be read as a second variable.
    #[error("-e {0:?}: the name has a control character; names are letters, digits and the like")]
    BadName(String),
    /// A value that no process can be given.
    #[error("-e {0}: the value has a NUL byte")]
    BadValue(String),
    /// A file of variables that cannot be read.
    #[error("--env-file {path}: {error}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A line of such a file.
    #[error("--env-file {path}, line {line}: {why}", path = path.display())]
    Line {
        /// Which file.
        path: PathBuf,
        /// Which line, from 1.
        line: usize,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A variable of ours that is no text.
    #[error("-e {0}: its value here is not UTF-8; give the value as -e {0}=VALUE")]
    NotText(String),
}

/// Checks one variable in the form `NAME=VALUE`.
fn check(name: &str, value: &str, written: &str) -> Result<(), EnvironmentError> {
    if name.is_empty() {
        return Err(EnvironmentError::NoName(written.to_owned()));
    }
    if name.contains(|c: char| c.is_control() || c == '=') {
        return Err(EnvironmentError::BadName(written.to_owned()));
    }
    if value.contains('\0') {
        return Err(EnvironmentError::BadValue(name.to_owned()));
    }
    Ok(())
}

/// Turns the arguments of `-e` into `NAME=VALUE`. `-e NAME` takes the value from `here`, and is left out
/// if there is none, as docker does.
pub(crate) fn resolve(
    written: &[String],
    here: impl Fn(&str) -> Option<std::ffi::OsString>,
) -> Result<Vec<String>, EnvironmentError> {
    let mut resolved = Vec::with_capacity(written.len());
    for one in written {
        match one.split_once('=') {
            Some((name, value)) => {
                check(name, value, one)?;
                resolved.push(one.clone());
            }
            None => {
                check(one, "", one)?;
                if let Some(value) = here(one) {
                    let value = value.into_string().map_err(|_| EnvironmentError::NotText(one.clone()))?;
                    resolved.push(format!("{one}={value}"));
                }
            }
        }
    }
    Ok(resolved)
}

/// Reads a file of variables, as docker does: a line is `NAME=VALUE`, or `NAME` for one of ours; empty ones and those
/// that begin with `#` say nothing.
pub(crate) fn read_file(
    path: &Path,
    here: impl Fn(&str) -> Option<std::ffi::OsString>,
) -> Result<Vec<String>, EnvironmentError> {
    let failed = |error| EnvironmentError::File { path: path.to_owned(), error };
    let mut text = String::new();
    File::open(path).map_err(failed)?.take(MAX_FILE.saturating_add(1)).read_to_string(&mut text).map_err(failed)?;
    if u64::try_from(text.len()).unwrap_or(u64::MAX) > MAX_FILE {
        return Err(failed(io::Error::other("it is over 1 MiB, which no environment is")));
    }
    let mut variables = Vec::new();
    for (number, line) in text.trim_start_matches('\u{feff}').lines().enumerate() {
        let bad = |why| EnvironmentError::Line { path: path.to_owned(), line: number.saturating_add(1), why };
        let line = line.trim_start();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let name = line.split_once('=').map_or(line, |(name, _)| name);
        if name.is_empty() {
            return Err(bad("no name before the ="));
        }
        if name.contains(char::is_whitespace) {
            return Err(bad("the name has a space in it"));
        }
        variables.extend(resolve(&[line.to_owned()], &here)?);
    }
    Ok(variables)
}

/// Lays `over` on `base`: a name that is already there keeps its place and gets the new value.
pub(crate) fn merge(base: &[String], over: &[String]) -> Vec<String> {
    fn name(variable: &str) -> &str {
        variable.split_once('=').map_or(variable, |(name, _)| name)
    }
    let mut merged: Vec<String> = base.to_vec();
    for variable in over {
        match merged.iter_mut().find(|have| name(have) == name(variable)) {
            Some(have) => have.clone_from(variable),
            None => merged.push(variable.clone()),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(of: &[&str]) -> Vec<String> {
        of.iter().map(|s| (*s).to_owned()).collect()
    }

    #[test]
    fn a_bare_name_takes_the_value_from_here() {
        let here = |name: &str| (name == "HERE").then(|| "a=b\nc".into());
        let resolved = resolve(&list(&["A=1", "HERE", "ABSENT", "EMPTY=", "X=a=b"]), here).unwrap();
        assert_eq!(resolved, list(&["A=1", "HERE=a=b\nc", "EMPTY=", "X=a=b"]));
    }

    #[test]
    fn a_name_cannot_smuggle_a_second_variable() {
        let nothing = |_: &str| None;
        assert!(matches!(resolve(&list(&["=x"]), nothing), Err(EnvironmentError::NoName(_))));
        assert!(matches!(resolve(&list(&[""]), nothing), Err(EnvironmentError::NoName(_))));
        assert!(matches!(resolve(&list(&["A\nB=1"]), nothing), Err(EnvironmentError::BadName(_))));
        assert!(matches!(resolve(&list(&["A\nB"]), nothing), Err(EnvironmentError::BadName(_))));
        assert!(matches!(resolve(&list(&["A=\0"]), nothing), Err(EnvironmentError::BadValue(_))));
    }

    #[test]
    fn a_file_is_read_as_docker_reads_it() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("env");
        let here = |name: &str| (name == "HERE").then(|| "x".into());
        let read = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            read_file(&path, here)
        };
        let good = read(b"\xef\xbb\xbf# comment\n\nA=1\n  B=with space # kept\r\nHERE\nABSENT\nC=\n").unwrap();
        assert_eq!(good, list(&["A=1", "B=with space # kept", "HERE=x", "C="]));
        for (text, line) in [(&b"A=1\n=2\n"[..], 2), (b"A B=1\n", 1)] {
            assert!(matches!(read(text), Err(EnvironmentError::Line { line: at, .. }) if at == line));
        }
        assert!(matches!(read(b"\xff"), Err(EnvironmentError::File { .. })));
        assert!(matches!(read(&vec![b'\n'; (1 << 20) + 1]), Err(EnvironmentError::File { .. })));
        assert!(matches!(read_file(Path::new("/no/such"), here), Err(EnvironmentError::File { .. })));
    }

    #[test]
    fn later_values_win_and_keep_their_place() {
        let merged = merge(&list(&["PATH=/bin", "HOME=/"]), &list(&["PATH=/opt", "NEW=1", "NEW=2"]));
        assert_eq!(merged, list(&["PATH=/opt", "HOME=/", "NEW=2"]));
    }
}
