//! Finds Google's Application Default Credentials, from which each call gets its authorization headers. Calls
//! to an emulator, or to an endpoint without TLS, are made without credentials.

use std::error::Error;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use google_cloud_auth::build_errors::Error as BuildError;
use google_cloud_auth::credentials::{
    Builder, CacheableResource, Credentials as GoogleCredentials,
};
use google_cloud_auth::errors::CredentialsError;
use tokio::time::Instant;
use tonic::codegen::http::{Extensions, HeaderMap};

use super::{CREDENTIALS_VARIABLE, Endpoint, Failure, SetupError, UnshownPath};

const SCOPE: &str = "https://www.googleapis.com/auth/pubsub";

/// The source of authorization headers. Google's library renews the tokens.
#[derive(Debug, Clone)]
pub(super) struct Credentials(Option<GoogleCredentials>);

impl Credentials {
    /// Finds the credentials for `endpoint`. For plain text there are none, because a token must
    /// never be sent unencrypted.
    ///
    /// # Errors
    /// [`SetupError::CredentialsMissing`], [`SetupError::CredentialsUnreadable`] and
    /// [`SetupError::CredentialsInvalid`].
    pub(super) fn for_endpoint(endpoint: &Endpoint) -> Result<Self, SetupError> {
        match endpoint {
            Endpoint::Service(url) if url.starts_with("https://") => {
                check_file()?;
                let credentials = Builder::default()
                    .with_scopes([SCOPE])
                    .build()
                    .map_err(not_built)?;
                Ok(Self(Some(credentials)))
            }
            Endpoint::Service(_) | Endpoint::Emulator(_) => Ok(Self(None)),
        }
    }

    /// The authorization headers for one call. Fails if no headers arrive before `deadline`. The error shows
    /// `timeout`, the time limit from which the caller computed the deadline.
    pub(super) async fn headers_by(
        &self,
        deadline: Instant,
        timeout: Duration,
    ) -> Result<HeaderMap, Failure> {
        let headers = tokio::time::timeout_at(deadline, self.headers()).await;
        headers.unwrap_or_else(|_| Err(Failure::no_token_in(timeout)))
    }

    /// The authorization headers for one call.
    pub(super) async fn headers(&self) -> Result<HeaderMap, Failure> {
        let Some(credentials) = &self.0 else {
            return Ok(HeaderMap::new());
        };
        match credentials.headers(Extensions::new()).await {
            Ok(CacheableResource::New { data, .. }) => Ok(data),
            Ok(CacheableResource::NotModified) => {
                let what = "the credentials returned no token";
                Err(Failure::credentials(what, true))
            }
            Err(e) => Err(Failure::credentials(no_token(&e), e.is_transient())),
        }
    }
}

/// Says why there is no access token. The text contains only the cause, without the sentences about retries
/// into which Google's library wraps the cause.
fn no_token(error: &CredentialsError) -> String {
    let mut text = "no access token".to_owned();
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(cause) = next {
        next = cause.source();
        let fact = match (cause.downcast_ref::<CredentialsError>(), next) {
            (Some(_), Some(_)) => continue,
            (Some(innermost), None) => without_prediction(innermost),
            (None, _) => cause.to_string(),
        };
        let quotes_the_next = next.is_some_and(|next| fact.contains(&next.to_string()));
        if !quotes_the_next && !text.contains(&fact) {
            text = format!("{text}: {fact}");
        }
    }
    text
}

/// The text of the error without its end, which says whether another attempt may succeed.
fn without_prediction(error: &CredentialsError) -> String {
    let text = error.to_string();
    let ends = [
        " but future attempts may succeed",
        " and future attempts will not succeed",
    ];
    let end = ends.iter().find_map(|end| text.strip_suffix(end));
    end.unwrap_or(&text).trim_end_matches('.').to_owned()
}

