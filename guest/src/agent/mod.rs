//! The guest's end: PID 1 of the machine. It stays in the initramfs; the workload has namespaces of its own.

mod cgroup;
mod child;
mod connect;
mod connection;
mod exec;
mod gate;
mod identity;
mod image;
mod machine;
mod modprobe;
mod network;
mod reach;
mod requests;
mod server;
mod tarball;
mod user;
mod workload;

pub use machine::{boot, serve_directory};
pub use modprobe::{MODPROBE, modprobe};
