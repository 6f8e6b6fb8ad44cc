//! Parses a connection URL into libpq's parameters.
//!
//! An unencoded `@`, `/` or `?` in a password moves a part of the password into the host, the port,
//! the database or a parameter, and from there into messages. So an ambiguous URL is refused, and no
//! error here shows any part of the URL: errors contain only the place and libpq's own parameter names.
//!
//! Source: <https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNSTRING-URIS>

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::parameters::{self, Usage};
use crate::environment::Environment;
use crate::error::{ErrorKind, ReplicationError, Result};

/// Values by parameter name.
pub(super) type Parameters = BTreeMap<&'static str, String>;

const ENCODE: &str = "percent-encode special characters in user, password and parameters: \
    @ is %40, : is %3A, / is %2F, ? is %3F, # is %23, % is %25, a space is %20";

/// Parses a URL; an empty URL has no parameters.
///
/// # Errors
/// `InvalidTarget`.
pub(super) fn parse(url: &str) -> Result<Parameters> {
    let mut found = Parameters::new();
    if url.is_empty() {
        return Ok(found);
    }
    let rest = ["postgres://", "postgresql://"]
        .into_iter()
        .find_map(|scheme| url.strip_prefix(scheme))
        .ok_or_else(|| invalid("DATABASE_URL does not start with postgres://"))?;
    let (login, rest) = split_login(rest)?;
    if let Some(login) = login {
        let (user, password) = match login.split_once(':') {
            Some((user, password)) => (user, Some(password)),
            None => (login, None),
        };
        insert(&mut found, "user", &decode(user)?);
        if let Some(password) = password {
            insert(&mut found, "password", &decode(password)?);
        }
    }
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (server, database) = rest.split_once('/').unwrap_or((rest, ""));
    let (host, port) = split_server(server)?;
    insert(&mut found, "host", &decode(host)?);
    insert(&mut found, "port", &decode(port)?);
    insert(&mut found, "dbname", &decode(database)?);
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    for (index, pair) in pairs.enumerate() {
        parameter(&mut found, index + 1, pair)?;
    }
    Ok(found)
}

/// The part before the `@`, and the rest.
fn split_login(url: &str) -> Result<(Option<&str>, &str)> {
    let Some((login, rest)) = url.split_once('@') else {
        return Ok((None, url));
    };
    if login.contains(['/', '?']) || rest.contains('@') {
        let what = "DATABASE_URL can be read in more than one way: it has an unencoded @, / or ? in \
            the wrong place";
        return Err(invalid(what).hint(ENCODE));
    }
    Ok((Some(login), rest))
}

/// Host and port; a host in brackets is an IPv6 address.
fn split_server(server: &str) -> Result<(&str, &str)> {
    if server.contains(',') {
        return Err(several_hosts());
    }
    if let Some(inner) = server.strip_prefix('[') {
        let (address, behind) = inner
            .split_once(']')
            .ok_or_else(|| invalid("DATABASE_URL has a [ without a ]"))?;
        return match (behind, behind.strip_prefix(':')) {
            ("", _) => Ok((address, "")),
            (_, Some(port)) => Ok((address, port)),
            (_, None) => Err(invalid(
                "DATABASE_URL has characters after the ] of its host",
            )),
        };
    }
    let (host, port) = server.split_once(':').unwrap_or((server, ""));
    if port.contains(':') {
        return Err(
            invalid("DATABASE_URL has two colons in host and port").hint(format!(
                "write an IPv6 address in brackets: [::1]; {ENCODE}"
            )),
        );
    }
    Ok((host, port))
}

/// One `name=value` of the query.
fn parameter(found: &mut Parameters, nth: usize, pair: &str) -> Result<()> {
    let place = format!("parameter {nth} after the ? of DATABASE_URL");
    let (name, value) = pair
        .split_once('=')
        .filter(|(_, value)| !value.contains('='))
        .ok_or_else(|| invalid(format!("{place} is not of the form name=value")).hint(ENCODE))?;
    let (name, value) = (decode(name)?, decode(value)?);
    // JDBC's spelling, which libpq also accepts.
    if name == "ssl" && value == "true" {
        insert(found, "sslmode", "require");
        return Ok(());
    }
    let Some(known) = parameters::find(&name) else {
        // The name is not shown: it may be a part of a password.
        let unknown = invalid(format!("{place} is not a parameter of libpq"));
        return Err(match parameters::nearest(&name) {
            Some(known) => unknown.hint(format!("did you mean `{known}`?")),
            None => unknown.hint(ENCODE),
        });
    };
    check(known, &value, "DATABASE_URL")?;
    insert(found, known.name, &value);
    Ok(())
}

