//! The dispatch table: what became of each event.
//!
//! [`writer`] records each [`outcome`] in batches (new [`rows`], and those of [`released`] events),
//! off the hot path, before anything is confirmed (G4); [`recorded`] asks after a restart which
//! events have an outcome already, so that they are not sent again (G3), and [`predecessor`] when
//! it is time to ask; [`successor`] says when it is too late to record; [`quarantined`] is what the
//! relay asks of what is in quarantine. The outbox itself is never written.
//!
//! Not here: which rows of a table have no outcome (`capture`).

mod outcome;
mod predecessor;
pub(crate) mod quarantined;
mod recorded;
mod released;
mod rows;
mod successor;
mod writer;

pub(crate) use outcome::{Outcome, Record};
pub(crate) use predecessor::wait_for_predecessor;
pub(crate) use recorded::{Lookup, Recorded, look_up_by_id};
pub(crate) use writer::{Reader, Writer, WriterEvent, Written};
