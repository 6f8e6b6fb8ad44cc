//! Finds the outbox columns in the server's description of a table. This happens once per description;
//! after that, columns are found by their index in the row.

use std::borrow::Cow;
use std::{iter, str};

use decoder::{Oid, OwnedRelation, Value};

use super::column_types::ColumnTypes;
use super::data::MessageData;
use super::error::{EventFault, MapError, SettingFault};
use super::payload::{self, ContentKind};
use super::settings::{Choice, ColumnRole, ColumnSettings};
use super::value::{self, pg_type};

/// The optional column of type `xid8` that names the transaction which inserted a row.
pub const INSERTED_XID: &str = "inserted_xid";

#[derive(Debug, Clone)]
pub(super) struct MappedColumn {
    name: Box<str>,
    position: usize,
    /// The type; for a domain, its base type.
    type_oid: Oid,
    has_order: bool,
}

impl MappedColumn {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    pub(super) fn type_oid(&self) -> Oid {
        self.type_oid
    }

    /// Whether rows can be sorted by this column.
    pub(super) fn has_order(&self) -> bool {
        self.has_order
    }

    /// The value in `row` as text; `None` when it is null.
    pub(super) fn text<'a>(&self, row: &[Value<'a>]) -> Result<Option<Cow<'a, str>>, EventFault> {
        value::text(row[self.position], self.type_oid, &self.name)
    }

    /// Appends the value in `row` as text, without checking that the value is UTF-8. The caller checks
    /// many values at once, and [`not_utf8`] then finds the faulty column. Returns the value's length in
    /// bytes, or `None` if it is null.
    #[inline]
    pub(super) fn append(
        &self,
        row: &[Value<'_>],
        out: &mut Vec<u8>,
    ) -> Result<Option<usize>, EventFault> {
        if let Value::Text(bytes) = row[self.position] {
            out.extend_from_slice(bytes);
            return Ok(Some(bytes.len()));
        }
        self.append_other(row, out)
    }

    #[inline(never)]
    fn append_other(
        &self,
        row: &[Value<'_>],
        out: &mut Vec<u8>,
    ) -> Result<Option<usize>, EventFault> {
        let text = self.text(row)?;
        out.extend_from_slice(text.as_deref().unwrap_or_default().as_bytes());
        Ok(text.map(|text| text.len()))
    }

    /// Returns the fault for a value that is needed, but null or empty.
    pub(super) fn null(&self, needed_for: &'static str) -> EventFault {
        EventFault::Null {
            column: self.name.to_string(),
            needed_for,
        }
    }
}

/// Returns the fault of the first column whose value is not valid UTF-8. The caller must know that there is
/// such a column.
#[cold]
pub(super) fn not_utf8<'c>(
    mut columns: impl Iterator<Item = &'c MappedColumn>,
    row: &[Value<'_>],
) -> EventFault {
    let fault = columns.find_map(|column| column.text(row).err());
    fault.expect("invariant: UTF-8 values are still UTF-8 when concatenated")
}

/// Looks up columns of one table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Finder<'a> {
    pub(super) relation: &'a OwnedRelation,
    pub(super) types: &'a ColumnTypes,
    pub(super) columns: &'a ColumnSettings,
}