/// Converts an error of the library's builder. If a file with credentials was found, the new error says why
/// the file cannot be used.
fn not_built(error: BuildError) -> SetupError {
    let found_a_file = error.is_parsing() || error.is_unknown_type() || error.is_not_supported();
    if !found_a_file {
        return SetupError::CredentialsMissing {
            source: error.into(),
        };
    }
    let cause = error
        .source()
        .map_or_else(|| error.to_string(), ToString::to_string);
    let why = if error.is_parsing() {
        cause
    } else {
        format!("its type {cause} is not supported")
    };
    SetupError::CredentialsInvalid { source: why.into() }
}

/// The source of the Application Default Credentials. The first source that applies counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CredentialsSource {
    /// The file that [`CREDENTIALS_VARIABLE`] names.
    Variable,
    /// The file that `gcloud auth application-default login` writes.
    File(PathBuf),
    /// The metadata server of the machine or the cluster.
    MetadataServer {
        /// Name or address of the server.
        host: String,
        /// The file that was looked for first; `None` if `HOME` is not set.
        missing: Option<PathBuf>,
    },
}

impl CredentialsSource {
    /// Finds the source in the same way as Google's library.
    ///
    /// Source: Google's AIP-4110, "Application Default Credentials".
    pub fn find() -> Self {
        Self::find_in(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn find_in(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        const METADATA_HOST: &str = "metadata.google.internal";
        const FILE: &str = ".config/gcloud/application_default_credentials.json";
        if variable(CREDENTIALS_VARIABLE).is_some() {
            return Self::Variable;
        }
        let file = variable("HOME").map(|home| PathBuf::from(home).join(FILE));
        match file {
            Some(file) if file.exists() => Self::File(file),
            missing => Self::MetadataServer {
                host: variable("GCE_METADATA_HOST").map_or_else(
                    || METADATA_HOST.to_owned(),
                    |host| host.to_string_lossy().into_owned(),
                ),
                missing,
            },
        }
    }
}

/// Checks that [`CREDENTIALS_VARIABLE`], if it is set, names a readable file. This check keeps private
/// keys out of error messages: some users put the content of the key file into the variable, and
/// Google's library shows the name of a file that it cannot open.
///
/// # Errors
/// [`SetupError::CredentialsUnreadable`].
fn check_file() -> Result<(), SetupError> {
    let path = std::env::var_os(CREDENTIALS_VARIABLE);
    let Some(path) = path.filter(|path| !path.is_empty()) else {
        return Ok(());
    };
    match std::fs::File::open(&path) {
        Ok(_) => Ok(()),
        Err(source) => {
            let path = UnshownPath::new(path);
            Err(SetupError::CredentialsUnreadable { path, source })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_missing_token_is_explained_by_its_cause_without_the_sentences_of_the_library() {
        let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
        let attempt = CredentialsError::new(true, "failed to fetch access token", refused());
        let all = CredentialsError::new(true, "Subsequent calls might succeed.", attempt);
        assert_eq!(no_token(&all), "no access token: connection refused");
        let innermost = CredentialsError::from_msg(false, "no private key in the file.");
        let all = CredentialsError::from_source(false, innermost);
        assert_eq!(
            no_token(&all),
            "no access token: no private key in the file"
        );
    }

    #[test]
    fn the_variable_comes_first_then_the_file_then_the_metadata_server() {
        let found = |set: &[(&str, &str)]| {
            CredentialsSource::find_in(|name| {
                let found = set.iter().find(|(one, _)| *one == name);
                found.map(|(_, value)| OsString::from(value))
            })
        };
        let home = ("HOME", "/no/such/home");
        assert_eq!(
            found(&[home, (CREDENTIALS_VARIABLE, "/key.json")]),
            CredentialsSource::Variable
        );
        let server = |host: &str, missing| CredentialsSource::MetadataServer {
            host: host.into(),
            missing,
        };
        assert_eq!(found(&[]), server("metadata.google.internal", None));
        let file = "/no/such/home/.config/gcloud/application_default_credentials.json";
        assert_eq!(
            found(&[home, ("GCE_METADATA_HOST", "127.0.0.1:1")]),
            server("127.0.0.1:1", Some(file.into()))
        );
    }
}
