//! Gathers libpq's parameters from three sources: `DATABASE_URL`, a service, and the environment.
//! If several sources set a parameter, the first one in this order wins.
//!
//! As in libpq, each source adds the parameters that the earlier sources omit. There is one
//! exception: if an earlier source names the host, a later source cannot set the host's address.
//! Otherwise a variable that somebody set for `psql` could silently send a relay to another server.

use super::parameters::{self, Parameter, Parameters, invalid};
use super::{key_value, service_file, url};
use crate::environment::Environment;
use crate::error::Result;

/// Gathers the connection parameters from all sources. `text` is a URL or `name=value` pairs, and
/// may be empty.
///
/// # Errors
/// `InvalidTarget`.
pub(super) fn gather(text: &str, env: &Environment) -> Result<Parameters> {
    let mut found = if text.trim().is_empty() {
        Parameters::new()
    } else if has_pairs(text) {
        key_value::parse(text)?
    } else {
        url::parse(text)?
    };
    let set = |name: &str, variable| {
        let value = found.get(name).or_else(|| env.get(variable));
        value.filter(|value| !value.is_empty()).cloned()
    };
    if let Some(service) = set("service", "PGSERVICE") {
        let file = set("servicefile", "PGSERVICEFILE");
        let of_service = service_file::read(&service, file.as_deref(), env)?;
        fill_in(&mut found, of_service, "the service")?;
    }
    let variables = of_environment(env, &found)?;
    fill_in(&mut found, variables, "PGHOSTADDR")?;
    Ok(found)
}

/// Whether the text consists of `name=value` pairs, not of a URL.
fn has_pairs(text: &str) -> bool {
    text.split_once('=')
        .is_some_and(|(name, _)| !name.contains("://"))
}

/// Reads from the environment the parameters that `found` lacks.
fn of_environment(env: &Environment, found: &Parameters) -> Result<Parameters> {
    let mut later = Parameters::new();
    let omitted = |parameter: &&Parameter| !found.contains_key(parameter.name);
    for parameter in parameters::PARAMETERS.iter().filter(omitted) {
        let variable = parameter.variable;
        let value = env.get(variable).filter(|value| !value.is_empty());
        if let Some(value) = value {
            parameters::set(&mut later, parameter, value, variable)?;
        }
    }
    Ok(later)
}

