//! Disk layers, snapshot formats and the store.
