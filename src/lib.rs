//! Postrider reads the write-ahead log of one PostgreSQL database and publishes the events of its
//! transactional outbox to Google Cloud Pub/Sub. It keeps the order per key and loses no event.
//!
//! The following tour follows an event through the modules:
//!
//! 1. [`settings`] reads the settings; [`postgres`] opens SQL sessions.
//! 2. [`session`] is the main loop: it opens sessions on the slot, and runs a pipeline in each session.
//! 3. [`replication::Source`] runs the replication session, on its own thread, and passes on chunks of
//!    the stream. The crate [`decoder`] parses them.
//! 4. `capture` turns the stream into events ([`event`]). `capture` also reads the tables, for rows that
//!    the stream does not contain. [`mapping`] turns a row into a Pub/Sub message. The names and formats
//!    in the message are a contract with consumers ([`outbox_event`]).
//! 5. `delivery` carries each event to its outcome: [`lanes`] keep the order per key and choose the next
//!    request, the crate [`publisher`] makes one publish attempt and classifies its failure, and bad
//!    events go to quarantine.
//! 6. `store` records the outcome. Apart from `postrider init`, only `store` has SQL on the relay's own
//!    tables.
//! 7. [`replication::Watermark`] computes the position up to which every event has its outcome.
//!    `Source` then confirms that position.
//!
//! `recovery` replaces a lost slot, and `audit` finds rows that the stream missed. [`error`] has the
//! codes that operators see. [`condition`] says what the relay is doing, and [`metrics`] and [`http`]
//! show it. [`traces`] exports spans, `ops` has the operations that operators can run, and [`cli`] has
//! the commands for them.
//!
//! The folders form layers. No folder imports a folder of a layer above it;
//! `tests/structure/layers.rs` lists the layers.
//!
//! # Example
//!
//! The program `postrider` is the product; the library exists for its tests and benchmarks. The parts of
//! the hot path are public, such as the choice of the ordering key:
//!
//! ```
//! use postrider::mapping::Ordering;
//!
//! let ordering: Ordering = "bucketed(256)".parse()?;
//! assert_eq!(ordering, Ordering::Bucketed(256));
//! # Ok::<(), postrider::mapping::ParseOrderingError>(())
//! ```

#![cfg_attr(
    not(test),
    warn(
        clippy::print_stderr,
        reason = "`eprintln!` panics if standard error cannot be written"
    )
)]
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
