//! Defines the settings of one outbox table: one `[[tables]]` section of the settings file.
//!
//! The defaults match `outbox.events`. Debezium's outbox table needs two settings:
//!
//! ```toml
//! [[tables]]
//! table = "public.outbox"
//! columns = { event_type = "type" }
//! ```
//!
//! Not here: the check that the table has these columns. The mapper checks them in `columns.rs`, when the
//! server describes the table.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

use outbox_event::{Envelope, TableIdentity};
use serde::{Deserialize, Deserializer, de};
use slot_manager::QualifiedName;

use super::ordering::Ordering;
use super::template::Template;

/// How rows of one table become messages.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TableSettings {
    /// The table. For a partitioned table, its root.
    #[serde(deserialize_with = "parsed")]
    pub table: QualifiedName,
    /// The names of the table's columns.
    pub columns: ColumnSettings,
    /// The topic: an id, or a full name `projects/.../topics/...`. A name in braces stands for a field of
    /// [`ColumnSettings`]. If there is no such field, it stands for a column of the table.
    #[serde(deserialize_with = "parsed")]
    pub topic: Template,
    /// Topics for specific aggregate types. The key is a value of `aggregatetype`. These topics take
    /// precedence over `topic`.
    pub topic_rules: BTreeMap<String, String>,
    /// How the ordering key is chosen.
    #[serde(deserialize_with = "parsed")]
    pub ordering: Ordering,
    /// The form of a message.
    #[serde(deserialize_with = "parsed")]
    pub envelope: Envelope,
    /// Additional columns to send as attributes of the same name. A null value adds no attribute.
    pub attributes: Vec<String>,
    /// The `source` of CloudEvents, a URI reference; `/schema.table` when not set.
    pub source: Option<String>,
    /// The meaning of a time without an offset in the column `occurred_at`.
    #[serde(deserialize_with = "time_zone")]
    pub time_zone: Option<TimeZone>,
}

/// The meaning of a time without an offset, such as a `timestamp without time zone`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeZone {
    /// The time is in UTC.
    Utc,
    /// The time zone is unknown, so the time is not a point in time. The relay sends the text of the
    /// column unchanged.
    Local,
}

impl TimeZone {
    /// The time zone with this name in the settings.
    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "UTC" => Some(TimeZone::Utc),
            "local" => Some(TimeZone::Local),
            _ => None,
        }
    }
}

/// Reads a time zone. An empty text means "not set", as in the top-level setting `time_zone`.
fn time_zone<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<TimeZone>, D::Error> {
    let text = String::deserialize(deserializer)?;
    match TimeZone::named(&text) {
        None if !text.is_empty() => Err(de::Error::unknown_variant(&text, &["UTC", "local"])),
        named => Ok(named),
    }
}

impl Default for TableSettings {
    fn default() -> Self {
        Self {
            table: "outbox.events"
                .parse()
                .expect("invariant: the default is a qualified name"),
            columns: ColumnSettings::default(),
            topic: "{aggregatetype}.events"
                .parse()
                .expect("invariant: the default is a template"),
            topic_rules: BTreeMap::new(),
            ordering: Ordering::default(),
            envelope: Envelope::default(),
            attributes: Vec::new(),
            source: None,
            time_zone: None,
        }
    }
}

/// The names that the table uses for the columns of an outbox.
///
/// If a field is not set, the relay uses the column with the name of the field (but see `topic` and `seq`). The
/// table may lack this column if the field is `version`, `schema_version`, `headers`, `tracingspancontext` or
/// `occurred_at`. An empty text means that the table has no such column. A column that *is* named must exist.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ColumnSettings {
    /// The identity of the event: a uuid, or any other value that is unique in the table.
    pub id: Option<String>,
    /// The kind of the aggregate.
    pub aggregatetype: Option<String>,
    /// The id of the aggregate, from which the ordering key is made.
    pub aggregateid: Option<String>,
    /// The type of the event.
    pub event_type: Option<String>,
    /// The version of the aggregate.
    pub version: Option<String>,
    /// The version of the payload's schema.
    pub schema_version: Option<String>,
    /// The message body: `json` and `jsonb` as JSON, `bytea` as bytes, any other type as text.
    pub payload: Option<String>,
    /// A JSON object whose entries become attributes.
    pub headers: Option<String>,
    /// Debezium's column for the trace context: a text with lines such as `traceparent=00-...`.
    pub tracingspancontext: Option<String>,
    /// When the event happened.
    pub occurred_at: Option<String>,
    /// A column that numbers rows in the order of their insertion, such as a `bigserial`. A recovery publishes rows
    /// in this order. If this field is not set, the relay uses a column called `seq`. If there is none, it uses the
    /// `id`, but only if a sequence fills the `id`.
    pub seq: Option<String>,
    /// The column with the event's topic. If its value is neither null nor empty, the value takes precedence over
    /// `topic_rules` and `topic` of [`TableSettings`]. If this field is not set, no column names the topic.
    pub topic: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ColumnRole {
    Id,
    AggregateType,
    AggregateId,
    EventType,
    Version,
    SchemaVersion,
    Payload,
    Headers,
    TracingSpanContext,
    OccurredAt,
    Topic,
}

