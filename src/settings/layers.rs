//! Merges the sources of settings: defaults, file, environment, flags.
//!
//! The result is one checked value per setting. Each value is stored with its source, which error
//! messages show. The parent module interprets the values; `file` reads the file.

use std::collections::BTreeMap;
use std::ffi::OsString;

use printable::may_contain_password;
use replication::connection::is_connection_variable;
use toml::Value;

use super::choices::{ByWord, by_word};
use super::keys::{self, KEYS, SettingKey, SettingKind};
use crate::environment::Environment;
use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;

/// Variables with the prefix `POSTRIDER_` that are not settings.
const OTHER_VARIABLES: &[&str] = &[
    "POSTRIDER_CONFIG",
    // Release builds set these variables.
    "POSTRIDER_COMMIT",
    "POSTRIDER_COMMIT_DATE",
];

/// Settings whose values may contain a password, or may look like a connection string. The check for misplaced
/// connection strings does not apply to them.
const MAY_CONTAIN_PASSWORDS: &[&str] = &[
    "database_url",
    "password_command",
    "http_token",
    "pubsub_endpoint",
    "pubsub_emulator_host",
];

/// The environment variables as text. A variable that is not UTF-8 is left out if Postrider does not read it.
///
/// # Errors
/// `setting-invalid` if a variable that Postrider reads is not UTF-8; the error does not show its value.
pub(crate) fn environment_of(
    variables: impl Iterator<Item = (OsString, OsString)>,
) -> Result<Environment> {
    let mut env = Environment::new();
    for (name, value) in variables {
        match (name.into_string(), value.into_string()) {
            (Ok(name), Ok(value)) => {
                env.insert(name, value);
            }
            (Ok(name), Err(_)) if is_read(&name) => {
                let what = format!("environment variable {name} is not UTF-8");
                let hint = format!("write {name} in UTF-8, or unset it");
                return Err(Error::new(Code::SettingInvalid, what).hint(hint));
            }
            _ => {}
        }
    }
    Ok(env)
}

/// Prefix of the variables that say where the tests find PostgreSQL's programs, such as `POSTRIDER_PG_BIN_17`.
const TEST_VARIABLES: &str = "POSTRIDER_PG_BIN";

/// Whether this variable with the prefix `POSTRIDER_` is not a setting.
fn is_other_variable(name: &str) -> bool {
    OTHER_VARIABLES.contains(&name) || name.starts_with(TEST_VARIABLES)
}

/// Whether Postrider reads this variable.
fn is_read(name: &str) -> bool {
    (name.starts_with("POSTRIDER_") && !is_other_variable(name))
        || KEYS.iter().any(|key| key.aliases.contains(&name))
        || is_connection_variable(name)
        || name == super::TRACES_VARIABLE
}

/// A value and its source, such as `relay.toml:3:8` or `POSTRIDER_SLOT`.
#[derive(Debug)]
struct SetValue {
    value: Value,
    /// The source of the value; `None` for a default.
    place: Option<String>,
}

/// A `[[tables]]` section, and its location in the file.
#[derive(Debug)]
pub(super) struct TableSection {
    pub(super) settings: TableSettings,
    pub(super) place: String,
}

/// The values that are set. A later layer replaces the values of an earlier one.
#[derive(Debug, Default)]
pub(super) struct Layers {
    values: BTreeMap<&'static str, SetValue>,
    /// The `[[tables]]` of the file, if it has any.
    pub(super) tables: Option<Vec<TableSection>>,
}

impl Layers {
    /// Sets a value from the source `place`. Checks the value's kind and bound, and refuses a misplaced
    /// connection string.
    pub(super) fn set(
        &mut self,
        key: &'static SettingKey,
        value: Value,
        place: String,
    ) -> Result<()> {
        if !is_allowed(key, &value) {
            return Err(invalid(key, &place));
        }
        if !MAY_CONTAIN_PASSWORDS.contains(&key.name)
            && value.as_str().is_some_and(may_contain_password)
        {
            return Err(misplaced_password(&format!(
                "{place}: setting `{}`",
                key.name
            )));
        }
        let place = Some(place);
        self.values.insert(key.name, SetValue { value, place });
        Ok(())
    }

    fn set_text(&mut self, key: &'static SettingKey, text: &str, place: String) -> Result<()> {
        match parsed(key, text) {
            Some(value) => self.set(key, value, place),
            None => Err(invalid(key, &place)),
        }
    }

