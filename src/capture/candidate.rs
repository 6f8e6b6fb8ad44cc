//! The rows that a scan finds, before their values are read.

use uuid::Uuid;

/// A row that may have to be published, and its location in the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// The OID of the table or partition that holds the row.
    pub(crate) leaf: u32,
    /// The row's `ctid` in that table or partition.
    pub(crate) ctid: String,
    pub(crate) seq: Option<i64>,
    pub(crate) id: Uuid,
    pub(crate) record: DispatchState,
}

/// The state of a row's event in outbox.dispatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DispatchState {
    /// The event has no record.
    Nothing,
    /// The event has a record as published. If other events of its key may lack records, the relay publishes the
    /// whole key again in order, including this event.
    Published,
    /// The reader of the table does not send the event, because the event is quarantined, released or discarded, or
    /// because an unfinished recovery has already resolved it.
    SetAside,
}

/// Returns an SQL array of these ids.
pub(super) fn ids_sql<'a>(ids: impl Iterator<Item = &'a Uuid>) -> String {
    let ids: Vec<String> = ids.map(Uuid::to_string).collect();
    format!("'{{{}}}'::uuid[]", ids.join(","))
}
