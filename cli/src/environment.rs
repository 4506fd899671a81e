//! The environment of a command: the image's, then what `-e` says.

/// Why a variable was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
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
    fn later_values_win_and_keep_their_place() {
        let merged = merge(&list(&["PATH=/bin", "HOME=/"]), &list(&["PATH=/opt", "NEW=1", "NEW=2"]));
        assert_eq!(merged, list(&["PATH=/opt", "HOME=/", "NEW=2"]));
    }
}
