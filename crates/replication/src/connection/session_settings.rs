//! The settings with which sessions start, so that settings of the role or the database cannot
//! change how a session behaves.
//!
//! We send these settings in the startup packet, where they override the settings of the role and the
//! database. The startup packet also contains the operator's connection parameter `options`, which is refused
//! if it sets one of our settings.

use super::parameters::invalid;
use crate::error::Result;

/// Settings that SQL sessions and replication sessions have in common.
const COMMON: &[(&str, &str)] = &[
    // Unqualified names in our statements must refer to PostgreSQL's own functions, operators,
    // types and tables, never to objects that another role created in a schema of the search path.
    // Our own tables are always written with their schema.
    ("search_path", "pg_catalog,pg_temp"),
    // The relay must be able to record outcomes even if an administrator has made all sessions
    // read-only. Managed services make sessions read-only when the disk is full. If old WAL fills the
    // disk, the server can remove this WAL only after the relay has recorded the outcomes.
    ("default_transaction_read_only", "off"),
    // The relay sets its own time limits where it needs them.
    ("lock_timeout", "0"),
    ("idle_in_transaction_session_timeout", "0"),
    ("idle_session_timeout", "0"),
    // The text of a value must not depend on the role, because event ids are derived from that text.
    ("timezone", "UTC"),
    ("datestyle", "ISO"),
    ("intervalstyle", "postgres"),
    ("extra_float_digits", "1"),
    ("quote_all_identifiers", "off"),
    ("bytea_output", "hex"),
    // The relay logs every notice of the walsender as a warning, so the server must not send
    // notices of lower levels.
    ("client_min_messages", "warning"),
    ("tcp_user_timeout", "0"),
];

/// Further settings, for SQL sessions only.
const SQL: &[(&str, &str)] = &[
    // If a row-level security policy would hide rows, let the server refuse the query (42501). With
    // `on`, the query would succeed without these rows, and nobody would notice.
    ("row_security", "off"),
    // A second query in the same transaction must see rows that were committed after the first
    // query.
    ("default_transaction_isolation", "read\\ committed"),
    ("synchronous_commit", "on"),
    ("standard_conforming_strings", "on"),
    ("tcp_keepalives_idle", "10"),
    ("tcp_keepalives_interval", "5"),
    ("tcp_keepalives_count", "2"),
];

/// The caller of [`of_sql`] chooses the value of this setting. A replication session has no statement
/// timeout.
const STATEMENT_TIMEOUT: &str = "statement_timeout";
/// The caller of [`of_replication`] chooses the value of this setting.
const WAL_SENDER_TIMEOUT: &str = "wal_sender_timeout";

/// Builds the startup parameter `options` of an SQL session. `operators` is the operator's own
/// `options`.
pub fn of_sql(operators: Option<&str>, statement_timeout_ms: u128) -> String {
    let timeout = statement_timeout_ms.to_string();
    let settings = COMMON.iter().chain(SQL).copied();
    join(
        operators,
        settings.chain([(STATEMENT_TIMEOUT, timeout.as_str())]),
    )
}

/// Builds the startup parameter `options` of a replication session. `operators` is the operator's
/// own `options`.
pub(crate) fn of_replication(operators: Option<&str>, wal_sender_timeout_ms: u128) -> String {
    let timeout = wal_sender_timeout_ms.to_string();
    let own = [
        (STATEMENT_TIMEOUT, "0"),
        (WAL_SENDER_TIMEOUT, timeout.as_str()),
    ];
    join(operators, COMMON.iter().copied().chain(own))
}

fn join<'a>(operators: Option<&str>, settings: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let own = settings.map(|(name, value)| format!("-c {name}={value}"));
    let all: Vec<String> = operators
        .map(str::to_owned)
        .into_iter()
        .chain(own)
        .collect();
    all.join(" ")
}

/// Refuses `options` that contain a setting which this crate sets itself.
///
/// # Errors
/// `InvalidTarget`, which names the setting.
pub(super) fn check_options(options: &str) -> Result<()> {
    let words = words(options).ok_or_else(|| {
        invalid("the connection parameter `options` ends with a single backslash")
    })?;
    let mut is_value_next = false;
    for word in &words {
        let assignment = match word.as_str() {
            "-c" => {
                is_value_next = true;
                continue;
            }
            word if is_value_next => word,
            word => word
                .strip_prefix("--")
                .or_else(|| word.strip_prefix("-c"))
                .unwrap_or_default(),
        };
        is_value_next = false;
        let name = assignment.split('=').next().unwrap_or_default();
        let name = name.to_ascii_lowercase().replace('-', "_");
        let ours = COMMON.iter().chain(SQL).map(|(name, _)| *name);
        let mut ours = ours.chain([STATEMENT_TIMEOUT, WAL_SENDER_TIMEOUT]);
        if let Some(name) = ours.find(|ours| *ours == name) {
            return Err(invalid(format!(
                "the connection parameter `options` sets `{name}`, which the program sets itself"
            ))
            .hint(format!("remove `{name}` from `options`")));
        }
    }
    Ok(())
}

/// Splits `options` at unescaped white space, as the server does. `None` if the text ends with an
/// unescaped backslash.
fn words(options: &str) -> Option<Vec<String>> {
    let mut words = vec![String::new()];
    let mut characters = options.chars();
    while let Some(c) = characters.next() {
        match c {
            '\\' => words.last_mut()?.push(characters.next()?),
            c if c.is_ascii_whitespace() => words.push(String::new()),
            c => words.last_mut()?.push(c),
        }
    }
    words.retain(|word| !word.is_empty());
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operators_options_come_before_ours() {
        let options = of_sql(Some("endpoint=ep-1 -c geqo=off"), 5000);
        assert!(
            options.starts_with("endpoint=ep-1 -c geqo=off -c search_path=pg_catalog,pg_temp ")
        );
        assert!(options.ends_with(" -c statement_timeout=5000"));
        let options = of_replication(None, 60_000);
        assert!(options.starts_with("-c search_path=pg_catalog,pg_temp "));
        assert!(options.ends_with(" -c statement_timeout=0 -c wal_sender_timeout=60000"));
    }

    #[test]
    fn options_that_override_ours_are_refused_in_every_spelling() {
        for options in [
            "-c search_path=evil",
            "-csearch_path=evil",
            "--search_path=evil",
            "--search-path=evil",
            "-c geqo=off -c SEARCH_PATH=evil",
            "-c sear\\ch_path=evil",
            "-c\tstatement_timeout=1",
        ] {
            let error = check_options(options).unwrap_err();
            assert!(
                error.to_string().contains("which the program sets itself"),
                "{options}"
            );
            assert!(!error.to_string().contains("evil"), "{error}");
        }
        assert!(check_options("-c geqo=off \\").is_err());
        for options in ["endpoint=ep-1", "-c geqo=off", "--work-mem=1MB", ""] {
            check_options(options).unwrap();
        }
    }
}
