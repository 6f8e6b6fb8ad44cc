//! Classifies failed attempts by gRPC code and error details, with one exhaustive table. The
//! error's text never matters.
//!
//! Some rows of the table are not obvious from the codes:
//!
//! - FAILED_PRECONDITION is a problem of the environment: a disabled encryption key, or a region
//!   that the topic's storage policy excludes. Pub/Sub also returns it for a request with mixed
//!   ordering keys, which callers must not send.
//! - INVALID_ARGUMENT is a problem of the content, unless the details blame something else, such as
//!   the topic's name or Google's service infrastructure. Pub/Sub returns this code for a whole
//!   request if one message does not fit the topic's schema. A malformed topic name could cause the
//!   same code without details, so the caller must check project names and topic names before use.

use std::fmt;
use std::time::Duration;

use tonic::{Code, Status};

use super::details::{Details, INFRASTRUCTURE};

/// How the caller should react to a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The failure may be temporary: retry the same batch, in the same order, without limit. Pub/Sub may have
    /// stored the messages, unless [`Failure::may_have_arrived`] is false.
    UnknownOutcome,
    /// Pub/Sub asks to slow down: retry the same batch, with fewer concurrent requests.
    Throttled,
    /// A topic, a grant or a credential is missing: retry slowly until an operator fixes it.
    Environment,
    /// Pub/Sub will never accept this batch: do not retry it as it is.
    Content,
}

/// The step of an attempt that failed. All topics share the credentials and the connections, so a
/// failure of one of the first three steps affects all topics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailedStep {
    /// There was no access token. Nothing was sent.
    Credentials,
    /// No connection to Pub/Sub could be opened. Nothing was sent.
    Connect,
    /// The connection broke before the answer arrived.
    Connection,
    /// Pub/Sub, or a proxy in front of it, answered with an error, or did not answer in time.
    Answer,
}

/// Why Google's service infrastructure refused a request, according to the error details.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalReason {
    /// The Pub/Sub API is not enabled in the project.
    ApiDisabled,
    /// The project has no active billing account.
    BillingDisabled,
    /// Another reason. The text of the [`Failure`] contains its name.
    Other,
}

/// A failed attempt.
#[derive(Debug, Clone)]
pub struct Failure {
    /// How the caller should react.
    pub class: Class,
    /// What failed.
    pub step: FailedStep,
    /// Why Google's service infrastructure refuses the request. `None` if the refusal came from elsewhere.
    pub refusal: Option<RefusalReason>,
    code: Option<Code>,
    message: String,
}

impl Failure {
    /// A failure after which it is unknown whether the messages were stored.
    pub(crate) fn unknown(message: impl Into<String>) -> Self {
        Self::without_code(Class::UnknownOutcome, FailedStep::Answer, message)
    }

    /// The failure when no connection could be opened in time, or when the deadline passed before the
    /// request was sent.
    pub(crate) fn not_connected(message: impl Into<String>) -> Self {
        Self::without_code(Class::UnknownOutcome, FailedStep::Connect, message)
    }

    /// The failure when no access token arrived within `time`.
    pub fn no_token_in(time: Duration) -> Self {
        let what = format!("Google's servers gave no access token in {time:?}");
        Self::credentials(what, true)
    }

    /// The failure when there is no access token. If `is_transient`, a later attempt may succeed without help
    /// from an operator.
    pub(crate) fn credentials(message: impl Into<String>, is_transient: bool) -> Self {
        let class = if is_transient {
            Class::UnknownOutcome
        } else {
            Class::Environment
        };
        Self::without_code(class, FailedStep::Credentials, message)
    }

    fn without_code(class: Class, step: FailedStep, message: impl Into<String>) -> Self {
        Self {
            class,
            step,
            refusal: None,
            code: None,
            message: message.into(),
        }
    }

    /// The failure of an attempt to connect.
    pub(crate) fn connect(status: &Status) -> Self {
        Self {
            step: FailedStep::Connect,
            ..Self::from_status(status)
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
            step: if connection_broke(status) {
                FailedStep::Connection
            } else {
                FailedStep::Answer
            },
            refusal: refusal(&details),
            code: Some(status.code()),
            message,
        }
    }

    /// The gRPC code, if the failure came with one.
    pub fn grpc_code(&self) -> Option<Code> {
        self.code
    }

    /// Whether Pub/Sub may have received the request. If not, no message can have been stored.
    pub fn may_have_arrived(&self) -> bool {
        match self.step {
            FailedStep::Credentials | FailedStep::Connect => false,
            FailedStep::Connection | FailedStep::Answer => true,
        }
    }
}

/// Whether the whole connection broke, rather than only the stream of this request.
fn connection_broke(status: &Status) -> bool {
    let source = std::error::Error::source(status);
    source
        .and_then(|source| source.downcast_ref::<h2::Error>())
        .is_some_and(|error| error.is_io() || error.is_go_away())
}

/// Returns the reason if Google's service infrastructure refused the request. Source:
/// google/api/error_reason.proto.
fn refusal(details: &Details) -> Option<RefusalReason> {
    if details.domain.as_deref() != Some(INFRASTRUCTURE) {
        return None;
    }
    Some(match details.reason.as_deref() {
        Some("SERVICE_DISABLED") => RefusalReason::ApiDisabled,
        Some("BILLING_DISABLED") => RefusalReason::BillingDisabled,
        _ => RefusalReason::Other,
    })
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

/// Maps a gRPC code to a class. `not_the_messages` is true if the error details blame something other than the
/// messages, for example the topic. It matters only for the two codes that blame the messages by default.
///
/// Sources: Google's retry settings for `Publish` (the first two arms), and the codes in the API's error
/// reference.
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
        // `Publish` should not return these codes. Never drop messages because of an unexpected
        // code: retry.
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
    fn error_details_can_clear_the_messages_of_blame_but_never_blame_them() {
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
    fn only_an_error_reason_of_googleapis_com_becomes_a_refusal_reason() {
        let refusal = |domain, reason| {
            let details = made_up::error_info(domain, reason);
            let code = Code::PermissionDenied;
            Failure::from_status(&Status::with_details(code, "refused", details.into())).refusal
        };
        let infrastructure = |reason| refusal("googleapis.com", reason);
        assert_eq!(
            infrastructure("SERVICE_DISABLED"),
            Some(RefusalReason::ApiDisabled)
        );
        assert_eq!(
            infrastructure("BILLING_DISABLED"),
            Some(RefusalReason::BillingDisabled)
        );
        assert_eq!(
            infrastructure("CONSUMER_SUSPENDED"),
            Some(RefusalReason::Other)
        );
        assert_eq!(refusal("pubsub.googleapis.com", "SERVICE_DISABLED"), None);
        assert_eq!(
            refusal("iam.googleapis.com", "IAM_PERMISSION_DENIED"),
            None,
            "only a right is missing"
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
