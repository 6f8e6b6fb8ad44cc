//! What a failed attempt means: one exhaustive table by gRPC code, never by text.

use std::fmt;

use tonic::{Code, Status};

/// What is to be done about a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The messages may or may not be stored: the same batch again, in the same order, without
    /// end.
    UnknownOutcome,
    /// Pub/Sub asks to slow down: the same, with fewer requests at once.
    Throttled,
    /// A topic, a grant or a credential is missing: wait for a person, and try slowly.
    Environment,
    /// Pub/Sub will never take this batch.
    Content,
}

/// A failed attempt.
#[derive(Debug, Clone)]
pub struct Failure {
    /// What is to be done.
    pub class: Class,
    code: Option<Code>,
    message: String,
}

impl Failure {
    /// A failure that says nothing about the messages.
    pub(crate) fn unknown(message: impl Into<String>) -> Self {
        Self {
            class: Class::UnknownOutcome,
            code: None,
            message: message.into(),
        }
    }

    /// No usable credentials at the moment.
    pub(crate) fn credentials(message: impl Into<String>) -> Self {
        Self {
            class: Class::Environment,
            code: None,
            message: message.into(),
        }
    }

    pub(crate) fn from_status(status: &Status) -> Self {
        let mut message = status.message().to_owned();
        let mut source = std::error::Error::source(status);
        while let Some(cause) = source {
            let text = cause.to_string();
            if !message.contains(&text) {
                message = format!("{message}: {text}");
            }
            source = cause.source();
        }
        Self {
            class: class_of(status.code()),
            code: Some(status.code()),
            message,
        }
    }

    /// The gRPC code, when the other side answered with one.
    pub fn grpc_code(&self) -> Option<Code> {
        self.code
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            Some(code) => write!(f, "{code:?}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for Failure {}

/// The table. Sources: Google's retry settings for `Publish` (the first two rows), and the
/// meaning of the codes in the API's error reference.
fn class_of(code: Code) -> Class {
    match code {
        Code::Unavailable
        | Code::Internal
        | Code::Unknown
        | Code::Aborted
        | Code::DeadlineExceeded
        | Code::Cancelled => Class::UnknownOutcome,
        Code::ResourceExhausted => Class::Throttled,
        Code::NotFound
        | Code::PermissionDenied
        | Code::Unauthenticated
        | Code::FailedPrecondition
        | Code::Unimplemented => Class::Environment,
        Code::InvalidArgument | Code::OutOfRange => Class::Content,
        // Codes that `Publish` has no use for. What is not understood is not dropped: again.
        Code::Ok | Code::AlreadyExists | Code::DataLoss => Class::UnknownOutcome,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_google_retries_is_retried_and_only_content_is_ever_given_up() {
        for code in (0..=16).map(Code::from) {
            let class = class_of(code);
            let retried = [1, 2, 4, 10, 13, 14].contains(&(code as i32));
            if retried {
                assert_eq!(class, Class::UnknownOutcome, "{code:?}");
            }
            assert_eq!(
                class == Class::Content,
                matches!(code, Code::InvalidArgument | Code::OutOfRange),
                "{code:?}"
            );
        }
    }
}
