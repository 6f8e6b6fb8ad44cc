//! Reads the settings file. Errors give file, line and column, and for a misspelt name the most similar
//! valid name.

use std::ops::Range;
use std::path::Path;

use printable::{may_contain_password, shown_path};
use serde::Deserialize;
use toml::Spanned;
use toml::Value;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use super::keys::{self, KEYS};
use super::layers::{self, Layers, TableSection};
use super::table_keys::{COLUMN_KEYS, TABLE_KEYS, TableKey};
use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;

/// The path and text of the file. Turns the offset of an error into line and column.
struct SettingsText<'a> {
    path: &'a Path,
    text: &'a str,
}

impl SettingsText<'_> {
    /// Returns file, line and column, such as `relay.toml:3:8`. Line and column count from 1.
    fn place(&self, span: Range<usize>) -> String {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        let start = before.rfind('\n').map_or(0, |at| at + 1);
        let column = before[start..].chars().count() + 1;
        format!("{}:{line}:{column}", shown_path(self.path))
    }

    fn invalid(&self, span: Range<usize>, what: &str) -> Error {
        let place = self.place(span);
        Error::new(Code::SettingInvalid, format!("{place}: {what}"))
    }

    /// Refuses a name in `table` that is not in `known`. `section` describes the table in the error.
    fn refuse_unknown(&self, table: &DeTable<'_>, known: &[TableKey], section: &str) -> Result<()> {
        let names = || known.iter().map(|key| key.name);
        let is_unknown = |name: &&Spanned<_>| {
            let name: &str = AsRef::<std::borrow::Cow<'_, str>>::as_ref(*name);
            names().all(|known| known != name)
        };
        let Some(unknown) = table.keys().find(is_unknown) else {
            return Ok(());
        };
        let name = unknown.get_ref();
        let place = self.place(unknown.span());
        if may_contain_password(name) {
            return Err(layers::misplaced_password(&format!(
                "{place}: the name of a setting in {section}"
            )));
        }
        let what = format!("{place}: unknown setting `{name}` in {section}");
        let error = Error::new(Code::SettingUnknown, what);
        Err(match keys::nearest(name, names()) {
            Some(known) => error.hint(format!("did you mean `{known}`?")),
            None => {
                let all: Vec<&str> = names().collect();
                error.hint(format!("{section} can have: {}", all.join(", ")))
            }
        })
    }

    /// Refuses connection strings with passwords among the values of a section, at any depth, because later errors
    /// show these values.
    fn refuse_passwords(&self, value: &Spanned<DeValue<'_>>) -> Result<()> {
        match value.get_ref() {
            DeValue::String(text) if may_contain_password(text) => {
                let setting = format!("{}: a setting in [[tables]]", self.place(value.span()));
                Err(layers::misplaced_password(&setting))
            }
            DeValue::Array(list) => list
                .iter()
                .try_for_each(|value| self.refuse_passwords(value)),
            DeValue::Table(table) => table
                .values()
                .try_for_each(|value| self.refuse_passwords(value)),
            _ => Ok(()),
        }
    }

    fn tables(&self, value: &Spanned<DeValue<'_>>) -> Result<Vec<TableSection>> {
        let list = value.get_ref().as_array();
        let list = list.ok_or_else(|| {
            self.invalid(value.span(), "`tables` must be a list of sections")
                .hint("begin the section of each table with [[tables]]")
        })?;
        if list.is_empty() {
            let error = self.invalid(value.span(), "`tables` is empty");
            return Err(error.hint("name at least one table in [[tables]]"));
        }
        list.iter().map(|section| self.table(section)).collect()
    }

    fn table(&self, section: &Spanned<DeValue<'_>>) -> Result<TableSection> {
        let Some(table) = section.get_ref().as_table() else {
            let error = self.invalid(section.span(), "a table of `tables` must be a section");
            return Err(error.hint("begin the section of each table with [[tables]]"));
        };
        self.refuse_passwords(section)?;
        self.refuse_unknown(table, TABLE_KEYS, "[[tables]]")?;
        let columns = table
            .get("columns")
            .and_then(|columns| columns.get_ref().as_table());
        if let Some(columns) = columns {
            self.refuse_unknown(columns, COLUMN_KEYS, "`columns` of [[tables]]")?;
        }
        let settings = TableSettings::deserialize(ValueDeserializer::from(section.clone()));
        let settings = settings.map_err(|error| {
            let span = error.span().unwrap_or_else(|| section.span());
            let of = match setting_at(table, &span) {
                Some(name) => format!("setting `{name}` in [[tables]]"),
                None => "[[tables]]".to_owned(),
            };
            let error = self.invalid(span, &format!("{of}: {}", error.message()));
            error.hint(
                "correct the setting; docs/reference/mapping.md explains the settings of a table",
            )
        })?;
        let named = table.get("table").map_or(section.span(), Spanned::span);
        let place = self.place(named);
        Ok(TableSection { settings, place })
    }
}

/// Finds the setting in a section by the place of its value in the file. Returns the name of the setting whose value
/// contains `span`, such as `columns.id`. Returns `None` if no value contains `span`.
fn setting_at(section: &DeTable<'_>, span: &Range<usize>) -> Option<String> {
    section.iter().find_map(|(name, value)| {
        let name = name.get_ref();
        if let Some(inner) = value.get_ref().as_table() {
            // The span of a section such as [tables.columns] does not include its values, so search the values
            // themselves.
            return setting_at(inner, span).map(|inner| format!("{name}.{inner}"));
        }
        let is_in = value.span().start <= span.start && span.end <= value.span().end;
        is_in.then(|| name.to_string())
    })
}

/// Reads the file into the first layer, which the environment and the flags override.
///
/// # Errors
/// `setting-invalid`, `setting-unknown`, with file, line and column.
pub(super) fn read(path: &Path) -> Result<Layers> {
    let text = std::fs::read_to_string(path).map_err(|e| {
        let what = format!("cannot read {}", shown_path(path));
        let error = Error::new(Code::SettingInvalid, what).caused_by(e);
        error.hint(
            "correct the path in --config or POSTRIDER_CONFIG, or the permissions of the file",
        )
    })?;
    let file = SettingsText { path, text: &text };
    let table = DeTable::parse(&text).map_err(|e| {
        let span = e.span().unwrap_or_default();
        file.invalid(span, e.message())
            .hint("correct the TOML syntax there")
    })?;
    let mut layers = Layers::default();
    for (name, value) in table.get_ref() {
        if *name.get_ref() == "tables" {
            layers.tables = Some(file.tables(value)?);
            continue;
        }
        let Some(key) = KEYS.iter().find(|key| key.name == *name.get_ref()) else {
            return Err(unknown_at_the_top(name.get_ref(), &file.place(name.span())));
        };
        let place = file.place(value.span());
        let plain = Value::deserialize(ValueDeserializer::from(value.clone()));
        let plain = plain.map_err(|e| file.invalid(value.span(), e.message()))?;
        layers.set(key, plain, place)?;
    }
    Ok(layers)
}

/// Returns the error for an unknown name at the top of the file. If the name belongs in a `[[tables]]`
/// section, the hint says so.
fn unknown_at_the_top(name: &str, place: &str) -> Error {
    let unknown = layers::unknown(name, place);
    if TABLE_KEYS.iter().any(|key| key.name == name) {
        return unknown.hint(format!("write `{name}` in a [[tables]] section"));
    }
    unknown
}
