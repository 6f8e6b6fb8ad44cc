//! The only error type of the demonstration: what failed, why, and a hint.

use std::error::Error as StdError;
use std::fmt;

const GENERAL_HINT: &str =
    "read the lines above; run again with --keep to leave everything running";

/// Why the demonstration failed.
#[derive(Debug)]
pub(crate) struct Error {
    what: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
    hint: Option<String>,
}

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// Creates an error that has no hint of its own. [`Report`] shows the general hint for it.
pub(crate) fn failed(what: impl Into<String>) -> Error {
    Error {
        what: what.into(),
        source: None,
        hint: None,
    }
}

impl Error {
    /// Adds the underlying error.
    pub(crate) fn caused_by(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Adds a hint, which [`Report`] shows instead of the general hint.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}

impl From<tokio_postgres::Error> for Error {
    fn from(error: tokio_postgres::Error) -> Self {
        failed("PostgreSQL refused a statement, or the connection broke").caused_by(error)
    }
}

/// The error as a terminal shows it: what failed, its causes without repetitions, and the hint.
pub(crate) struct Report<'a>(pub(crate) &'a Error);

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report(error) = self;
        writeln!(f, "error: {error}")?;
        let (mut shown, mut next) = (error.what.clone(), error.source());
        while let Some(cause) = next {
            let text = cause.to_string();
            if !shown.contains(&text) {
                writeln!(f, "  cause: {text}")?;
            }
            (shown, next) = (text, cause.source());
        }
        write!(
            f,
            "  hint:  {}",
            error.hint.as_deref().unwrap_or(GENERAL_HINT)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_each_cause_once_and_ends_with_a_hint() {
        let inner = failed("no route: refused").caused_by("refused");
        let error = failed("cannot connect").caused_by(inner);
        assert_eq!(
            Report(&error).to_string(),
            format!("error: cannot connect\n  cause: no route: refused\n  hint:  {GENERAL_HINT}")
        );
        let hinted = failed("x").hint("do y");
        assert_eq!(Report(&hinted).to_string(), "error: x\n  hint:  do y");
    }
}
