//! Checks the project, the credentials, the endpoint, the topics and their subscriptions.

use std::time::Duration;

use publisher::{Endpoint, Failure, Publisher, TopicAdmin};
use slot_manager::{Finding, Severity};

use crate::error::{Code, Error, Result};
use crate::mapping::Ordering;
use crate::ops::finding::{finding, finding_with_remedy, from_error};
use crate::settings::Settings;

/// Maximum duration of one call. The client itself would retry for longer.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of topics to look up. Each topic takes up to three calls, one after the other, so this
/// number limits the time of the check.
const LOOKED_UP_MAX: usize = 50;

/// Name of the topic that the check looks up to find out whether Pub/Sub answers. The topic need not
/// exist.
const PROBE: &str = "postrider-check";

/// Checks Pub/Sub. Looks up `topics`, which are full names, and the dead-letter topic.
pub(super) async fn check(settings: &Settings, mut topics: Vec<String>) -> Vec<Finding> {
    let mut findings = Vec::new();
    // Ignore the error for a missing project, because the call of `settings.project()` below reports it.
    if let Ok(topic) = settings.dead_letter_topic() {
        topics.extend(topic.map(|topic| topic.to_string()));
    }
    findings.extend(region(settings));
    let project = match settings.project() {
        Ok(project) => {
            findings.push(finding(
                Severity::Ok,
                "project",
                format!("the project is {project}"),
            ));
            project
        }
        Err(error) => {
            findings.push(from_error(&error));
            return findings;
        }
    };
    let publisher = Publisher::new(&settings.pubsub, 1, settings.publish_timeout);
    let client = match publisher {
        Ok(publisher) => TopicAdmin::new(&publisher),
        Err(error) => {
            findings.push(from_error(&error.into()));
            return findings;
        }
    };
    if matches!(&settings.pubsub, Endpoint::Service(url) if url.starts_with("https://")) {
        let error = credentials(&client, project).await.err();
        let has_token = error.is_none();
        findings.push(error.map_or_else(
            || {
                let what = "the Google credentials give an access token";
                finding(Severity::Ok, "credentials", what)
            },
            |error| from_error(&error),
        ));
        if !has_token {
            return findings;
        }
    }
    let endpoint = endpoint(&client, project).await;
    let answers = endpoint.severity < Severity::Warning;
    findings.push(endpoint);
    if answers {
        findings.extend(look_up(&client, settings, &topics).await);
    }
    findings
}

fn region(settings: &Settings) -> Option<Finding> {
    let ordered = settings
        .tables
        .iter()
        .any(|table| table.ordering != Ordering::None);
    (ordered && settings.pubsub.is_global()).then(|| {
        finding_with_remedy(
            Severity::Warning,
            "endpoint-global",
            "events are ordered, but the endpoint is the global one: Pub/Sub keeps the order of a \
             key only among publishes in one region",
            "set POSTRIDER_PUBSUB_ENDPOINT=https://REGION-pubsub.googleapis.com",
        )
    })
}

/// Checks that the credentials give an access token.
async fn credentials(client: &TopicAdmin, project: &str) -> Result<()> {
    let probe = format!("projects/{project}/topics/{PROBE}");
    let asking = client.check_credentials();
    let failure = match tokio::time::timeout(CALL_TIMEOUT, asking).await {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(failure)) => failure,
        Err(_) => Failure::no_token_in(CALL_TIMEOUT),
    };
    Err(Error::pubsub(&failure, &probe))
}

async fn endpoint(client: &TopicAdmin, project: &str) -> Finding {
    let probe = format!("projects/{project}/topics/{PROBE}");
    let error = match in_time(&probe, client.exists(&probe)).await {
        Ok(_) => return finding(Severity::Ok, "endpoint", "Pub/Sub answers"),
        Err(error) => error,
    };
    match error.code() {
        // The relay can publish without the right to look topics up, so this is not an error.
        Code::PubsubPermission => finding_with_remedy(
            Severity::Info,
            "topics-not-visible",
            format!("Pub/Sub answers, but topics cannot be looked up: {error}"),
            "grant roles/pubsub.viewer to check topics and their subscriptions, too; the relay itself needs \
             roles/pubsub.publisher",
        ),
        Code::PubsubUnreachable => Finding {
            remedy: Some(
                "check POSTRIDER_PUBSUB_ENDPOINT or PUBSUB_EMULATOR_HOST, and the network".into(),
            ),
            ..from_error(&error)
        },
        // The last part of the probe's name is valid, so Pub/Sub must have refused the project in the name.
        Code::EventRefused => finding_with_remedy(
            Severity::Error,
            "setting-invalid",
            format!("Pub/Sub refuses project {project}: {error}"),
            "set PUBSUB_PROJECT_ID to the project's id (not its name or number)",
        ),
        _ => from_error(&error),
    }
}

