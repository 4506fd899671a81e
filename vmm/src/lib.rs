//! The virtual machine monitor.
