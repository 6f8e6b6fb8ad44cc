//! Prints findings as text or JSON, and derives the exit code from them.

use std::process::ExitCode;

use serde::Serialize;
use slot_manager::{Finding, Severity};

use super::output;
use super::paint::Paint;
use crate::error::Error;
use crate::printable::printable_lines;

/// Findings under headings.
#[derive(Debug, Default)]
pub(super) struct Findings {
    sections: Vec<(String, Vec<Finding>)>,
}

#[derive(Serialize)]
struct FindingsJson<'a> {
    findings: Vec<&'a Finding>,
    worst: Severity,
}

impl Findings {
    /// Adds findings under a heading.
    pub(super) fn section(&mut self, heading: impl Into<String>, findings: Vec<Finding>) {
        self.sections.push((heading.into(), findings));
    }

    fn all(&self) -> impl Iterator<Item = &Finding> {
        self.sections.iter().flat_map(|(_, findings)| findings)
    }

    /// The worst severity; `Ok` without findings.
    pub(super) fn worst(&self) -> Severity {
        self.all()
            .map(|finding| finding.severity)
            .max()
            .unwrap_or(Severity::Ok)
    }

    /// 0 when all is well, 1 with a warning, 2 with an error.
    pub(super) fn exit_code(&self) -> ExitCode {
        exit_code(self.worst())
    }

    /// One object: `{"findings": [...], "worst": "..."}`.
    pub(super) fn print_json(&self) {
        let json = FindingsJson {
            findings: self.all().collect(),
            worst: self.worst(),
        };
        output::write_json(&json);
    }

    /// Prints a line for each finding, and below it a line with the remedy.
    pub(super) fn print(&self) {
        output::write(&self.to_text(Paint::stdout()));
    }

    fn to_text(&self, paint: Paint) -> String {
        let width = self
            .all()
            .map(|finding| finding.code.len())
            .max()
            .unwrap_or(0);
        let mut text = String::new();
        for (heading, findings) in &self.sections {
            text += &format!("{heading}\n");
            for Finding {
                code,
                severity,
                what,
                remedy,
            } in findings
            {
                let word = paint.severity(*severity, &format!("{:<7}", name(*severity)));
                let what = printable_lines(what);
                text += &format!("  {word}  {code:<width$}  {what}\n");
                if let Some(remedy) = remedy.as_deref().map(printable_lines) {
                    text += &format!(
                        "  {:7}  {:width$}  {}\n",
                        "",
                        "",
                        paint.faint(&format!("-> {remedy}"))
                    );
                }
            }
            text.push('\n');
        }
        text
    }

    /// The number of errors and warnings, such as `1 error, 2 warnings`.
    pub(super) fn summary(&self) -> String {
        let count = |severity| {
            self.all()
                .filter(|finding| finding.severity == severity)
                .count()
        };
        let counted = [(Severity::Error, "error"), (Severity::Warning, "warning")];
        let parts: Vec<String> = counted
            .into_iter()
            .filter(|(severity, _)| count(*severity) > 0)
            .map(|(severity, word)| super::figures::count(count(severity) as u64, word))
            .collect();
        parts.join(", ")
    }
}

/// 0 when all is well, 1 for a warning, 2 for an error.
pub(super) fn exit_code(severity: Severity) -> ExitCode {
    ExitCode::from(match severity {
        Severity::Ok | Severity::Info => 0,
        Severity::Warning => 1,
        Severity::Error => 2,
    })
}

/// The word for a severity, as in the JSON form.
pub(super) fn name(severity: Severity) -> &'static str {
    match severity {
        Severity::Ok => "ok",
        Severity::Info => "info",
        Severity::Warning => "warning",
        Severity::Error => "error",
    }
}

/// A finding without a remedy.
pub(super) fn finding(severity: Severity, code: &'static str, what: impl Into<String>) -> Finding {
    Finding {
        code,
        severity,
        what: what.into(),
        remedy: None,
    }
}

/// A finding with a remedy.
pub(super) fn finding_with_remedy(
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

/// An error as a finding: its code, the whole chain of causes, its hint.
pub(super) fn from_error(error: &Error) -> Finding {
    let (code, hint) = (error.code().name(), error.hint_text());
    finding_with_remedy(Severity::Error, code, error.to_string(), hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings() -> Findings {
        let mut findings = Findings::default();
        let fine = finding(Severity::Ok, "wal-level", "wal_level is logical");
        let short = finding_with_remedy(
            Severity::Warning,
            "wal-senders-short",
            "1 is left",
            "raise it",
        );
        findings.section("PostgreSQL a@b:1/c", vec![fine, short]);
        findings
    }

    #[test]
    fn every_finding_is_a_line_with_its_remedy_below() {
        let text = findings().to_text(Paint::PLAIN);
        let expected = "PostgreSQL a@b:1/c\n  \
            ok       wal-level          wal_level is logical\n  \
            warning  wal-senders-short  1 is left\n                              \
            -> raise it\n\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn the_worst_finding_is_the_overall_severity() {
        let mut findings = findings();
        assert_eq!(findings.worst(), Severity::Warning);
        assert_eq!(findings.summary(), "1 warning");
        findings.section("Pub/Sub", vec![finding(Severity::Error, "x", "y")]);
        assert_eq!(findings.worst(), Severity::Error);
        assert_eq!(findings.summary(), "1 error, 1 warning");
    }
}
