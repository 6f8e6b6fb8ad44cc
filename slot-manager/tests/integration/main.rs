//! Integration tests of slots, publications, tables and checks on real servers.
//!
//! `POSTRIDER_PG_BIN` chooses the major version. A test that cannot run on this version prints that
//! it is skipped.

mod activity;
mod cluster;
mod health;
mod preflight;
mod publication;
mod retention;
mod slots;
mod support;
mod table;
