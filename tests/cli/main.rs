//! The commands as a person or a script meets them: the built binary, a real PostgreSQL, exit
//! codes, what stands on standard output and what on standard error.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bad_input;
mod check;
mod delivery;
mod help;
mod init;
mod quarantine;
mod recover;
mod secrets;
mod slot;
mod support;
