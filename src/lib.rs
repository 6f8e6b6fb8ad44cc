//! Postrider reads the write-ahead log of one PostgreSQL database and delivers its transactional
//! outbox to Google Cloud Pub/Sub, in order per key, losing nothing.
//!
//! A tour that follows an event:
//!
//! 1. [`settings`] reads the settings; [`postgres`] opens connections to the database.
//! 2. `source` runs the replication session, on its own thread, and passes on chunks of the stream.
//!    The crate [`decoder`] parses them.
//! 3. [`relay`] is the main loop: it opens sessions, and runs the pipeline of each one.
//! 4. [`map`] turns a row into a Pub/Sub message.
//! 5. [`lanes`] keep the order per key and choose the next request.
//! 6. [`publish`] makes one publish attempt and classifies its failure.
//! 7. `dispatch` records the outcome of each event. `capture` finds, and `table` reads, rows that are
//!    missing from the stream.
//! 8. [`watermark`] computes the position up to which every event has its outcome; `source` then
//!    confirms that position.
//!
//! [`error`] has the codes that operators see, [`metrics`] and [`http`] are for monitoring, and [`cli`]
//! has the commands.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

mod audit;
mod capture;
pub mod cli;
mod delivery;
pub mod environment;
pub mod error;
pub mod event;
pub mod http;
pub mod lanes;
pub mod mapping;
pub mod metrics;
pub mod postgres;
mod printable;
pub mod publish;
mod recovery;
mod server_clock;
pub mod session;
pub mod settings;
mod source;
mod spelling;
pub mod state;
mod store;
mod throttled_log;
pub mod watermark;
