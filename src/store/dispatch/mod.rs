//! The dispatch table, `outbox.dispatch`: the durable outcome of each event.
//!
//! [`writer`] records [`outcome`]s in batches, off the hot path, before the relay confirms the positions
//! of their events (guarantee G4). The outcome of a new event becomes a new row ([`rows`]). The outcome of a
//! [`released`] event updates the event's row. After a restart, [`recorded`] finds the events that
//! already have an outcome, so that they are not sent again (G3). Once our walsender has the slot
//! ([`slot_reader`]), [`predecessor`] waits until the previous relay writes no more rows. [`successor`]
//! finds out whether another relay has taken over the slot. If so, this relay must stop recording.
//!
//! [`quarantined`] has the relay's queries on the quarantine, and [`quarantine_commands`] has those of
//! `postrider quarantine`. [`known`] has SQL fragments with which statements on captured tables look up
//! events. [`history`] reads records for commands, and [`pruning`] deletes records.
//!
//! Nothing here writes to an outbox table. A recorded outcome changes only if its event is released, replayed
//! or discarded.
//!
//! Not here: finding out which rows of a captured table have no outcome (`capture`).

pub(crate) mod history;
mod known;
mod outcome;
mod predecessor;
pub(crate) mod pruning;
pub(crate) mod quarantine_commands;
pub(crate) mod quarantined;
mod recorded;
mod released;
mod rows;
mod slot_reader;
mod successor;
mod writer;

pub(crate) use known::{RECORD_OF_ROW, check_readable, has_no_row_sql, state_sql};
pub(crate) use outcome::{Outcome, Record};
pub(crate) use predecessor::{PredecessorGone, wait_for_predecessor};
pub(crate) use recorded::{EarlierOutcomes, Lookup, last_ordinal, look_up_by_id};
pub(crate) use slot_reader::SlotReader;
pub(crate) use writer::{DispatchWriter, ResolvedEvents, WriterEvent, Written};
