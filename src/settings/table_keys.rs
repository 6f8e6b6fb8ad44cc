//! Lists the settings of a `[[tables]]` section, for "did you mean" hints and for the JSON Schema.
//!
//! `mapping::TableSettings` reads the values. A test compares the names here with its fields.

use super::keys::{ENVELOPES, SettingKind, TIME_ZONES};

/// The values that a setting of `[[tables]]` accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableKeyKind {
    /// One plain value.
    Plain(SettingKind),
    /// A list of strings.
    List,
    /// A TOML table with arbitrary keys, whose values are strings.
    Texts,
    /// A TOML table with the settings in [`COLUMN_KEYS`].
    Columns,
}

/// One setting of a `[[tables]]` section, or of its table `columns`.
#[derive(Debug)]
pub struct TableKey {
    /// Name in the TOML file.
    pub name: &'static str,
    /// The values that the setting accepts.
    pub kind: TableKeyKind,
    /// What the setting does.
    pub reason: &'static str,
}

const fn key(name: &'static str, kind: TableKeyKind, reason: &'static str) -> TableKey {
    TableKey { name, kind, reason }
}

const fn column(name: &'static str, reason: &'static str) -> TableKey {
    key(name, TableKeyKind::Plain(SettingKind::Text("NAME")), reason)
}

/// The settings of a `[[tables]]` section.
pub const TABLE_KEYS: &[TableKey] = &[
    key(
        "table",
        TableKeyKind::Plain(SettingKind::Text("TABLE")),
        "The outbox table, as schema.table; for a partitioned table, the root",
    ),
    key(
        "columns",
        TableKeyKind::Columns,
        "The names of its columns, where they differ from the default",
    ),
    key(
        "topic",
        TableKeyKind::Plain(SettingKind::Text("TEMPLATE")),
        "Topic of an event: text with column names in braces",
    ),
    key(
        "topic_rules",
        TableKeyKind::Texts,
        "Topics for specific aggregate types. They take precedence over `topic`",
    ),
    key(
        "ordering",
        TableKeyKind::Plain(SettingKind::Text("key|none|bucketed(N)")),
        "Ordering key: `key` (the aggregate id), `bucketed(n)` (one of n hash buckets of it) or `none`",
    ),
    key(
        "envelope",
        TableKeyKind::Plain(SettingKind::Choice(ENVELOPES)),
        "Format of a message",
    ),
    key(
        "attributes",
        TableKeyKind::List,
        "More columns to send as attributes of the same name, when not null",
    ),
    key(
        "source",
        TableKeyKind::Plain(SettingKind::Text("URI")),
        "The attribute `source` of CloudEvents, by default /schema.table",
    ),
    key(
        "time_zone",
        TableKeyKind::Plain(SettingKind::Choice(TIME_ZONES)),
        "Meaning of times without an offset in the column `occurred_at`",
    ),
];

/// The settings of the table `columns` in a `[[tables]]` section. An empty text means that the table has
/// no such column.
pub const COLUMN_KEYS: &[TableKey] = &[
    column(
        "id",
        "Identity of the event: a uuid, or anything else that is unique in the table",
    ),
    column("aggregatetype", "Kind of aggregate"),
    column(
        "aggregateid",
        "The aggregate, from which the ordering key comes",
    ),
    column("event_type", "The type of the event"),
    column("version", "Version of the aggregate"),
    column("schema_version", "Version of the payload's schema"),
    column("payload", "The message body: jsonb, json, text or bytea"),
    column("headers", "A JSON object whose entries become attributes"),
    column(
        "tracingspancontext",
        "The trace context as Debezium's tables have it: lines such as traceparent=00-...",
    ),
    column("occurred_at", "When the event happened"),
    column(
        "seq",
        "A number that gives the rows their order of insertion",
    ),
    column(
        "topic",
        "The event's topic. If neither null nor empty, it takes precedence over `topic_rules` and `topic`",
    ),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde::Deserialize;
    use serde::de::value::Error as ValueError;
    use serde::de::{Deserializer, Error, Visitor};
    use serde::forward_to_deserialize_any;

    use super::*;
    use crate::mapping::{ColumnSettings, TableSettings};

    /// A deserializer that always fails. The text of its error lists the fields of the struct to be deserialized.
    struct FieldNames;

    impl<'de> Deserializer<'de> for FieldNames {
        type Error = ValueError;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, ValueError> {
            Err(ValueError::custom("not a struct"))
        }

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, ValueError> {
            Err(ValueError::custom(fields.join(" ")))
        }

        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
            unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    fn assert_same<'de, T: Deserialize<'de> + std::fmt::Debug>(keys: &[TableKey]) {
        let fields = T::deserialize(FieldNames).unwrap_err().to_string();
        let fields: BTreeSet<&str> = fields.split(' ').collect();
        let names: BTreeSet<&str> = keys.iter().map(|key| key.name).collect();
        assert_eq!(fields, names);
    }

    #[test]
    fn the_tables_of_keys_are_the_fields_that_are_read() {
        assert_same::<TableSettings>(TABLE_KEYS);
        assert_same::<ColumnSettings>(COLUMN_KEYS);
    }

    #[test]
    fn the_listed_words_are_the_ones_that_are_accepted() {
        for (name, words) in [("envelope", ENVELOPES), ("time_zone", TIME_ZONES)] {
            for word in words {
                toml::from_str::<TableSettings>(&format!("{name} = '{word}'")).unwrap();
            }
            toml::from_str::<TableSettings>(&format!("{name} = 'other'")).unwrap_err();
        }
    }
}
