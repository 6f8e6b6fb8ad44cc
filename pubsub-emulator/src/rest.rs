//! Topics and subscriptions over HTTP and JSON, on the same port as gRPC.
//!
//! `gcloud`, Terraform and some official clients manage resources over REST. The Rust client does so although
//! it publishes over gRPC. This module creates, reads, lists and deletes topics and subscriptions, in the
//! form of <https://cloud.google.com/pubsub/docs/reference/rest>. It also supports pulling and acknowledging
//! messages (`pull.rs`), but not publishing.

mod pull;

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::names;
use crate::proto;
use crate::registry::{Registry, page};

type Answered = Result<Json<Value>, Refused>;
type Registered = State<Arc<Registry>>;

/// Returns the router for all paths below `/v1`.
pub(crate) fn router(registry: Arc<Registry>) -> Router {
    Router::new()
        .route("/v1/projects/{project}/topics", get(list_topics))
        .route(
            "/v1/projects/{project}/topics/{id}",
            get(get_topic).put(create_topic).delete(delete_topic),
        )
        .route(
            "/v1/projects/{project}/subscriptions",
            get(list_subscriptions),
        )
        .route(
            "/v1/projects/{project}/subscriptions/{id}",
            get(get_subscription)
                .put(create_subscription)
                .delete(delete_subscription)
                .post(pull::call),
        )
        .method_not_allowed_fallback(not_over_rest)
        .with_state(registry)
}

/// A topic as JSON. A request with an unknown field is refused, and the error names that field.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct TopicJson {
    name: String,
    labels: HashMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message_retention_duration: Option<String>,
}

/// A subscription as JSON. A request with an unknown field is refused, and the error names that field.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct SubscriptionJson {
    name: String,
    topic: String,
    push_config: NoSettings,
    ack_deadline_seconds: i32,
    labels: HashMap<String, String>,
    enable_message_ordering: bool,
    filter: String,
    detached: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    message_retention_duration: Option<String>,
}

/// A JSON object that must be empty, because the emulator supports none of its settings.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NoSettings {}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PageQuery {
    page_size: i32,
    page_token: String,
}

impl TopicJson {
    fn from_resource(topic: proto::Topic) -> Self {
        Self {
            name: topic.name,
            labels: topic.labels,
            message_retention_duration: topic
                .message_retention_duration
                .map(|duration| duration.to_string()),
        }
    }
}

impl SubscriptionJson {
    fn from_resource(subscription: proto::Subscription) -> Self {
        Self {
            name: subscription.name,
            topic: subscription.topic,
            push_config: NoSettings {},
            ack_deadline_seconds: subscription.ack_deadline_seconds,
            labels: subscription.labels,
            enable_message_ordering: subscription.enable_message_ordering,
            filter: subscription.filter,
            detached: subscription.detached,
            message_retention_duration: subscription
                .message_retention_duration
                .map(|duration| duration.to_string()),
        }
    }
}

async fn create_topic(
    State(registry): Registered,
    Path((project, id)): Path<(String, String)>,
    body: String,
) -> Answered {
    let wanted: TopicJson = read(&body)?;
    let created = registry.create_topic(proto::Topic {
        name: topic_name(&project, &id),
        labels: wanted.labels,
        message_retention_duration: duration(wanted.message_retention_duration.as_deref())?,
        ..Default::default()
    })?;
    write(TopicJson::from_resource(created))
}

async fn get_topic(
    State(registry): Registered,
    Path((project, id)): Path<(String, String)>,
) -> Answered {
    let topic = registry.topic(&topic_name(&project, &id))?;
    write(TopicJson::from_resource(topic.resource()))
}

async fn list_topics(
    State(registry): Registered,
    Path(project): Path<String>,
    Query(query): Query<PageQuery>,
) -> Answered {
    let project = format!("projects/{project}");
    names::check_project(&project)?;
    let topics = registry.topics_of(&project);
    let (topics, next) = page(
        topics,
        |topic| &topic.name,
        query.page_size,
        &query.page_token,
    );
    let topics: Vec<_> = topics.into_iter().map(TopicJson::from_resource).collect();
    write(json!({ "topics": topics, "nextPageToken": next }))
}