    pub(super) fn add_environment(&mut self, env: &Environment) -> Result<()> {
        for variable in env.keys().filter(|v| v.starts_with("POSTRIDER_")) {
            let name = variable["POSTRIDER_".len()..].to_lowercase();
            let is_other = is_other_variable(variable) || is_service_link(&name);
            if keys::find(&name).is_none() && !is_other {
                return Err(unknown(&name, &format!("environment variable {variable}")));
            }
        }
        for key in KEYS {
            let aliases = key.aliases.iter().map(|alias| (*alias).to_owned());
            let found = std::iter::once(key.variable())
                .chain(aliases)
                .find_map(|name| {
                    let text = env.get(&name).filter(|text| !text.is_empty())?;
                    Some((name, text))
                });
            if let Some((name, text)) = found {
                self.set_text(key, text, name)?;
            }
        }
        Ok(())
    }

    pub(super) fn add_flag(&mut self, name: &str, text: &str) -> Result<()> {
        let key = keys::find(name).expect("invariant: flags are made from the table of keys");
        self.set_text(key, text, format!("--{}", key.flag()))
    }

    /// Adds the defaults of settings that are not set.
    pub(super) fn add_defaults(&mut self) {
        for key in KEYS.iter().filter(|key| !key.default.is_empty()) {
            self.values.entry(key.name).or_insert_with(|| SetValue {
                value: parsed(key, key.default).expect("invariant: defaults are valid"),
                place: None,
            });
        }
    }

