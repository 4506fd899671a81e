//! Disk layers, snapshot formats and the store.

#![forbid(unsafe_code)]

pub mod disk;
#[cfg(feature = "store")]
pub mod store;
