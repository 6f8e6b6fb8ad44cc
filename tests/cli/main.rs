//! Tests the commands as a user or a script runs them: the built binary, a real PostgreSQL, exit
//! codes, standard output and standard error.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod audit;
mod backlog;
mod bad_input;
mod bad_settings;
mod check;
mod check_forecast;
mod check_sequence;
mod check_server;
mod check_waiting;
mod connection;
mod delivery;
mod event;
mod explain;
mod help;
mod hostile_text;
mod init;
mod locked_table;
mod misplaced_secrets;
mod named_table;
mod output;
mod prune;
mod prune_other_settings;
mod quarantine;
mod recover;
mod replay_waits;
mod secrets;
mod slot;
mod support;
mod tail;
mod terminal;
