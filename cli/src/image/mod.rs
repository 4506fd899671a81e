//! Images: the store, and how one is made of what people have.
//!
//! [`source`] finds out what there is and reads it, hashing; [`builder`] has a machine unpack it; [`disk`] turns that
//! machine's disk into a file; [`store`] is where images lie. `docs/formats/image-store.md` describes it all.

mod builder;
mod command;
mod digest;
mod disk;
mod import;
mod name;
pub(crate) mod progress;
mod record;
mod source;
mod store;
mod verify;

pub(crate) use command::{ImageCommand, run};
pub(crate) use digest::Digest;
#[cfg(test)]
pub(crate) use record::Config;
pub(crate) use store::{Image, Images};
