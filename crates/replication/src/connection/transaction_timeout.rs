//! Turns off the setting `transaction_timeout` of PostgreSQL 17 and newer.
//!
//! A role or a database may set this timeout. It ends a long transaction together with its session. PostgreSQL
//! treats a walsender as if it were in a transaction, so the timeout would end the stream again and again.
//!
//! This setting cannot be one of the startup options, because servers before 17 refuse a session
//! with an unknown setting. So we turn the timeout off with a statement after the login, on servers
//! that have the setting.

/// First PostgreSQL major version that has the setting.
const MAJOR: u32 = 17;

/// The statement that turns the timeout off in a session.
pub const OFF: &str = "SET transaction_timeout = 0";

/// Whether a server of this version has the setting. `server_version` is the value of the parameter
/// that the server reports under this name, such as `17.5 (Debian 17.5-1)`.
pub fn exists(server_version: Option<&str>) -> bool {
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
    fn the_setting_exists_from_17_on_with_any_version_suffix() {
        for version in ["17.5 (Debian 17.5-1)", "17", "18beta1", "19devel"] {
            assert!(exists(Some(version)), "{version}");
        }
        for version in [Some("16.9"), Some("9.6.24"), Some(""), Some("x"), None] {
            assert!(!exists(version), "{version:?}");
        }
    }
}
