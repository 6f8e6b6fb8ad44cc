//! Maps the rows of one table to messages. The relay creates a mapper when the server describes the
//! table, and calls it for every row.

mod faulty;
mod table_columns;

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use decoder::{OwnedRelation, Value};
use outbox_event::attribute::{FIXED, SOURCE_ID};
use outbox_event::{Envelope, TableIdentity};

use super::attributes::Attributes;
use super::column_types::ColumnTypes;
use super::columns::{EventColumns, Finder, MappedColumn, OutboxRow, RowTexts};
use super::data::MessageData;
use super::envelope::{self, EventContext};
use super::error::{EventFault, Limit, MapError, SettingFault};
use super::event_id::EventIds;
use super::headers::Headers;
use super::ordering::{Ordering, OrderingKeys};
use super::settings::{ColumnRole, TableSettings, TimeZone};
use super::timestamp::{self, CivilTime, WithoutOffset};
use super::topic::TopicResolver;
use super::value::pg_type;
use super::{limits, wire};
use crate::event::{CommittedAt, EventId, OrderingKey, UUID_CHARS};

pub use table_columns::{TableColumns, TimeKind};

/// Maximum capacity in bytes that the envelope buffer keeps between events, so that a large event does not
/// hold its memory forever.
const KEPT_BYTES: usize = 256 * 1024;

/// An event that is ready to be published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapped {
    /// The topic's full name, `projects/p/topics/t`. All events of the topic share one copy.
    pub topic: Arc<str>,
    /// The ordering key of the message.
    pub ordering_key: OrderingKey,
    /// The event's identity.
    pub event_id: EventId,
    /// The encoded `google.pubsub.v1.PubsubMessage`: data, attributes and ordering key. These bytes are
    /// copied unchanged into field 2 of a `PublishRequest`.
    pub message: Bytes,
}

/// Makes messages from the rows of one table.
#[derive(Debug, Clone)]
pub struct Mapper {
    table: Arc<str>,
    identity: TableIdentity,
    relation_columns: usize,
    columns: EventColumns,
    extra_attributes: Vec<MappedColumn>,
    trace_context: Option<MappedColumn>,
    ids: EventIds,
    /// The column `inserted_xid`, if the identities of events depend on it.
    inserted_xid: Option<MappedColumn>,
    topics: TopicResolver,
    ordering: OrderingKeys,
    envelope: Envelope,
    source: String,
    without_offset: WithoutOffset,
    texts: RowTexts,
    inputs: Inputs,
    output: Output,
}

/// Values derived from a row before its message is made. The buffers are reused for the next row.
#[derive(Debug, Clone, Default)]
struct Inputs {
    headers: Headers,
    /// The value of `occurred_at` in RFC 3339. Used only if the row has a time with a known UTC offset.
    occurred_at: String,
}

/// The parts of a message. The buffers are reused for the next row.
#[derive(Debug, Clone, Default)]
struct Output {
    attributes: Attributes,
    body: Vec<u8>,
}

impl Mapper {
    /// Finds the configured columns in `relation`. Must be called again whenever the server sends a new
    /// description of the table. `types` must contain every column type that is not one of the common
    /// built-in types. `identity` is the table's name in the ids of its events.
    ///
    /// # Errors
    /// [`MapError::ColumnMissing`] and [`MapError::Setting`].
    pub fn resolve(
        relation: &OwnedRelation,
        types: &ColumnTypes,
        settings: &TableSettings,
        identity: &TableIdentity,
        project: &str,
    ) -> Result<Self, MapError> {
        let finder = Finder {
            relation,
            types,
            columns: &settings.columns,
        };
        let table = finder.table();
        let columns = EventColumns::find(&finder)?;
        if settings.ordering != Ordering::None {
            finder.needed(ColumnRole::AggregateId, "ordering")?;
        }
        if envelope::needs_event_type(settings.envelope).is_some() {
            finder.needed(ColumnRole::EventType, "envelope")?;
        }
        let is_uuid = columns.id.type_oid() == pg_type::UUID;
        let ids = EventIds::new(identity, is_uuid);
        let without_offset = without_offset(&finder, &columns, settings.time_zone)?;
        Ok(Self {
            relation_columns: relation.columns.len(),
            extra_attributes: extra_attributes(&finder, &settings.attributes, is_uuid)?,
            trace_context: finder.role(ColumnRole::TracingSpanContext)?,
            inserted_xid: ids.need_xid().then(|| finder.inserted_xid()).flatten(),
            ids,
            identity: identity.clone(),
            without_offset,
            topics: TopicResolver::resolve(&finder, settings, project)?,
            ordering: OrderingKeys::new(settings.ordering),
            envelope: settings.envelope,
            source: settings
                .source
                .clone()
                .unwrap_or_else(|| format!("/{identity}")),
            texts: RowTexts::default(),
            inputs: Inputs::default(),
            output: Output::default(),
            table: table.into(),
            columns,
        })
    }

