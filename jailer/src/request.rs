//! What a jailer is asked to do, as its arguments: `NAME=VALUE`, each exactly once, in this order.

use std::fmt;

/// The program that is jailed. It decides which system calls there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// `bulkhead-vmm`
    Vmm,
    /// `bulkhead-netfilter`
    Netfilter,
}

impl Target {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Vmm, Self::Netfilter];

    /// Whether it works in the host's network. What it may do there, its list says.
    pub fn needs_network(self) -> bool {
        self == Self::Netfilter
    }

    /// The name of its process.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vmm => "bulkhead-vmm",
            Self::Netfilter => "bulkhead-netfilter",
        }
    }
}

/// A part of the jail that a host may be unable to give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// User, mount, pid, network, IPC, UTS and cgroup namespaces, and with them the empty root.
    Namespaces,
    /// Landlock.
    Landlock,
    /// A cgroup with limits.
    Cgroup,
}

impl Part {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Namespaces, Self::Landlock, Self::Cgroup];

    /// As users write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Namespaces => "namespaces",
            Self::Landlock => "landlock",
            Self::Cgroup => "cgroup",
        }
    }

    /// From what users write.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|part| part.name() == name)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What the target may have, whatever cgroups the host has: `setrlimit(2)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Open descriptors.
    pub descriptors: u64,
    /// Threads, the first included.
    pub threads: u64,
    /// Bytes of private writable memory.
    pub memory: u64,
    /// Length of a file that it writes.
    pub file_size: u64,
}

/// What a jailer is asked to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The program.
    pub target: Target,
    /// The user that it becomes. If it is not the jailer's own, the jailer must be root.
    pub uid: u32,
    /// The group that it becomes.
    pub gid: u32,
    /// Its limits.
    pub limits: Limits,
    /// Whether it is born in the cgroup that stands in [`crate::CGROUP`].
    pub cgroup: bool,
    /// What is left out. The user said so.
    pub without: Vec<Part>,
}

/// Arguments that are no request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("argument {number}: {given:?}, expected {expected}")]
pub struct RequestError {
    /// Which, from 1.
    pub number: usize,
    /// What stands there.
    pub given: String,
    /// What should.
    pub expected: &'static str,
}

impl Request {
    /// As arguments.
    pub fn arguments(&self) -> Vec<String> {
        let Self { target, uid, gid, limits, cgroup, without } = self;
        let Limits { descriptors, threads, memory, file_size } = limits;
        let without: Vec<&str> = without.iter().map(|part| part.name()).collect();
        vec![
            format!("target={}", target.name()),
            format!("uid={uid}"),
            format!("gid={gid}"),
            format!("descriptors={descriptors}"),
            format!("threads={threads}"),
            format!("memory={memory}"),
            format!("file-size={file_size}"),
            format!("cgroup={cgroup}"),
            format!("without={}", without.join(",")),
        ]
    }

    /// From arguments.
    pub fn from_arguments(arguments: &[String]) -> Result<Self, RequestError> {
        let mut arguments = Arguments { all: arguments, at: 0 };
        let request = Self {
            target: arguments.next("target=", |name| Target::ALL.into_iter().find(|target| target.name() == name))?,
            uid: arguments.next("uid=", id)?,
            gid: arguments.next("gid=", id)?,
            limits: Limits {
                descriptors: arguments.next("descriptors=", |value| value.parse().ok())?,
                threads: arguments.next("threads=", |value| value.parse().ok())?,
                memory: arguments.next("memory=", |value| value.parse().ok())?,
                file_size: arguments.next("file-size=", |value| value.parse().ok())?,
            },
            cgroup: arguments.next("cgroup=", |value| value.parse().ok())?,
            without: arguments.next("without=", parts)?,
        };
        arguments.end()?;
        Ok(request)
    }
}

/// Neither root nor "no change".
fn id(value: &str) -> Option<u32> {
    value.parse().ok().filter(|id: &u32| !matches!(*id, 0 | u32::MAX))
}

fn parts(value: &str) -> Option<Vec<Part>> {
    value.split(',').filter(|name| !name.is_empty()).map(Part::from_name).collect()
}

struct Arguments<'a> {
    all: &'a [String],
    at: usize,
}

impl Arguments<'_> {
    fn next<T>(&mut self, name: &'static str, parse: impl FnOnce(&str) -> Option<T>) -> Result<T, RequestError> {
        let given = self.all.get(self.at).map_or("", String::as_str);
        self.at = self.at.saturating_add(1);
        given.strip_prefix(name).and_then(parse).ok_or_else(|| self.wrong(given, name))
    }

    fn end(mut self) -> Result<(), RequestError> {
        let given = self.all.get(self.at).cloned();
        self.at = self.at.saturating_add(1);
        given.map_or(Ok(()), |given| Err(self.wrong(&given, "nothing more")))
    }

    fn wrong(&self, given: &str, expected: &'static str) -> RequestError {
        RequestError { number: self.at, given: given.to_owned(), expected }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        Request {
            target: Target::Vmm,
            uid: 7,
            gid: 8,
            limits: Limits { descriptors: 1, threads: 2, memory: 3, file_size: u64::MAX },
            cgroup: true,
            without: vec![Part::Landlock, Part::Namespaces],
        }
    }

    #[test]
    fn a_request_survives_its_arguments() {
        let other = Request { target: Target::Netfilter, cgroup: false, without: Vec::new(), ..request() };
        for request in [request(), other] {
            assert_eq!(Request::from_arguments(&request.arguments()), Ok(request));
        }
    }

    #[test]
    fn anything_else_is_refused() {
        let good = request().arguments();
        for number in 0..good.len() {
            let mut missing = good.clone();
            missing.remove(number);
            assert_eq!(Request::from_arguments(&missing).unwrap_err().number, number + 1);
            let mut wrong = good.clone();
            wrong[number].push('x');
            assert_eq!(Request::from_arguments(&wrong).unwrap_err().number, number + 1);
        }
        let more = [good.clone(), vec![String::new()]].concat();
        assert_eq!(Request::from_arguments(&more).unwrap_err().expected, "nothing more");
        for id in ["uid=0", "uid=4294967295", "uid=-1"] {
            let mut root = good.clone();
            root[1] = id.to_owned();
            assert_eq!(Request::from_arguments(&root).unwrap_err().number, 2, "{id}");
        }
    }
}
