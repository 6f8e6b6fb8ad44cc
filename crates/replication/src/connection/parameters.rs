//! libpq's connection parameters: those that Postrider supports, and the hints for those it refuses.
//!
//! No parameter is ignored silently. A parameter that is missing here does not exist in libpq.
//!
//! Source: <https://www.postgresql.org/docs/18/libpq-connect.html#LIBPQ-PARAMKEYWORDS>

use strsim::levenshtein;

/// What Postrider does with a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Usage {
    /// `Target` reads it.
    Honoured,
    /// Only these values, which Postrider satisfies anyway; other values are refused with this hint.
    OnlyWith(&'static [&'static str], &'static str),
    /// Refused, with this hint.
    Refused(&'static str),
}

/// One connection parameter.
#[derive(Debug)]
pub(super) struct Parameter {
    pub(super) name: &'static str,
    /// The environment variable to read if the URL omits the parameter; empty if there is none.
    pub(super) variable: &'static str,
    pub(super) usage: Usage,
}

use Usage::{Honoured, OnlyWith, Refused};

const NO_GSSAPI: &str =
    "Postrider does not support GSSAPI logins; use a password or a client certificate";
const NO_OAUTH: &str =
    "Postrider does not support OAuth logins; use a password or a client certificate";
const NO_REVOCATION: &str = "Postrider does not read revocation lists; leave the parameter out";
const NAMES: &str = "Postrider sets the name itself, to recognize its own sessions; leave the \
    parameter out";
const NO_SERVICE_FILE: &str = "Postrider does not read service files; put host, port, dbname and user \
    into DATABASE_URL";

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
    // Has no effect: libpq uses it only for sessions without a name.
    honoured("fallback_application_name", ""),
    refused("application_name", "", NAMES),
    only_with(
        "client_encoding",
        "",
        &["utf8", "UTF8", "utf-8", "UTF-8"],
        "Postrider's sessions use UTF8; leave the parameter out",
    ),
    only_with(
        "load_balance_hosts",
        "PGLOADBALANCEHOSTS",
        &["disable"],
        "Postrider connects to one host; leave the parameter out",
    ),
    only_with(
        "sslnegotiation",
        "PGSSLNEGOTIATION",
        &["postgres"],
        "Postrider supports only PostgreSQL's usual TLS negotiation; leave the parameter out",
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
        "Postrider sends the client certificate that sslcert names when the server asks for one; \
         leave the parameter out",
    ),
    only_with(
        "gssencmode",
        "PGGSSENCMODE",
        &["disable", "prefer"],
        "Postrider does not support GSSAPI encryption; use sslmode=verify-full",
    ),
    only_with("gssdelegation", "PGGSSDELEGATION", &["0"], NO_GSSAPI),
    only_with(
        "min_protocol_version",
        "PGMINPROTOCOLVERSION",
        &["3.0"],
        "Postrider speaks protocol 3.0; leave the parameter out",
    ),
    only_with(
        "max_protocol_version",
        "PGMAXPROTOCOLVERSION",
        &["3.0", "3.2", "latest"],
        "Postrider speaks protocol 3.0; leave the parameter out",
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
        "Postrider does not check the owner of a Unix socket; leave the parameter out",
    ),
    refused(
        "sslpassword",
        "",
        "Postrider reads only unencrypted keys; set sslkey to a key without a password",
    ),
    refused("sslcrl", "PGSSLCRL", NO_REVOCATION),
    refused("sslcrldir", "PGSSLCRLDIR", NO_REVOCATION),
    refused(
        "sslkeylogfile",
        "",
        "Postrider writes no TLS keys to a file; leave the parameter out",
    ),
    refused("service", "PGSERVICE", NO_SERVICE_FILE),
    refused("servicefile", "PGSERVICEFILE", NO_SERVICE_FILE),
    refused(
        "replication",
        "",
        "Postrider sets this parameter itself; leave it out",
    ),
    refused("krbsrvname", "PGKRBSRVNAME", NO_GSSAPI),
    refused("gsslib", "PGGSSLIB", NO_GSSAPI),
    refused(
        "scram_client_key",
        "",
        "Postrider logs in with a password; set the password instead",
    ),
    refused(
        "scram_server_key",
        "",
        "Postrider logs in with a password; set the password instead",
    ),
    refused("oauth_issuer", "", NO_OAUTH),
    refused("oauth_client_id", "", NO_OAUTH),
    refused("oauth_client_secret", "", NO_OAUTH),
    refused("oauth_scope", "", NO_OAUTH),
];

/// The parameter with this name.
pub(super) fn find(name: &str) -> Option<&'static Parameter> {
    PARAMETERS.iter().find(|parameter| parameter.name == name)
}

/// The parameter with the name most similar to the unknown `name`.
pub(super) fn nearest(name: &str) -> Option<&'static str> {
    let names = PARAMETERS.iter().map(|parameter| parameter.name);
    let with_distance = names.map(|known| (levenshtein(known, name), known));
    let (distance, known) = with_distance.min()?;
    (distance <= 2).then_some(known)
}

/// Whether this environment variable is one of libpq's that `PARAMETERS` lists.
pub fn is_connection_variable(name: &str) -> bool {
    let mut variables = PARAMETERS.iter().map(|parameter| parameter.variable);
    !name.is_empty() && variables.any(|variable| variable == name)
}
