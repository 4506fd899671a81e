//! The egress filter.
#![forbid(unsafe_code)]

pub mod bucket;
pub mod dial;
pub mod dns;
pub mod engine;
pub mod flow;
pub mod gate;
pub mod host;
pub mod http;
pub mod limits;
pub mod local;
pub mod log;
pub mod names;
pub use netfilter_control::plan;
pub mod reactor;
pub mod stack;
#[cfg(test)]
mod tests;
pub mod tls;
mod wire;
