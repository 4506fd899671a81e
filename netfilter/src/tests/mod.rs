//! Tests at the level of bytes. Each that answers a row of the catalogue of attacks names it.

mod dns;
mod frames;
mod gate;
mod local;
