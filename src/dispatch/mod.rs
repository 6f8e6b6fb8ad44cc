//! The dispatch table: what became of each event.
//!
//! [`writer`] records outcomes in batches, off the hot path, before anything is confirmed (G4);
//! [`recorded`] asks after a restart which events have an outcome already, so that they are not
//! sent again (G3). The outbox itself is never written.

mod recorded;
mod writer;

pub(crate) use recorded::{Lookup, Recorded};
pub(crate) use writer::{Published, Writer, WriterEvent};
