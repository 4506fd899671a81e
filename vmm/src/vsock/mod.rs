//! The virtio socket device: byte streams between the host and the guest, begun by the host only.
//!
//! | module | subject |
//! |---|---|
//! | `packet` | the header on the wire |
//! | `connection` | one stream as a pure state machine |
//! | `muxer` | all streams: routing, fairness, limits; pure too |
//! | `buffers` | guest memory of one descriptor chain |
//! | `host` | the host's sockets and how they wake us |
//! | `device` | the queues, and the loop that moves bytes |
//!
//! The guest cannot begin a connection: its requests are answered with a RST. See the limits in
//! [`MAX_CONNECTIONS`](muxer::MAX_CONNECTIONS) and [`BUFFER_SIZE`](connection::BUFFER_SIZE).

mod buffers;
pub mod connection;
pub mod device;
mod host;
pub mod muxer;
pub mod packet;

#[cfg(test)]
mod device_tests;
#[cfg(test)]
mod model;
#[cfg(test)]
mod muxer_tests;

pub use buffers::ChainError;
pub use device::{ConnectError, DEVICE_ID, Error, GUEST_CID, QUEUE_SIZES, State, Vsock};
pub use muxer::{ConnectionId, Counters};
