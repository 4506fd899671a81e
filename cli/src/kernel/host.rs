//! The kernel that this host runs, as a guest kernel: where its files are, and the command that imports it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// What there is of the running kernel.
#[derive(Debug)]
pub(crate) struct HostKernel {
    /// As `uname -r` prints it.
    release: String,
    /// Its file, if it was found, and whether we may read it.
    image: Option<(PathBuf, bool)>,
    /// Its modules, if they were found.
    modules: Option<PathBuf>,
}

impl HostKernel {
    /// Looks where distributions have it.
    pub(crate) fn find() -> Self {
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        Self::find_below(Path::new("/"), release)
    }

    fn find_below(root: &Path, release: String) -> Self {
        let image = [
            format!("boot/vmlinuz-{release}"),
            format!("usr/lib/modules/{release}/vmlinuz"),
            format!("lib/modules/{release}/vmlinuz"),
        ];
        // Some distributions let only root read it.
        let look = |path: PathBuf| match File::open(&path) {
            Ok(_) => Some((path, true)),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Some((path, false)),
            Err(_) => None,
        };
        let image = image.iter().find_map(|path| look(root.join(path)));
        let modules = ["lib/modules", "usr/lib/modules"].map(|path| root.join(path).join(&release));
        let modules = modules.into_iter().find(|path| path.join("modules.builtin").exists());
        Self { release, image, modules }
    }

    /// The command that imports it, or why there is none.
    pub(crate) fn import_command(&self) -> Result<String, String> {
        let release = &self.release;
        let Some((image, readable)) = &self.image else {
            return Err(format!("the running kernel's file, /boot/vmlinuz-{release}, is not there"));
        };
        let Some(modules) = &self.modules else {
            return Err(format!("the running kernel's modules, /lib/modules/{release}, are not there"));
        };
        let (image, modules) = (image.display(), modules.display());
        if *readable {
            return Ok(format!("bulkhead kernel import {image} --modules {modules}"));
        }
        Ok(format!("sudo cat {image} >vmlinuz && bulkhead kernel import vmlinuz --modules {modules}"))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_command_names_what_is_there() {
        let root = tempfile::tempdir().unwrap();
        let at = root.path().display();
        let command = || HostKernel::find_below(root.path(), "6.1.0-x".into()).import_command();
        assert!(command().unwrap_err().contains("/boot/vmlinuz-6.1.0-x, is not there"));
        fs::create_dir_all(root.path().join("usr/lib/modules/6.1.0-x")).unwrap();
        fs::write(root.path().join("usr/lib/modules/6.1.0-x/vmlinuz"), "").unwrap();
        assert!(command().unwrap_err().contains("/lib/modules/6.1.0-x, are not there"));
        fs::write(root.path().join("usr/lib/modules/6.1.0-x/modules.builtin"), "").unwrap();
        let modules = format!("{at}/usr/lib/modules/6.1.0-x");
        assert_eq!(command().unwrap(), format!("bulkhead kernel import {modules}/vmlinuz --modules {modules}"));
        fs::create_dir(root.path().join("boot")).unwrap();
        let image = root.path().join("boot/vmlinuz-6.1.0-x");
        fs::write(&image, "").unwrap();
        assert_eq!(command().unwrap(), format!("bulkhead kernel import {} --modules {modules}", image.display()));
    }

    #[test]
    fn a_kernel_that_only_root_may_read_is_copied_first() {
        let host = HostKernel {
            release: "6".into(),
            image: Some(("/boot/vmlinuz-6".into(), false)),
            modules: Some("/lib/modules/6".into()),
        };
        let expected = "sudo cat /boot/vmlinuz-6 >vmlinuz && bulkhead kernel import vmlinuz --modules /lib/modules/6";
        assert_eq!(host.import_command().unwrap(), expected);
    }
}
