//! Turns rows from the replication stream and from the captured tables into events.
//!
//! **The stream.** [`intake`] turns messages of the stream into events. After a restart, [`earlier`]
//! finds the events that already have an outcome, so that they are skipped. Sometimes the stream contains an
//! insert of a row that an earlier transaction had already inserted, for example because somebody moved the row to
//! another partition. [`moved`] decides whether such an insert is a new event.
//! [`session_records`] finds the capture record of a streamed row, even if its table was dropped or renamed since.
//!
//! **The tables.** The recovery and the auditor read the captured tables, to find rows that still have to be published.
//! All other rows were committed before capturing began, or are already handled. The table's capture record tells
//! them apart. It is one durable row in `outbox.capture` (`store::capture_record`) with these fields, among others:
//!
//! - `since` is the snapshot in which capturing began. A row that is visible in this snapshot was
//!   committed before capturing began and is never published. If the relay created the slot when it began
//!   to capture the table, `since` is the slot's own snapshot. `None` captures every row (`start = all`).
//! - `floor` is a transaction number. Every row of an older transaction is resolved.
//! - `identity` is the name from which event ids are computed, unless the row ids are uuids. It stays the same when the
//!   table is renamed or created again.
//! - `id_suffixes` distinguishes the event ids of an earlier and a later table with the same `identity`. A table that
//!   was created again may number its rows from 1 again. A copied table keeps the suffix of the original. Event ids
//!   that are computed with `inserted_xid` need no suffix.
//! - `detached` lists former tables that may have unresolved rows: detached partitions, and tables that this table
//!   replaced. `settled` lists the former tables whose rows all have an outcome ([`detached`]).
//! - `slot` is the slot that owns the table. A relay on another slot is refused ([`claim`]).
//!
//! Each of these modules does one part of reading a table:
//!
//! - [`shape`] finds the column `inserted_xid`, which is compared with `since` and `floor`, and the column `seq`, which
//!   gives the order of the rows. It also decides what replaces a missing column.
//! - [`window`] writes the SQL condition for the wanted rows.
//! - [`scan`] walks a table in short statements and finds the unrecorded rows.
//! - [`tops`] notes the highest `seq`, so that a later scan can start there.
//! - [`rows`] reads the rows that the scan found, and works around values that PostgreSQL cannot send.
//! - [`table`] describes a table, and maps its rows in the same way as rows from the stream.
//! - [`blocked`] finds the rows that come before the first quarantined event of their key.
//! - [`unrecorded`] combines `scan`, `rows`, `table` and `blocked`, and returns the events to publish.
//! - [`from_table`] sends the events into the pipeline.
//!
//! **Invariants.**
//!
//! - A statement over a captured table reads a bounded number of rows, and holds no lock or snapshot while the
//!   relay waits for something else. The exception is a look-up by id in a table without an index on the id
//!   column, which reads the whole table.
//! - A floor rises only after every row below it is resolved, and only while the session holds the slot.
//! - An event has the same ordinal whenever PostgreSQL decodes the same rows of its transaction.
//!
//! Not here: when to read the tables (`audit`, `recovery`), how a row becomes a message (`mapping`),
//! and how an event is delivered (`delivery`).

pub(crate) mod blocked;
mod bounds;
mod candidate;
mod captured;
pub(crate) mod claim;
pub(crate) mod detached;
pub(crate) mod earlier;
pub(crate) mod from_table;
pub(crate) mod intake;
pub(crate) mod moved;
pub(crate) mod positions;
pub(crate) mod rows;
pub(crate) mod scan;
pub(crate) mod session_records;
pub(crate) mod shape;
pub(crate) mod table;
pub(crate) mod tops;
pub(crate) mod unrecorded;
pub(crate) mod window;

pub(crate) use bounds::Bounds;
pub(crate) use window::ScanWindow;
