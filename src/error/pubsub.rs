//! Converts errors of the publisher into errors for the operator.

use publisher::{
    CREDENTIALS_VARIABLE, Class, CredentialsSource, FailedStep, Failure, GrpcCode, RefusalReason,
    SetupError,
};

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
            SetupError::CredentialsInvalid { source } => {
                let error = Error::new(Code::CredentialsMissing, what).caused_by(source);
                error.hint(
                    "download the key of the service account again, or run `gcloud auth application-default login`",
                )
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
    /// Creates the error for a failed call to Pub/Sub about this topic.
    pub(crate) fn pubsub(failure: &Failure, topic: &str) -> Self {
        let code = pubsub_code(failure);
        let error = Error::new(code, format!("Pub/Sub, {topic}: {failure}"));
        match (code, failure.grpc_code()) {
            (Code::CredentialsUnavailable, _) => error.hint(credentials_hint()),
            (Code::PubsubApiDisabled, _) => error.hint(api_hint(topic)),
            (Code::PubsubUnreachable, Some(GrpcCode::Unimplemented)) => error.hint(
                "make sure that POSTRIDER_PUBSUB_ENDPOINT or PUBSUB_EMULATOR_HOST is the address of Pub/Sub, \
                 and that no other server answers there",
            ),
            (Code::PubsubPermission, Some(GrpcCode::InvalidArgument | GrpcCode::OutOfRange)) => error
                .hint("correct the project and topic settings, or fix what Google's message names"),
            (Code::PubsubPermission, _) if failure.refusal.is_some() => error.hint(
                "fix what Google's message names: a role for the service account may not change that",
            ),
            _ => error,
        }
    }
}

fn pubsub_code(failure: &Failure) -> Code {
    if failure.step == FailedStep::Credentials {
        return Code::CredentialsUnavailable;
    }
    match failure.refusal {
        Some(RefusalReason::ApiDisabled) => return Code::PubsubApiDisabled,
        Some(RefusalReason::BillingDisabled) => return Code::PubsubBillingDisabled,
        Some(RefusalReason::Other) | None => {}
    }
    match (failure.class, failure.grpc_code()) {
        (
            Class::UnknownOutcome,
            Some(GrpcCode::Internal | GrpcCode::Unknown | GrpcCode::DataLoss),
        ) => Code::PubsubInternal,
        (Class::UnknownOutcome, _) => Code::PubsubUnreachable,
        (Class::Throttled, _) => Code::PubsubThrottled,
        (Class::Environment, Some(GrpcCode::NotFound)) => Code::TopicMissing,
        (Class::Environment, Some(GrpcCode::FailedPrecondition)) => Code::PubsubPrecondition,
        // The server that answers is not Pub/Sub.
        (Class::Environment, Some(GrpcCode::Unimplemented)) => Code::PubsubUnreachable,
        (Class::Environment, Some(GrpcCode::Unauthenticated) | None) => Code::PubsubUnauthenticated,
        (Class::Environment, Some(_)) => Code::PubsubPermission,
        (Class::Content, _) => Code::EventRefused,
    }
}

/// Returns a hint that says where Google's library looked for credentials, and what to do.
fn credentials_hint() -> String {
    match CredentialsSource::find() {
        CredentialsSource::MetadataServer { host, missing } => {
            let file = missing.map_or_else(
                || "HOME is not set".to_owned(),
                |file| format!("{} does not exist", shown_path(&file)),
            );
            format!(
                "run `gcloud auth application-default login`, set {CREDENTIALS_VARIABLE} to the path of a \
                 key file, or attach a service account to the machine or pod; {CREDENTIALS_VARIABLE} is not \
                 set, {file}, and the metadata server {host} gave no token; the relay retries automatically"
            )
        }
        CredentialsSource::File(file) => format!(
            "run `gcloud auth application-default login` again if the login in {} has expired, and check the \
             network to https://oauth2.googleapis.com; the relay retries automatically",
            shown_path(&file)
        ),
        CredentialsSource::Variable => format!(
            "check that the key in the file of {CREDENTIALS_VARIABLE} is still valid, and check the network \
             to https://oauth2.googleapis.com; the relay retries automatically"
        ),
    }
}

/// Returns a hint with the command that enables the API in the topic's project.
fn api_hint(topic: &str) -> String {
    let project = topic.strip_prefix("projects/").unwrap_or(topic);
    let project = project.split('/').next().unwrap_or(project);
    format!(
        "run `gcloud services enable pubsub.googleapis.com --project={project}`; it takes effect in a few \
         minutes, and the relay retries automatically"
    )
}
