//! Implements the queries and actions of operators, without printing. The commands and the HTTP port
//! show the same facts.
//!
//! - [`slot`] reads the slot, the row of its relay, the publication and the quarantine. From these it decides
//!   the state of the relay, with a severity and a remedy. [`pending`] counts the events that wait.
//!   [`status`] adds the tables and the rates of events.
//! - [`event`] finds the outcome of one event, and [`tail`] follows the records as they appear.
//! - [`check`] checks PostgreSQL and Pub/Sub before the start, and [`finding`] creates the findings.
//! - [`capture`] records that a slot captures the tables.
//! - [`audit`] compares the tables with the records.
//! - [`prune`] deletes old rows and records, and [`pruner`] does so in a running relay.
//! - [`replay`] publishes events again.
//! - [`quarantine`] lists, releases and discards quarantined events.
//! - [`recover`] previews a recovery and requests one.
//! - [`rights`] names the GRANT that our role lacks.
//! - `walk` compares the rows of a table with their records, for `audit` and `prune`. `progress` waits until
//!   the slot has confirmed a position. [`since`] parses points in time and finds the first rows after them.
//!
//! The commands learn about the relay from the database, so the relay itself need not be reachable.
//!
//! Not here: the output (`cli`, `http`), and what the relay knows about itself (`condition`).

pub(crate) mod audit;
pub(crate) mod capture;
pub(crate) mod check;
pub(crate) mod event;
pub(crate) mod finding;
pub(crate) mod pending;
mod progress;
pub(crate) mod prune;
pub(crate) mod pruner;
pub(crate) mod quarantine;
pub(crate) mod recover;
pub(crate) mod replay;
pub(crate) mod rights;
pub(crate) mod since;
pub(crate) mod slot;
pub(crate) mod status;
pub(crate) mod tail;
mod walk;

use std::time::Duration;

/// How long the statements of a command wait for a lock on a captured table. After this time, the command ends with
/// an error that names the holder of the lock.
pub(crate) const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
