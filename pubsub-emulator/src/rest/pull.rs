//! `pull` and `acknowledge` over HTTP and JSON, so that `curl` and `gcloud` can receive messages.

use axum::extract::{Path, State};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use prost::Message;
use serde::Deserialize;
use serde_json::{Value, json};
use tonic::Status;

use super::{Answered, Refused, Registered, not_over_rest, read, subscription_name, write};
use crate::proto::PubsubMessage;
use crate::subscriber::{check_ack_request, pull};
use crate::wire::ReceivedMessage;

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct PullJson {
    max_messages: i32,
    return_immediately: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct AcknowledgeJson {
    ack_ids: Vec<String>,
}

/// `POST .../subscriptions/{id}:pull` and `:acknowledge`.
pub(super) async fn call(
    State(registry): Registered,
    Path((project, id)): Path<(String, String)>,
    body: String,
) -> Answered {
    let Some((id, method)) = id.rsplit_once(':') else {
        return Err(not_over_rest().await);
    };
    let subscription = registry.subscription(&subscription_name(&project, id))?;
    match method {
        "pull" => {
            let wanted: PullJson = read(&body)?;
            let immediately = wanted.return_immediately;
            let pulled = pull(&subscription, wanted.max_messages, immediately).await?;
            let messages: Result<Vec<_>, _> =
                pulled.received_messages.iter().map(received).collect();
            write(json!({ "receivedMessages": messages? }))
        }
        "acknowledge" => {
            let wanted: AcknowledgeJson = read(&body)?;
            check_ack_request(body.len(), &wanted.ack_ids)?;
            subscription.acknowledge(&wanted.ack_ids)?;
            write(json!({}))
        }
        _ => Err(not_over_rest().await),
    }
}

fn received(received: &ReceivedMessage) -> Result<Value, Refused> {
    let unreadable =
        |error| Status::internal(format!("A stored message cannot be decoded: {error}."));
    let message = PubsubMessage::decode(received.message.clone()).map_err(unreadable)?;
    Ok(json!({
        "ackId": received.ack_id,
        "message": {
            "data": STANDARD.encode(&message.data),
            "attributes": message.attributes,
            "messageId": message.message_id,
            "publishTime": message.publish_time.map(|time| time.to_string()),
            "orderingKey": message.ordering_key,
        },
    }))
}
