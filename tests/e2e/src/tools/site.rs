//! What the tools talk to: `site.py`, which runs in the tools' own image and in the Internet's network namespace.

use std::fs;
use std::net::Ipv4Addr;
use std::process::Command;

use rustix::mount::{MountFlags, mount, mount_bind_recursive};

use crate::command::Running;
use crate::host;
use crate::internet::{HOST, Internet, ORIGIN, ROUTER};

/// Where everything is that the tools get to.
pub(super) const SITE: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 40);
/// The name server of the host.
pub(super) const RESOLVER: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 54);

/// The servers. They end with it.
pub(super) struct Site {
    servers: Running,
    _root: tempfile::TempDir,
}

impl Site {
    /// Starts them. The mounts are this process's own and go with it.
    pub(super) fn start(internet: &Internet) -> Self {
        let directory = host::directory();
        let root = directory.path();
        let mounted = Command::new("mount").args(["-o", "loop,ro"]).arg(host::image("nettools")).arg(root).status();
        assert!(mounted.unwrap().success());
        for place in ["srv", "run", "tmp"] {
            mount("place", root.join(place), "tmpfs", MountFlags::empty(), Some(c"mode=755")).unwrap();
        }
        mount_bind_recursive("/dev", root.join("dev")).unwrap();
        fs::write(root.join("run/site.py"), include_str!("site.py")).unwrap();

        let within = format!("--net={}", internet.namespace().display());
        for address in [SITE, RESOLVER] {
            let add = ["ip", "addr", "add", &format!("{address}/32"), "dev", "lo"].map(String::from);
            assert!(Command::new("nsenter").arg(&within).args(add).status().unwrap().success());
        }
        let mut command = Command::new("nsenter");
        // All of them are killed when the first process of their namespace is.
        command.args([within.as_str(), "unshare", "--pid", "--fork", "--kill-child", "chroot"]).arg(root);
        command.args(["/usr/bin/env", "-i", "PATH=/usr/sbin:/usr/bin", "HOME=/root", "python3", "/run/site.py"]);
        command.args([SITE, ORIGIN, RESOLVER, HOST, ROUTER].map(|address| address.to_string()));
        let mut servers = Running::start(&mut command);
        servers.until_printed("ready\n");
        Self { servers, _root: directory }
    }

    /// What they were asked until now, a line each.
    pub(super) fn heard(&self) -> Vec<String> {
        self.servers.printed().lines().map(String::from).collect()
    }
}