    /// Makes the message of a row from its values, which are in the order of the table's description.
    ///
    /// # Errors
    /// [`MapError::Event`] when the row cannot become a message that Pub/Sub accepts.
    pub fn map_row(&mut self, row: &[Value<'_>], at: CommittedAt) -> Result<Mapped, MapError> {
        self.message_of(row, at)
            .map_err(|fault| self.event_error(row, at, fault))
    }

    fn message_of(&mut self, row: &[Value<'_>], at: CommittedAt) -> Result<Mapped, EventFault> {
        if row.len() != self.relation_columns {
            let expected = self.relation_columns;
            return Err(EventFault::ColumnCount {
                expected,
                found: row.len(),
            });
        }
        let outbox_row = self.columns.read(row, &mut self.texts)?;
        let xid = inserted_xid(self.inserted_xid.as_ref(), row);
        let event_id = self
            .ids
            .event_id(outbox_row.id, xid.as_deref(), self.columns.id.name())?;
        let topic = self.topics.topic(row, outbox_row.aggregate_type)?;
        let ordering_key = self.ordering.key(outbox_row.aggregate_id)?;
        // If the payload alone exceeds the limit, refuse the row here, before the message is encoded.
        check_size(
            &topic,
            outbox_row.payload.as_ref().map_or(0, MessageData::len),
        )?;

        let time = self
            .inputs
            .read(&self.columns, &outbox_row, self.without_offset)?;
        let mut uuid = [0; UUID_CHARS];
        let (event_text, source_id) = match event_id.source_id {
            None => (outbox_row.id, None),
            Some(_) => (event_id.uuid_text(&mut uuid), Some(outbox_row.id)),
        };
        let event = EventContext {
            row: &outbox_row,
            event_id: event_text,
            source_id,
            event_type: self
                .columns
                .event_type(&outbox_row, envelope::needs_event_type(self.envelope))?,
            payload_column: self.columns.payload.name(),
            source: &self.source,
            headers: &self.inputs.headers,
            occurred_at: time.map(|time| (time, self.inputs.occurred_at.as_str())),
            at,
        };
        self.output
            .set_attributes(self.envelope, &event, &self.extra_attributes, row)?;
        if let Some(column) = &self.trace_context {
            let text = column.text(row)?;
            self.output
                .attributes
                .add_trace_context(&text.unwrap_or_default());
        }
        self.output.attributes.add_trace_aliases()?;
        let message = self
            .output
            .message(self.envelope, &event, &topic, ordering_key.as_str())?;
        Ok(Mapped {
            topic,
            ordering_key,
            event_id,
            message,
        })
    }

    /// The index of the payload column in a row.
    pub(crate) fn payload_position(&self) -> usize {
        self.columns.payload.position()
    }

    /// The indexes of the columns from which a message is made.
    pub(crate) fn used_columns(&self) -> Vec<usize> {
        let columns = self.columns.all().chain(self.topics.columns());
        let columns = columns.chain(&self.extra_attributes);
        let columns = columns.chain(&self.trace_context);
        let columns = columns.chain(&self.inserted_xid);
        columns.map(MappedColumn::position).collect()
    }

    /// The indexes of the columns from which the topic of an event can come.
    pub(crate) fn topic_columns(&self) -> Vec<usize> {
        let rules = self.columns.aggregate_type.iter();
        let rules = rules.filter(|_| self.topics.has_rules());
        let columns = self.topics.columns().chain(rules);
        columns.map(MappedColumn::position).collect()
    }
}

impl Inputs {
    /// Reads the headers and the time of a row. Returns the time, or `None` if the time is missing, is not a
    /// timestamp, or has no known UTC offset.
    fn read(
        &mut self,
        columns: &EventColumns,
        row: &OutboxRow<'_>,
        without_offset: WithoutOffset,
    ) -> Result<Option<CivilTime>, EventFault> {
        self.headers.read(row.headers).map_err(|fault| {
            let column = columns
                .headers
                .as_ref()
                .map_or("", MappedColumn::name)
                .to_owned();
            EventFault::HeadersMalformed {
                column,
                line: fault.line,
                at_column: fault.column,
            }
        })?;
        let text = row.occurred_at;
        Ok(
            text.and_then(|text| {
                timestamp::to_rfc3339(text, without_offset, &mut self.occurred_at)
            }),
        )
    }
}

impl Output {
    /// Sets the attributes. The caller adds two kinds of attributes later: the trace context from Debezium's column,
    /// and the aliases of trace attributes. If two attributes have the same name, the first one wins.
    fn set_attributes(
        &mut self,
        envelope: Envelope,
        event: &EventContext<'_>,
        extra: &[MappedColumn],
        row: &[Value<'_>],
    ) -> Result<(), EventFault> {
        let attributes = &mut self.attributes;
        let rfc3339 = event.occurred_at.map(|(_, rfc3339)| rfc3339);
        attributes.clear();
        attributes.add_fixed(
            event.event_id,
            event.source_id,
            event.row,
            rfc3339.or(event.row.occurred_at),
        )?;
        envelope::add_attributes(envelope, event, attributes)?;
        for column in extra {
            if let Some(value) = column.text(row)? {
                attributes.add(column.name(), &value)?;
            }
        }
        attributes.add_headers(event.headers)
    }

    /// Encodes the message with the attributes that were set.
    fn message(
        &mut self,
        envelope: Envelope,
        event: &EventContext<'_>,
        topic: &str,
        key: &str,
    ) -> Result<Bytes, EventFault> {
        self.body.clear();
        self.body.shrink_to(KEPT_BYTES);
        let body = envelope::body(envelope, event, &self.attributes, &mut self.body)?;
        let attributes = self.attributes.wire();
        check_size(
            topic,
            wire::message_size(body.len(), attributes.len(), key.len()),
        )?;
        Ok(wire::message(body, attributes, key))
    }
}

/// Returns how to read a time without an offset. Returns an error if `occurred_at` is a `timestamp` column and the
/// settings name no time zone.
fn without_offset(
    finder: &Finder<'_>,
    columns: &EventColumns,
    time_zone: Option<TimeZone>,
) -> Result<WithoutOffset, MapError> {
    let is_timestamp = |column: &&MappedColumn| column.type_oid() == pg_type::TIMESTAMP;
    match (time_zone, columns.occurred_at.as_ref().filter(is_timestamp)) {
        (Some(TimeZone::Utc), _) => Ok(WithoutOffset::IsUtc),
        (Some(TimeZone::Local), _) | (None, None) => Ok(WithoutOffset::IsNoInstant),
        (None, Some(column)) => Err(finder.fault(SettingFault::TimeZoneMissing {
            column: column.name().to_owned(),
        })),
    }
}

/// The transaction that inserted a row, if the table records it.
fn inserted_xid<'a>(column: Option<&MappedColumn>, row: &[Value<'a>]) -> Option<Cow<'a, str>> {
    column.and_then(|column| column.text(row).ok().flatten())
}

