//! Reads a service from libpq's service files. A service is a named group of connection parameters.
//!
//! As in libpq, there are two files, and the first one that has the service counts:
//!
//! 1. the file that `servicefile` (`PGSERVICEFILE`) names, or else `~/.pg_service.conf`
//! 2. `pg_service.conf` in the folder that `PGSYSCONFDIR` names. Unlike libpq, we use no built-in
//!    system folder if `PGSYSCONFDIR` is not set.
//!
//! A service file may contain passwords, so errors show only the file's path and the line number.
//!
//! Source: <https://www.postgresql.org/docs/current/libpq-pgservice.html>

use std::path::{Path, PathBuf};

use super::parameters::{self, Parameters, invalid};
use printable::shown_path;

use crate::environment::Environment;
use crate::error::{ReplicationError, Result};

const FORMAT: &str =
    "write one name=value on each line below the [name] of the service, without quotes";

/// Reads the parameters of the service called `name`.
///
/// # Errors
/// `InvalidTarget` if no file has the service, if a file cannot be read, or if the service has a
/// line that this crate does not support.
pub(super) fn read(name: &str, file: Option<&str>, env: &Environment) -> Result<Parameters> {
    let of_user = match file {
        Some(path) => Some(PathBuf::from(path)),
        None => in_folder(env, "HOME", ".pg_service.conf").filter(|path| path.exists()),
    };
    let of_system = in_folder(env, "PGSYSCONFDIR", "pg_service.conf").filter(|path| path.exists());
    let files: Vec<PathBuf> = of_user.into_iter().chain(of_system).collect();
    for path in &files {
        if let Some(found) = in_file(name, path)? {
            return Ok(found);
        }
    }
    // Do not show the name, because somebody may have put a piece of a password there by mistake.
    let looked: Vec<String> = files.iter().map(|path| shown_path(path)).collect();
    let what = match looked.as_slice() {
        [] => {
            "there is no service file for the service that DATABASE_URL or PGSERVICE names".into()
        }
        files => format!(
            "{} does not have the service that DATABASE_URL or PGSERVICE names",
            files.join(" or ")
        ),
    };
    Err(invalid(what).hint(
        "correct `service` or PGSERVICE; the file is ~/.pg_service.conf, unless PGSERVICEFILE names it",
    ))
}

/// Returns the path of `file` in the folder that the variable names. `None` if the variable is not
/// set, or if the folder's path is not absolute.
pub(super) fn in_folder(env: &Environment, variable: &str, file: &str) -> Option<PathBuf> {
    let folder = Path::new(env.get(variable)?);
    folder.is_absolute().then(|| folder.join(file))
}

fn in_file(name: &str, path: &Path) -> Result<Option<Parameters>> {
    let text = std::fs::read_to_string(path).map_err(|e| {
        let what = format!("the service file {} cannot be read", shown_path(path));
        let error = invalid(what).caused_by(e);
        error.hint("correct PGSERVICEFILE, or the rights of the file; it must be UTF-8")
    })?;
    of_text(name, &text, &shown_path(path))
}

/// Reads the parameters below the heading `[name]`; `None` if there is no such heading. Does not
/// check the lines of other services.
fn of_text(name: &str, text: &str, path: &str) -> Result<Option<Parameters>> {
    let mut found = None;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if line.starts_with('[') {
            if found.is_some() {
                break;
            }
            let heading = line
                .strip_prefix('[')
                .and_then(|line| line.strip_suffix(']'));
            found = (heading == Some(name)).then(Parameters::new);
            continue;
        }
        if let Some(found) = &mut found {
            let location = format!("line {} of {path}", index + 1);
            parameter(found, line, &location)?;
        }
    }
    Ok(found)
}

/// Adds the parameter of one line `name=value` to `found`. As in libpq, the value has no quotes,
/// spaces at its start belong to it, and if a parameter occurs twice, the first value counts.
fn parameter(found: &mut Parameters, line: &str, location: &str) -> Result<()> {
    let refused =
        |what: &str| -> ReplicationError { invalid(format!("{location} {what}")).hint(FORMAT) };
    if line.starts_with("ldap") {
        return Err(refused(
            "looks the service up by LDAP, which is not supported",
        ));
    }
    let (name, value) = line
        .split_once('=')
        .ok_or_else(|| refused("is not of the form name=value"))?;
    let known = parameters::named(name, location, FORMAT)?;
    if known.name.starts_with("service") {
        return Err(refused("names another service"));
    }
    if found.contains_key(known.name) {
        return Ok(());
    }
    parameters::set(found, known, value, location)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "# services\n\n[other]\nnonsense\n[shop]\n  host=a,b  \nport=5432,5433\r\n\
                        password=it's \\ = #1\nport=1\n[shop]\nhost=later\n";

    #[test]
    fn a_service_is_read_from_the_first_section_with_its_name() {
        let found = of_text("shop", FILE, "f").unwrap().unwrap();
        let pairs: Vec<(&str, &str)> = found.iter().map(|(n, v)| (*n, v.as_str())).collect();
        assert_eq!(
            pairs,
            [
                ("host", "a,b"),
                ("password", "it's \\ = #1"),
                ("port", "5432,5433"),
            ]
        );
        assert!(of_text("none", FILE, "f").unwrap().is_none());
    }

    #[test]
    fn a_wrong_line_is_refused_with_its_number_and_not_shown() {
        for line in [
            "ter2",
            "ter2=x",
            "service=ter2",
            "servicefile=ter2",
            "ldap://ter2/o=x",
            "application_name=ter2",
            "password=ter2\0",
        ] {
            let text = format!("[shop]\nhost=h\n{line}\n");
            let error = of_text("shop", &text, "/etc/services.conf").unwrap_err();
            let shown = format!("{error} {error:?} {}", error.hint_text());
            assert!(
                error
                    .to_string()
                    .starts_with("line 3 of /etc/services.conf"),
                "{error}"
            );
            assert!(!shown.contains("ter2"), "{line}: {shown}");
        }
    }

    #[test]
    fn the_users_file_comes_before_the_file_of_the_system() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(path(".pg_service.conf"), "[a]\nhost=user\n").unwrap();
        std::fs::write(
            path("pg_service.conf"),
            "[a]\nhost=system\n[b]\nhost=system\n",
        )
        .unwrap();
        std::fs::write(path("named.conf"), "[a]\nhost=named\n").unwrap();
        let home = folder.path().display().to_string();
        let env: Environment = [("HOME", &home), ("PGSYSCONFDIR", &home)]
            .map(|(name, value)| (name.to_owned(), value.clone()))
            .into();
        let host = |name: &str, file: Option<&str>| {
            read(name, file, &env).map(|found| found["host"].clone())
        };
        assert_eq!(host("a", None).unwrap(), "user");
        assert_eq!(host("b", None).unwrap(), "system");
        assert_eq!(host("a", Some(&path("named.conf"))).unwrap(), "named");
        let error = host("ter2", None).unwrap_err();
        assert!(
            error.to_string().contains(&path(".pg_service.conf")),
            "{error}"
        );
        assert!(!format!("{error:?}").contains("ter2"), "{error:?}");
        let error = host("a", Some(&path("absent.conf"))).unwrap_err();
        assert!(error.to_string().contains("cannot be read"), "{error}");
        let error = read("a", None, &Environment::new()).unwrap_err();
        assert!(
            error.to_string().contains("there is no service file"),
            "{error}"
        );
    }
}
