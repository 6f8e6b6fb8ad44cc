//! Settings that every session of ours starts with, so that what a role or a database sets for its
//! sessions does not change what Postrider does.
//!
//! They travel in the startup packet, which wins over the role and the database. What the operator
//! asks for in the connection parameter `options` comes first, and may not set any of these.

use super::url::invalid;
use crate::error::Result;

/// For SQL sessions and replication sessions alike.
const COMMON: &[(&str, &str)] = &[
    // Names in our statements mean PostgreSQL's own functions, operators, types and tables, never
    // those that some role has put into a schema of a longer search path. Ours are written with
    // their schema.
    ("search_path", "pg_catalog,pg_temp"),
    // An administrator sets it as a default for others, or a service when its disk is full. The
    // relay has to record outcomes, and only then may the server remove log.
    ("default_transaction_read_only", "off"),
    // The relay sets a limit of its own where one is wanted.
    ("lock_timeout", "0"),
    ("idle_in_transaction_session_timeout", "0"),
    ("idle_session_timeout", "0"),
    ("timezone", "UTC"),
    ("datestyle", "ISO"),
    ("bytea_output", "hex"),
    ("tcp_user_timeout", "0"),
];

/// For SQL sessions.
const SQL: &[(&str, &str)] = &[
    // Without it a policy hides rows without a word; with it the server refuses (42501).
    ("row_security", "off"),
    // Who looks a second time in one transaction wants to see what is new.
    ("default_transaction_isolation", "read\\ committed"),
    ("synchronous_commit", "on"),
    ("standard_conforming_strings", "on"),
    ("tcp_keepalives_idle", "10"),
    ("tcp_keepalives_interval", "5"),
    ("tcp_keepalives_count", "2"),
];

/// Those with a value of the caller's: the first of SQL sessions, the second of replication
/// sessions.
const STATEMENT_TIMEOUT: &str = "statement_timeout";
const WAL_SENDER_TIMEOUT: &str = "wal_sender_timeout";

/// The startup option `options` of an SQL session.
pub(super) fn of_sql(operators: Option<&str>, statement_timeout_ms: u128) -> String {
    let timeout = statement_timeout_ms.to_string();
    let settings = COMMON.iter().chain(SQL).copied();
    join(
        operators,
        settings.chain([(STATEMENT_TIMEOUT, timeout.as_str())]),
    )
}

/// The startup option `options` of a replication session.
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

/// Refuses `options` that set what Postrider sets itself.
///
/// # Errors
/// `database-url-invalid`, which names the setting.
pub(super) fn check_options(options: &str) -> Result<()> {
    let words = words(options).ok_or_else(|| {
        invalid("the connection parameter `options` ends within a backslash escape")
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
                "the connection parameter `options` sets `{name}`, which Postrider sets itself"
            ))
            .hint(format!("take `{name}` out of `options`")));
        }
    }
    Ok(())
}

/// Splits at white space that no backslash precedes, as the server does; `None` when the last
/// backslash has nothing behind it.
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
    fn what_the_operator_asks_for_comes_before_our_own_settings() {
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
    fn options_that_set_our_own_settings_are_refused_however_they_are_written() {
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
                error.what().contains("which Postrider sets itself"),
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
