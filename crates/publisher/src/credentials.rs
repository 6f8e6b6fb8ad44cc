//! Application Default Credentials for Pub/Sub. An emulator or an endpoint without TLS gets none.

use google_cloud_auth::credentials::{
    Builder, CacheableResource, Credentials as GoogleCredentials,
};
use tonic::codegen::http::{Extensions, HeaderMap};

use super::{CREDENTIALS_VARIABLE, Endpoint, Failure, SetupError, UnshownPath};

const SCOPE: &str = "https://www.googleapis.com/auth/pubsub";

/// The source of the authorization headers. Google's library renews the tokens.
#[derive(Debug, Clone)]
pub(super) struct Credentials(Option<GoogleCredentials>);

impl Credentials {
    /// The credentials for `endpoint`; none for plain text, since a token is never sent unencrypted.
    ///
    /// # Errors
    /// [`SetupError::CredentialsMissing`] and [`SetupError::CredentialsUnreadable`].
    pub(super) fn for_endpoint(endpoint: &Endpoint) -> Result<Self, SetupError> {
        match endpoint {
            Endpoint::Service(url) if url.starts_with("https://") => {
                check_file()?;
                let credentials = Builder::default()
                    .with_scopes([SCOPE])
                    .build()
                    .map_err(|e| SetupError::CredentialsMissing { source: e.into() })?;
                Ok(Self(Some(credentials)))
            }
            Endpoint::Service(_) | Endpoint::Emulator(_) => Ok(Self(None)),
        }
    }

    /// The authorization headers for one call.
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

/// Checks that [`CREDENTIALS_VARIABLE`], if set, names a readable file. When Google's library cannot
/// open the file, its error shows the variable's value, and some users put the content of the key
/// file there, private key included.
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
