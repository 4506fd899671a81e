//! `bulkhead kernel` as a user says it, right and wrong. What kernels are made of is tested where it is read.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::{Command, Stdio};

/// Status, standard output, standard error.
fn bulkhead(home: &Path, arguments: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
    command.args(arguments).current_dir(home).env("BULKHEAD_HOME", home).stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn what_is_wrong_is_one_line_and_leaves_nothing() {
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("text"), "no kernel").unwrap();
    std::fs::write(home.path().join("empty"), "").unwrap();
    std::fs::write(home.path().join("lib.deb"), "!<arch>\n").unwrap();
    let id = "0".repeat(64);
    for (arguments, said) in [
        (&["kernel", "import"][..], "required arguments were not provided: <VMLINUZ|PACKAGE.deb>"),
        (&["kernel", "import", "text", "--modles", "x"], "a similar argument exists: '--modules'"),
        (&["kernel", "import", "--name", "a/b", "text"], "names begin with a letter or digit"),
        (&["kernel", "import", "--name", ".x", "text"], "names begin with a letter or digit"),
        (&["kernel", "import", "--name", &id, "text"], "an id cannot be a name"),
        (&["kernel", "import", "nowhere"], "cannot import kernel: nowhere: No such file"),
        (&["kernel", "import", "."], "cannot import kernel: .: it is a directory; name a vmlinuz"),
        (&["kernel", "import", "/dev/null"], "cannot import kernel: /dev/null: it is no plain file"),
        (&["kernel", "import", "text"], "text: it is no kernel: its first bytes are of no known kind; name a vmlinuz"),
        (&["kernel", "import", "empty"], "empty: it is no kernel: it is empty"),
        (&["kernel", "import", "lib.deb"], "lib.deb: not a whole Debian package: it has no data.tar"),
        (&["kernel", "import", "lib.deb", "--modules", "."], "a package brings its modules; leave it out"),
        (&["kernel", "import", "lib.deb", "text"], "text: not a Debian package; only packages may be several"),
        (&["kernel", "imprt"], "'import'"),
        (&["kernel", "list", "--format", "xml"], "possible values: table, json"),
        (&["kernel", "rm", "nothing"], "kernel \"nothing\": not found in "),
        (&["kernel", "rm"], "required"),
        (&["kernel", "inspect", ""], "kernel \"\": not found in "),
    ] {
        let (status, output, errors) = bulkhead(home.path(), arguments);
        assert_eq!((status, output.as_str()), (125, ""), "{arguments:?}");
        assert!(errors.starts_with("bulkhead: ") && errors.contains(said), "{arguments:?}: {errors}");
        assert_eq!(errors.lines().count(), 1, "{arguments:?}: {errors}");
    }
    let left = std::fs::read_dir(home.path().join("kernels")).unwrap();
    assert_eq!(left.map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>(), [".lock"]);
}

#[test]
fn a_store_without_kernels_lists_none() {
    let home = tempfile::tempdir().unwrap();
    assert_eq!(bulkhead(home.path(), &["kernel", "list", "-q"]), (0, String::new(), String::new()));
    assert_eq!(bulkhead(home.path(), &["kernel", "ls", "--format", "json"]), (0, "[]\n".into(), String::new()));
    let (status, table, _) = bulkhead(home.path(), &["kernel", "list"]);
    assert_eq!((status, table.as_str()), (0, "NAME  ID  RELEASE  SIZE  MODULES\n"));
    assert!(!home.path().join("kernels").exists());
}
