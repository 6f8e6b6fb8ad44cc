//! PostgreSQL 17 can end a transaction, and with it the session, after a time that the role or the
//! database sets. A walsender counts as one that is in a transaction, so that the stream ended
//! again and again.
//!
//! Older servers refuse a session that names a setting which they lack, so it cannot be among the
//! options of the start: it is turned off by a statement, on servers that have it.

/// The first major that has it.
const MAJOR: u32 = 17;

/// The statement that turns it off for a session.
pub(crate) const OFF: &str = "SET transaction_timeout = 0";

/// Whether a server has it, by its parameter `server_version`, such as `17.5 (Debian 17.5-1)`.
pub(crate) fn exists(server_version: Option<&str>) -> bool {
    let major = server_version.and_then(|version| {
        let digits = version.split(|c: char| !c.is_ascii_digit()).next()?;
        digits.parse::<u32>().ok()
    });
    major.is_some_and(|major| major >= MAJOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_is_there_from_17_on_whatever_follows_the_number() {
        for version in ["17.5 (Debian 17.5-1)", "17", "18beta1", "19devel"] {
            assert!(exists(Some(version)), "{version}");
        }
        for version in [Some("16.9"), Some("9.6.24"), Some(""), Some("x"), None] {
            assert!(!exists(version), "{version:?}");
        }
    }
}
