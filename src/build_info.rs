//! Provides the version and commit from which this program was built.
//!
//! The build of a release sets `POSTRIDER_COMMIT` and `POSTRIDER_COMMIT_DATE`. In any other build from a
//! git checkout, `build.rs` sets them from HEAD.

/// The version of the package.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit that was built; `None` if the build did not record it.
pub(crate) fn commit() -> Option<&'static str> {
    recorded(option_env!("POSTRIDER_COMMIT"))
}

/// The date of the commit that was built, such as `2026-11-21`; `None` if the build did not record it.
pub(crate) fn commit_date() -> Option<&'static str> {
    recorded(option_env!("POSTRIDER_COMMIT_DATE"))
}

/// Treats the placeholder `unknown` as not recorded. An image that was built by hand can have this
/// placeholder.
fn recorded(value: Option<&'static str>) -> Option<&'static str> {
    value.filter(|value| !value.is_empty() && *value != "unknown")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_placeholder_is_not_a_commit() {
        assert_eq!(recorded(Some("1f2e3d4")), Some("1f2e3d4"));
        assert_eq!(recorded(Some("unknown")), None);
        assert_eq!(recorded(Some("")), None);
        assert_eq!(recorded(None), None);
    }
}
