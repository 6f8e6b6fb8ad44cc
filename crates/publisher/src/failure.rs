//! Classifies failed attempts, with one exhaustive table by gRPC code and error details, never by
//! text.
//!
//! Decisions that are not obvious from the codes:
//!
//! - FAILED_PRECONDITION belongs to the environment: a disabled encryption key, or a region that the
//!   topic's storage policy excludes. Pub/Sub also returns it for a request with mixed ordering keys,
//!   which callers must not make.
//! - INVALID_ARGUMENT belongs to the content: Pub/Sub returns it for a whole request if one message
//!   does not fit the topic's schema. The exception is an answer whose details blame something else:
//!   the topic's name, or Google's service infrastructure. The caller must check project and topic names
//!   before use, so that without details only the content can be at fault.

use std::fmt;

use tonic::{Code, Status};

use super::details::Details;

/// How to react to a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The messages may or may not be stored: retry the same batch, in the same order, without end.
    UnknownOutcome,
    /// Pub/Sub asks to slow down: retry the same batch, with fewer concurrent requests.
    Throttled,
    /// A topic, a grant or a credential is missing: retry slowly until a person fixes it.
    Environment,
    /// Pub/Sub will never accept this batch.
    Content,
}

/// A failed attempt.
#[derive(Debug, Clone)]
pub struct Failure {
    /// How to react.
    pub class: Class,
    code: Option<Code>,
    message: String,
}

impl Failure {
    /// A failure that does not say whether the messages were stored.
    pub(crate) fn unknown(message: impl Into<String>) -> Self {
        Self {
            class: Class::UnknownOutcome,
            code: None,
            message: message.into(),
        }
    }

    /// A failure because there are no usable credentials at the moment.
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
        let details = Details::read(status.details());
        if let Some(reason) = &details.reason
            && !message.contains(reason.as_str())
        {
            message = format!("{message} ({reason})");
        }
        Self {
            class: class_of(status.code(), details.not_the_messages),
            code: Some(status.code()),
            message,
        }
    }

    /// The gRPC code, if there is one.
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

/// The table from gRPC code to class. Sources: Google's retry settings for `Publish` (the first two
/// rows), and the codes in the API's error reference. The details can only take the blame off the
/// messages.
fn class_of(code: Code, not_the_messages: bool) -> Class {
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
        Code::InvalidArgument | Code::OutOfRange if not_the_messages => Class::Environment,
        Code::InvalidArgument | Code::OutOfRange => Class::Content,
        // Codes that `Publish` should not return. Never drop what we do not understand: retry.
        Code::Ok | Code::AlreadyExists | Code::DataLoss => Class::UnknownOutcome,
    }
}

#[cfg(test)]
mod tests {
    use super::super::details::made_up;
    use super::*;

    #[test]
    fn codes_that_google_retries_are_retried_and_only_content_errors_are_final() {
        for code in (0..=16).map(Code::from) {
            let class = class_of(code, false);
            let retried = [1, 2, 4, 10, 13, 14].contains(&(code as i32));
            if retried {
                assert_eq!(class, Class::UnknownOutcome, "{code:?}");
            }
            assert_eq!(
                class == Class::Content,
                matches!(code, Code::InvalidArgument | Code::OutOfRange),
                "{code:?}"
            );
            assert_ne!(class_of(code, true), Class::Content, "{code:?}");
        }
    }

    #[test]
    fn details_take_the_blame_off_the_messages_and_never_put_it_on_them() {
        let class = |code, details: Vec<u8>| {
            let status = Status::with_details(code, "refused", details.into());
            Failure::from_status(&status).class
        };
        let infrastructure = || made_up::error_info("googleapis.com", "API_KEY_INVALID");
        let schema = || made_up::error_info("pubsub.googleapis.com", "INVALID_JSON_AVRO_MESSAGE");
        assert_eq!(
            class(Code::InvalidArgument, infrastructure()),
            Class::Environment
        );
        assert_eq!(class(Code::InvalidArgument, schema()), Class::Content);
        assert_eq!(
            class(Code::InvalidArgument, made_up::bad_field("topic")),
            Class::Environment
        );
        assert_eq!(
            class(
                Code::InvalidArgument,
                made_up::bad_field("messages[3].data")
            ),
            Class::Content
        );
        assert_eq!(
            class(Code::FailedPrecondition, schema()),
            Class::Environment
        );
    }

    #[test]
    fn a_reason_appears_once_in_the_message() {
        let details = made_up::error_info("pubsub.googleapis.com", "INVALID_JSON_AVRO_MESSAGE");
        let status = Status::with_details(Code::InvalidArgument, "bad data", details.into());
        assert_eq!(
            Failure::from_status(&status).to_string(),
            "InvalidArgument: bad data (INVALID_JSON_AVRO_MESSAGE)"
        );
    }
}