async fn look_up(client: &TopicAdmin, settings: &Settings, topics: &[String]) -> Vec<Finding> {
    if topics.is_empty() {
        let what = "no topic was looked up: the topics are known only when the tables have events";
        return vec![finding(Severity::Info, "topics-unknown", what)];
    }
    let mut findings = Vec::new();
    for topic in topics.iter().take(LOOKED_UP_MAX) {
        match look_up_one(client, settings, topic).await {
            Ok(found) => findings.extend(found),
            Err(error) => {
                findings.push(from_error(&error));
                return findings;
            }
        }
    }
    if topics.len() > LOOKED_UP_MAX {
        let left = topics.len() - LOOKED_UP_MAX;
        let topics = if left == 1 { "topic" } else { "topics" };
        let what = format!("{left} more {topics} not looked up");
        findings.push(finding(Severity::Info, "topics-unknown", what));
    }
    findings
}

/// Checks whether the topic exists, whether we may publish to it, and whether it has a subscription.
async fn look_up_one(
    client: &TopicAdmin,
    settings: &Settings,
    topic: &str,
) -> Result<Vec<Finding>> {
    let exists = match in_time(topic, client.exists(topic)).await {
        Err(error) if error.code() == Code::PubsubPermission => None,
        found => Some(found?),
    };
    if exists == Some(false) {
        return Ok(vec![missing(settings, topic)]);
    }
    let mut findings = Vec::new();
    match in_time(topic, client.may_publish(topic)).await? {
        Some(false) => findings.push(may_not_publish(settings, topic, exists)),
        Some(true) => findings.push(finding(
            Severity::Ok,
            "topic",
            format!("the credentials may publish to {topic}"),
        )),
        None => {}
    }
    if exists.is_some() {
        findings.push(subscriptions(client, topic).await?);
    }
    Ok(findings)
}

fn may_not_publish(settings: &Settings, topic: &str, exists: Option<bool>) -> Finding {
    let (severity, unless) = match exists {
        Some(_) => (Severity::Error, ""),
        None if settings.create_topics => {
            (Severity::Warning, ", or the relay has to create it first")
        }
        None => (Severity::Error, ", or it does not exist"),
    };
    finding_with_remedy(
        severity,
        "pubsub-permission",
        format!("the credentials may not publish to {topic}{unless}"),
        format!(
            "gcloud pubsub topics add-iam-policy-binding {topic} --role=roles/pubsub.publisher \
             --member=serviceAccount:ACCOUNT"
        ),
    )
}

fn missing(settings: &Settings, topic: &str) -> Finding {
    if settings.create_topics {
        finding_with_remedy(
            Severity::Warning,
            "topic-missing",
            format!("{topic} does not exist; the relay creates it"),
            "create it with its subscriptions first: a topic without a subscription keeps no messages",
        )
    } else {
        finding_with_remedy(
            Severity::Error,
            "topic-missing",
            format!("{topic} does not exist"),
            format!("gcloud pubsub topics create {topic}, or set POSTRIDER_CREATE_TOPICS=true"),
        )
    }
}

async fn subscriptions(client: &TopicAdmin, topic: &str) -> Result<Finding> {
    let has_subscription = match in_time(topic, client.has_subscription(topic)).await {
        // Some roles may look up topics but not their subscriptions, so do not report a missing subscription
        // here.
        Err(error) if error.code() == Code::PubsubPermission => true,
        found => found?,
    };
    if has_subscription {
        return Ok(finding(
            Severity::Ok,
            "topic",
            format!("{topic} exists and has a subscription"),
        ));
    }
    Ok(finding_with_remedy(
        Severity::Warning,
        "topic-without-subscription",
        format!("{topic} has no subscription: without message retention it keeps no messages"),
        format!(
            "gcloud pubsub subscriptions create NAME --topic={topic} --enable-message-ordering"
        ),
    ))
}

/// Waits for the answer to a question about this topic, for at most [`CALL_TIMEOUT`].
async fn in_time<T>(topic: &str, question: impl Future<Output = Result<T, Failure>>) -> Result<T> {
    match tokio::time::timeout(CALL_TIMEOUT, question).await {
        Ok(answer) => answer.map_err(|failure| Error::pubsub(&failure, topic)),
        Err(_) => {
            let what = format!("Pub/Sub did not answer in {CALL_TIMEOUT:?}");
            Err(Error::new(Code::PubsubUnreachable, what))
        }
    }
}
