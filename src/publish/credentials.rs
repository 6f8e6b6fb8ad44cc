//! Application Default Credentials, or none for an emulator.

use std::path::Path;

use google_cloud_auth::credentials::{
    Builder, CacheableResource, Credentials as GoogleCredentials,
};
use tonic::codegen::http::{Extensions, HeaderMap};

use super::Failure;
use crate::error::{Code, Error, Result, shown_path};
use crate::settings::Endpoint;

const SCOPE: &str = "https://www.googleapis.com/auth/pubsub";

/// The source of the headers that prove who we are. Tokens are renewed underneath.
#[derive(Debug, Clone)]
pub(crate) struct Credentials(Option<GoogleCredentials>);

impl Credentials {
    /// None for plain-text endpoints: a token is never sent unencrypted.
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
                        Error::new(Code::CredentialsMissing, "no Google credentials").caused_by(e)
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
                Err(Failure::unknown("the credentials gave no token"))
            }
            Err(e) if e.is_transient() => Err(Failure::unknown(e.to_string())),
            Err(e) => Err(Failure::credentials(e.to_string())),
        }
    }
}

/// Google's library shows the value of the variable when it cannot open the file, and some put the
/// content of the file there, with the private key.
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
            let what = format!("{VARIABLE} names no file that can be read: {path}");
            Err(Error::new(Code::CredentialsMissing, what)
                .caused_by(e)
                .hint(format!(
                    "let {VARIABLE} be the path of the key file, not its content"
                )))
        }
    }
}
