//! Lists all connection parameters of libpq, and says which ones are supported. A parameter or a value that
//! is not supported is refused with a hint. Only `fallback_application_name` is ignored silently.
//!
//! Source: <https://www.postgresql.org/docs/18/libpq-connect.html#LIBPQ-PARAMKEYWORDS>

use std::collections::BTreeMap;

use crate::error::{ErrorKind, ReplicationError, Result};
use strsim::levenshtein;

/// The values of connection parameters, by parameter name.
pub(super) type Parameters = BTreeMap<&'static str, String>;

/// Our treatment of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Usage {
    /// Supported: the value is used.
    Honoured,
    /// Accepted only with one of these values, which request our normal behaviour. Any other value
    /// is refused with this hint.
    OnlyWith(&'static [&'static str], &'static str),
    /// Refused, with this hint.
    Refused(&'static str),
}

#[derive(Debug)]
pub(super) struct Parameter {
    pub(super) name: &'static str,
    /// The environment variable that sets the parameter if neither `DATABASE_URL` nor the service
    /// does. Empty if there is no such variable.
    pub(super) variable: &'static str,
    pub(super) usage: Usage,
}

use Usage::{Honoured, OnlyWith, Refused};

const NO_GSSAPI: &str = "GSSAPI logins are not supported; use a password or a client certificate";
const NO_OAUTH: &str = "OAuth logins are not supported; use a password or a client certificate";
const NO_REVOCATION: &str = "revocation lists are not supported; leave the parameter out";
const NAMES: &str = "the program sets the name itself, to recognize its own sessions; leave the \
    parameter out";

const fn honoured(name: &'static str, variable: &'static str) -> Parameter {
    Parameter {
        name,
        variable,
        usage: Honoured,
    }
}

const fn only_with(
    name: &'static str,
    variable: &'static str,
    values: &'static [&'static str],
    hint: &'static str,
) -> Parameter {
    Parameter {
        name,
        variable,
        usage: OnlyWith(values, hint),
    }
}

const fn refused(name: &'static str, variable: &'static str, hint: &'static str) -> Parameter {
    Parameter {
        name,
        variable,
        usage: Refused(hint),
    }
}

/// Every parameter of libpq 18.
pub(super) const PARAMETERS: &[Parameter] = &[
    honoured("service", "PGSERVICE"),
    honoured("servicefile", "PGSERVICEFILE"),
    honoured("host", "PGHOST"),
    honoured("hostaddr", "PGHOSTADDR"),
    honoured("port", "PGPORT"),
    honoured("dbname", "PGDATABASE"),
    honoured("user", "PGUSER"),
    honoured("password", "PGPASSWORD"),
    honoured("passfile", "PGPASSFILE"),
    honoured("channel_binding", "PGCHANNELBINDING"),
    honoured("connect_timeout", "PGCONNECT_TIMEOUT"),
    honoured("options", "PGOPTIONS"),
    honoured("target_session_attrs", "PGTARGETSESSIONATTRS"),
    honoured("keepalives", ""),
    honoured("keepalives_idle", ""),
    honoured("keepalives_interval", ""),
    honoured("keepalives_count", ""),
    honoured("tcp_user_timeout", ""),
    honoured("sslmode", "PGSSLMODE"),
    honoured("sslrootcert", "PGSSLROOTCERT"),
    honoured("sslcert", "PGSSLCERT"),
    honoured("sslkey", "PGSSLKEY"),
    honoured("sslsni", "PGSSLSNI"),
    honoured("ssl_min_protocol_version", "PGSSLMINPROTOCOLVERSION"),
    honoured("ssl_max_protocol_version", "PGSSLMAXPROTOCOLVERSION"),
    // Has no effect, because libpq uses this parameter only for sessions without an `application_name`, and
    // our sessions have one.
    honoured("fallback_application_name", ""),
    refused("application_name", "", NAMES),
    only_with(
        "client_encoding",
        "",
        &["utf8", "UTF8", "utf-8", "UTF-8"],
        "sessions always use UTF8; leave the parameter out",
    ),
    only_with(
        "load_balance_hosts",
        "PGLOADBALANCEHOSTS",
        &["disable"],
        "hosts are tried in the order given; leave the parameter out",
    ),
    only_with(
        "sslnegotiation",
        "PGSSLNEGOTIATION",
        &["postgres"],
        "only PostgreSQL's usual TLS negotiation is supported; leave the parameter out",
    ),
    only_with(
        "sslcompression",
        "PGSSLCOMPRESSION",
        &["0"],
        "TLS compression is unsafe and not supported; leave the parameter out",
    ),
    only_with(
        "sslcertmode",
        "PGSSLCERTMODE",
        &["allow"],
        "the client certificate that sslcert names is sent when the server asks for one; \
         leave the parameter out",
    ),
    only_with(
        "gssencmode",
        "PGGSSENCMODE",
        &["disable", "prefer"],
        "GSSAPI encryption is not supported; use sslmode=verify-full",
    ),
    only_with("gssdelegation", "PGGSSDELEGATION", &["0"], NO_GSSAPI),
    only_with(
        "min_protocol_version",
        "PGMINPROTOCOLVERSION",
        &["3.0"],
        "only protocol 3.0 is supported; leave the parameter out",
    ),
    only_with(
        "max_protocol_version",
        "PGMAXPROTOCOLVERSION",
        &["3.0", "3.2", "latest"],
        "only protocol 3.0 is supported; leave the parameter out",
    ),
    refused(
        "require_auth",
        "PGREQUIREAUTH",
        "use channel_binding=require: it accepts only SCRAM logins",
    ),
    refused(
        "requiressl",
        "PGREQUIRESSL",
        "write sslmode=require, or better sslmode=verify-full",
    ),
    refused(
        "requirepeer",
        "PGREQUIREPEER",
        "the owner of a Unix socket is not checked; leave the parameter out",
    ),
    refused(
        "sslpassword",
        "",
        "only unencrypted keys are supported; set sslkey to a key without a password",
    ),
    refused("sslcrl", "PGSSLCRL", NO_REVOCATION),
    refused("sslcrldir", "PGSSLCRLDIR", NO_REVOCATION),
    refused(
        "sslkeylogfile",
        "",
        "TLS keys are never written to a file; leave the parameter out",
    ),
    refused(
        "replication",
        "",
        "the program sets this parameter itself; leave it out",
    ),
    refused("krbsrvname", "PGKRBSRVNAME", NO_GSSAPI),
    refused("gsslib", "PGGSSLIB", NO_GSSAPI),
    refused(
        "scram_client_key",
        "",
        "only logins with a password are supported; set the password instead",
    ),
    refused(
        "scram_server_key",
        "",
        "only logins with a password are supported; set the password instead",
    ),
    refused("oauth_issuer", "", NO_OAUTH),
    refused("oauth_client_id", "", NO_OAUTH),
    refused("oauth_client_secret", "", NO_OAUTH),
    refused("oauth_scope", "", NO_OAUTH),
];

