//! Collects the known facts about a row that cannot become a message, for its error and for the quarantine.

use std::sync::Arc;

use bytes::Bytes;
use decoder::Value;

use super::{Mapper, inserted_xid};
use crate::event::{CommittedAt, OrderingKey, SHOWN_CHARS};
use crate::mapping::error::{EventError, EventFault, FaultyRow, MapError};
use crate::mapping::event_id::id_of_position;
use crate::mapping::{limits, payload};

impl EventError {
    /// Describes the fault for a dispatch row. Omits the event's id and position, because the dispatch row has its
    /// own columns for them.
    pub(crate) fn without_id(&self) -> String {
        format!("{} (table {})", self.fault, self.table)
    }
}

impl Mapper {
    /// The payload of a row that cannot become a message. Empty if the payload is null, cannot be read, or is
    /// too large for any message.
    #[cold]
    pub fn payload(&self, row: &[Value<'_>]) -> Bytes {
        let Some(&value) = row.get(self.columns.payload.position()) else {
            return Bytes::new();
        };
        let payload = &self.columns.payload;
        match payload::read(value, payload.type_oid(), payload.name()) {
            Ok(Some(body)) if body.len() <= limits::REQUEST_BYTES => {
                let mut out = Vec::with_capacity(body.len());
                body.write(&mut out);
                out.into()
            }
            Ok(_) | Err(_) => Bytes::new(),
        }
    }

    /// Makes the error of a row in which a value could not be read.
    #[cold]
    pub(crate) fn refused(
        &mut self,
        row: &[Value<'_>],
        at: CommittedAt,
        fault: EventFault,
    ) -> MapError {
        self.event_error(row, at, fault)
    }

    #[cold]
    pub(super) fn event_error(
        &mut self,
        row: &[Value<'_>],
        at: CommittedAt,
        fault: EventFault,
    ) -> MapError {
        let whole = row.len() == self.relation_columns;
        let id = whole
            .then(|| self.columns.id.text(row).ok().flatten())
            .flatten();
        let known = FaultyRow {
            event_id: id
                .as_deref()
                .and_then(|id| {
                    let xid = inserted_xid(self.inserted_xid.as_ref(), row);
                    let column = self.columns.id.name();
                    self.ids.event_id(id, xid.as_deref(), column).ok()
                })
                .unwrap_or_else(|| id_of_position(&self.identity, at.position)),
            topic: whole.then(|| self.topic_of(row)).flatten(),
            ordering_key: if whole {
                self.known_key(row)
            } else {
                OrderingKey::UNORDERED
            },
        };
        let shown = id.filter(|id| !id.is_empty());
        let event_id = shown.map(|id| id.chars().take(SHOWN_CHARS).collect());
        MapError::Event(Box::new(EventError {
            table: Arc::clone(&self.table),
            event_id,
            at,
            fault,
            known,
        }))
    }

    /// The full name of the row's topic, or `None` if the row's values give no valid topic.
    pub(crate) fn topic_of(&mut self, row: &[Value<'_>]) -> Option<Arc<str>> {
        let aggregate_type = self.columns.aggregate_type.as_ref();
        let aggregate_type = aggregate_type.map(|column| column.text(row)).transpose();
        let aggregate_type = aggregate_type.ok()?.flatten();
        self.topics.topic(row, aggregate_type.as_deref()).ok()
    }

    fn known_key(&self, row: &[Value<'_>]) -> OrderingKey {
        let aggregate_id = self.columns.aggregate_id.as_ref();
        let aggregate_id = aggregate_id.and_then(|column| column.text(row).ok().flatten());
        self.ordering
            .key(aggregate_id.as_deref())
            .unwrap_or_default()
    }
}
