//! Generates the reference page of the settings from the table of settings, and checks that this page and the
//! JSON Schema of the settings (`settings_schema`) are up to date.

use std::fmt::Write;

use postrider::settings::{KEYS, SettingKind};

use crate::root;
use crate::settings_schema::settings_schema;

const SETTINGS_HEAD: &str = "\
# Settings

Generated from `src/settings/keys.rs` by `cargo xtask settings-doc`: change the settings there.

Set each setting in a TOML file (named by `--config` or `POSTRIDER_CONFIG`), in the environment, or by a flag. A
flag overrides the environment, the environment overrides the file, and the file overrides the default. An unknown
name is an error, both in the file and in a variable with the prefix `POSTRIDER_`.

`table`, `topic`, `ordering`, `envelope` and `time_zone` describe a single outbox table. For several tables use
`[[tables]]` in the file instead, where each table has its own: see [mapping.md](mapping.md).

An editor that knows JSON Schema can check the file while you write it: begin the file with
`#:schema /usr/share/postrider/settings.schema.json`, or with the path of [settings.schema.json](settings.schema.json).
`postrider check --offline` checks it without any connection. Its errors name file, line and column.

A flag exists only for the commands that use its setting; `postrider COMMAND --help` lists them. The file and the
environment may hold settings that a command does not use.

The relay also reads `RUST_LOG` (the log level), `GOOGLE_APPLICATION_CREDENTIALS` (Google's credentials), and, for
parameters that `database_url` leaves out, the variables and service files of libpq: see
[connection.md](connection.md). The demo and the tests read `POSTRIDER_PG_BIN`, the folder of PostgreSQL's programs.
";

fn settings_page() -> String {
    let mut page = SETTINGS_HEAD.to_owned();
    for key in KEYS {
        let values = match key.kind {
            SettingKind::Text(_) => "Text".to_owned(),
            SettingKind::Choice(words) => words
                .iter()
                .map(|word| format!("`{word}`"))
                .collect::<Vec<_>>()
                .join(", "),
            SettingKind::Number(min, max) => format!("{min} to {max}"),
            SettingKind::Switch => "`true` or `false`".to_owned(),
        };
        let default = match key.default {
            "" => "no default".to_owned(),
            default => format!("default `{default}`"),
        };
        let variables = std::iter::once(key.variable())
            .chain(key.aliases.iter().map(ToString::to_string))
            .map(|name| format!("`{name}`"));
        let variables = variables.collect::<Vec<_>>().join(", else ");
        let (name, flag, reason) = (key.name, key.flag(), key.reason);
        write!(
            page,
            "\n## `{name}`\n\n{values}, {default}. {variables}; `--{flag}`.\n\n{reason}.\n"
        )
        .expect("writing to a String");
    }
    page
}

/// Checks that a generated file is up to date. With `UPDATE_DOCS`, writes the file first.
fn assert_generated(path: &str, rendered: &str) {
    let file = root().join(path);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, rendered).unwrap_or_else(|e| panic!("{path}: {e}"));
    }
    let written = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        written == rendered,
        "{path} is stale: run `cargo xtask settings-doc`"
    );
}

#[test]
fn the_settings_page_matches_the_table_of_settings() {
    assert_generated("docs/reference/settings.md", &settings_page());
}

#[test]
fn the_settings_schema_matches_the_table_of_settings() {
    assert_generated("docs/reference/settings.schema.json", &settings_schema());
}