/// Returns the parameter called `name`. `location` is the place where the name was found; errors show it.
///
/// # Errors
/// `InvalidTarget` if libpq has no such parameter. The error does not show `name`, which may be a piece of a
/// password. The error's hint suggests a parameter with a similar name, or is `hint` if no name is similar.
pub(super) fn named(name: &str, location: &str, hint: &str) -> Result<&'static Parameter> {
    let found = PARAMETERS.iter().find(|parameter| parameter.name == name);
    found.ok_or_else(|| {
        let unknown = invalid(format!("{location} is not a parameter of libpq"));
        match nearest(name) {
            Some(known) => unknown.hint(format!("did you mean `{known}`?")),
            None => unknown.hint(hint),
        }
    })
}

/// Finds the parameter whose name is most similar to the unknown `name`. `None` if every name
/// differs in more than two characters.
fn nearest(name: &str) -> Option<&'static str> {
    let names = PARAMETERS.iter().map(|parameter| parameter.name);
    let with_distance = names.map(|known| (levenshtein(known, name), known));
    let (distance, known) = with_distance.min()?;
    (distance <= 2).then_some(known)
}

/// Sets a parameter to `value`. `location` is the place where the value was found; errors show it. Like
/// libpq, ignores an empty value of a supported parameter.
///
/// # Errors
/// `InvalidTarget` if the parameter or this value is not supported, or if the value contains a NUL
/// character.
pub(super) fn set(
    found: &mut Parameters,
    parameter: &Parameter,
    value: &str,
    location: &str,
) -> Result<()> {
    let name = parameter.name;
    if value.contains('\0') {
        return Err(invalid(format!(
            "{location}: `{name}` contains a NUL character"
        )));
    }
    match parameter.usage {
        OnlyWith(values, hint) if !values.contains(&value) => Err(invalid(format!(
            "{location}: this value of the connection parameter `{name}` is not supported"
        ))
        .hint(hint)),
        Refused(hint) => Err(invalid(format!(
            "{location}: the connection parameter `{name}` is not supported"
        ))
        .hint(hint)),
        Honoured | OnlyWith(..) => {
            insert(found, name, value);
            Ok(())
        }
    }
}

/// Adds a value to `found`. Ignores an empty value, as libpq does.
pub(super) fn insert(found: &mut Parameters, name: &'static str, value: &str) {
    if !value.is_empty() {
        found.insert(name, value.to_owned());
    }
}

pub(super) fn invalid(what: impl Into<String>) -> ReplicationError {
    ReplicationError::new(ErrorKind::InvalidTarget, what)
}

/// Whether `name` is an environment variable of libpq that we read or refuse.
pub fn is_connection_variable(name: &str) -> bool {
    let mut variables = PARAMETERS.iter().map(|parameter| parameter.variable);
    !name.is_empty() && (name == "PGSYSCONFDIR" || variables.any(|variable| variable == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_page_says_what_happens_to_each_parameter() {
        let page = include_str!("../../../../docs/reference/connection.md");
        for parameter in PARAMETERS {
            let variable = match parameter.variable {
                "" => "|".to_owned(),
                variable => format!("`{variable}` |"),
            };
            let start = format!("| `{}` | {variable} ", parameter.name);
            let row = page.lines().find_map(|line| line.strip_prefix(&start));
            let row = row.unwrap_or_else(|| panic!("no row {start}"));
            match parameter.usage {
                Honoured => assert!(!row.starts_with("refused") && !row.starts_with("only")),
                OnlyWith(values, _) => {
                    assert!(row.starts_with("only "), "{row}");
                    assert!(row.contains(&format!("`{}`", values[0])) || row.contains("`UTF8`"));
                }
                Refused(_) => assert!(row.starts_with("refused"), "{row}"),
            }
        }
    }
}