/// Whether the column of a [`ColumnRole`] must exist, according to the settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice<'a> {
    /// The table must have a column of this name.
    Must(&'a str),
    /// The column of this name is used if the table has one.
    May(&'a str),
    /// The column is not used.
    Off,
}

impl ColumnRole {
    pub(super) const ALL: [ColumnRole; 11] = [
        ColumnRole::Id,
        ColumnRole::AggregateType,
        ColumnRole::AggregateId,
        ColumnRole::EventType,
        ColumnRole::Version,
        ColumnRole::SchemaVersion,
        ColumnRole::Payload,
        ColumnRole::Headers,
        ColumnRole::TracingSpanContext,
        ColumnRole::OccurredAt,
        ColumnRole::Topic,
    ];

    /// The name of the role's field in [`ColumnSettings`], which is also the column's default name.
    pub(super) fn name(self) -> &'static str {
        match self {
            ColumnRole::Id => "id",
            ColumnRole::AggregateType => "aggregatetype",
            ColumnRole::AggregateId => "aggregateid",
            ColumnRole::EventType => "event_type",
            ColumnRole::Version => "version",
            ColumnRole::SchemaVersion => "schema_version",
            ColumnRole::Payload => "payload",
            ColumnRole::Headers => "headers",
            ColumnRole::TracingSpanContext => "tracingspancontext",
            ColumnRole::OccurredAt => "occurred_at",
            ColumnRole::Topic => "topic",
        }
    }

    /// The name of the setting for the role's column, such as `columns.id`.
    pub(super) fn setting(self) -> String {
        format!("columns.{}", self.name())
    }
}

impl ColumnSettings {
    /// Returns the role whose column `{name}` stands for in a template. Returns `None` if `{name}` stands for the
    /// column called `name`, because no role has this name. Also returns `None` for `{topic}` if the settings choose no
    /// topic column: it then stands for a column called `topic`.
    pub(super) fn role_in_template(&self, name: &str) -> Option<ColumnRole> {
        let role = ColumnRole::ALL
            .into_iter()
            .find(|role| role.name() == name)?;
        let is_column = (role, self.choice(role)) == (ColumnRole::Topic, Choice::Off);
        (!is_column).then_some(role)
    }

    pub(super) fn choice(&self, role: ColumnRole) -> Choice<'_> {
        let set = match role {
            ColumnRole::Id => &self.id,
            ColumnRole::AggregateType => &self.aggregatetype,
            ColumnRole::AggregateId => &self.aggregateid,
            ColumnRole::EventType => &self.event_type,
            ColumnRole::Version => &self.version,
            ColumnRole::SchemaVersion => &self.schema_version,
            ColumnRole::Payload => &self.payload,
            ColumnRole::Headers => &self.headers,
            ColumnRole::TracingSpanContext => &self.tracingspancontext,
            ColumnRole::OccurredAt => &self.occurred_at,
            ColumnRole::Topic => &self.topic,
        };
        match (set.as_deref(), role) {
            (Some(""), _) | (None, ColumnRole::Topic) => Choice::Off,
            (Some(name), _) => Choice::Must(name),
            (
                None,
                ColumnRole::Id
                | ColumnRole::AggregateType
                | ColumnRole::AggregateId
                | ColumnRole::EventType
                | ColumnRole::Payload,
            ) => Choice::Must(role.name()),
            (
                None,
                ColumnRole::Version
                | ColumnRole::SchemaVersion
                | ColumnRole::Headers
                | ColumnRole::TracingSpanContext
                | ColumnRole::OccurredAt,
            ) => Choice::May(role.name()),
        }
    }
}

