//! Reports the error that ends the process, as text, as a JSON log line, or as a JSON object.
//!
//! By default the report is text for the operator. `postrider run` with a JSON log format writes a line of
//! that log, so that log collectors can parse it. Other commands with `--json` write one JSON object.
//!
//! The error may be a mistake in the command line or in the settings file, and then the usual parsers fail. So this
//! module has its own search for the flag or setting that chooses the form.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use super::{command, logging, wrap};
use crate::error::{Code, Error, Report};
use crate::settings::LogFormat;

/// The form in which an error is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReportForm {
    Text,
    /// A line in the log format of `postrider run`.
    Log(LogFormat),
    /// One JSON object on standard error.
    Object,
}

impl ReportForm {
    /// Returns the form for this process, from its arguments, its environment and its settings file.
    pub(super) fn of_process() -> Self {
        let arguments = std::env::args_os().skip(1);
        let arguments: Vec<String> = arguments
            .map(|argument| argument.to_string_lossy().into_owned())
            .collect();
        Self::of(&arguments, |name| std::env::var(name).ok())
    }

    fn of(arguments: &[String], variable: impl Fn(&str) -> Option<String>) -> Self {
        let commands = command();
        let known = |argument: &&String| commands.find_subcommand(argument.as_str()).is_some();
        if arguments
            .iter()
            .find(known)
            .is_none_or(|name| *name != "run")
        {
            return if arguments.iter().any(|argument| argument == "--json") {
                Self::Object
            } else {
                Self::Text
            };
        }
        let asked = flag(arguments, "--log-format")
            .or_else(|| variable("POSTRIDER_LOG_FORMAT").filter(|value| !value.is_empty()))
            .or_else(|| {
                let file = flag(arguments, "--config").or_else(|| variable("POSTRIDER_CONFIG"))?;
                log_format_in(&std::fs::read_to_string(Path::new(&file)).ok()?)
            });
        match asked.as_deref().and_then(LogFormat::named) {
            None | Some(LogFormat::Text) => Self::Text,
            Some(format) => Self::Log(format),
        }
    }

    /// Reports the error, and returns the exit code.
    pub(super) fn report(self, error: &Error) -> ExitCode {
        match self {
            Self::Log(format) => {
                logging::start_by_default(format);
                tracing::error!(code = %error.code(), hint = error.hint_text(), "{error}");
            }
            Self::Object => write(&object(error)),
            Self::Text => write(&wrap::lines(
                &Report(error).to_string(),
                wrap::error_width(),
            )),
        }
        ExitCode::from(error.code().exit_status())
    }
}

/// Writes the error of a command to standard error, as text or as one JSON object. Returns the exit code.
pub(super) fn write_error(error: &Error, json: bool) -> ExitCode {
    let form = if json {
        ReportForm::Object
    } else {
        ReportForm::Text
    };
    form.report(error)
}

/// Returns the error for a command line that clap has refused with this text.
pub(super) fn wrong_usage(text: &str) -> Error {
    let what = text.lines().next().unwrap_or_default();
    let what = what.strip_prefix("error: ").unwrap_or(what);
    Error::new(Code::SettingInvalid, what)
        .hint("correct the command line; `--help` after the command shows how it is used")
}

/// Ends the command with a usage error, because the arguments do not say what to do. `what` says which
/// arguments to add.
pub(super) fn refuse(what: &str) -> ! {
    match ReportForm::of_process() {
        ReportForm::Text => write(&wrap::lines(&format!("error: {what}"), wrap::error_width())),
        form => _ = form.report(&wrong_usage(what)),
    }
    std::process::exit(Code::SettingInvalid.exit_status().into())
}

fn object(error: &Error) -> String {
    serde_json::json!({ "error": error.json() }).to_string()
}

/// Writes lines to standard error in one piece, so that no other output comes between them.
pub(super) fn write(text: &str) {
    write_part(&format!("{text}\n"));
}

/// Writes a part of a line to standard error. Ignores a failed write, because an error of standard error
/// cannot be reported anywhere else. `eprint!` would panic.
pub(super) fn write_part(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Returns the value of the flag `name`. If the flag is repeated, the last one counts.
fn flag(arguments: &[String], name: &str) -> Option<String> {
    let mut indexed = arguments.iter().enumerate().rev();
    indexed.find_map(|(index, argument)| match argument.strip_prefix(name)? {
        "" => arguments.get(index + 1).cloned(),
        rest => rest.strip_prefix('=').map(str::to_owned),
    })
}

/// Returns the value of `log_format` from the part of a settings file before the first `[section]`. Finds the
/// value even if other lines of the file have mistakes.
fn log_format_in(text: &str) -> Option<String> {
    let mut top = text
        .lines()
        .take_while(|line| !line.trim_start().starts_with('['));
    top.find_map(|line| {
        let value = line.trim().strip_prefix("log_format")?.trim_start();
        let value = value.strip_prefix('=')?.trim_start();
        let quote = value.chars().next().filter(|c| "\"'".contains(*c))?;
        Some(value[1..].split(quote).next()?.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(line: &str, environment: &[(&str, &str)]) -> ReportForm {
        let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        ReportForm::of(&arguments, |name| {
            let found = environment.iter().find(|(one, _)| *one == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_form_of_an_error_is_known_even_if_the_command_line_is_wrong() {
        let json = [("POSTRIDER_LOG_FORMAT", "json")];
        let log = ReportForm::Log(LogFormat::Json);
        for line in ["run", "run --nosuch", "run extra", "--slot x run"] {
            assert_eq!(form(line, &json), log, "{line}");
        }
        assert_eq!(form("run --log-format=json --nosuch", &[]), log);
        assert_eq!(form("run --log-format json", &[]), log);
        assert_eq!(form("run --log-format text", &json), ReportForm::Text);
        assert_eq!(form("run", &[]), ReportForm::Text);
        assert_eq!(form("status --json --nosuch", &[]), ReportForm::Object);
        assert_eq!(form("status", &json), ReportForm::Text);
        assert_eq!(form("--nosuch", &json), ReportForm::Text);
    }

    #[test]
    fn the_log_format_is_found_in_a_file_with_mistakes() {
        let text = "slot = 7\n  log_format  =  'json' # for the collector\nx = = 1\n[tables]\n";
        assert_eq!(log_format_in(text).as_deref(), Some("json"));
        assert_eq!(log_format_in("[a]\nlog_format = \"json\"\n"), None);
        assert_eq!(log_format_in("log_formats = \"json\"\n"), None);
        assert_eq!(log_format_in("log_format = json\n"), None);
    }

    #[test]
    fn a_json_error_has_code_text_and_hint_on_one_line() {
        let error = Error::new(Code::SlotMissing, "slot a\nb").hint("do \"this\"");
        let text = object(&error);
        assert!(!text.contains('\n'), "{text}");
        let read: serde_json::Value = serde_json::from_str(&text).unwrap();
        let read = &read["error"];
        assert_eq!(read["code"], "slot-missing");
        assert_eq!(read["hint"], "do \"this\"");
        assert!(read["what"].as_str().unwrap().starts_with("slot a"));
    }
}
