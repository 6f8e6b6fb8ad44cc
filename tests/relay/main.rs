//! Tests the relay with a real PostgreSQL server and a real gRPC server. The relay runs as a process.
//! The tests create everything else themselves.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod audit;
mod background_pruning;
mod capture;
mod condition;
mod connections;
mod damaged_value;
mod days;
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
mod incidents;
mod inherited;
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
mod replay;
mod restart;
mod role_settings;
mod secrets;
mod service;
mod several_servers;
mod shutdown;
mod standby;
mod tls;
mod traces;
mod types;
mod unreadable;
mod unsendable;
