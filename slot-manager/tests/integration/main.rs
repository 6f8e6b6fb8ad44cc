//! Integration tests of slots, publications, tables and checks on real servers.
//!
//! `POSTRIDER_PG_BIN` chooses the major version. A test that this version cannot run is skipped,
//! and says so.

mod activity;
mod cluster;
mod health;
mod preflight;
mod publication;
mod retention;
mod slots;
mod support;
mod table;
