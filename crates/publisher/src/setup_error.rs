//! Defines the error that says why a [`Publisher`](crate::Publisher) cannot be prepared.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// The environment variable that names a file with Google credentials.
pub const CREDENTIALS_VARIABLE: &str = "GOOGLE_APPLICATION_CREDENTIALS";

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// An error that an operator must fix before anything can be published.
#[derive(Debug, Error)]
pub enum SetupError {
    /// The URL is malformed, or TLS cannot be set up for it.
    #[error("cannot use {url}")]
    Endpoint {
        /// The URL.
        url: String,
        /// Why the URL cannot be used.
        source: Cause,
    },
    /// No Application Default Credentials exist.
    #[error("found no Google credentials")]
    CredentialsMissing {
        /// The error of Google's library.
        source: Cause,
    },
    /// The file with the credentials is not valid.
    #[error("the file with the Google credentials cannot be used")]
    CredentialsInvalid {
        /// Why the file cannot be used.
        source: Cause,
    },
    /// [`CREDENTIALS_VARIABLE`] is set, but its value is not the path of a readable file.
    #[error("{CREDENTIALS_VARIABLE} does not name a readable file")]
    CredentialsUnreadable {
        /// The value of the variable.
        path: UnshownPath,
        /// Why the file cannot be read.
        source: io::Error,
    },
}

/// A path that error texts never show, because some users put the content of a key file into the
/// variable.
#[derive(Clone, PartialEq, Eq)]
pub struct UnshownPath(PathBuf);

impl UnshownPath {
    pub(crate) fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// The path. Check that the value looks like a path before you show it.
    pub fn as_path(&self) -> &Path {
        &self.0
    }
}

impl fmt::Debug for UnshownPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UnshownPath(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_never_shows_the_value_of_the_variable() {
        let error = SetupError::CredentialsUnreadable {
            path: UnshownPath::new("{\"private_key\": \"secret\"}"),
            source: io::ErrorKind::NotFound.into(),
        };
        for text in [error.to_string(), format!("{error:?}")] {
            assert!(!text.contains("secret"), "{text}");
        }
    }
}
