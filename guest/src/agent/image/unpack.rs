//! Layers laid over each other, as the image format's rules have it.

use super::{
    BuildError, compression,
    members::Members,
    tree::{There, Tree, show},
};
use crate::{
    archive::{Kind, Member, Time},
    build::BuildReport,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read,
};

/// Begins the name of a member that takes away what lies below.
const WHITEOUT: &[u8] = b".wh.";
/// Names for the storage driver that the format comes from; only the next one means something.
const RESERVED: &[u8] = b".wh..wh.";
/// Takes away everything that lies below in its directory.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Most members of all layers: several times what the largest images have. More only take time.
const MAX_MEMBERS: u64 = 10_000_000;

/// Takes layers, the lowest first.
pub(super) struct Unpacker {
    tree: Tree,
    /// Whether names may be whiteouts; an archive that is no layer has files of any name.
    layered: bool,
    limit: u64,
    /// Layers that are done.
    below: u64,
    /// Paths of the current layer, which its whiteouts do not touch. There is nothing to touch below the lowest.
    own: BTreeSet<Vec<u8>>,
    /// Hard links of the current layer to what is not there yet: their path and target.
    pending: Vec<(Vec<u8>, Vec<u8>)>,
    /// Directories change whenever something in them does, so their times are set at the end.
    times: BTreeMap<Vec<u8>, Time>,
    report: BuildReport,
}

impl Unpacker {
    /// Unpacks into `tree` at most `limit` bytes in all.
    pub(super) fn new(tree: Tree, layered: bool, limit: u64) -> Self {
        Self {
            tree,
            layered,
            limit,
            below: 0,
            own: BTreeSet::new(),
            pending: Vec::new(),
            times: BTreeMap::new(),
            report: BuildReport::default(),
        }
    }

    /// Lays one layer over those before.
    pub(super) fn layer(&mut self, from: &mut impl Read) -> Result<(), BuildError> {
        let plain = compression::plain(from).map_err(|error| BuildError::Archive(error.to_string()))?;
        let mut members = Members::new(plain, self.report.bytes, self.limit);
        while let Some(member) = members.next_member(!self.layered)? {
            self.member(&member, &mut members)?;
            self.report.members = self.report.members.saturating_add(1);
            if self.report.members > MAX_MEMBERS {
                return Err(BuildError::Archive(format!("it has more than {MAX_MEMBERS} members")));
            }
            self.report.without_acl = self.report.without_acl.saturating_add(u64::from(member.has_acl));
        }
        self.report.bytes = members.total();
        self.link_pending()?;
        self.own.clear();
        self.below = self.below.saturating_add(1);
        Ok(())
    }

    /// Ends the tree.
    pub(super) fn finish(self) -> Result<BuildReport, BuildError> {
        if self.report.members == 0 {
            return Err(BuildError::Archive("it holds nothing".into()));
        }
        if self.tree.there(b"oci-layout")? != There::Nothing && self.tree.there(b"blobs")? == There::Directory
            || self.tree.there(b"manifest.json")? != There::Nothing
                && self.tree.there(b"repositories")? != There::Nothing
        {
            let why = "it holds an image archive, not a root file system; import that archive itself, decompressed";
            return Err(BuildError::Archive(why.into()));
        }
        for (path, time) in &self.times {
            // Something else may have taken its place.
            if self.tree.there(path)? == There::Directory {
                self.tree.time(*time, path)?;
            }
        }
        Ok(self.report)
    }

    fn member(&mut self, member: &Member, content: &mut impl Read) -> Result<(), BuildError> {
        if member.kind == Kind::Label {
            return Ok(());
        }
        let path = clean(&member.path)?;
        let (directory, name) = match path.iter().rposition(|byte| *byte == b'/') {
            Some(at) => (path.get(..at).unwrap_or_default(), path.get(at.saturating_add(1)..).unwrap_or_default()),
            None => (&b""[..], path.as_slice()),
        };
        if self.layered && path.split(|byte| *byte == b'/').any(|part| part.starts_with(WHITEOUT)) {
            return self.whiteout(directory, name);
        }
        if path.is_empty() {
            if member.kind != Kind::Directory {
                return Err(BuildError::Archive(format!("its root ({}) is not a directory", show(&member.path))));
            }
        } else {
            self.tree.make_parents(&path)?;
        }
        if self.below > 0 {
            self.own.insert(path.clone());
        }
        if member.kind == Kind::HardLink {
            return self.hard_link(path, clean(&member.target)?);
        }
        match (self.tree.there(&path)?, member.kind) {
            (There::Directory, Kind::Directory) | (There::Nothing, _) => {}
            _ => self.tree.remove(&path)?,
        }
        match member.kind {
            Kind::File => self.tree.file(member, &path, content)?,
            Kind::Directory if self.tree.there(&path)? == There::Nothing => self.tree.directory(&path)?,
            Kind::Directory => {}
            Kind::Symlink => self.tree.symlink(&member.target, &path)?,
            Kind::Character | Kind::Block | Kind::Fifo => self.tree.node(member, &path)?,
            Kind::HardLink | Kind::Label => {}
        }
        self.tree.attributes(member, &path)?;
        if member.kind == Kind::Directory {
            self.times.insert(path, member.mtime);
            Ok(())
        } else {
            self.tree.time(member.mtime, &path)
        }
    }

