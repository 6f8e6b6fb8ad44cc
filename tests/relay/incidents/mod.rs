//! Typical incidents of a night on call. Each test checks all views of the operator (`status`,
//! `slot show`, `/status`, `/readyz`, the page, the metrics, the relay's log) during the incident
//! and after the repair. No view may report health while nothing is delivered.
//!
//! | file | incidents |
//! |---|---|
//! | `pubsub` | Pub/Sub unreachable; topic missing, no permission, quota used up, credentials refused |
//! | `events` | a schema refuses an event, events that can never be published |
//! | `slot` | the slot is dropped under the relay, lost, unreserved, or held back by a long transaction |
//! | `database` | PostgreSQL stopped, disk full, table out of the publication, publication dropped, `INSERT` revoked |
//! | `states` | one relay in several states, one after the other; a slot near a small limit |
//! | `relays` | the relay is down or frozen, its password was changed, its row was deleted, a second relay on the same or on another slot, another program reads the slot |
//! | `audits` | the auditor fails, with and without rows that the stream has left out |
//! | `locks` | a migration holds a lock on a captured table, or on a table of the relay |
//! | `lasting` | a relay that stops again and again, a recovery that waits for a topic, a wrong publication while a topic is missing |
//! | `rare` | the slot is lost while the relay is frozen, somebody ends the walsender again and again, a synchronous standby is gone, a table of the relay is gone |
//!
//! In `database` only the tablespace of `outbox.dispatch` is full. `full_disk` tests a server that stops because it
//! cannot write its WAL.

mod audits;
mod database;
mod desk;
mod events;
mod lasting;
mod locks;
mod pubsub;
mod rare;
mod relays;
mod sight;
mod slot;
mod states;
