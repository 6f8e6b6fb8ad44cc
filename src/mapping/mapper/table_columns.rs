//! Defines the columns by which `capture` finds rows when it reads the table.

use super::Mapper;
use crate::mapping::columns::MappedColumn;
use crate::mapping::timestamp::WithoutOffset;
use crate::mapping::value::pg_type;

/// The columns by which `capture` finds rows when it reads the table.
#[derive(Debug, Clone, Copy)]
pub struct TableColumns<'a> {
    /// The column with the identity of the event.
    pub id: &'a str,
    /// Whether the id is a uuid. If so, it is also the event id.
    pub id_is_uuid: bool,
    /// Whether PostgreSQL can compare and sort values of the id's type (`json`, for example, cannot
    /// be compared).
    pub id_has_order: bool,
    /// The column `occurred_at`.
    pub occurred_at: Option<&'a str>,
    /// The meaning of the values in `occurred_at`.
    pub time_kind: TimeKind,
}

/// The meaning of the values in the column `occurred_at`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeKind {
    /// `timestamp with time zone`.
    Instant,
    /// `timestamp without time zone`, in UTC.
    Utc,
    /// No column `occurred_at`, another type, or a `timestamp` in an unknown time zone: SQL cannot compare the
    /// values with the current time.
    Unknown,
}

impl Mapper {
    /// Returns the columns by which `capture` finds rows when it reads the table.
    pub fn table_columns(&self) -> TableColumns<'_> {
        let columns = &self.columns;
        let id = &columns.id;
        TableColumns {
            id: id.name(),
            id_is_uuid: id.type_oid() == pg_type::UUID,
            id_has_order: id.has_order(),
            occurred_at: columns.occurred_at.as_ref().map(MappedColumn::name),
            time_kind: self.time_kind(),
        }
    }

    fn time_kind(&self) -> TimeKind {
        let time = self
            .columns
            .occurred_at
            .as_ref()
            .map(MappedColumn::type_oid);
        match (time, self.without_offset) {
            (Some(pg_type::TIMESTAMPTZ), _) => TimeKind::Instant,
            (Some(pg_type::TIMESTAMP), WithoutOffset::IsUtc) => TimeKind::Utc,
            _ => TimeKind::Unknown,
        }
    }
}