    /// Whether the setting has a value. Before [`add_defaults`](Self::add_defaults), a value means that the user
    /// has set it. Later it may be the default.
    pub(super) fn is_set(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    /// The text of a setting; empty if it is not set.
    pub(super) fn text(&self, name: &str) -> &str {
        let value = self.values.get(name).and_then(|set| set.value.as_str());
        value.unwrap_or_default()
    }

    /// The value of a setting whose kind is a number. Every such setting has a default.
    pub(super) fn number(&self, name: &str) -> u64 {
        let value = self.values.get(name).and_then(|set| set.value.as_integer());
        u64::try_from(value.expect("invariant: numbers have a default"))
            .expect("invariant: the value was checked")
    }

    pub(super) fn switch(&self, name: &str) -> bool {
        let value = self.values.get(name).and_then(|set| set.value.as_bool());
        value.unwrap_or_default()
    }

    /// The value of a setting whose kind is a choice, as the enum `T`. The setting must have a default.
    pub(super) fn choice<T: ByWord>(&self, name: &str) -> T {
        by_word(self.text(name)).expect("invariant: the word was checked")
    }

    /// The text of a setting, read as another type.
    pub(super) fn parsed<T>(&self, name: &str) -> Result<T>
    where
        T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>,
    {
        let read = self.text(name).parse();
        read.map_err(|e| self.invalid(name).caused_by(e))
    }

    /// Returns the error for a value that is not valid. The error does not show the value.
    pub(super) fn invalid(&self, name: &str) -> Error {
        self.error(name, &format!("setting `{name}` is not valid"))
    }

    /// The source of a setting, such as a variable, a flag, or a place in the file. `None` for a default.
    pub(super) fn place(&self, name: &str) -> Option<&str> {
        self.values.get(name).and_then(|set| set.place.as_deref())
    }

    /// Returns the error `setting-invalid`, with the source of this setting.
    pub(super) fn error(&self, name: &str, what: &str) -> Error {
        let what = match self.place(name) {
            Some(place) => format!("{place}: {what}"),
            None => what.to_owned(),
        };
        Error::new(Code::SettingInvalid, what)
    }
}

/// Whether `name`, a variable without its prefix `POSTRIDER_`, is one that Kubernetes sets for a Service named
/// `postrider`.
fn is_service_link(name: &str) -> bool {
    name == "port" || name.starts_with("port_") || name.starts_with("service_")
}

/// Whether a value has the setting's kind and is within its bound.
fn is_allowed(key: &SettingKey, value: &Value) -> bool {
    match (key.kind, value) {
        (SettingKind::Text(_), Value::String(_)) | (SettingKind::Switch, Value::Boolean(_)) => true,
        (SettingKind::Choice(words), Value::String(word)) => {
            // An empty word means "not set" if the setting has no default.
            words.contains(&word.as_str()) || (word.is_empty() && key.default.is_empty())
        }
        (SettingKind::Number(min, max), Value::Integer(n)) => {
            u64::try_from(*n).is_ok_and(|n| (min..=max).contains(&n))
        }
        _ => false,
    }
}

/// Parses a text from the environment or a flag. Returns `None` if the text does not have the setting's
/// kind.
fn parsed(key: &SettingKey, text: &str) -> Option<Value> {
    match key.kind {
        SettingKind::Text(_) | SettingKind::Choice(_) => Some(Value::String(text.into())),
        SettingKind::Number(..) => text.parse().ok().map(Value::Integer),
        SettingKind::Switch => match text {
            "true" | "1" | "on" | "yes" => Some(Value::Boolean(true)),
            "false" | "0" | "off" | "no" => Some(Value::Boolean(false)),
            _ => None,
        },
    }
}

// The error does not show the value, because it may be a URL with a password.
fn invalid(key: &SettingKey, place: &str) -> Error {
    let wanted = key.kind.wanted();
    let what = format!("{place}: setting `{}` must be {wanted}", key.name);
    let error = Error::new(Code::SettingInvalid, what);
    match key.kind {
        SettingKind::Choice(_) => error.hint(format!("use {wanted}")),
        SettingKind::Text(_) | SettingKind::Number(..) | SettingKind::Switch => error,
    }
}

/// The error for a connection string in a setting that must not contain one. This error stops the program
/// before another message can show the value of the setting, and with it the password.
pub(super) fn misplaced_password(setting: &str) -> Error {
    let what = format!("{setting} looks like a connection string with a password");
    Error::new(Code::SettingInvalid, what)
        .hint("put the connection string into DATABASE_URL, and correct this setting")
}

/// The error for an unknown name at the top of the file or in a variable.
pub(super) fn unknown(name: &str, place: &str) -> Error {
    if may_contain_password(name) {
        // Leave out `place`. If `name` is the name of an environment variable, `place` contains this name, and with it
        // the password.
        return misplaced_password("the name of a setting or of an environment variable");
    }
    let error = Error::new(
        Code::SettingUnknown,
        format!("{place}: unknown setting `{name}`"),
    );
    match keys::nearest(name, KEYS.iter().map(|key| key.name)) {
        Some(known) => error.hint(format!("did you mean `{known}`?")),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(pairs: &[(&str, &str)]) -> Environment {
        pairs
            .iter()
            .map(|(k, v)| ((*k).into(), (*v).into()))
            .collect()
    }

    fn refused(pairs: &[(&str, &str)]) -> Error {
        Layers::default().add_environment(&env(pairs)).unwrap_err()
    }

    #[test]
    #[cfg(unix)]
    fn a_variable_that_is_not_utf8_is_an_error_only_if_it_is_read() {
        use std::os::unix::ffi::OsStringExt;
        let of = |name: &str| {
            let value = OsString::from_vec(b"postgres://u:hunter2\xff@h/d".to_vec());
            let good = ("POSTRIDER_SLOT".into(), "a".into());
            environment_of([(name.into(), value), good].into_iter())
        };
        for name in [
            "DATABASE_URL",
            "POSTRIDER_DATABASE_URL",
            "PGPASSWORD",
            "PGHOSTADDR",
            "PUBSUB_PROJECT_ID",
        ] {
            let error = of(name).unwrap_err();
            assert_eq!(error.code(), Code::SettingInvalid);
            assert!(error.what().contains(name), "{error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        }
        for name in ["HOME", "PGDATA", "POSTRIDER_CONFIG"] {
            assert_eq!(of(name).unwrap().len(), 1, "{name}");
        }
    }

    #[test]
    fn our_own_variable_wins_over_the_standard_one() {
        let mut layers = Layers::default();
        let env = env(&[
            ("PUBSUB_PROJECT_ID", "standard"),
            ("POSTRIDER_PROJECT", "ours"),
        ]);
        layers.add_environment(&env).unwrap();
        assert_eq!(layers.text("project"), "ours");
    }

    #[test]
    fn an_unknown_variable_is_an_error_that_names_a_similar_setting() {
        let error = refused(&[("POSTRIDER_PUBLICATON", "x")]);
        assert_eq!(error.code(), Code::SettingUnknown);
        assert!(error.hint_text().contains("`publication`"));
    }

    #[test]
    fn variables_of_a_kubernetes_service_named_postrider_are_ignored() {
        let links = [
            ("POSTRIDER_PORT", "tcp://1"),
            ("POSTRIDER_SERVICE_HOST", "10.0.0.1"),
        ];
        Layers::default().add_environment(&env(&links)).unwrap();
    }

    #[test]
    fn a_number_out_of_its_bound_is_refused_without_showing_the_value() {
        let error = refused(&[("POSTRIDER_IN_FLIGHT_MIB", "99999")]);
        assert_eq!(error.code(), Code::SettingInvalid);
        assert_eq!(
            error.what(),
            "POSTRIDER_IN_FLIGHT_MIB: setting `in_flight_mib` must be a whole number from 1 to 4096"
        );
        assert!(!error.to_string().contains("99999"));
    }

    #[test]
    fn a_choice_is_refused_with_the_words_that_are_allowed() {
        let error = refused(&[("POSTRIDER_START", "hunter2")]);
        assert_eq!(
            error.what(),
            "POSTRIDER_START: setting `start` must be `new` or `all`"
        );
        assert_eq!(error.hint_text(), "use `new` or `all`");
    }

    #[test]
    fn every_default_is_valid() {
        for key in KEYS.iter().filter(|key| !key.default.is_empty()) {
            let value = parsed(key, key.default);
            assert!(
                value.is_some_and(|value| is_allowed(key, &value)),
                "{}",
                key.name
            );
        }
    }
}
