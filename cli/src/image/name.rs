//! Names that people give images.

use super::digest::Digest;

/// Longest name.
const MAX: usize = 128;

/// Checks a name. It becomes one part of a path, and is printed.
pub(super) fn check(text: &str) -> Result<String, String> {
    let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | ':' | '/' | '@');
    if text.len() > MAX {
        return Err(format!("longer than {MAX} characters"));
    }
    if text.contains("//") {
        return Err("it has two slashes in a row; write one".to_owned());
    }
    if !text.starts_with(|c: char| c.is_ascii_alphanumeric()) || !text.chars().all(fine) {
        return Err("names begin with a letter or digit and go on with letters, digits and . _ - : / @".to_owned());
    }
    if Digest::from_hex(text).is_some() {
        return Err("it reads as an image's id".to_owned());
    }
    Ok(text.to_owned())
}

/// The file that stands for a name.
pub(super) fn to_file(name: &str) -> String {
    name.replace('/', "%2F")
}

/// The name that a file stands for, if it does.
pub(super) fn from_file(file: &str) -> Option<String> {
    check(&file.replace("%2F", "/")).ok()
}

/// A name from what a source calls itself, or from its file's name: what does not fit is left out.
pub(super) fn suggest(reference: &str) -> Option<String> {
    // Where docker's own registry is meant, docker does not say so.
    let short = reference.strip_prefix("docker.io/").unwrap_or(reference);
    let short = short.strip_prefix("library/").unwrap_or(short);
    check(short).ok()
}

/// A name from a path: its last part without what says the format.
pub(super) fn from_path(path: &std::path::Path) -> Option<String> {
    let mut name = path.file_name()?.to_str()?;
    for ending in [".gz", ".zst", ".xz"] {
        name = name.strip_suffix(ending).unwrap_or(name);
    }
    for ending in [".tgz", ".txz", ".tzst", ".tar"] {
        name = name.strip_suffix(ending).unwrap_or(name);
    }
    check(name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_in_paths_and_terminals() {
        for fine in ["debian", "debian:12", "ghcr.io/a/b:1.0", "a@sha256:00", "A_b-c.d"] {
            assert_eq!(check(fine).as_deref(), Ok(fine));
            assert_eq!(from_file(&to_file(fine)).as_deref(), Some(fine));
            assert!(!to_file(fine).contains('/'));
        }
        let hex = "0".repeat(64);
        for wrong in ["", ".", "..", "-x", "/etc", "a b", "a\nb", "a//b", "a%2Fb", "é", &hex, &"x".repeat(129)] {
            assert!(check(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn names_come_from_references_and_files() {
        assert_eq!(suggest("docker.io/library/alpine:3.20").as_deref(), Some("alpine:3.20"));
        assert_eq!(suggest("quay.io/a/b:c").as_deref(), Some("quay.io/a/b:c"));
        assert_eq!(suggest("a b"), None);
        let of = |path: &str| from_path(path.as_ref());
        assert_eq!(of("/x/rootfs.tar.gz").as_deref(), Some("rootfs"));
        assert_eq!(of("debian-12.tgz").as_deref(), Some("debian-12"));
        assert_eq!(of("layout").as_deref(), Some("layout"));
        assert_eq!(of("/"), None);
        assert_eq!(of("a b.tar"), None);
    }
}