impl Finder<'_> {
    /// `schema.table`.
    pub(super) fn table(&self) -> String {
        format!("{}.{}", self.relation.namespace, self.relation.name)
    }

    /// Finds the column called `name`. `setting` is the setting that names the column.
    pub(super) fn named(&self, name: &str, setting: &str) -> Result<MappedColumn, MapError> {
        self.find(name).ok_or_else(|| MapError::ColumnMissing {
            table: self.table(),
            column: name.to_owned(),
            setting: setting.to_owned(),
            present: self
                .relation
                .columns
                .iter()
                .map(|column| column.name.clone())
                .collect(),
        })
    }

    /// Finds the column that a template names. `name` is the name of a [`ColumnRole`], or the name of a column
    /// if no role has this name.
    pub(super) fn in_template(&self, name: &str) -> Result<MappedColumn, MapError> {
        match self.columns.role_in_template(name) {
            Some(role) => self.needed(role, "topic"),
            None => self.named(name, "topic"),
        }
    }

    /// Finds the column of a role. `setting` is the setting that needs the column.
    pub(super) fn needed(
        &self,
        role: ColumnRole,
        setting: &'static str,
    ) -> Result<MappedColumn, MapError> {
        match self.columns.choice(role) {
            Choice::Must(name) | Choice::May(name) => self.named(name, &role.setting()),
            Choice::Off => Err(self.fault(SettingFault::ColumnNeeded {
                setting,
                column_setting: role.setting(),
            })),
        }
    }

    pub(super) fn fault(&self, fault: SettingFault) -> MapError {
        MapError::Setting {
            table: self.table(),
            fault,
        }
    }

    /// Finds the column of a role that every event needs.
    fn always(&self, role: ColumnRole) -> Result<MappedColumn, MapError> {
        match self.columns.choice(role) {
            Choice::Off => Err(self.fault(SettingFault::ColumnSwitchedOff {
                setting: role.setting(),
            })),
            Choice::Must(name) | Choice::May(name) => self.named(name, &role.setting()),
        }
    }

    /// Finds the column of a role, if the table has one and the settings do not switch it off.
    pub(super) fn role(&self, role: ColumnRole) -> Result<Option<MappedColumn>, MapError> {
        match self.columns.choice(role) {
            Choice::Must(name) => self.named(name, &role.setting()).map(Some),
            Choice::May(name) => Ok(self.find(name)),
            Choice::Off => Ok(None),
        }
    }

    /// Finds the column `inserted_xid`, if the table has one of type `xid8`.
    pub(super) fn inserted_xid(&self) -> Option<MappedColumn> {
        let column = self.find(INSERTED_XID)?;
        (column.type_oid == pg_type::XID8).then_some(column)
    }

    fn find(&self, name: &str) -> Option<MappedColumn> {
        let position = self
            .relation
            .columns
            .iter()
            .position(|column| column.name == name)?;
        let type_oid = self.relation.columns[position].type_oid;
        Some(MappedColumn {
            name: name.into(),
            position,
            type_oid: self.types.base(type_oid),
            has_order: self.types.has_order(type_oid),
        })
    }
}

/// The columns that the mapper reads from every row. They do not depend on the table's envelope.
#[derive(Debug, Clone)]
pub(super) struct EventColumns {
    pub(super) id: MappedColumn,
    pub(super) headers: Option<MappedColumn>,
    pub(super) aggregate_type: Option<MappedColumn>,
    pub(super) aggregate_id: Option<MappedColumn>,
    event_type: Option<MappedColumn>,
    pub(super) version: Option<MappedColumn>,
    schema_version: Option<MappedColumn>,
    pub(super) payload: MappedColumn,
    pub(super) occurred_at: Option<MappedColumn>,
}

/// The values of one row; `None` means null, or that there is no such column.
#[derive(Debug, Clone)]
pub(super) struct OutboxRow<'a> {
    pub(super) id: &'a str,
    pub(super) aggregate_type: Option<&'a str>,
    pub(super) aggregate_id: Option<&'a str>,
    pub(super) event_type: Option<&'a str>,
    pub(super) version: Option<&'a str>,
    pub(super) schema_version: Option<&'a str>,
    pub(super) payload: Option<MessageData<'a>>,
    pub(super) content_kind: ContentKind,
    pub(super) headers: Option<&'a str>,
    pub(super) occurred_at: Option<&'a str>,
}

/// The concatenated text values of one row, so that one call can check all of them for valid UTF-8. Most values
/// are so short that separate checks would take several times as long. The buffer is reused for the next row.
#[derive(Debug, Clone, Default)]
pub(super) struct RowTexts(Vec<u8>);

/// Maximum capacity in bytes that the buffer keeps between rows, so that a large row does not hold its memory
/// forever.
const KEPT_BYTES: usize = 64 * 1024;

impl EventColumns {
    pub(super) fn find(finder: &Finder<'_>) -> Result<Self, MapError> {
        Ok(Self {
            id: finder.always(ColumnRole::Id)?,
            aggregate_type: finder.role(ColumnRole::AggregateType)?,
            aggregate_id: finder.role(ColumnRole::AggregateId)?,
            event_type: finder.role(ColumnRole::EventType)?,
            version: finder.role(ColumnRole::Version)?,
            schema_version: finder.role(ColumnRole::SchemaVersion)?,
            payload: finder.always(ColumnRole::Payload)?,
            headers: finder.role(ColumnRole::Headers)?,
            occurred_at: finder.role(ColumnRole::OccurredAt)?,
        })
    }

