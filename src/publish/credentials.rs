//! Application Default Credentials, or none for an emulator.

use std::path::Path;

use google_cloud_auth::credentials::{
    Builder, CacheableResource, Credentials as GoogleCredentials,
};
use printable::shown_path;
use tonic::codegen::http::{Extensions, HeaderMap};

use super::Failure;
use crate::error::{Code, Error, Result};
use crate::settings::Endpoint;

const SCOPE: &str = "https://www.googleapis.com/auth/pubsub";

/// The source of the authorization headers. Google's library renews the tokens.
#[derive(Debug, Clone)]
pub(crate) struct Credentials(Option<GoogleCredentials>);

impl Credentials {
    /// The credentials for `endpoint`; none for plain text, since a token is never sent unencrypted.
    ///
    /// # Errors
    /// `credentials-missing`.
    pub(crate) fn for_endpoint(endpoint: &Endpoint) -> Result<Self> {
        match endpoint {
            Endpoint::Service(url) if url.starts_with("https://") => {
                refuse_what_is_no_file()?;
                let credentials = Builder::default()
                    .with_scopes([SCOPE])
                    .build()
                    .map_err(|e| {
                        Error::new(Code::CredentialsMissing, "found no Google credentials")
                            .caused_by(e)
                    })?;
                Ok(Self(Some(credentials)))
            }
            Endpoint::Service(_) | Endpoint::Emulator(_) => Ok(Self(None)),
        }
    }

    /// Headers for one call.
    pub(super) async fn headers(&self) -> Result<HeaderMap, Failure> {
        let Some(credentials) = &self.0 else {
            return Ok(HeaderMap::new());
        };
        match credentials.headers(Extensions::new()).await {
            Ok(CacheableResource::New { data, .. }) => Ok(data),
            Ok(CacheableResource::NotModified) => {
                Err(Failure::unknown("the credentials returned no token"))
            }
            Err(e) if e.is_transient() => Err(Failure::unknown(e.to_string())),
            Err(e) => Err(Failure::credentials(e.to_string())),
        }
    }
}

/// Checks that the variable names a readable file. When Google's library cannot open the file, its
/// error shows the variable's value, and some users put the content of the key file there, private
/// key included.
///
/// # Errors
/// `credentials-missing`.
fn refuse_what_is_no_file() -> Result<()> {
    const VARIABLE: &str = "GOOGLE_APPLICATION_CREDENTIALS";
    let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) else {
        return Ok(());
    };
    match std::fs::File::open(&path) {
        Ok(_) => Ok(()),
        Err(e) => {
            let path = shown_path(Path::new(&path));
            let what = format!("{VARIABLE} does not name a readable file: {path}");
            Err(Error::new(Code::CredentialsMissing, what)
                .caused_by(e)
                .hint(format!(
                    "set {VARIABLE} to the path of the key file, not to its content"
                )))
        }
    }
}
