//! The egress filter.
#![forbid(unsafe_code)]

pub mod bucket;
pub mod dns;
pub mod gate;
pub mod local;
pub mod log;
pub mod names;
pub mod plan;
#[cfg(test)]
mod tests;
mod wire;
