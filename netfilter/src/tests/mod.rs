//! Tests at the level of bytes. Each that answers a row of the catalogue of attacks names it.

mod catalogue;
mod dns;
mod flows;
mod frames;
mod gate;
mod http;
mod local;
mod net;
mod proxy;
mod resolver;
mod tls;
