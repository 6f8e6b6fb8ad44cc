//! Finds the committed rows of captured tables that still have to be published.
//!
//! The stream delivers new rows. Recovery, the auditor and the first start read the *tables*, and
//! must tell the rows that are ours from rows that are older than the relay or handled already. For
//! this, each captured table has one durable row in `outbox.capture` ([`record`]):
//!
//! - `since` is the snapshot in which capturing began. A row that is visible in it is older than
//!   capturing and is never published. `None` captures every row (`start = all`).
//! - `floor`: every row of an older transaction is resolved.
//! - The event id is derived from `identity`, which stays when the table is renamed or created
//!   again.
//! - `slot` owns the table. A relay on another slot is refused ([`claim`]).
//!
//! Both bounds are compared with the row's column `inserted_xid`. [`shape`] finds out which of
//! these columns a table has, and what to use without them. [`window`] writes the condition.
//! [`scan`] walks a table in short statements and finds the rows that lack a record. [`rows`] reads
//! those rows, and works around values that cannot be read.
//!
//! **Invariants.** A statement over a captured table reads a bounded number of rows, and holds no
//! lock or snapshot while the relay waits for something else. A floor moves only after the session
//! that holds the slot has confirmed everything below it.
//!
//! Not here: when to look (`relay::auditor`, `relay::recovery`), and how a row becomes a message
//! (`table`, `map`).

pub(crate) mod blocked;
mod bounds;
pub(crate) mod claim;
pub(crate) mod earlier;
pub(crate) mod from_table;
pub(crate) mod intake;
pub(crate) mod moved;
pub(crate) mod rows;
pub(crate) mod scan;
pub(crate) mod shape;
pub(crate) mod table;
pub(crate) mod unrecorded;
pub(crate) mod window;

pub(crate) use bounds::Bounds;
pub(crate) use window::ScanWindow;
