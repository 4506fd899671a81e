//! What goes where: docker's rules for copies.

use std::path::Path;

/// What is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// A file, or a link that is not followed.
    File,
    /// A directory.
    Directory {
        /// Only what is below it: its path ends in `/.`.
        contents: bool,
    },
}

/// What stands at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum There {
    /// Nothing.
    Absent {
        /// Whether it could be made: the directory above is there.
        parent: bool,
    },
    /// A directory.
    Directory,
    /// A file.
    File,
    /// Neither.
    Other,
}

/// Where it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Into the destination, under the source's name.
    Into,
    /// To the destination itself, under its name.
    As,
    /// What is below the source, into the destination.
    Contents,
}

/// Decides; the error says what is wrong with the destination. `slash` says that its path ends in one.
pub(crate) fn plan(source: Source, there: There, slash: bool) -> Result<Plan, &'static str> {
    match (source, there) {
        (_, There::Other) => Err("it is neither a file nor a directory"),
        (Source::File, There::Absent { .. }) if slash => Err("there is no such directory"),
        (_, There::Absent { parent: false }) => Err("the directory above it is not there"),
        (_, There::Absent { parent: true }) => Ok(Plan::As),
        (Source::File, There::Directory) | (Source::Directory { contents: false }, There::Directory) => Ok(Plan::Into),
        (Source::Directory { contents: true }, There::Directory) => Ok(Plan::Contents),
        (Source::File, There::File) if slash => Err("it is a file, not a directory"),
        (Source::File, There::File) => Ok(Plan::As),
        (Source::Directory { .. }, There::File) => Err("it is a file, and a directory cannot be copied to one"),
    }
}

/// Whether a path asks for what is below it alone.
pub(crate) fn contents_only(path: &str) -> bool {
    path == "." || path.ends_with("/.") || path.trim_end_matches('/').is_empty()
}

/// A path in the guest, absolute: relative ones begin at `/`, as in docker.
pub(crate) fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }
}

/// The directory and the name of a path in the guest; nothing for `/` and for what ends in `..`.
pub(crate) fn split(path: &str) -> Option<(String, String)> {
    let path = Path::new(path);
    let name = path.file_name()?.to_str()?.to_owned();
    let above = path.parent()?.to_str()?;
    Some((if above.is_empty() { "/".to_owned() } else { above.to_owned() }, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rules_are_dockers() {
        let (file, tree, contents) =
            (Source::File, Source::Directory { contents: false }, Source::Directory { contents: true });
        let (absent, nowhere) = (There::Absent { parent: true }, There::Absent { parent: false });
        for (source, there, slash, plan_is) in [
            (file, absent, false, Some(Plan::As)),
            (file, absent, true, None),
            (file, nowhere, false, None),
            (file, There::File, false, Some(Plan::As)),
            (file, There::File, true, None),
            (file, There::Directory, false, Some(Plan::Into)),
            (file, There::Directory, true, Some(Plan::Into)),
            (file, There::Other, false, None),
            (tree, absent, false, Some(Plan::As)),
            (tree, absent, true, Some(Plan::As)),
            (tree, nowhere, false, None),
            (tree, There::File, false, None),
            (tree, There::Directory, false, Some(Plan::Into)),
            (contents, absent, false, Some(Plan::As)),
            (contents, There::File, false, None),
            (contents, There::Directory, true, Some(Plan::Contents)),
        ] {
            assert_eq!(plan(source, there, slash).ok(), plan_is, "{source:?} to {there:?}, {slash}");
        }
    }

    #[test]
    fn paths_are_taken_apart() {
        assert!(contents_only(".") && contents_only("/a/.") && contents_only("/") && contents_only("/a/b//."));
        assert!(!contents_only("/a") && !contents_only("/a/") && !contents_only("a."));
        assert_eq!(absolute("a/b"), "/a/b");
        assert_eq!(split("/a/b/"), Some(("/a".into(), "b".into())));
        assert_eq!(split("/a"), Some(("/".into(), "a".into())));
        assert_eq!(split("/"), None);
        assert_eq!(split("/a/.."), None);
    }
}