    /// A link may stand before what it leads to.
    fn hard_link(&mut self, path: Vec<u8>, target: Vec<u8>) -> Result<(), BuildError> {
        if path == target {
            return Ok(());
        }
        match self.tree.there(&target)? {
            There::Nothing => self.pending.push((path, target)),
            There::Directory => {
                return Err(BuildError::Archive(format!("{}: a hard link to a directory", show(&path))));
            }
            // Through a symbolic link two paths may be one.
            There::Other if self.tree.is_same(&target, &path)? => {}
            There::Other => {
                self.tree.remove(&path)?;
                if !self.tree.hard_link(&target, &path)? {
                    self.pending.push((path, target));
                }
            }
        }
        Ok(())
    }

    /// Makes the links that waited; those among them that lead to others take more than one round.
    fn link_pending(&mut self) -> Result<(), BuildError> {
        while !self.pending.is_empty() {
            let waiting = std::mem::take(&mut self.pending);
            let before = waiting.len();
            for (path, target) in waiting {
                self.hard_link(path, target)?;
            }
            if let Some((path, target)) = self.pending.first().filter(|_| self.pending.len() == before) {
                let (path, target) = (show(path), show(target));
                return Err(BuildError::Archive(format!("{path}: a hard link to {target}, which is not there")));
            }
        }
        Ok(())
    }

    /// Takes away what lies below. Only the name counts: some writers make whiteouts hard links of each other.
    fn whiteout(&mut self, directory: &[u8], name: &[u8]) -> Result<(), BuildError> {
        if name == OPAQUE {
            return self.uncover(directory);
        }
        // Others, and whatever lies below a directory of such a name, mean nothing.
        let Some(name) = name.strip_prefix(WHITEOUT).filter(|_| !name.starts_with(RESERVED)) else { return Ok(()) };
        if matches!(name, b"" | b"." | b"..") {
            return Err(BuildError::Archive(format!("{}: a whiteout of nothing", show(directory))));
        }
        let path = if directory.is_empty() { name.to_vec() } else { [directory, name].join(&b'/') };
        self.clear(&path)
    }

    /// Removes what is at a path, but for what is this layer's own.
    fn clear(&mut self, path: &[u8]) -> Result<(), BuildError> {
        if self.own.contains(path) {
            return if self.tree.there(path)? == There::Directory { self.uncover(path) } else { Ok(()) };
        }
        // A directory that this layer did not name may still hold what it brought.
        let below = [path, b"/"].concat();
        if self.below > 0 && self.own.range(below.clone()..).next().is_some_and(|own| own.starts_with(&below)) {
            return self.uncover(path);
        }
        if self.below > 0 {
            self.tree.remove(path)?;
        }
        Ok(())
    }

    /// Clears everything in a directory.
    fn uncover(&mut self, directory: &[u8]) -> Result<(), BuildError> {
        if self.tree.there(directory)? != There::Directory {
            return Ok(());
        }
        for name in self.tree.names(directory)? {
            let path = if directory.is_empty() { name } else { [directory, name.as_slice()].join(&b'/') };
            self.clear(&path)?;
        }
        Ok(())
    }
}

/// A member's path without what means nothing: slashes at the ends, double ones, `.`.
fn clean(path: &[u8]) -> Result<Vec<u8>, BuildError> {
    let parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    if parts.contains(&&b".."[..]) {
        return Err(BuildError::Archive(format!("{}: a path that leads upwards", show(path))));
    }
    if path.contains(&0) {
        return Err(BuildError::Archive(format!("{}: a path with a NUL byte", show(path))));
    }
    Ok(parts.join(&b'/'))
}

#[cfg(test)]
#[path = "unpack_tests.rs"]
mod tests;
