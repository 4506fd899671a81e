//! virtio devices and their transport.

mod batch;
pub mod block;
mod block_queue;
pub mod chain;
pub mod device;
pub mod iovec;
pub mod mmio;
pub mod net;
pub mod notify;
pub mod request;
pub mod rng;
#[cfg(test)]
mod save_tests;
pub mod vsock;
