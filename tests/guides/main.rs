//! Follows pages of docs/: takes commands and SQL from each page and runs them with a real
//! PostgreSQL, a relay and the Pub/Sub emulator.
//!
//! `tests/docs/commands.rs` lists the programs whose commands no test runs.

mod adopting;
#[path = "../docs/blocks.rs"]
mod blocks;
mod cluster;
mod debezium;
mod guide;
mod playground;
mod replay;
mod sql;
mod tutorial;
mod your_database;
