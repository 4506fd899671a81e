//! Users and groups of the image. Its files are hostile input, like everything in it.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use super::child::Failure;
use crate::message::StartFailure;
use rustix::fs::{Mode, OFlags};
use std::{fs::File, io::Read};

/// Longest /etc/passwd or /etc/group that is read; what comes after is not seen.
const MAX_FILE: u64 = 4 * 1024 * 1024;

/// Most supplementary groups; Linux takes 65,536.
const MAX_GROUPS: usize = 1024;

/// Ids above this are refused by much that runs in images.
const MAX_NUMBER: u32 = i32::MAX.unsigned_abs();

/// Who a process runs as.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) groups: Vec<u32>,
    pub(super) home: String,
}

/// Looks a user up in the image that this process is in.
pub(super) fn look_up(user: Option<&str>) -> Result<Identity, Failure> {
    resolve(user.unwrap_or("0"), &read("/etc/passwd"), &read("/etc/group"))
}

/// A file's text, or nothing: an image need not have users. Only regular files, so that no pipe or device of the image
/// can hold up its reader.
fn read(path: &str) -> String {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut bytes = Vec::new();
    if let Ok(file) = rustix::fs::open(path, flags, Mode::empty()).map(File::from)
        && file.metadata().is_ok_and(|m| m.is_file())
    {
        let _ = file.take(MAX_FILE).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

struct Entry<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

/// The rule of the usual container tools: a name, or else a number that need not be in the file; an explicit group
/// replaces the user's own and the supplementary ones.
fn resolve(spec: &str, passwd: &str, group: &str) -> Result<Identity, Failure> {
    let (user, wanted_group) = match spec.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|g| !g.is_empty())),
        None => (spec, None),
    };
    let user = if user.is_empty() { "0" } else { user };
    let entries = || passwd.lines().filter_map(entry);
    let found = entries().find(|e| e.name == user).or_else(|| {
        let uid = number(user)?;
        entries().find(|e| e.uid == uid).or(Some(Entry { name: "", uid, gid: 0, home: "/" }))
    });
    let Some(found) = found else {
        return Err(Failure::new(StartFailure::NoSuchUser, format!("user {user:?}: not in the image's /etc/passwd")));
    };
    let home = if found.home.starts_with('/') { found.home } else { "/" };
    let (gid, groups) = match wanted_group {
        Some(wanted) => (find_group(wanted, group)?, Vec::new()),
        None => (found.gid, memberships(found.name, group)),
    };
    Ok(Identity { uid: found.uid, gid, groups, home: home.to_owned() })
}

fn find_group(wanted: &str, file: &str) -> Result<u32, Failure> {
    file.lines()
        .filter_map(group_entry)
        .find(|(name, ..)| *name == wanted)
        .map(|(_, gid, _)| gid)
        .or(number(wanted))
        .ok_or_else(|| {
            Failure::new(StartFailure::NoSuchGroup, format!("group {wanted:?}: not in the image's /etc/group"))
        })
}

fn memberships(user: &str, file: &str) -> Vec<u32> {
    let member = |members: &str| !user.is_empty() && members.split(',').any(|m| m == user);
    file.lines()
        .filter_map(group_entry)
        .filter(|(.., members)| member(members))
        .map(|(_, gid, _)| gid)
        .take(MAX_GROUPS)
        .collect()
}

/// `name:password:uid:gid:comment:home:shell`
fn entry(line: &str) -> Option<Entry<'_>> {
    let mut fields = line.split(':');
    let name = fields.next().filter(|n| !n.is_empty())?;
    let uid = number(fields.nth(1)?)?;
    let gid = number(fields.next()?)?;
    Some(Entry { name, uid, gid, home: fields.nth(1).unwrap_or("/") })
}

/// `name:password:gid:members`
fn group_entry(line: &str) -> Option<(&str, u32, &str)> {
    let mut fields = line.split(':');
    let name = fields.next().filter(|n| !n.is_empty())?;
    let gid = number(fields.nth(1)?)?;
    Some((name, gid, fields.next().unwrap_or("")))
}

fn number(text: &str) -> Option<u32> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?.filter(|n| *n <= MAX_NUMBER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\n#junk\n\nbad:x:notanumber:0\n\
        app:x:1000:1001:App:/home/app:/bin/sh\n77:x:5:6::/odd:\nhuge:x:4294967295:0::/:\n";
    const GROUP: &str = "root:x:0:\napp:x:1001:\nwheel:x:10:root,app\naudio:x:29:app\n";

    fn id(uid: u32, gid: u32, groups: &[u32], home: &str) -> Identity {
        Identity { uid, gid, groups: groups.to_vec(), home: home.into() }
    }

    #[test]
    fn users_as_container_tools_take_them() {
        let ok = |spec| resolve(spec, PASSWD, GROUP).unwrap();
        assert_eq!(ok("0"), id(0, 0, &[10], "/root"));
        assert_eq!(ok(""), id(0, 0, &[10], "/root"));
        assert_eq!(ok("app"), id(1000, 1001, &[10, 29], "/home/app"));
        assert_eq!(ok("1000"), id(1000, 1001, &[10, 29], "/home/app"));
        assert_eq!(ok("app:wheel"), id(1000, 10, &[], "/home/app"));
        assert_eq!(ok("app:55"), id(1000, 55, &[], "/home/app"));
        assert_eq!(ok("4242"), id(4242, 0, &[], "/"));
        assert_eq!(ok("4242:7"), id(4242, 7, &[], "/"));
        assert_eq!(ok("77"), id(5, 6, &[], "/odd"), "a name comes before a number");
        assert_eq!(resolve("0", "", "").unwrap(), id(0, 0, &[], "/"));
    }

    #[test]
    fn what_is_not_there_is_named() {
        let kind = |spec| resolve(spec, PASSWD, GROUP).unwrap_err().kind;
        assert_eq!(kind("nobody"), StartFailure::NoSuchUser);
        assert_eq!(kind("bad"), StartFailure::NoSuchUser);
        assert_eq!(kind("huge"), StartFailure::NoSuchUser);
        assert_eq!(kind("-1"), StartFailure::NoSuchUser);
        assert_eq!(kind("99999999999"), StartFailure::NoSuchUser);
        assert_eq!(kind("app:nogroup"), StartFailure::NoSuchGroup);
    }

    proptest! {
        #[test]
        fn any_files_are_survived(spec in ".{0,20}", passwd in "(.{0,40}\n){0,5}", group in "(.{0,40}\n){0,5}") {
            let _ = resolve(&spec, &passwd, &group);
        }
    }
}
