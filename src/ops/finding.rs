//! Creates findings, the results of checks.

use slot_manager::{Finding, Severity};

use crate::error::Error;

/// Creates a finding without a remedy.
pub(crate) fn finding(severity: Severity, code: &'static str, what: impl Into<String>) -> Finding {
    Finding {
        code,
        severity,
        what: what.into(),
        remedy: None,
    }
}

/// Creates a finding with a remedy.
pub(crate) fn finding_with_remedy(
    severity: Severity,
    code: &'static str,
    what: impl Into<String>,
    remedy: impl Into<String>,
) -> Finding {
    Finding {
        remedy: Some(remedy.into()),
        ..finding(severity, code, what)
    }
}

/// Converts an error to a finding with its code, the whole chain of causes, and its hint.
pub(crate) fn from_error(error: &Error) -> Finding {
    let (code, hint) = (error.code().name(), error.hint_text());
    finding_with_remedy(Severity::Error, code, error.to_string(), hint)
}
