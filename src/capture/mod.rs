//! Which committed rows of the captured tables still have to be published.
//!
//! The stream delivers new rows. Recovery, the auditor and the first start read the *tables*, and
//! must tell the rows that are ours from those that are older than the relay, or handled already.
//! One durable row per captured table in `outbox.capture` answers that ([`record`]):
//!
//! - `since` is the snapshot in which capturing began. A row that it shows is from before, and is
//!   never published. `None` captures every row (`start = all`).
//! - `floor`: every row of an older transaction is resolved.
//! - The event id is derived from `identity`, which stays when the table is renamed or recreated.
//! - `slot` owns the table; a relay on another slot is refused ([`claim`]).
//!
//! Both bounds compare with the column `inserted_xid` of the row. [`shape`] finds out which columns
//! a table has for that, and what to do without them; [`window`] writes the condition, [`scan`] walks
//! a table in short statements and returns the rows that lack a record, and [`rows`] reads those,
//! around values that cannot be read.
//!
//! Not here: when to look (`relay::auditor`, `relay::recovery`), and how a row becomes a message
//! (`table`, `map`).

mod bounds;
pub(crate) mod claim;
pub(crate) mod record;
pub(crate) mod rows;
pub(crate) mod scan;
pub(crate) mod shape;
mod snapshot;
mod window;

pub(crate) use bounds::Bounds;
pub(crate) use snapshot::Snapshot;
pub(crate) use window::Window;