    /// Reads one row, which must have as many columns as the table's description.
    pub(super) fn read<'a>(
        &self,
        row: &[Value<'a>],
        texts: &'a mut RowTexts,
    ) -> Result<OutboxRow<'a>, EventFault> {
        self.read_at_once(row, texts)
            .map_err(|fault| self.first_fault(row).unwrap_or(fault))
    }

    /// Returns the fault of the first faulty column. The order of the columns is fixed, so a row with several
    /// faults always reports the same one.
    #[cold]
    fn first_fault(&self, row: &[Value<'_>]) -> Option<EventFault> {
        let fault = |column: &MappedColumn| column.text(row).err();
        let payload = &self.payload;
        match self.id.text(row) {
            Ok(id) if id.as_deref().is_none_or(str::is_empty) => {
                Some(self.id.null("the event's id"))
            }
            // Check `headers` and `occurred_at` only after the payload (in `texts`, below).
            Ok(_) => self.texts_before_payload().find_map(fault),
            Err(fault) => Some(fault),
        }
        .or_else(|| payload::read(row[payload.position], payload.type_oid, &payload.name).err())
        .or_else(|| self.texts().find_map(fault))
    }

    fn read_at_once<'a>(
        &self,
        row: &[Value<'a>],
        RowTexts(buffer): &'a mut RowTexts,
    ) -> Result<OutboxRow<'a>, EventFault> {
        buffer.clear();
        buffer.shrink_to(KEPT_BYTES);
        let mut append = |column: Option<&MappedColumn>| match column {
            Some(column) => column.append(row, buffer),
            None => Ok(None),
        };
        let id = append(Some(&self.id))?;
        let aggregate_type = append(self.aggregate_type.as_ref())?;
        let aggregate_id = append(self.aggregate_id.as_ref())?;
        let event_type = append(self.event_type.as_ref())?;
        let version = append(self.version.as_ref())?;
        let schema_version = append(self.schema_version.as_ref())?;
        let headers = append(self.headers.as_ref())?;
        let occurred_at = append(self.occurred_at.as_ref())?;

        let mut rest = str::from_utf8(buffer).map_err(|_| not_utf8(self.texts(), row))?;
        let mut take = |length: Option<usize>| {
            let Some(length) = length else {
                return Ok(None);
            };
            // All values together can be valid UTF-8 although one of them is not: a character begins in this value
            // and ends in the next one. The split then fails.
            let parts = rest.split_at_checked(length);
            let (text, others) = parts.ok_or_else(|| not_utf8(self.texts(), row))?;
            rest = others;
            Ok(Some(text))
        };
        let id = take(id)?;
        let aggregate_type = take(aggregate_type)?;
        let aggregate_id = take(aggregate_id)?;
        let event_type = take(event_type)?;
        let version = take(version)?;
        let schema_version = take(schema_version)?;
        let headers = take(headers)?;
        let occurred_at = take(occurred_at)?;

        let id = id.filter(|id| !id.is_empty());
        let payload = &self.payload;
        Ok(OutboxRow {
            id: id.ok_or_else(|| self.id.null("the event's id"))?,
            aggregate_type,
            aggregate_id,
            event_type,
            version,
            schema_version,
            payload: payload::read(row[payload.position], payload.type_oid, &payload.name)?,
            content_kind: ContentKind::of(payload.type_oid),
            headers,
            occurred_at,
        })
    }

    /// All columns of this struct.
    pub(super) fn all(&self) -> impl Iterator<Item = &MappedColumn> {
        self.texts().chain(iter::once(&self.payload))
    }

    /// The columns that are read as text.
    fn texts(&self) -> impl Iterator<Item = &MappedColumn> {
        let others = [&self.headers, &self.occurred_at];
        self.texts_before_payload()
            .chain(others.into_iter().flatten())
    }

    fn texts_before_payload(&self) -> impl Iterator<Item = &MappedColumn> {
        let others = [
            &self.aggregate_type,
            &self.aggregate_id,
            &self.event_type,
            &self.version,
            &self.schema_version,
        ];
        iter::once(&self.id).chain(others.into_iter().flatten())
    }

    /// Returns the event type of a row, or an empty text if the event type is null. `needed_for` says why the
    /// envelope needs an event type, and is `None` if the envelope needs none.
    ///
    /// # Errors
    /// [`EventFault::Null`] if the envelope needs the event type, but it is null or empty.
    pub(super) fn event_type<'r>(
        &self,
        row: &OutboxRow<'r>,
        needed_for: Option<&'static str>,
    ) -> Result<&'r str, EventFault> {
        let event_type = row.event_type.unwrap_or_default();
        match needed_for {
            Some(needed_for) if event_type.is_empty() => {
                let column = self
                    .event_type
                    .as_ref()
                    .map_or("event_type", MappedColumn::name);
                Err(EventFault::Null {
                    column: column.to_owned(),
                    needed_for,
                })
            }
            _ => Ok(event_type),
        }
    }
}
