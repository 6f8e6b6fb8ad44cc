//! Checks topic names by Pub/Sub's rules, and expands topic ids to full names.

use std::sync::Arc;

use thiserror::Error;

use super::limits;

/// The reason why Pub/Sub would refuse a topic name
/// (<https://cloud.google.com/pubsub/docs/pubsub-basics#resource_names>).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TopicNameFault {
    /// The id is too short or too long.
    #[error("a topic id has 3 to 255 characters, not {0}")]
    Length(usize),
    /// The first character is not a letter.
    #[error("a topic id begins with a letter")]
    Start,
    /// The id has a character that is not allowed.
    #[error("a topic id may have only letters, digits and -_.~+%, not {0:?}")]
    Character(char),
    /// The id begins with the prefix that Google reserves.
    #[error("a topic id must not begin with \"goog\"")]
    Reserved,
    /// The name contains slashes but is not a full topic name.
    #[error("a name with slashes has the form projects/PROJECT/topics/TOPIC")]
    FullName,
    /// The name has the form `projects/PROJECT/topics/TOPIC`, but PROJECT is not a valid project id.
    #[error("the project of a full name is not a project id")]
    Project,
}

/// Returns the full name of a topic. `topic` is the topic's id or its full name.
///
/// # Errors
/// The reason why Pub/Sub would refuse the topic.
pub fn topic_name(project: &str, topic: &str) -> Result<Arc<str>, TopicNameFault> {
    full_name(&format!("projects/{project}/topics/"), topic)
}

/// Returns the full name of a topic. `topic` is its full name, or its id, which is appended to `prefix`.
pub(super) fn full_name(prefix: &str, topic: &str) -> Result<Arc<str>, TopicNameFault> {
    if !topic.contains('/') {
        check_id(topic)?;
        return Ok([prefix, topic].concat().into());
    }
    let mut parts = topic.split('/');
    match (
        parts.next(),
        parts.next(),
        parts.next(),
        parts.next(),
        parts.next(),
    ) {
        (Some("projects"), Some(project), Some("topics"), Some(id), None) => {
            if !limits::is_project_id(project) {
                return Err(TopicNameFault::Project);
            }
            check_id(id)?;
            Ok(topic.into())
        }
        _ => Err(TopicNameFault::FullName),
    }
}

pub(super) fn check_id(id: &str) -> Result<(), TopicNameFault> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.~+%".contains(c);
    if let Some(character) = id.chars().find(|c| !allowed(*c)) {
        return Err(TopicNameFault::Character(character));
    }
    if !limits::TOPIC_ID_CHARS.contains(&id.len()) {
        return Err(TopicNameFault::Length(id.len()));
    }
    if !id.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return Err(TopicNameFault::Start);
    }
    if id.starts_with("goog") {
        return Err(TopicNameFault::Reserved);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFIX: &str = "projects/p/topics/";

    #[test]
    fn a_topic_id_gets_the_projects_prefix_and_a_full_name_is_kept() {
        assert_eq!(
            &*full_name(PREFIX, "order.events").unwrap(),
            "projects/p/topics/order.events"
        );
        assert_eq!(
            &*full_name(PREFIX, "projects/q/topics/abc").unwrap(),
            "projects/q/topics/abc"
        );
    }

    #[test]
    fn names_that_pubsub_refuses_are_refused_with_the_reason() {
        for (topic, fault) in [
            ("", TopicNameFault::Length(0)),
            ("ab", TopicNameFault::Length(2)),
            ("1abc", TopicNameFault::Start),
            ("google.events", TopicNameFault::Reserved),
            ("order events", TopicNameFault::Character(' ')),
            ("bestellungen-ä", TopicNameFault::Character('ä')),
            ("projects/p/topics", TopicNameFault::FullName),
            ("projects//topics/abc", TopicNameFault::Project),
            ("projects/a\nb/topics/abc", TopicNameFault::Project),
            ("projects/p/topics/abc/d", TopicNameFault::FullName),
            ("projects/p/topics/a", TopicNameFault::Length(1)),
        ] {
            assert_eq!(full_name(PREFIX, topic), Err(fault), "{topic}");
        }
        assert!(full_name(PREFIX, &"t".repeat(255)).is_ok());
        assert_eq!(
            full_name(PREFIX, &"t".repeat(256)),
            Err(TopicNameFault::Length(256))
        );
        let long = format!("projects/{}/topics/abc", "p".repeat(900_000));
        assert_eq!(full_name(PREFIX, &long), Err(TopicNameFault::Project));
    }
}