impl TableSettings {
    /// The columns that the table must have and that the publication must publish.
    pub fn required_columns(&self) -> Vec<String> {
        let named = self.chosen(|choice| match choice {
            Choice::Must(name) => Some(name),
            Choice::May(_) | Choice::Off => None,
        });
        let in_topic = self.topic.columns().filter(|name| {
            let is_column = self.columns.role_in_template(name).is_none();
            is_column && !self.attributes.iter().any(|column| column == name)
        });
        let others = self.attributes.iter().cloned();
        named
            .chain(others)
            .chain(in_topic.map(str::to_owned))
            .collect()
    }

    /// The columns that the publication must publish if the table has them. A recovery reads all columns from the
    /// table, so its messages would differ from those of the stream if the publication left a column out.
    pub fn optional_columns(&self) -> Vec<String> {
        let named = self.chosen(|choice| match choice {
            Choice::May(name) => Some(name),
            Choice::Must(_) | Choice::Off => None,
        });
        named.collect()
    }

    fn chosen<'s>(
        &'s self,
        name: impl Fn(Choice<'s>) -> Option<&'s str> + 's,
    ) -> impl Iterator<Item = String> + 's {
        let choices = ColumnRole::ALL
            .into_iter()
            .map(|role| self.columns.choice(role));
        choices.filter_map(move |choice| name(choice).map(str::to_owned))
    }

    /// The name that identifies the table in the ids of its events.
    pub fn identity(&self) -> TableIdentity {
        TableIdentity::new(&format!("{}.{}", self.table.schema, self.table.name))
    }
}

/// Parses a value from its text form.
fn parsed<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: Display>,
{
    String::deserialize(deserializer)?
        .parse()
        .map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(toml: &str) -> Result<TableSettings, toml::de::Error> {
        toml::from_str(toml)
    }

    #[test]
    fn an_empty_section_is_the_default() {
        assert_eq!(read("").unwrap(), TableSettings::default());
        assert_eq!(TableSettings::default().table.to_string(), "outbox.events");
    }

    #[test]
    fn the_columns_of_the_topic_are_required() {
        let settings = read("topic = '{region}.{aggregatetype}.{zone}'\nattributes = ['zone']");
        let columns = settings.unwrap().required_columns();
        assert!(columns.contains(&"region".to_owned()), "{columns:?}");
        let zones = columns.iter().filter(|column| *column == "zone");
        assert_eq!(zones.count(), 1, "{columns:?}");
    }

    #[test]
    fn debeziums_outbox_takes_two_lines() {
        let settings = read("table = 'public.outbox'\ncolumns = { event_type = 'type' }").unwrap();
        assert_eq!(
            settings.columns.choice(ColumnRole::EventType),
            Choice::Must("type")
        );
        assert_eq!(
            settings.columns.choice(ColumnRole::AggregateId),
            Choice::Must("aggregateid")
        );
        assert_eq!(
            settings.columns.choice(ColumnRole::Version),
            Choice::May("version")
        );
    }

    #[test]
    fn everything_can_be_set() {
        let settings = read(
            r#"
            table = "sales.outbox"
            topic = "{aggregatetype}-{tenant}"
            topic_rules = { order = "orders" }
            ordering = "bucketed(64)"
            envelope = "cloudevents-binary"
            attributes = ["tenant"]
            source = "/sales"
            time_zone = "UTC"
            [columns]
            id = "seq"
            version = ""
            topic = "topic"
            "#,
        )
        .unwrap();
        assert_eq!(settings.ordering, Ordering::Bucketed(64));
        assert_eq!(settings.envelope, Envelope::CloudeventsBinary);
        assert_eq!(settings.topic.to_string(), "{aggregatetype}-{tenant}");
        assert_eq!(settings.time_zone, Some(TimeZone::Utc));
        assert_eq!(settings.columns.choice(ColumnRole::Version), Choice::Off);
        assert_eq!(
            settings.columns.choice(ColumnRole::Topic),
            Choice::Must("topic")
        );
    }

    #[test]
    fn unknown_and_malformed_settings_are_refused_with_the_reason() {
        for (toml, part) in [
            ("colums = {}", "unknown field `colums`"),
            ("columns = { type = 'x' }", "unknown field `type`"),
            ("ordering = 'bucketed(0)'", "not an ordering"),
            ("envelope = 'cloudevents'", "not an envelope"),
            ("topic = '{aggregatetype'", "unbalanced brace"),
            ("table = ''", "table"),
            ("time_zone = 'Europe/Berlin'", "`UTC` or `local`"),
            ("time_zone = 1", "expected a string"),
        ] {
            let refused = read(toml).unwrap_err().to_string();
            assert!(refused.contains(part), "{toml}: {refused}");
        }
    }
}
