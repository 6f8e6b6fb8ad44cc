//! Loads settings from arbitrary files, environments and flags. Checks that nothing panics, that the
//! result is the same each time, that an error has one of the codes of settings, and that no error shows
//! the database password.

use std::path::PathBuf;
use std::sync::LazyLock;

use arbitrary::Arbitrary;
use postrider::environment::Environment;
use postrider::error::Code;
use postrider::settings::{KEYS, Settings};

const PASSWORD: &str = "s3cr3t-4711";

/// The input of the target.
#[derive(Debug, Arbitrary)]
pub(crate) struct Input<'a> {
    file: Option<File<'a>>,
    environment: Vec<(Variable<'a>, Text<'a>)>,
    flags: Vec<(u8, Text<'a>)>,
}

#[derive(Debug, Arbitrary)]
enum File<'a> {
    Any(&'a str),
    Lines(Vec<(u8, Toml<'a>)>),
    Table(Vec<(u8, Toml<'a>)>),
}

#[derive(Debug, Arbitrary)]
enum Toml<'a> {
    Raw(&'a str),
    Text(Text<'a>),
    Number(i64),
    Switch(bool),
}

#[derive(Debug, Arbitrary)]
enum Variable<'a> {
    Setting(u8),
    Alias(u8),
    OfLibpq(u8),
    Ours(&'a str),
    Any(&'a str),
}

const OF_LIBPQ: [&str; 13] = [
    "PGHOST",
    "PGHOSTADDR",
    "PGOPTIONS",
    "PGCONNECT_TIMEOUT",
    "PGTARGETSESSIONATTRS",
    "PGPORT",
    "PGUSER",
    "PGPASSWORD",
    "PGDATABASE",
    "PGSSLMODE",
    "PGSSLROOTCERT",
    "PGSSLCERT",
    "PGSSLKEY",
];

const IN_TABLES: [&str; 10] = [
    "table",
    "topic",
    "ordering",
    "envelope",
    "columns",
    "columns.id",
    "topic_rules.order",
    "attributes",
    "source",
    "columns.payload",
];

#[derive(Debug, Arbitrary)]
enum Text<'a> {
    Any(&'a str),
    Url { host: &'a str, rest: &'a str },
    Usual(u8),
}

const USUAL: [&str; 12] = [
    "1",
    "true",
    "off",
    "json",
    "127.0.0.1:8085",
    "https://pubsub.example",
    "bucketed(16)",
    "cloudevents-binary",
    "{aggregatetype}.events",
    "outbox.events",
    "verify-full",
    "/nowhere",
];

impl Text<'_> {
    fn text(&self) -> String {
        match self {
            Text::Any(text) => (*text).to_owned(),
            Text::Url { host, rest } => format!("postgres://user:{PASSWORD}@{host}/{rest}"),
            Text::Usual(n) => USUAL[usize::from(*n) % USUAL.len()].to_owned(),
        }
    }
}

impl File<'_> {
    fn text(&self) -> String {
        let line = |name: &str, value: &Toml<'_>| match value {
            Toml::Raw(raw) => format!("{name} = {raw}\n"),
            Toml::Text(text) => format!("{name} = {:?}\n", text.text()),
            Toml::Number(number) => format!("{name} = {number}\n"),
            Toml::Switch(on) => format!("{name} = {on}\n"),
        };
        match self {
            File::Any(text) => (*text).to_owned(),
            File::Lines(lines) => lines
                .iter()
                .map(|(n, value)| line(KEYS[usize::from(*n) % KEYS.len()].name, value))
                .collect(),
            File::Table(lines) => {
                let lines = lines.iter();
                let lines =
                    lines.map(|(n, v)| line(IN_TABLES[usize::from(*n) % IN_TABLES.len()], v));
                format!("[[tables]]\n{}", lines.collect::<String>())
            }
        }
    }
}

impl Variable<'_> {
    fn name(&self) -> String {
        match self {
            Variable::Setting(n) => KEYS[usize::from(*n) % KEYS.len()].variable(),
            Variable::Alias(n) => {
                let all: Vec<_> = KEYS.iter().flat_map(|key| key.aliases).collect();
                all[usize::from(*n) % all.len()].to_string()
            }
            Variable::OfLibpq(n) => OF_LIBPQ[usize::from(*n) % OF_LIBPQ.len()].to_owned(),
            Variable::Ours(rest) => format!("POSTRIDER_{rest}"),
            Variable::Any(name) => (*name).to_owned(),
        }
    }
}

/// The path of one settings file, which all executions in this process share.
static PATH: LazyLock<PathBuf> = LazyLock::new(|| {
    std::env::temp_dir().join(format!("postrider-fuzz-{}.toml", std::process::id()))
});

/// Panics if the code has a fault with this input.
pub(crate) fn check_input(input: &Input<'_>) {
    let path = input.file.as_ref().map(|file| {
        std::fs::write(&*PATH, file.text()).expect("the folder for temporary files is writable");
        &**PATH
    });
    let environment: Environment = input
        .environment
        .iter()
        .map(|(name, text)| (name.name(), text.text()))
        .collect();
    let flags: Vec<_> = input
        .flags
        .iter()
        .map(|(n, text)| {
            (
                KEYS[usize::from(*n) % KEYS.len()].name.to_owned(),
                text.text(),
            )
        })
        .collect();
    let load = || Settings::load(path, &environment, &flags);
    match (load(), load()) {
        (Ok(settings), Ok(again)) => {
            assert!(!settings.tables.is_empty());
            assert_eq!(format!("{settings:?}"), format!("{again:?}"));
        }
        (Err(error), Err(again)) => {
            assert_eq!(error.to_string(), again.to_string());
            assert!(
                matches!(
                    error.code(),
                    Code::SettingInvalid
                        | Code::SettingUnknown
                        | Code::DatabaseUrlInvalid
                        | Code::PubsubEndpoint
                ),
                "{error}"
            );
            assert!(!error.hint_text().is_empty());
            check_secrecy(input, &error);
        }
        (first, second) => panic!("once {first:?}, once {second:?}"),
    }
}

/// Checks that no error shows the password, if the password occurs only in the variables that contain the
/// database URL.
fn check_secrecy(input: &Input<'_>, error: &postrider::error::Error) {
    let is_own_place = |variable: &Variable<'_>| {
        matches!(
            variable.name().as_str(),
            "DATABASE_URL" | "POSTRIDER_DATABASE_URL"
        )
    };
    let elsewhere = input
        .environment
        .iter()
        .any(|(name, text)| text.text().contains(PASSWORD) && !is_own_place(name))
        || input
            .flags
            .iter()
            .any(|(_, text)| text.text().contains(PASSWORD))
        || input
            .file
            .as_ref()
            .is_some_and(|file| file.text().contains(PASSWORD));
    if !elsewhere {
        let shown = format!("{error} {:?} {}", error.causes(), error.hint_text());
        assert!(!shown.contains(PASSWORD), "{shown}");
    }
}