/// Adds those parameters of a later source that the earlier sources omit.
fn fill_in(found: &mut Parameters, later: Parameters, source: &str) -> Result<()> {
    if found.contains_key("host")
        && !found.contains_key("hostaddr")
        && later.contains_key("hostaddr")
    {
        return Err(invalid(format!(
            "{source} sets the address (hostaddr) of a host that another source names"
        ))
        .hint(
            "put hostaddr next to the host, or remove it (PGHOSTADDR); a host that is the folder of a Unix \
             socket has no address",
        ));
    }
    for (name, value) in later {
        found.entry(name).or_insert(value);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn gathered(text: &str, env: &[(&str, &str)]) -> Result<Parameters> {
        let env = env
            .iter()
            .map(|(k, v)| ((*k).into(), (*v).into()))
            .collect();
        gather(text, &env)
    }

    #[test]
    fn the_url_wins_over_the_service_and_the_service_over_the_environment() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(
            file.path(),
            "[shop]\nhost=of-service\nport=6543\nsslmode=require\n",
        )
        .unwrap();
        let path = file.path().to_str().unwrap();
        let env = [
            ("PGSERVICEFILE", path),
            ("PGSERVICE", "shop"),
            ("PGSSLMODE", "disable"),
            ("PGUSER", "relay"),
            ("PGDATABASE", ""),
        ];
        for text in [
            "postgres://of-url:1/shop",
            "host=of-url port=1 dbname=shop",
            "port=1 dbname=shop service=shop",
        ] {
            let found = gathered(text, &env).unwrap();
            let of = |name| found.get(name).map(String::as_str);
            let host = if text.contains("of-url") {
                "of-url"
            } else {
                "of-service"
            };
            assert_eq!(of("host"), Some(host), "{text}");
            assert_eq!(of("port"), Some("1"), "{text}");
            assert_eq!(of("dbname"), Some("shop"), "{text}");
            assert_eq!(of("sslmode"), Some("require"), "{text}");
            assert_eq!(of("user"), Some("relay"), "{text}");
        }
        let found = gathered("", &env).unwrap();
        assert_eq!(found["host"], "of-service");
        assert!(gathered("postgres://h/d", &[("PGSERVICE", "absent")]).is_err());
    }

    #[test]
    fn a_later_source_cannot_redirect_a_host() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "[shop]\nhostaddr=10.0.0.7\n").unwrap();
        let path = file.path().to_str().unwrap();
        for (text, env) in [
            ("postgres://u@h/d", &[("PGHOSTADDR", "10.0.0.7")][..]),
            ("postgres://u@%2Frun/d", &[("PGHOSTADDR", "10.0.0.7")]),
            ("host=h user=u", &[("PGHOSTADDR", "10.0.0.7")]),
            ("host=h service=shop", &[("PGSERVICEFILE", path)]),
        ] {
            let error = gathered(text, env).unwrap_err();
            assert!(error.to_string().contains("hostaddr"), "{error}");
            assert!(!format!("{error:?}").contains("10.0.0.7"), "{error:?}");
        }
        // An address is accepted if no source names a host, or if the source of the address also
        // names the host.
        for env in [
            &[("PGHOSTADDR", "10.0.0.7")][..],
            &[("PGHOSTADDR", "10.0.0.7"), ("PGHOST", "h")],
        ] {
            assert_eq!(
                gathered("postgres://u@/d", env).unwrap()["hostaddr"],
                "10.0.0.7"
            );
        }
    }

    #[test]
    fn an_unsupported_variable_is_refused_by_name() {
        let error = gathered("postgres://u@h/d", &[("PGREQUIREPEER", "ter2")]).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::InvalidTarget);
        assert!(error.to_string().starts_with("PGREQUIREPEER: "), "{error}");
        assert!(!format!("{error:?}").contains("ter2"), "{error:?}");
    }

    /// Our parsers of pairs and of URLs read the same values as tokio-postgres, even from texts that
    /// are hard to parse.
    #[test]
    fn urls_and_key_value_pairs_are_parsed_as_tokio_postgres_parses_them() {
        let values = [
            "plain",
            "it's",
            "a b",
            "\\",
            "a\\'b",
            "ü=1",
            "%40@:/?#&",
            "'",
            " x ",
        ];
        for password in values {
            for dbname in values {
                let escaped = |text: &str| text.replace('\\', "\\\\").replace('\'', "\\'");
                let pairs = format!(
                    "host=a,b port=1,2 user=relay password='{}' dbname='{}' connect_timeout=3",
                    escaped(password),
                    escaped(dbname)
                );
                let encoded = |text: &str| -> String {
                    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
                };
                let url = format!(
                    "postgresql://relay:{}@a:1,b:2/{}?connect_timeout=3",
                    encoded(password),
                    encoded(dbname)
                );
                for text in [&pairs, &url] {
                    let ours = gathered(text, &[]).unwrap();
                    let theirs: tokio_postgres::Config = text.parse().unwrap();
                    assert_eq!(ours["password"].as_bytes(), theirs.get_password().unwrap());
                    assert_eq!(Some(ours["dbname"].as_str()), theirs.get_dbname(), "{text}");
                    assert_eq!(Some(ours["user"].as_str()), theirs.get_user());
                    let hosts: Vec<String> = theirs
                        .get_hosts()
                        .iter()
                        .map(|host| match host {
                            tokio_postgres::config::Host::Tcp(name) => name.clone(),
                            other => format!("{other:?}"),
                        })
                        .collect();
                    assert_eq!(ours["host"], hosts.join(","));
                    assert_eq!(theirs.get_ports(), [1, 2]);
                    assert_eq!((&*ours["port"], &*ours["connect_timeout"]), ("1,2", "3"));
                }
            }
        }
    }
}
