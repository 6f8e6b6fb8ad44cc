//! The relay against a real PostgreSQL and a real gRPC server: one process under test, everything
//! else made by the test itself.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod audit;
mod connections;
mod delivery;
mod google_emulator;
mod harness;
mod hostile_clients;
mod http;
mod identifiers;
mod mapping;
mod outage;
mod privileges;
mod restart;
mod secrets;
mod service;
