//! The relay against a real PostgreSQL and a real gRPC server: one process under test, everything
//! else made by the test itself.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod connections;
mod delivery;
mod failover;
mod google_emulator;
mod harness;
mod http;
mod load;
mod mapping;
mod outage;
mod postgres_events;
mod pubsub_events;
mod restart;
mod service;
mod shutdown;
mod standby;