async fn delete_topic(
    State(registry): Registered,
    Path((project, id)): Path<(String, String)>,
) -> Answered {
    registry.delete_topic(&topic_name(&project, &id))?;
    write(json!({}))
}

async fn create_subscription(
    State(registry): Registered,
    Path((project, id)): Path<(String, String)>,
    body: String,
) -> Answered {
    let wanted: SubscriptionJson = read(&body)?;
    let created = registry.create_subscription(proto::Subscription {
        name: subscription_name(&project, &id),
        topic: wanted.topic,
        ack_deadline_seconds: wanted.ack_deadline_seconds,
        labels: wanted.labels,
        enable_message_ordering: wanted.enable_message_ordering,
        filter: wanted.filter,
        message_retention_duration: duration(wanted.message_retention_duration.as_deref())?,
        ..Default::default()
    })?;
    write(SubscriptionJson::from_resource(created))
}

async fn get_subscription(
    State(registry): Registered,
    Path((project, id)): Path<(String, String)>,
) -> Answered {
    let subscription = registry.subscription(&subscription_name(&project, &id))?;
    write(SubscriptionJson::from_resource(subscription.resource()))
}

async fn list_subscriptions(
    State(registry): Registered,
    Path(project): Path<String>,
    Query(query): Query<PageQuery>,
) -> Answered {
    let project = format!("projects/{project}");
    names::check_project(&project)?;
    let all = registry.subscriptions_of(&project);
    let (page, next) = page(
        all,
        |subscription| &subscription.name,
        query.page_size,
        &query.page_token,
    );
    let page: Vec<_> = page
        .into_iter()
        .map(SubscriptionJson::from_resource)
        .collect();
    write(json!({ "subscriptions": page, "nextPageToken": next }))
}

async fn delete_subscription(
    State(registry): Registered,
    Path((project, id)): Path<(String, String)>,
) -> Answered {
    registry.delete_subscription(&subscription_name(&project, &id))?;
    write(json!({}))
}

async fn not_over_rest() -> Refused {
    let message = "This emulator offers no such method over REST. Use gRPC.";
    Refused(Status::unimplemented(message))
}

fn topic_name(project: &str, id: &str) -> String {
    format!("projects/{project}/topics/{id}")
}

fn subscription_name(project: &str, id: &str) -> String {
    format!("projects/{project}/subscriptions/{id}")
}

fn read<T: DeserializeOwned + Default>(body: &str) -> Result<T, Status> {
    if body.is_empty() {
        return Ok(T::default());
    }
    serde_json::from_str(body)
        .map_err(|error| Status::invalid_argument(format!("Invalid JSON payload: {error}.")))
}

fn write(answer: impl Serialize) -> Answered {
    let written = serde_json::to_value(answer);
    Ok(Json(written.expect(
        "invariant: plain structs with string keys become JSON",
    )))
}

fn duration(text: Option<&str>) -> Result<Option<prost_types::Duration>, Status> {
    let Some(text) = text else { return Ok(None) };
    let duration = text.parse().map_err(|_| {
        Status::invalid_argument(format!(
            "Invalid duration {text:?}. Write it like \"600s\"."
        ))
    })?;
    Ok(Some(duration))
}

/// An error in the JSON format of Google's REST APIs.
#[derive(Debug)]
struct Refused(Status);

impl From<Status> for Refused {
    fn from(status: Status) -> Self {
        Self(status)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let (http, name) = match self.0.code() {
            Code::InvalidArgument => (StatusCode::BAD_REQUEST, "INVALID_ARGUMENT"),
            Code::FailedPrecondition => (StatusCode::BAD_REQUEST, "FAILED_PRECONDITION"),
            Code::NotFound => (StatusCode::NOT_FOUND, "NOT_FOUND"),
            Code::AlreadyExists => (StatusCode::CONFLICT, "ALREADY_EXISTS"),
            Code::Unimplemented => (StatusCode::NOT_IMPLEMENTED, "UNIMPLEMENTED"),
            _ => (StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL"),
        };
        let error = json!({
            "code": http.as_u16(), "message": self.0.message(), "status": name,
        });
        (http, Json(json!({ "error": error }))).into_response()
    }
}
