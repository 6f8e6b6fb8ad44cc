//! Prints findings as text or JSON, and derives the exit code from them.

use std::cmp::Reverse;
use std::process::ExitCode;

use printable::printable_lines;
use serde::Serialize;
use slot_manager::{Finding, Severity};

use super::paint::Paint;
use super::{explain, output, wrap};
pub(super) use crate::ops::finding::{finding, finding_with_remedy, from_error};

#[derive(Debug, Default)]
pub(super) struct Findings {
    sections: Vec<(String, Vec<Finding>)>,
}

/// All findings as JSON: `{"findings": [...], "worst": "..."}`.
#[derive(Serialize)]
pub(super) struct FindingsJson<'a> {
    findings: Vec<&'a Finding>,
    worst: Severity,
}

impl Findings {
    /// Adds findings under a heading.
    pub(super) fn section(&mut self, heading: impl Into<String>, findings: Vec<Finding>) {
        debug_assert!(
            findings
                .iter()
                .all(|finding| explain::is_known(finding.code)),
            "a code has no page and no section in docs/reference/checks.md: {findings:?}"
        );
        self.sections.push((heading.into(), findings));
    }

    fn all(&self) -> impl Iterator<Item = &Finding> {
        self.sections.iter().flat_map(|(_, findings)| findings)
    }

    /// Returns the worst severity of all findings; `Ok` if there are none.
    pub(super) fn worst(&self) -> Severity {
        self.all()
            .map(|finding| finding.severity)
            .max()
            .unwrap_or(Severity::Ok)
    }

    /// Returns exit code 0 when all is well, 1 with a warning, 2 with an error.
    pub(super) fn exit_code(&self) -> ExitCode {
        exit_code(self.worst())
    }

    pub(super) fn print_json(&self) {
        output::write_json(&self.json());
    }

    pub(super) fn json(&self) -> FindingsJson<'_> {
        FindingsJson {
            findings: self.all().collect(),
            worst: self.worst(),
        }
    }

    /// Prints all findings, each on a line, with its remedy on the line below.
    pub(super) fn print(&self) {
        output::write(&self.to_text(Paint::stdout(), wrap::terminal_width(), true));
    }

    /// Prints the findings that are not ok, and the number of checks that passed.
    pub(super) fn print_problems(&self) {
        output::write(&self.to_text(Paint::stdout(), wrap::terminal_width(), false));
    }

    /// Returns the findings as text, wrapped at `width`. Leaves out the findings that are ok unless
    /// `with_ok`. Under each heading, the worst finding comes first.
    fn to_text(&self, paint: Paint, width: Option<usize>, with_ok: bool) -> String {
        let is_shown = |finding: &&Finding| with_ok || finding.severity != Severity::Ok;
        let shown = self.all().filter(is_shown);
        let code_width = shown.map(|finding| finding.code.len()).max().unwrap_or(0);
        let column = "  warning  ".len() + code_width + 2;
        // If the terminal is too narrow for a column next to the codes, the text begins below its code.
        let is_narrow = width.is_some_and(|width| width < column + wrap::NARROWEST_COLUMN);
        let indent = if is_narrow { "    ".len() } else { column };
        let mut text = String::new();
        for (heading, findings) in &self.sections {
            text += &format!("{}\n", printable_lines(heading));
            let mut shown: Vec<&Finding> = findings.iter().filter(is_shown).collect();
            shown.sort_by_key(|finding| Reverse(finding.severity));
            for finding in &shown {
                let severity = finding.severity;
                let word = paint.severity(severity, &format!("{:<7}", name(severity)));
                let what = wrap::wrapped(&printable_lines(&finding.what), indent, width);
                let code = finding.code;
                text += &if is_narrow {
                    format!("  {word}  {code}\n{:indent$}{what}\n", "")
                } else {
                    format!("  {word}  {code:<code_width$}  {what}\n")
                };
                if let Some(remedy) = &finding.remedy {
                    let remedy = format!("-> {}", printable_lines(remedy));
                    let remedy = wrap::wrapped(&remedy, indent, width);
                    text += &format!("{:indent$}{}\n", "", paint.faint(&remedy));
                }
            }
            let hidden = findings.len() - shown.len();
            if hidden > 0 {
                let word = paint.severity(Severity::Ok, "ok     ");
                let checks = super::figures::count(hidden as u64, "check");
                text += &format!("  {word}  {checks} passed (--all lists them)\n");
            }
            text.push('\n');
        }
        text
    }

    /// Returns the number of errors and warnings, such as `1 error, 2 warnings`.
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

/// Returns exit code 0 when all is well, 1 for a warning, 2 for an error.
pub(super) fn exit_code(severity: Severity) -> ExitCode {
    ExitCode::from(match severity {
        Severity::Ok | Severity::Info => 0,
        Severity::Warning => 1,
        Severity::Error => 2,
    })
}

/// Returns the word for a severity. The JSON form uses the same words.
pub(super) fn name(severity: Severity) -> &'static str {
    match severity {
        Severity::Ok => "ok",
        Severity::Info => "info",
        Severity::Warning => "warning",
        Severity::Error => "error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings() -> Findings {
        let mut findings = Findings::default();
        let fine = finding(Severity::Ok, "wal-level", "wal_level is logical");
        let short = finding_with_remedy(
            Severity::Warning,
            "replication-slots",
            "1 is left",
            "raise it",
        );
        findings.section("PostgreSQL a@b:1/c", vec![fine, short]);
        findings
    }

    #[test]
    fn the_worst_finding_comes_first_with_its_remedy_below() {
        let text = findings().to_text(Paint::PLAIN, None, true);
        let expected = "PostgreSQL a@b:1/c\n  \
            warning  replication-slots  1 is left\n                              \
            -> raise it\n  \
            ok       wal-level          wal_level is logical\n\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn checks_that_passed_are_only_counted_unless_asked_for() {
        let text = findings().to_text(Paint::PLAIN, Some(72), false);
        let expected = "PostgreSQL a@b:1/c\n  \
            warning  replication-slots  1 is left\n                              \
            -> raise it\n  \
            ok       1 check passed (--all lists them)\n\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn on_a_narrow_terminal_the_text_is_below_its_code() {
        let text = findings().to_text(Paint::PLAIN, Some(60), true);
        let expected = "PostgreSQL a@b:1/c\n  \
            warning  replication-slots\n    \
            1 is left\n    \
            -> raise it\n  \
            ok       wal-level\n    \
            wal_level is logical\n\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn the_worst_finding_is_the_overall_severity() {
        let mut findings = findings();
        assert_eq!(findings.worst(), Severity::Warning);
        assert_eq!(findings.summary(), "1 warning");
        findings.section(
            "Pub/Sub",
            vec![finding(Severity::Error, "topic-missing", "y")],
        );
        assert_eq!(findings.worst(), Severity::Error);
        assert_eq!(findings.summary(), "1 error, 1 warning");
    }
}
