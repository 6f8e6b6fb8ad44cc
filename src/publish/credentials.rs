//! Application Default Credentials, or none for an emulator.

use google_cloud_auth::credentials::{
    Builder, CacheableResource, Credentials as GoogleCredentials,
};
use tonic::codegen::http::{Extensions, HeaderMap};

use super::Failure;
use crate::error::{Code, Error, Result};
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
