//! The result of one check, for operators and for alerts.

use serde::Serialize;

/// How bad a finding is. The variants are ordered from harmless to bad, so `max` finds the worst of
/// several severities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Everything is as it should be.
    Ok,
    /// Worth knowing, but nothing has to be done.
    Info,
    /// Works now but will cause trouble later, or already causes minor trouble.
    Warning,
    /// Does not work, or puts data at risk.
    Error,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable kebab-case code, such as `wal-level`.
    pub code: &'static str,
    /// How bad the finding is.
    pub severity: Severity,
    /// The finding as a sentence, with the values that the check saw.
    pub what: String,
    /// What to run or change; absent when there is nothing to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Finding {
    pub(crate) fn ok(code: &'static str, what: impl Into<String>) -> Self {
        Self {
            code,
            severity: Severity::Ok,
            what: what.into(),
            remedy: None,
        }
    }

    pub(crate) fn info(
        code: &'static str,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            code,
            severity: Severity::Info,
            what: what.into(),
            remedy: Some(remedy.into()),
        }
    }

    pub(crate) fn warning(
        code: &'static str,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            code,
            severity: Severity::Warning,
            what: what.into(),
            remedy: Some(remedy.into()),
        }
    }

    pub(crate) fn error(
        code: &'static str,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            code,
            severity: Severity::Error,
            what: what.into(),
            remedy: Some(remedy.into()),
        }
    }
}
