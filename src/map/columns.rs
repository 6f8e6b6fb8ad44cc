//! Finds the columns of an outbox in a table as the server describes it, once per description, so
//! that a row is read by position.

use std::borrow::Cow;

use decoder::{Oid, OwnedRelation, Value};

use super::error::{EventFault, MapError, SettingFault};
use super::payload::{self, ContentKind};
use super::settings::{Choice, Columns, Role};
use super::value;
use super::wire::Body;

/// One column of the table.
#[derive(Debug, Clone)]
pub(super) struct Column {
    name: Box<str>,
    position: usize,
    type_oid: Oid,
}

impl Column {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    pub(super) fn type_oid(&self) -> Oid {
        self.type_oid
    }

    /// The value in `row` as text; `None` when it is null.
    pub(super) fn text<'a>(&self, row: &[Value<'a>]) -> Result<Option<Cow<'a, str>>, EventFault> {
        value::text(row[self.position], self.type_oid, &self.name)
    }

    /// The value in `row` as text, which must be there.
    pub(super) fn needed_text<'a>(
        &self,
        row: &[Value<'a>],
        needed_for: &'static str,
    ) -> Result<Cow<'a, str>, EventFault> {
        self.text(row)?
            .filter(|text| !text.is_empty())
            .ok_or_else(|| self.null(needed_for))
    }

    fn null(&self, needed_for: &'static str) -> EventFault {
        EventFault::Null {
            column: self.name.to_string(),
            needed_for,
        }
    }
}

/// Looks columns up in one table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Finder<'a> {
    pub(super) relation: &'a OwnedRelation,
    pub(super) columns: &'a Columns,
}

impl Finder<'_> {
    /// `schema.table`.
    pub(super) fn table(&self) -> String {
        format!("{}.{}", self.relation.namespace, self.relation.name)
    }

    /// The column called `name`, which `setting` names.
    pub(super) fn named(&self, name: &str, setting: &str) -> Result<Column, MapError> {
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

    /// The column that a template names: by its role, else by its own name.
    pub(super) fn in_template(&self, name: &str) -> Result<Column, MapError> {
        match Role::ALL.into_iter().find(|role| role.name() == name) {
            // Without a topic column of that role, {topic} is like any other column.
            Some(role) if (role, self.columns.choice(role)) != (Role::Topic, Choice::Off) => {
                self.needed(role, "topic")
            }
            _ => self.named(name, "topic"),
        }
    }

    /// The column of a role that `setting` cannot do without.
    pub(super) fn needed(&self, role: Role, setting: &'static str) -> Result<Column, MapError> {
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

    /// The column of a role that no event can do without.
    fn always(&self, role: Role) -> Result<Column, MapError> {
        match self.columns.choice(role) {
            Choice::Off => Err(self.fault(SettingFault::ColumnSwitchedOff {
                setting: role.setting(),
            })),
            Choice::Must(name) | Choice::May(name) => self.named(name, &role.setting()),
        }
    }

    /// The column of a role, if the table has one and the settings do not switch it off.
    pub(super) fn role(&self, role: Role) -> Result<Option<Column>, MapError> {
        match self.columns.choice(role) {
            Choice::Must(name) => self.named(name, &role.setting()).map(Some),
            Choice::May(name) => Ok(self.find(name)),
            Choice::Off => Ok(None),
        }
    }

    fn find(&self, name: &str) -> Option<Column> {
        let position = self
            .relation
            .columns
            .iter()
            .position(|column| column.name == name)?;
        let type_oid = self.relation.columns[position].type_oid;
        Some(Column {
            name: name.into(),
            position,
            type_oid,
        })
    }
}

/// The columns that every envelope uses.
#[derive(Debug, Clone)]
pub(super) struct EventColumns {
    pub(super) id: Column,
    pub(super) headers: Option<Column>,
    pub(super) aggregate_type: Option<Column>,
    pub(super) aggregate_id: Option<Column>,
    event_type: Option<Column>,
    pub(super) version: Option<Column>,
    schema_version: Option<Column>,
    pub(super) payload: Column,
    pub(super) occurred_at: Option<Column>,
}

/// What the columns hold in one row; `None` is null or no such column.
#[derive(Debug, Clone)]
pub(super) struct OutboxRow<'a> {
    pub(super) id: Cow<'a, str>,
    pub(super) aggregate_type: Option<Cow<'a, str>>,
    pub(super) aggregate_id: Option<Cow<'a, str>>,
    pub(super) event_type: Option<Cow<'a, str>>,
    pub(super) version: Option<Cow<'a, str>>,
    pub(super) schema_version: Option<Cow<'a, str>>,
    pub(super) payload: Option<Body<'a>>,
    pub(super) content_kind: ContentKind,
    pub(super) headers: Option<Cow<'a, str>>,
    pub(super) occurred_at: Option<Cow<'a, str>>,
}

impl EventColumns {
    pub(super) fn find(finder: &Finder<'_>) -> Result<Self, MapError> {
        Ok(Self {
            id: finder.always(Role::Id)?,
            aggregate_type: finder.role(Role::AggregateType)?,
            aggregate_id: finder.role(Role::AggregateId)?,
            event_type: finder.role(Role::EventType)?,
            version: finder.role(Role::Version)?,
            schema_version: finder.role(Role::SchemaVersion)?,
            payload: finder.always(Role::Payload)?,
            headers: finder.role(Role::Headers)?,
            occurred_at: finder.role(Role::OccurredAt)?,
        })
    }

    /// Reads one row, which must be as long as the table was described.
    pub(super) fn read<'a>(&self, row: &[Value<'a>]) -> Result<OutboxRow<'a>, EventFault> {
        let text = |column: &Option<Column>| match column {
            Some(column) => column.text(row),
            None => Ok(None),
        };
        let payload = &self.payload;
        Ok(OutboxRow {
            id: self.id.needed_text(row, "the event's id")?,
            aggregate_type: text(&self.aggregate_type)?,
            aggregate_id: text(&self.aggregate_id)?,
            event_type: text(&self.event_type)?,
            version: text(&self.version)?,
            schema_version: text(&self.schema_version)?,
            payload: payload::read(row[payload.position], payload.type_oid, &payload.name)?,
            content_kind: ContentKind::of(payload.type_oid),
            headers: text(&self.headers)?,
            occurred_at: text(&self.occurred_at)?,
        })
    }

    /// The event type; empty when it is null and nothing needs it.
    pub(super) fn event_type<'r>(
        &self,
        row: &'r OutboxRow<'_>,
        needed_for: Option<&'static str>,
    ) -> Result<&'r str, EventFault> {
        let event_type = row.event_type.as_deref().unwrap_or_default();
        match needed_for {
            Some(needed_for) if event_type.is_empty() => {
                let column = self.event_type.as_ref().map_or("event_type", Column::name);
                Err(EventFault::Null {
                    column: column.to_owned(),
                    needed_for,
                })
            }
            _ => Ok(event_type),
        }
    }
}
