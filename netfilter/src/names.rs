//! Addresses that stand for names: each means one name, in one sandbox, for as long as its lineage lives.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use netfilter_control::Name;

use crate::bucket::Bucket;
use crate::plan::FIRST_NAME;

/// Most names of a lineage. An address is never given to a second name, since the first may be on the guest's disk.
pub const MAX_NAMES: usize = 4096;
/// Most new names in an hour that one wildcard lets a guest make up: each is a few bytes that the name's owner sees.
const NEW_NAMES_AN_HOUR: u64 = 64;

/// The names that have an address.
#[derive(Debug, Default)]
pub struct Names {
    /// In the order of their addresses.
    names: Vec<Name>,
    index: HashMap<Name, usize>,
    /// By the wildcard's text. A policy has few, and what it no longer has is forgotten with the policy.
    wildcards: HashMap<String, Bucket>,
}

/// Why a name gets no address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Full {
    /// [`MAX_NAMES`] are used.
    Lineage,
    /// The wildcard's hour is used up.
    Wildcard,
}

impl Names {
    /// The name that an address stands for.
    pub fn name(&self, address: Ipv4Addr) -> Option<&Name> {
        let offset = address.to_bits().checked_sub(FIRST_NAME.to_bits())?;
        self.names.get(usize::try_from(offset).ok()?)
    }

    /// The address of a name: the one it has, or the next. `wildcard` is the rule's text if the rule is one.
    pub fn address(&mut self, name: &Name, wildcard: Option<&str>, now: Duration) -> Result<(Ipv4Addr, bool), Full> {
        if let Some(index) = self.index.get(name) {
            return Ok((address_at(*index), false));
        }
        if self.names.len() >= MAX_NAMES {
            return Err(Full::Lineage);
        }
        if let Some(text) = wildcard {
            let hour = || Bucket::per(Duration::from_secs(3600), NEW_NAMES_AN_HOUR, NEW_NAMES_AN_HOUR);
            let bucket = match self.wildcards.get_mut(text) {
                Some(bucket) => bucket,
                None => self.wildcards.entry(text.to_owned()).or_insert_with(hour),
            };
            if !bucket.take(now) {
                return Err(Full::Wildcard);
            }
        }
        let index = self.names.len();
        self.names.push(name.clone());
        self.index.insert(name.clone(), index);
        Ok((address_at(index), true))
    }

    /// All names, in the order of their addresses: what a snapshot saves.
    pub fn all(&self) -> &[Name] {
        &self.names
    }

    /// Takes over the names of a snapshot. `false`, and nothing is taken, if they are too many or one stands twice.
    #[must_use]
    pub fn restore(&mut self, names: Vec<Name>) -> bool {
        let index: HashMap<Name, usize> = names.iter().cloned().zip(0..).collect();
        if names.len() > MAX_NAMES || index.len() != names.len() {
            return false;
        }
        self.names = names;
        self.index = index;
        true
    }

    /// Forgets wildcards that a new policy does not have.
    pub fn keep_wildcards(&mut self, keep: impl Fn(&str) -> bool) {
        self.wildcards.retain(|text, _| keep(text));
    }
}

fn address_at(index: usize) -> Ipv4Addr {
    // At most `MAX_NAMES`, far below the 2^17 addresses of the pool.
    let offset = u32::try_from(index).unwrap_or(u32::MAX);
    Ipv4Addr::from_bits(FIRST_NAME.to_bits().saturating_add(offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::parse(text).unwrap()
    }

    /// Row 51: guessing addresses.
    #[test]
    fn an_address_means_one_name() {
        let mut names = Names::default();
        let (a, new) = names.address(&name("a.example"), None, Duration::ZERO).unwrap();
        assert!(new);
        let (b, _) = names.address(&name("b.example"), None, Duration::ZERO).unwrap();
        assert_eq!(names.address(&name("a.example"), None, Duration::ZERO), Ok((a, false)));
        assert_ne!(a, b);
        assert_eq!(names.name(a), Some(&name("a.example")));
        assert_eq!(names.name(b), Some(&name("b.example")));
        let known = (0..=u32::MAX).step_by(65_521).chain(a.to_bits() - 300..b.to_bits() + 300);
        let hits = known
            .filter(|bits| names.name(Ipv4Addr::from_bits(*bits)).is_some())
            .collect::<std::collections::BTreeSet<_>>();
        assert!(hits.iter().all(|bits| [a.to_bits(), b.to_bits()].contains(bits)));
    }

    /// Row 37: a tunnel under an allowed wildcard.
    #[test]
    fn a_wildcard_makes_few_new_names() {
        let mut names = Names::default();
        let mut ask = |n: usize, now: u64| {
            names.address(&name(&format!("n{n}.example.com")), Some("*.example.com"), Duration::from_secs(now)).is_ok()
        };
        assert_eq!((0..10_000).filter(|n| ask(*n, 0)).count(), 64);
        assert!(ask(5, 0), "a known name stays");
        assert_eq!((20_000..30_000).filter(|n| ask(*n, 3600)).count(), 64);
        assert!(names.address(&name("listed.example.org"), None, Duration::ZERO).is_ok(), "a name that is listed");
    }

    #[test]
    fn names_are_limited_and_never_reused() {
        let mut names = Names::default();
        for n in 0..MAX_NAMES {
            names.address(&name(&format!("n{n}.example")), None, Duration::ZERO).unwrap();
        }
        assert_eq!(names.address(&name("one-more.example"), None, Duration::ZERO), Err(Full::Lineage));
        let last = address_at(MAX_NAMES - 1);
        assert!(netfilter_control::Cidr::v4([198, 18, 0, 0].into(), 15).contains(last.into()));

        let mut restored = Names::default();
        assert!(restored.restore(names.all().to_vec()));
        assert_eq!(restored.name(last), names.name(last));
        assert_eq!(restored.address(&name("one-more.example"), None, Duration::ZERO), Err(Full::Lineage));
        assert!(!restored.restore(vec![name("a.example"), name("a.example")]));
    }
}
