//! The dispatch table: what became of each event.
//!
//! [`writer`] records outcomes in batches, off the hot path, before anything is confirmed (G4);
//! [`recorded`] asks after a restart which events have an outcome already, so that they are not
//! sent again (G3); [`quarantined`] is what the relay asks of what is in quarantine. The outbox itself
//! is never written.

pub(crate) mod quarantined;
mod recorded;
mod writer;

pub(crate) use recorded::{Lookup, Recorded};
pub(crate) use writer::{Outcome, Record, Writer, WriterEvent, Written};
