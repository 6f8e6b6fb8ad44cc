//! Postrider reads the write-ahead log of one PostgreSQL database and delivers its transactional
//! outbox to Google Cloud Pub/Sub, in order per key, losing nothing.
//!
//! A tour, along the way of an event:
//!
//! 1. [`settings`] says what to do; [`postgres`] is where the database is.
//! 2. `source` holds the replication session, on a thread of its own, and hands on chunks of the
//!    stream. [`decoder`] (a crate) reads them.
//! 3. [`relay`] is the loop around everything: sessions, and the pipeline of one session.
//! 4. [`map`] makes a Pub/Sub message of a row.
//! 5. [`lanes`] keep the order per key and say which request goes next.
//! 6. [`publish`] makes one attempt and says what its failure means.
//! 7. `dispatch` records what became of each event; `table` reads rows that the stream does not
//!    bring.
//! 8. [`watermark`] says how far everything is resolved, which `source` then confirms.
//!
//! [`error`] has the codes that operators see, [`metrics`] and [`http`] what they watch, [`cli`]
//! the commands, [`demo`] the one to begin with.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

mod capture;
pub mod cli;
pub mod demo;
mod dispatch;
pub mod error;
pub mod http;
pub mod lanes;
pub mod map;
pub mod metrics;
pub mod postgres;
mod printable;
pub mod publish;
pub mod relay;
mod server_clock;
pub mod settings;
mod source;
mod table;
mod throttled_log;
pub mod watermark;
