//! Tests the commands as a person or a script runs them: the built binary, a real PostgreSQL, exit
//! codes, standard output and standard error.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod audit;
mod bad_input;
mod check;
mod check_forecast;
mod connection;
mod delivery;
mod event;
mod explain;
mod help;
mod init;
mod prune;
mod prune_other_settings;
mod quarantine;
mod recover;
mod secrets;
mod slot;
mod support;
mod tail;
