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

/// How a path ends: what it says of what stands there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// In a name.
    Name,
    /// In a slash: it is a directory, or is to become one.
    Slash,
    /// In `/.`, or it is `.` alone: what is in a directory that is there.
    Dot,
}

impl Ending {
    /// Of this path. A slash after the dot changes nothing.
    pub(crate) fn of(path: &str) -> Self {
        let bare = path.trim_end_matches('/');
        match () {
            () if bare == "." || bare.ends_with("/.") => Self::Dot,
            () if path.ends_with('/') => Self::Slash,
            () => Self::Name,
        }
    }
}

/// Decides; the error says what is wrong with the destination, whose path ends so.
pub(crate) fn plan(source: Source, there: There, ending: Ending) -> Result<Plan, &'static str> {
    match (source, there) {
        (_, There::Other) => Err("it is neither a file nor a directory"),
        (_, There::Absent { .. }) if ending == Ending::Dot => Err("there is no such directory"),
        (Source::File, There::Absent { .. }) if ending == Ending::Slash => Err("there is no such directory"),
        (_, There::Absent { parent: false }) => Err("the directory above it is not there"),
        (_, There::Absent { parent: true }) => Ok(Plan::As),
        (Source::File, There::Directory) | (Source::Directory { contents: false }, There::Directory) => Ok(Plan::Into),
        (Source::Directory { contents: true }, There::Directory) => Ok(Plan::Contents),
        (Source::File, There::File) if ending != Ending::Name => Err("it is a file, not a directory"),
        (Source::File, There::File) => Ok(Plan::As),
        (Source::Directory { .. }, There::File) => Err("it is a file, and a directory cannot be copied to one"),
    }
}

/// Whether a path asks for what is below it alone.
pub(crate) fn contents_only(path: &str) -> bool {
    Ending::of(path) == Ending::Dot || path.trim_end_matches('/').is_empty()
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
        let (name, slash, dot) = (Ending::Name, Ending::Slash, Ending::Dot);
        for (source, there, ending, plan_is) in [
            (file, absent, name, Some(Plan::As)),
            (file, absent, slash, None),
            (file, absent, dot, None),
            (file, nowhere, name, None),
            (file, There::File, name, Some(Plan::As)),
            (file, There::File, slash, None),
            (file, There::File, dot, None),
            (file, There::Directory, name, Some(Plan::Into)),
            (file, There::Directory, slash, Some(Plan::Into)),
            (file, There::Directory, dot, Some(Plan::Into)),
            (file, There::Other, name, None),
            (tree, absent, name, Some(Plan::As)),
            (tree, absent, slash, Some(Plan::As)),
            (tree, absent, dot, None),
            (tree, nowhere, name, None),
            (tree, There::File, name, None),
            (tree, There::Directory, name, Some(Plan::Into)),
            (tree, There::Directory, dot, Some(Plan::Into)),
            (contents, absent, name, Some(Plan::As)),
            (contents, absent, slash, Some(Plan::As)),
            (contents, absent, dot, None),
            (contents, There::File, name, None),
            (contents, There::Directory, slash, Some(Plan::Contents)),
            (contents, There::Directory, dot, Some(Plan::Contents)),
        ] {
            assert_eq!(plan(source, there, ending).ok(), plan_is, "{source:?} to {there:?}, {ending:?}");
        }
    }

    #[test]
    fn paths_are_taken_apart() {
        for contents in [".", "./", "/a/.", "/a/./", "/", "//", "/a/b//."] {
            assert!(contents_only(contents), "{contents}");
        }
        for whole in ["/a", "/a/", "a.", "..", "/a/..", "/.."] {
            assert!(!contents_only(whole), "{whole}");
        }
        assert_eq!(["a", "a/", "a/.", "a/./"].map(Ending::of), [Ending::Name, Ending::Slash, Ending::Dot, Ending::Dot]);
        assert_eq!(absolute("a/b"), "/a/b");
        assert_eq!(split("/a/b/"), Some(("/a".into(), "b".into())));
        assert_eq!(split("/a"), Some(("/".into(), "a".into())));
        assert_eq!(split("/"), None);
        assert_eq!(split("/a/.."), None);
    }
}