/// Fills in parameters that the URL omits from the environment.
///
/// # Errors
/// `InvalidTarget`: a variable of libpq is set that Postrider does not support.
pub(super) fn fill_in(
    found: &mut Parameters,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<()> {
    for parameter in parameters::PARAMETERS {
        if parameter.variable.is_empty() || found.contains_key(parameter.name) {
            continue;
        }
        if let Some(value) = variable(parameter.variable).filter(|value| !value.is_empty()) {
            check(parameter, &value, parameter.variable)?;
            insert(found, parameter.name, &value);
        }
    }
    Ok(())
}

/// Whether to name the host in the TLS handshake (`sslsni`).
pub(super) fn ssl_sni(found: &Parameters) -> Result<bool> {
    match found.get("sslsni").map(String::as_str) {
        None | Some("1") => Ok(true),
        Some("0") => Ok(false),
        Some(_) => Err(invalid("sslsni is neither 0 nor 1")),
    }
}

/// libpq's default password file, `~/.pgpass`.
pub(super) fn default_password_file(env: &Environment) -> Option<PathBuf> {
    let home = Path::new(env.get("HOME")?);
    home.is_absolute().then(|| home.join(".pgpass"))
}

/// Refuses parameters that Postrider does not support.
fn check(parameter: &parameters::Parameter, value: &str, place: &str) -> Result<()> {
    let name = parameter.name;
    if value.contains('\0') {
        return Err(invalid(format!(
            "{place}: `{name}` contains a NUL character"
        )));
    }
    match parameter.usage {
        Usage::Honoured => Ok(()),
        Usage::OnlyWith(values, _) if values.contains(&value) => Ok(()),
        Usage::OnlyWith(_, hint) => Err(invalid(format!(
            "{place}: this value of the connection parameter `{name}` is not supported"
        ))
        .hint(hint)),
        Usage::Refused(hint) => Err(invalid(format!(
            "{place}: the connection parameter `{name}` is not supported"
        ))
        .hint(hint)),
    }
}

/// Ignores an empty value, as libpq does.
fn insert(found: &mut Parameters, name: &'static str, value: &str) {
    if !value.is_empty() {
        found.insert(name, value.to_owned());
    }
}

fn decode(text: &str) -> Result<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let hex = rest
            .get(..2)
            .filter(|hex| hex.iter().all(u8::is_ascii_hexdigit));
        let hex = hex.and_then(|hex| std::str::from_utf8(hex).ok());
        let value = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        let value = value.filter(|value| *value != 0).ok_or_else(|| {
            invalid("DATABASE_URL has a % without two hexadecimal digits after it, or %00")
                .hint(ENCODE)
        })?;
        bytes.push(value);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).map_err(|_| invalid("DATABASE_URL is not UTF-8"))
}

pub(super) fn several_hosts() -> ReplicationError {
    invalid("DATABASE_URL names several hosts")
        .hint("name one host: the primary, or an address that follows the primary")
}

pub(super) fn invalid(what: impl Into<String>) -> ReplicationError {
    ReplicationError::new(ErrorKind::InvalidTarget, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_url_becomes_a_parameter() {
        let url = "postgresql://us%40er:pass:word@[::1]:6543/the%20shop?sslmode=require&ssl=true";
        let found = parse(url).unwrap();
        let pairs: Vec<(&str, &str)> = found.iter().map(|(n, v)| (*n, v.as_str())).collect();
        assert_eq!(
            pairs,
            [
                ("dbname", "the shop"),
                ("host", "::1"),
                ("password", "pass:word"),
                ("port", "6543"),
                ("sslmode", "require"),
                ("user", "us@er"),
            ]
        );
        assert_eq!(parse("postgres:///d?host=%2Frun").unwrap()["host"], "/run");
        assert!(parse("").unwrap().is_empty());
    }

    #[test]
    fn an_ambiguous_url_is_refused_without_showing_it() {
        for url in [
            "postgres://u:hun@ter2@h/d",
            "postgres://u:hun/ter2@h/d",
            "postgres://u:1234/ter2@h/d",
            "postgres://u:hun?ter2@h/d",
            "postgres://u:1234?ter2=x@h/d",
            "postgres://u:hun%ter2@h/d",
            "postgres://u@h/d?password=hun&ter2=1",
            "postgres://u@h/d?ter2",
            "postgres://u@h/d?sslmode=require=ter2",
            "postgres://ter2:hun:3@@h/d",
            "ter2://u:p@h/d",
        ] {
            let error = parse(url).unwrap_err();
            assert_eq!(error.kind(), &ErrorKind::InvalidTarget, "{url}");
            let shown = format!("{error} {error:?} {}", error.hint_text());
            assert!(
                !shown.contains("ter2") && !shown.contains("hun"),
                "{url}: {shown}"
            );
        }
    }

    #[test]
    fn several_hosts_are_refused() {
        for url in ["postgres://u@a,b/d", "postgres://u@a:1,b:2/d"] {
            assert!(
                parse(url)
                    .unwrap_err()
                    .to_string()
                    .contains("several hosts"),
                "{url}"
            );
        }
    }

    #[test]
    fn each_libpq_parameter_is_supported_or_refused_with_a_hint() {
        for parameter in parameters::PARAMETERS {
            let name = parameter.name;
            let parsed = parse(&format!("postgres://u@h/d?{name}=ter2"));
            match parameter.usage {
                Usage::Honoured => assert_eq!(parsed.unwrap()[name], "ter2"),
                Usage::OnlyWith(values, hint) => {
                    let error = parsed.unwrap_err();
                    assert!(error.to_string().contains(&format!("`{name}`")), "{error}");
                    assert_eq!(error.hint_text(), hint);
                    for value in values {
                        parse(&format!("postgres://u@h/d?{name}={value}")).unwrap();
                    }
                }
                Usage::Refused(hint) => {
                    let error = parsed.unwrap_err();
                    assert!(error.to_string().contains(&format!("`{name}`")), "{error}");
                    assert_eq!(error.hint_text(), hint);
                }
            }
        }
    }

    #[test]
    fn an_unsupported_variable_is_refused_and_the_url_wins_over_variables() {
        let mut found = parse("postgres://u@h/d?sslmode=require").unwrap();
        let environment = |name: &str| match name {
            "PGSSLMODE" => Some("disable".to_owned()),
            "PGPORT" => Some("6543".to_owned()),
            "PGUSER" => Some(String::new()),
            _ => None,
        };
        fill_in(&mut found, environment).unwrap();
        assert_eq!(
            (found["sslmode"].as_str(), found["port"].as_str()),
            ("require", "6543")
        );
        let service = |name: &str| (name == "PGSERVICE").then(|| "shop".to_owned());
        let error = fill_in(&mut found, service).unwrap_err();
        assert!(error.to_string().starts_with("PGSERVICE: "), "{error}");
    }
}
