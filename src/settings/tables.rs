//! Builds the settings of the captured tables and of their topics, and refuses settings that contradict each other.

use std::collections::HashSet;

use super::layers::{Layers, TableSection};
use crate::error::{Code, Error, Result};
use crate::mapping::{TableSettings, TimeZone};

/// Names of the settings that describe the single captured table, if the file has no [[tables]].
const OF_ONE_TABLE: [&str; 5] = ["table", "topic", "ordering", "envelope", "time_zone"];

/// Returns the tables from the `[[tables]]` sections of the file. If the file has no such section, returns
/// the single table that the settings in [`OF_ONE_TABLE`] describe.
pub(super) fn tables(layers: &mut Layers) -> Result<Vec<TableSettings>> {
    let Some(sections) = layers.tables.take() else {
        let table = TableSettings {
            table: layers.parsed("table")?,
            topic: layers.parsed("topic")?,
            ordering: layers.parsed("ordering")?,
            envelope: layers.parsed("envelope")?,
            time_zone: TimeZone::named(layers.text("time_zone")),
            ..TableSettings::default()
        };
        table.refuse_contradictions()?;
        return Ok(vec![table]);
    };
    let mut names = HashSet::new();
    for TableSection { settings, place } in &sections {
        if !names.insert(&settings.table) {
            let what = format!("{place}: [[tables]] names table {} twice", settings.table);
            return Err(Error::new(Code::SettingInvalid, what)
                .hint("put all settings of a table into one [[tables]] section"));
        }
        settings
            .refuse_contradictions()
            .map_err(|fault| Error::from(fault).at(place))?;
    }
    let tables = sections.into_iter().map(|section| section.settings);
    Ok(tables.collect())
}

/// Refuses an invalid name of the dead-letter topic. The check uses a placeholder for the project, because not every
/// command knows the project.
pub(super) fn refuse_wrong_dead_letter_topic(layers: &Layers) -> Result<()> {
    const SETTING: &str = "dead_letter_topic";
    match layers.text(SETTING) {
        "" => Ok(()),
        name => crate::mapping::topic_name("any-project", name)
            .map(drop)
            .map_err(|fault| layers.invalid(SETTING).caused_by(fault)),
    }
}

/// Refuses the settings of a single table together with [[tables]], because they would have no effect.
pub(super) fn refuse_settings_of_one_table(layers: &Layers) -> Result<()> {
    if layers.tables.is_none() {
        return Ok(());
    }
    match OF_ONE_TABLE.into_iter().find(|name| layers.is_set(name)) {
        Some(name) => {
            let what = format!("setting `{name}` has no effect together with [[tables]]");
            let hint = format!("remove it there, and set `{name}` in each [[tables]] section");
            Err(layers.error(name, &what).hint(hint))
        }
        None => Ok(()),
    }
}
