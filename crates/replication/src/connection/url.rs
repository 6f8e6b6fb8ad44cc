//! Parses a connection URL into libpq's parameters.
//!
//! If a password contains an unencoded `@`, `/` or `?`, a part of the password would be read as host,
//! port, database or parameter, and messages would show this part. So the parser refuses an ambiguous
//! URL. Its errors show no part of the URL, only the position of the problem and libpq's own
//! parameter names.
//!
//! Source: <https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNSTRING-URIS>

use super::parameters::{self, Parameters, insert, invalid};
use crate::error::Result;

const ENCODE: &str = "percent-encode special characters in user, password and parameters: \
    @ is %40, : is %3A, / is %2F, ? is %3F, # is %23, % is %25, a space is %20";

/// Parses a URL.
///
/// # Errors
/// `InvalidTarget`.
pub(super) fn parse(url: &str) -> Result<Parameters> {
    let mut found = Parameters::new();
    let rest = ["postgres://", "postgresql://"]
        .into_iter()
        .find_map(|scheme| url.strip_prefix(scheme))
        .ok_or_else(|| {
            let what = "DATABASE_URL is neither a URL that starts with postgres:// nor a list of parameters";
            invalid(what).hint(
                "write postgres://user:password@host:5432/database, or host=HOST port=5432 user=USER dbname=DATABASE",
            )
        })?;
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
    let (hosts, ports) = split_servers(server)?;
    insert(&mut found, "host", &decode(&hosts)?);
    insert(&mut found, "port", &decode(&ports)?);
    insert(&mut found, "dbname", &decode(database)?);
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    for (index, pair) in pairs.enumerate() {
        parameter(&mut found, index + 1, pair)?;
    }
    Ok(found)
}

/// Splits the URL at the `@` into the login and the rest.
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

/// Returns the hosts and the ports as two comma-separated lists. The list of ports is empty if no
/// host has a port.
fn split_servers(servers: &str) -> Result<(String, String)> {
    let pairs = servers.split(',').map(split_server);
    let (hosts, ports): (Vec<&str>, Vec<&str>) = pairs.collect::<Result<_>>()?;
    let has_port = ports.iter().any(|port| !port.is_empty());
    let ports = if has_port {
        ports.join(",")
    } else {
        String::new()
    };
    Ok((hosts.join(","), ports))
}

/// Splits one server into host and port. A host in brackets is an IPv6 address.
fn split_server(server: &str) -> Result<(&str, &str)> {
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

/// Adds one `name=value` pair of the URL's query to `found`.
fn parameter(found: &mut Parameters, nth: usize, pair: &str) -> Result<()> {
    let location = format!("parameter {nth} after the ? of DATABASE_URL");
    let (name, value) = pair
        .split_once('=')
        .filter(|(_, value)| !value.contains('='))
        .ok_or_else(|| invalid(format!("{location} is not of the form name=value")).hint(ENCODE))?;
    let (name, value) = (decode(name)?, decode(value)?);
    // This is JDBC's spelling, which libpq accepts too.
    if name == "ssl" && value == "true" {
        insert(found, "sslmode", "require");
        return Ok(());
    }
    let known = parameters::named(&name, &location, ENCODE)?;
    parameters::set(found, known, &value, "DATABASE_URL")
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

#[cfg(test)]
mod tests {
    use super::super::parameters::Usage;
    use super::*;
    use crate::error::ErrorKind;

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
    fn several_hosts_become_lists_of_hosts_and_ports() {
        for (url, hosts, ports) in [
            ("postgres://u@a,b/d", "a,b", None),
            ("postgres://u@a:1,b:2/d", "a,b", Some("1,2")),
            ("postgres://u@a,[::1]:2,%2Frun/d", "a,::1,/run", Some(",2,")),
            ("postgres://u@/d?host=a,b&port=1,2", "a,b", Some("1,2")),
        ] {
            let found = parse(url).unwrap();
            assert_eq!(found["host"], hosts, "{url}");
            assert_eq!(found.get("port").map(String::as_str), ports, "{url}");
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
}