/// Finds the columns that are sent as attributes in addition to the fixed attributes.
fn extra_attributes(
    finder: &Finder<'_>,
    names: &[String],
    id_is_uuid: bool,
) -> Result<Vec<MappedColumn>, MapError> {
    // If the id is a uuid, messages have no fixed attribute `source_id`, so an extra column may use that
    // name.
    let is_fixed = |name: &str| FIXED.contains(&name) && !(id_is_uuid && name == SOURCE_ID);
    let mut columns: Vec<MappedColumn> = Vec::with_capacity(names.len());
    for name in names {
        if is_fixed(name) || columns.iter().any(|column| column.name() == name) {
            return Err(finder.fault(SettingFault::AttributeTaken {
                attribute: name.clone(),
            }));
        }
        if name.len() > limits::ATTRIBUTE_KEY_BYTES || limits::is_reserved_attribute(name) {
            return Err(finder.fault(SettingFault::AttributeName {
                attribute: name.clone(),
            }));
        }
        columns.push(finder.named(name, "attributes")?);
    }
    Ok(columns)
}

fn check_size(topic: &str, message_bytes: usize) -> Result<(), EventFault> {
    if wire::fits_a_request(topic.len(), message_bytes) {
        return Ok(());
    }
    let found = wire::request_size(topic.len(), message_bytes);
    Err(EventFault::OverLimit {
        limit: Limit::Request,
        found,
    })
}

#[cfg(test)]
mod tests;
