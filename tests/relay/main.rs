//! The relay against a real PostgreSQL and a real gRPC server. The relay is the process under test;
//! the tests create everything else themselves.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod audit;
mod capture;
mod condition;
mod connections;
mod dead_ends;
mod delivery;
mod exceptions;
mod failover;
mod first_start;
mod full_disk;
mod google_emulator;
mod hanging_topic;
mod harness;
mod hostile_clients;
mod http;
mod identifiers;
mod limits;
mod load;
mod lost_answers;
mod mapping;
mod new_snapshot;
mod outage;
mod page;
mod passfile;
mod planted;
mod postgres_events;
mod privileges;
mod pruning;
mod publication_altered;
mod pubsub_events;
mod quarantine;
mod quarantine_kept;
mod recovery;
mod referee;
mod restart;
mod role_settings;
mod secrets;
mod service;
mod shutdown;
mod standby;
mod tls;
mod types;
mod unreadable;
mod unsendable;
