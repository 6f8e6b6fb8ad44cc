//! `postrider explain`: explains the meaning of a code, and what to do.
//!
//! Each error code has a page. The other codes, which `check` and `init` use, have sections on the page
//! about checks.

use std::process::ExitCode;

use strsim::levenshtein;

use super::raw_args::is_plain;
use super::{output, wrap};
use crate::error::{Code, Error, Result};

/// The page about checks. Each of its sections explains a check of `check` or `init`, and has the codes of the
/// check in its heading. None of these codes is an error code.
const CHECKS: &str = include_str!("../../docs/reference/checks.md");

/// The groups in the list of all codes: exit code and heading.
const GROUPS: [(u8, &str); 5] = [
    (2, "Settings and usage"),
    (3, "PostgreSQL"),
    (4, "Pub/Sub"),
    (5, "Events and their tables"),
    (1, "Postrider itself"),
];

/// Explains one code, or lists all codes.
///
/// # Errors
/// `setting-invalid` for an unknown code; the hint names the most similar code.
pub(super) fn explain(code: Option<&str>) -> Result<ExitCode> {
    match code {
        Some(name) => {
            let page = page(name).ok_or_else(|| unknown(name))?;
            // On a terminal, wrap the page at the width of the terminal. Otherwise print the page as it is.
            let width = wrap::terminal_width();
            let text = width.map_or_else(|| page.to_owned(), |_| wrap::markdown(page, width));
            output::write(&text);
        }
        None => output::write(&list(wrap::terminal_width())),
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether this code can be explained.
pub(super) fn is_known(name: &str) -> bool {
    page(name).is_some()
}

fn page(name: &str) -> Option<&'static str> {
    match name.parse::<Code>() {
        Ok(code) => Some(code.page()),
        Err(_) => sections().find(|section| codes(section).any(|code| code == name)),
    }
}

/// Returns the sections about checks, each from its heading to its end.
fn sections() -> impl Iterator<Item = &'static str> {
    let starts = CHECKS.match_indices("\n## ").map(|(at, _)| at + 1);
    starts.map(|start| {
        let section = &CHECKS[start..];
        let end = section.find("\n## ").map_or(section.len(), |at| at + 1);
        &section[..end]
    })
}

/// Returns the codes in the heading of a section.
fn codes(section: &str) -> impl Iterator<Item = &str> {
    let heading = section.lines().next().unwrap_or_default();
    heading.split('`').skip(1).step_by(2)
}

fn unknown(name: &str) -> Error {
    let all = Code::ALL.iter().map(|code| code.name());
    let all = all.chain(sections().flat_map(codes));
    let nearest = all.map(|known| (levenshtein(name, known), known));
    let nearest = nearest.filter(|(distance, known)| *distance <= 1 + known.len() / 4);
    // The argument may be a connection string with a password, so show it only if it is plain.
    let shown = if is_plain(name) { name } else { "..." };
    let error = Error::new(Code::SettingInvalid, format!("there is no code `{shown}`"));
    match nearest.min() {
        Some((_, known)) => error.hint(format!("did you mean `{known}`?")),
        None => error.hint("`postrider explain` lists all codes"),
    }
}

fn list(width: Option<usize>) -> String {
    let names = Code::ALL.iter().map(|code| code.name());
    let column = names.map(str::len).max().unwrap_or_default() + 4;
    // If the terminal is too narrow for a column next to the codes, each hint begins below its code.
    let is_narrow = width.is_some_and(|width| width < column + wrap::NARROWEST_COLUMN);
    let mut text = String::new();
    for (status, heading) in GROUPS {
        text += &format!("{heading} (exit code {status})\n");
        for code in Code::ALL.iter().filter(|code| code.exit_status() == status) {
            text += &if is_narrow {
                let hint = wrap::wrapped(code.hint(), 4, width);
                format!("  {}\n    {hint}\n", code.name())
            } else {
                let hint = wrap::wrapped(code.hint(), column, width);
                format!("  {:<1$}{hint}\n", code.name(), column - 2)
            };
        }
        text.push('\n');
    }
    let checks: Vec<&str> = sections().flat_map(codes).collect();
    let checks = wrap::wrapped(&checks.join(", "), 2, Some(width.unwrap_or(100)));
    text + &format!("Names of checks, in `postrider check` and `postrider init`\n  {checks}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_has_every_code_once_under_its_exit_code() {
        let text = list(None);
        for code in Code::ALL {
            let line = format!("\n  {code} ");
            assert_eq!(text.matches(&line).count(), 1, "{code}");
        }
        assert!(
            text.contains("PostgreSQL (exit code 3)\n  postgres-unreachable "),
            "{text}"
        );
        assert!(text.contains("endpoint-global"), "{text}");
    }

    #[test]
    fn the_list_fits_a_terminal_of_60_columns() {
        for line in list(Some(60)).lines() {
            assert!(line.chars().count() <= 60, "{line}");
        }
    }

    #[test]
    fn a_check_has_its_section_and_no_other() {
        let page = page("slot-wal-unlimited").unwrap();
        assert!(page.starts_with("## `slot-wal-limit`,"), "{page}");
        assert!(page.contains("max_slot_wal_keep_size"), "{page}");
        assert_eq!(page.matches("## ").count(), 1, "{page}");
    }

    #[test]
    fn no_code_has_two_meanings() {
        for code in sections().flat_map(codes) {
            assert!(code.parse::<Code>().is_err(), "{code} is an error code");
            assert_eq!(
                sections()
                    .flat_map(codes)
                    .filter(|other| *other == code)
                    .count(),
                1
            );
        }
    }

    #[test]
    fn a_misspelt_code_is_refused_with_a_suggestion() {
        let error = explain(Some("slot-mising")).unwrap_err();
        assert_eq!(error.hint_text(), "did you mean `slot-missing`?");
        let error = explain(Some("nonsense")).unwrap_err();
        assert!(error.hint_text().contains("lists all"));
    }
}
