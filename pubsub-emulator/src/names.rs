//! Resource names: `projects/{project}/topics/{id}` and `projects/{project}/subscriptions/{id}`.
//!
//! Checks names like the service, and uses the service's wording for missing and existing
//! resources, so that a client handles these errors in the same way here and with the service.
//! Rules: <https://cloud.google.com/pubsub/docs/pubsub-basics#resource_names>.

use tonic::Status;

/// Value of a subscription's `topic` field after the topic was deleted.
pub(crate) const DELETED_TOPIC: &str = "_deleted-topic_";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Topic,
    Subscription,
}

impl Kind {
    fn collection(self) -> &'static str {
        match self {
            Self::Topic => "topics",
            Self::Subscription => "subscriptions",
        }
    }
}

/// Returns INVALID_ARGUMENT for a malformed resource name.
pub(crate) fn check(kind: Kind, name: &str) -> Result<(), Status> {
    if is_valid(kind, name) {
        return Ok(());
    }
    Err(Status::invalid_argument(format!(
        "Invalid resource name given (name={name}). Refer to \
         https://cloud.google.com/pubsub/docs/pubsub-basics#resource_names for more information."
    )))
}

/// Returns INVALID_ARGUMENT for anything but `projects/{project}`.
pub(crate) fn check_project(name: &str) -> Result<(), Status> {
    match name.strip_prefix("projects/") {
        Some(project) if is_valid_project(project) => Ok(()),
        _ => Err(Status::invalid_argument(format!(
            "Invalid project name given (name={name}). Expected projects/{{project}}."
        ))),
    }
}

/// The last part of a resource name, which the service shows in its error messages.
pub(crate) fn short(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

/// Builds a NOT_FOUND error in the service's wording.
pub(crate) fn not_found(name: &str) -> Status {
    Status::not_found(format!("Resource not found (resource={}).", short(name)))
}

/// Builds an ALREADY_EXISTS error in the service's wording.
pub(crate) fn already_exists(name: &str) -> Status {
    Status::already_exists(format!(
        "Resource already exists in the project (resource={}).",
        short(name)
    ))
}

fn is_valid(kind: Kind, name: &str) -> bool {
    let mut parts = name.split('/');
    let expected = (
        parts.next() == Some("projects"),
        parts.next().is_some_and(is_valid_project),
        parts.next() == Some(kind.collection()),
        parts.next().is_some_and(is_valid_id),
        parts.next(),
    );
    matches!(expected, (true, true, true, true, None))
}

/// Checks only the characters of a project id, because people use emulators with invented ids.
fn is_valid_project(project: &str) -> bool {
    !project.is_empty()
        && project
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b':' | b'_'))
}

fn is_valid_id(id: &str) -> bool {
    let allowed =
        |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'~' | b'+' | b'%');
    (3..=255).contains(&id.len())
        && id.as_bytes()[0].is_ascii_alphabetic()
        && id.bytes().all(allowed)
        && !id.starts_with("goog")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_documented_form_are_accepted() {
        for id in ["abc", "orders.events", "a-b_c.d~e+f%25", &"x".repeat(255)] {
            assert!(
                is_valid(Kind::Topic, &format!("projects/demo-1/topics/{id}")),
                "{id}"
            );
        }
        assert!(is_valid(
            Kind::Subscription,
            "projects/example.com:p/subscriptions/audit"
        ));
    }

    #[test]
    fn names_of_another_form_are_refused() {
        let too_long = "x".repeat(256);
        for id in [
            "ab",
            "1abc",
            "goog-x",
            "a b c",
            "ab/c",
            "",
            too_long.as_str(),
        ] {
            assert!(
                !is_valid(Kind::Topic, &format!("projects/p/topics/{id}")),
                "{id}"
            );
        }
        assert!(!is_valid(Kind::Topic, "projects/p/subscriptions/abc"));
        assert!(!is_valid(Kind::Topic, "projects//topics/abc"));
        assert!(!is_valid(Kind::Topic, "topics/abc"));
    }

    #[test]
    fn answers_carry_the_short_name_as_the_service_words_it() {
        let status = not_found("projects/p/topics/orders");
        assert_eq!(status.message(), "Resource not found (resource=orders).");
        let status = already_exists("projects/p/topics/orders");
        assert_eq!(
            status.message(),
            "Resource already exists in the project (resource=orders)."
        );
    }
}
