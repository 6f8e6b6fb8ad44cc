//! Postrider reads the write-ahead log of one PostgreSQL database and delivers its transactional
//! outbox to Google Cloud Pub/Sub, in order per key, losing nothing.
//!
//! A tour that follows an event:
//!
//! 1. [`settings`] reads the settings; [`postgres`] opens SQL sessions.
//! 2. [`session`] is the main loop: it opens sessions on the slot, and runs a pipeline in each session.
//! 3. [`replication::Source`] runs the replication session, on its own thread, and passes on chunks of
//!    the stream. The crate [`decoder`] parses them.
//! 4. `capture` turns the stream into events ([`event`]). `capture` also reads the tables, for rows that the
//!    stream does not bring. [`mapping`] turns a row into a Pub/Sub message. The names and forms in the
//!    message are a contract with consumers ([`outbox_event`]).
//! 5. `delivery` takes each event to its outcome: [`lanes`] keep the order per key and choose the next
//!    request, the crate [`publisher`] makes one publish attempt and classifies its failure, and bad events
//!    go to quarantine.
//! 6. `store` records the outcome. Only `store` has SQL on the relay's own tables.
//! 7. [`replication::Watermark`] computes the position up to which every event has its outcome;
//!    `Source` then confirms that position.
//!
//! `recovery` replaces a lost slot, and `audit` finds rows that the stream missed. [`error`] has the
//! codes that operators see. [`condition`] says what the relay is doing, and [`metrics`] and [`http`]
//! show it. [`traces`] exports spans, `ops` answers the questions of operators, and [`cli`] has the
//! commands.
//!
//! The folders form layers. No folder imports a folder of a layer above it;
//! `tests/structure/layers.rs` lists the layers.
//!
//! # Example
//!
//! The program is the product; the library exists for its tests and benchmarks. The hot path's parts are public,
//! such as the choice of the ordering key:
//!
//! ```
//! use postrider::mapping::Ordering;
//!
//! let ordering: Ordering = "bucketed(256)".parse()?;
//! assert_eq!(ordering, Ordering::Bucketed(256));
//! # Ok::<(), postrider::mapping::ParseOrderingError>(())
//! ```

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test fails by panicking"))]

mod audit;
mod build_info;
mod capture;
pub mod cli;
pub mod condition;
mod delivery;
pub mod environment;
pub mod error;
pub mod event;
pub mod http;
pub mod lanes;
pub mod mapping;
pub mod metrics;
mod ops;
pub mod postgres;
mod recovery;
mod server_clock;
pub mod session;
pub mod settings;
mod store;
mod throttled_log;
pub mod traces;
