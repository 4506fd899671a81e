//! Files in and out of the workload, as tar archives on stdin and stdout. It runs as the exec's user in its
//! namespaces, so it can do what that user can do and no more.

use std::{
    fs::{self, File, Metadata},
    io::{self, BufReader, BufWriter, Read, Write},
    os::{fd::AsFd, unix::fs::FileTypeExt},
    path::{Path, PathBuf},
};

/// Reads and writes of archives, in bytes.
const BUFFER: usize = 64 * 1024;

/// Unpacks stdin below a directory.
pub(super) fn extract(dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir).map_err(naming(dir))?;
    let input = File::from(rustix::stdio::stdin().try_clone_to_owned()?);
    unpack(&mut BufReader::with_capacity(BUFFER, input), dir)
}

fn unpack(input: &mut impl Read, dir: &Path) -> io::Result<()> {
    let mut archive = tar::Archive::new(&mut *input);
    archive.set_preserve_permissions(true);
    archive.set_preserve_mtime(true);
    archive.set_preserve_ownerships(rustix::process::geteuid().is_root());
    archive.unpack(dir).map_err(|e| io::Error::new(e.kind(), explain(&e)))?;
    // What follows the end of the archive is padding; unread, it would look like a broken pipe to its sender.
    io::copy(input, &mut io::sink())?;
    Ok(())
}

/// An error with all of its causes: the archive reader's own names the file, its source the reason.
fn explain(error: &io::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.get_ref().and_then(|inner| inner.source());
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

/// Writes a file or a tree to stdout.
pub(super) fn create(path: &str) -> io::Result<()> {
    let output = File::from(rustix::stdio::stdout().as_fd().try_clone_to_owned()?);
    let mut output = BufWriter::with_capacity(BUFFER, output);
    pack(path, &mut output)?;
    output.flush()
}

fn pack(path: &str, output: &mut impl Write) -> io::Result<()> {
    let source = Path::new(path);
    // `/a/b` is packed as `b`; `/a/b/.` and `/` as what is below.
    let name = match source.file_name() {
        Some(name) if !path.ends_with("/.") => PathBuf::from(name),
        _ => PathBuf::from("."),
    };
    let mut builder = tar::Builder::new(output);
    builder.follow_symlinks(false);
    builder.sparse(false);
    let mut waiting = vec![(source.to_owned(), name)];
    while let Some((source, name)) = waiting.pop() {
        // What vanishes while the tree is walked was never there; the first path must be.
        let metadata = match fs::symlink_metadata(&source) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && source != Path::new(path) => continue,
            other => other.map_err(naming(&source))?,
        };
        if metadata.file_type().is_socket() {
            continue;
        }
        if metadata.is_dir() {
            for entry in fs::read_dir(&source).map_err(naming(&source))? {
                let entry = entry.map_err(naming(&source))?;
                waiting.push((entry.path(), name.join(entry.file_name())));
            }
        }
        append(&mut builder, &source, &name, &metadata).map_err(naming(&source))?;
    }
    builder.finish()
}

fn append(builder: &mut tar::Builder<impl Write>, source: &Path, name: &Path, metadata: &Metadata) -> io::Result<()> {
    if !metadata.is_file() {
        return builder.append_path_with_name(source, name);
    }
    // The length in the header counts, whatever a writer does to the file meanwhile: cut, or filled with zeros.
    let mut header = tar::Header::new_gnu();
    header.set_metadata(metadata);
    let file = File::open(source)?;
    let length = metadata.len();
    builder.append_data(&mut header, name, file.chain(io::repeat(0)).take(length))
}

fn naming(path: &Path) -> impl Fn(io::Error) -> io::Error + '_ {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_tree_goes_round() {
        let from = tempfile::tempdir().unwrap();
        let tree = from.path().join("tree");
        let deep = tree.join("d".repeat(120)).join("e".repeat(120));
        fs::create_dir_all(&deep).unwrap();
        fs::write(deep.join("file"), "deep").unwrap();
        fs::write(tree.join("script"), "#!/bin/sh\n").unwrap();
        fs::set_permissions(tree.join("script"), fs::Permissions::from_mode(0o750)).unwrap();
        symlink("script", tree.join("link")).unwrap();
        symlink("/nowhere", tree.join("dangling")).unwrap();
        fs::create_dir(tree.join("empty")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(tree.join("socket")).unwrap();

        let mut archive = Vec::new();
        pack(tree.to_str().unwrap(), &mut archive).unwrap();
        let to = tempfile::tempdir().unwrap();
        unpack(&mut &archive[..], to.path()).unwrap();
        let tree = to.path().join("tree");
        assert_eq!(fs::read(tree.join("d".repeat(120)).join("e".repeat(120)).join("file")).unwrap(), b"deep");
        assert_eq!(fs::metadata(tree.join("script")).unwrap().permissions().mode() & 0o7777, 0o750);
        assert_eq!(fs::read_link(tree.join("link")).unwrap(), Path::new("script"));
        assert_eq!(fs::read_link(tree.join("dangling")).unwrap(), Path::new("/nowhere"));
        assert!(tree.join("empty").is_dir());
        assert!(!tree.join("socket").exists());

        let mut archive = Vec::new();
        pack(&format!("{}/.", tree.display()), &mut archive).unwrap();
        let to = tempfile::tempdir().unwrap();
        unpack(&mut &archive[..], to.path()).unwrap();
        assert!(to.path().join("script").is_file());
    }

    #[test]
    fn failures_name_the_file() {
        let error = pack("/nonexistent/x", &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/x"), "{error}");
        let error = unpack(&mut &[1u8; 700][..], Path::new("/tmp")).unwrap_err();
        assert!(!error.to_string().is_empty());
    }
}
