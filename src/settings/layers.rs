//! Merges the sources of settings: defaults, file, environment, flags.
//!
//! The result is one TOML table; the parent module interprets the values.

use std::ffi::OsString;
use std::path::Path;

use toml::{Table, Value};

use super::keys::{self, KEYS, SettingKey, SettingKind};
use crate::environment::Environment;
use crate::error::{Code, Error, Result, shown_path};
use crate::postgres::is_connection_variable;

/// Variables with the prefix `POSTRIDER_` that are not settings.
const OTHER_VARIABLES: &[&str] = &["POSTRIDER_CONFIG", "POSTRIDER_PG_BIN"];

/// The variables as text. Other programs may have variables that are not UTF-8, which are left out.
///
/// # Errors
/// `setting-invalid` for a variable that Postrider reads; its value is not shown.
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

/// Whether this variable is a setting or a connection parameter.
fn is_read(name: &str) -> bool {
    (name.starts_with("POSTRIDER_") && !OTHER_VARIABLES.contains(&name))
        || KEYS.iter().any(|key| key.aliases.contains(&name))
        || is_connection_variable(name)
}

/// Reads the file; `[[tables]]` stays unparsed.
pub(super) fn file(path: &Path) -> Result<Table> {
    let invalid = |what: String| Error::new(Code::SettingInvalid, what);
    let text = std::fs::read_to_string(path)
        .map_err(|e| invalid(format!("cannot read {}", shown_path(path))).caused_by(e))?;
    let table: Table = text.parse().map_err(|e: toml::de::Error| {
        invalid(format!("{}: {}", shown_path(path), e.message())).hint(format!(
            "correct the TOML syntax{}",
            e.span()
                .map(|s| format!(" near byte {}", s.start))
                .unwrap_or_default()
        ))
    })?;
    for name in table.keys().filter(|name| *name != "tables") {
        if keys::find(name).is_none() {
            return Err(unknown(name, &shown_path(path)));
        }
    }
    Ok(table)
}

/// Merges the environment into `table`.
pub(super) fn environment(table: &mut Table, env: &Environment) -> Result<()> {
    for variable in env.keys().filter(|v| v.starts_with("POSTRIDER_")) {
        let name = variable["POSTRIDER_".len()..].to_lowercase();
        let is_other = OTHER_VARIABLES.contains(&variable.as_str()) || is_service_link(&name);
        if keys::find(&name).is_none() && !is_other {
            return Err(unknown(&name, &format!("environment variable {variable}")));
        }
    }
    for key in KEYS {
        let names = std::iter::once(key.variable()).chain(key.aliases.iter().map(|a| (*a).into()));
        let found = names.into_iter().find_map(|name| {
            env.get(&name)
                .filter(|text| !text.is_empty())
                .map(|text| (name, text))
        });
        if let Some((name, text)) = found {
            table.insert(key.name.into(), parse(key, text, &name)?);
        }
    }
    Ok(())
}

/// Whether Kubernetes sets this variable for a Service named `postrider`.
fn is_service_link(name: &str) -> bool {
    name == "port" || name.starts_with("port_") || name.starts_with("service_")
}

/// Merges one flag into `table`.
pub(super) fn flag(table: &mut Table, key: &SettingKey, text: &str) -> Result<()> {
    table.insert(
        key.name.into(),
        parse(key, text, &format!("--{}", key.flag()))?,
    );
    Ok(())
}

/// Adds the defaults of settings that are not set.
pub(super) fn defaults(table: &mut Table) -> Result<()> {
    for key in KEYS.iter().filter(|key| !key.default.is_empty()) {
        if !table.contains_key(key.name) {
            table.insert(key.name.into(), parse(key, key.default, "default")?);
        }
    }
    Ok(())
}

/// Checks kind and bound of a value.
pub(super) fn check(key: &SettingKey, value: &Value, place: &str) -> Result<()> {
    let fits = match (key.kind, value) {
        (SettingKind::Text, Value::String(_)) | (SettingKind::Switch, Value::Boolean(_)) => true,
        (SettingKind::Number(min, max), Value::Integer(n)) => {
            u64::try_from(*n).is_ok_and(|n| (min..=max).contains(&n))
        }
        _ => false,
    };
    if fits {
        Ok(())
    } else {
        Err(invalid(key, place))
    }
}

fn parse(key: &SettingKey, text: &str, place: &str) -> Result<Value> {
    let value = match key.kind {
        SettingKind::Text => Value::String(text.into()),
        SettingKind::Number(..) => Value::Integer(text.parse().map_err(|_| invalid(key, place))?),
        SettingKind::Switch => Value::Boolean(match text {
            "true" | "1" | "on" | "yes" => true,
            "false" | "0" | "off" | "no" => false,
            _ => return Err(invalid(key, place)),
        }),
    };
    check(key, &value, place)?;
    Ok(value)
}

// The value itself is not shown: it may be a URL with a password.
fn invalid(key: &SettingKey, place: &str) -> Error {
    let wanted = match key.kind {
        SettingKind::Text => "a text".into(),
        SettingKind::Number(min, max) => format!("a whole number from {min} to {max}"),
        SettingKind::Switch => "true or false".into(),
    };
    Error::new(
        Code::SettingInvalid,
        format!("{place}: setting `{}` must be {wanted}", key.name),
    )
}

fn unknown(name: &str, place: &str) -> Error {
    let error = Error::new(
        Code::SettingUnknown,
        format!("{place}: unknown setting `{name}`"),
    );
    match keys::nearest(name) {
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
        let mut table = Table::new();
        let env = env(&[
            ("PUBSUB_PROJECT_ID", "standard"),
            ("POSTRIDER_PROJECT", "ours"),
        ]);
        environment(&mut table, &env).unwrap();
        assert_eq!(table["project"].as_str(), Some("ours"));
    }

    #[test]
    fn an_unknown_variable_is_an_error_that_names_a_similar_setting() {
        let error =
            environment(&mut Table::new(), &env(&[("POSTRIDER_PUBLICATON", "x")])).unwrap_err();
        assert_eq!(error.code(), Code::SettingUnknown);
        assert!(error.hint_text().contains("`publication`"));
    }

    #[test]
    fn variables_of_a_kubernetes_service_named_postrider_are_ignored() {
        let links = [
            ("POSTRIDER_PORT", "tcp://1"),
            ("POSTRIDER_SERVICE_HOST", "10.0.0.1"),
        ];
        environment(&mut Table::new(), &env(&links)).unwrap();
    }

    #[test]
    fn a_number_out_of_its_bound_is_refused_without_showing_the_value() {
        let error = environment(
            &mut Table::new(),
            &env(&[("POSTRIDER_IN_FLIGHT_MIB", "99999")]),
        )
        .unwrap_err();
        assert_eq!(error.code(), Code::SettingInvalid);
        assert!(error.what().contains("from 1 to 4096"));
        assert!(!error.to_string().contains("99999"));
    }

    #[test]
    fn every_default_is_valid() {
        let mut table = Table::new();
        defaults(&mut table).unwrap();
        assert_eq!(table["slot"].as_str(), Some("postrider"));
    }
}
