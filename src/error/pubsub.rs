//! Converts errors of the publisher into the operator's errors.

use publisher::{CREDENTIALS_VARIABLE, Class, Failure, GrpcCode, SetupError};

use printable::shown_path;

use super::{Code, Error};

impl From<SetupError> for Error {
    fn from(error: SetupError) -> Self {
        let what = error.to_string();
        match error {
            SetupError::Endpoint { source, .. } => {
                Error::new(Code::PubsubEndpoint, what).caused_by(source)
            }
            SetupError::CredentialsMissing { source } => {
                Error::new(Code::CredentialsMissing, what).caused_by(source)
            }
            SetupError::CredentialsUnreadable { path, source } => {
                let what = format!("{what}: {}", shown_path(path.as_path()));
                let hint = format!(
                    "set {CREDENTIALS_VARIABLE} to the path of the key file, not to its content"
                );
                let error = Error::new(Code::CredentialsMissing, what);
                error.caused_by(source).hint(hint)
            }
        }
    }
}

impl Error {
    /// The error of a failed call to Pub/Sub about this topic.
    pub(crate) fn pubsub(failure: &Failure, topic: &str) -> Self {
        let code = match (failure.class, failure.grpc_code()) {
            (Class::UnknownOutcome, _) => Code::PubsubUnreachable,
            (Class::Throttled, _) => Code::PubsubThrottled,
            (Class::Environment, Some(GrpcCode::NotFound)) => Code::TopicMissing,
            (Class::Environment, Some(GrpcCode::Unauthenticated) | None) => {
                Code::PubsubUnauthenticated
            }
            (Class::Environment, Some(_)) => Code::PubsubPermission,
            (Class::Content, _) => Code::EventRefused,
        };
        let error = Error::new(code, format!("Pub/Sub, {topic}: {failure}"));
        match (failure.class, failure.grpc_code()) {
            (Class::Environment, Some(GrpcCode::InvalidArgument)) => error
                .hint("correct the project and topic settings, or fix what Google's message names"),
            _ => error,
        }
    }
}
