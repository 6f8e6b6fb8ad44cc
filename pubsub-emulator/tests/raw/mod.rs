//! Access to the emulator through bare tonic clients, without the behaviour of any client library.
//!
//! Every wait has a deadline. When the deadline passes, the test fails and says which condition was
//! not met.

#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use googleapis_tonic_google_pubsub_v1::google::pubsub::v1 as proto;
use proto::publisher_client::PublisherClient;
use proto::subscriber_client::SubscriberClient;
use proto::{PubsubMessage, ReceivedMessage, StreamingPullRequest, StreamingPullResponse};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

/// How long each wait may take. This is far more than any test needs, so that tests also pass on
/// busy machines.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Clients of both services, and the project in which the test creates its resources.
#[derive(Clone)]
pub(crate) struct Clients {
    pub(crate) publisher: PublisherClient<Channel>,
    pub(crate) subscriber: SubscriberClient<Channel>,
    pub(crate) project: String,
}

/// A message without an event id.
pub(crate) fn message(ordering_key: &str, data: &str) -> PubsubMessage {
    PubsubMessage {
        data: data.to_owned().into(),
        ordering_key: ordering_key.to_owned(),
        ..Default::default()
    }
}

/// A message with an event id, which is also its data.
pub(crate) fn event(ordering_key: &str, event_id: &str) -> PubsubMessage {
    let attributes = HashMap::from([("event_id".to_owned(), event_id.to_owned())]);
    PubsubMessage {
        attributes,
        ..message(ordering_key, event_id)
    }
}

/// The data of a received message.
pub(crate) fn data(received: &ReceivedMessage) -> String {
    let message = received
        .message
        .as_ref()
        .expect("a received message has a message");
    String::from_utf8(message.data.to_vec()).expect("text")
}

/// Checks that the result is an error with this code. Returns the status.
#[track_caller]
pub(crate) fn refused<T: std::fmt::Debug>(result: Result<T, Status>, code: Code) -> Status {
    let status = result.expect_err("this must be refused");
    assert_eq!(status.code(), code, "{status:?}");
    status
}

impl Clients {
    pub(crate) async fn connect(address: SocketAddr, project: &str) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("valid");
        let channel = endpoint.connect().await.expect("the emulator listens");
        Self {
            publisher: PublisherClient::new(channel.clone()),
            subscriber: SubscriberClient::new(channel).max_decoding_message_size(64 << 20),
            project: format!("projects/{}", project.replace('_', "-")),
        }
    }

    pub(crate) fn topic(&self, id: &str) -> String {
        format!("{}/topics/{id}", self.project)
    }

    pub(crate) fn subscription(&self, id: &str) -> String {
        format!("{}/subscriptions/{id}", self.project)
    }

    pub(crate) async fn create_topic(&mut self, id: &str) -> String {
        let name = self.topic(id);
        let topic = proto::Topic {
            name: name.clone(),
            ..Default::default()
        };
        self.publisher
            .create_topic(topic)
            .await
            .expect("a new topic");
        name
    }

    /// Creates a topic and an ordered subscription to it. Returns their names.
    pub(crate) async fn create_ordered(&mut self, id: &str) -> (String, String) {
        let topic = self.create_topic(id).await;
        let settings = proto::Subscription {
            enable_message_ordering: true,
            ..Default::default()
        };
        let subscription = self
            .subscribe(id, &topic, settings)
            .await
            .expect("a new subscription");
        (topic, subscription)
    }

    pub(crate) async fn subscribe(
        &mut self,
        id: &str,
        topic: &str,
        settings: proto::Subscription,
    ) -> Result<String, Status> {
        let name = self.subscription(id);
        let wanted = proto::Subscription {
            name: name.clone(),
            topic: topic.to_owned(),
            ..settings
        };
        self.subscriber
            .create_subscription(wanted)
            .await
            .map(|_| name)
    }

    pub(crate) async fn publish(
        &mut self,
        topic: &str,
        messages: Vec<PubsubMessage>,
    ) -> Result<Vec<String>, Status> {
        let request = proto::PublishRequest {
            topic: topic.to_owned(),
            messages,
        };
        Ok(self
            .publisher
            .publish(request)
            .await?
            .into_inner()
            .message_ids)
    }

    /// Pulls once. Returns the messages that are available now.
    pub(crate) async fn pull(
        &mut self,
        subscription: &str,
        max_messages: i32,
    ) -> Result<Vec<ReceivedMessage>, Status> {
        #[allow(deprecated, reason = "the only way to ask without waiting")]
        let request = proto::PullRequest {
            subscription: subscription.to_owned(),
            return_immediately: true,
            max_messages,
        };
        Ok(self
            .subscriber
            .pull(request)
            .await?
            .into_inner()
            .received_messages)
    }

    /// Pulls until `count` messages have arrived.
    pub(crate) async fn pull_all(
        &mut self,
        subscription: &str,
        count: usize,
    ) -> Vec<ReceivedMessage> {
        let mut received = Vec::new();
        let pulling = async {
            while received.len() < count {
                received.extend(self.pull(subscription, 100).await.expect("a pull"));
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, pulling)
            .await
            .expect("the messages come in time");
        received
    }

    pub(crate) async fn acknowledge(
        &mut self,
        subscription: &str,
        ack_ids: Vec<String>,
    ) -> Result<(), Status> {
        let request = proto::AcknowledgeRequest {
            subscription: subscription.to_owned(),
            ack_ids,
        };
        self.subscriber.acknowledge(request).await.map(drop)
    }

    pub(crate) async fn modify_ack_deadline(
        &mut self,
        subscription: &str,
        ack_ids: Vec<String>,
        ack_deadline_seconds: i32,
    ) -> Result<(), Status> {
        let request = proto::ModifyAckDeadlineRequest {
            subscription: subscription.to_owned(),
            ack_ids,
            ack_deadline_seconds,
        };
        self.subscriber.modify_ack_deadline(request).await.map(drop)
    }

    /// Opens a stream with the default settings.
    pub(crate) async fn stream(&mut self, subscription: &str) -> Stream {
        self.stream_with(subscription, StreamingPullRequest::default())
            .await
    }

    /// Opens a stream. Fills in the name of the subscription and, if missing, the ack deadline.
    pub(crate) async fn stream_with(
        &mut self,
        subscription: &str,
        mut first: StreamingPullRequest,
    ) -> Stream {
        subscription.clone_into(&mut first.subscription);
        if first.stream_ack_deadline_seconds == 0 {
            first.stream_ack_deadline_seconds = 60;
        }
        let (requests, outgoing) = mpsc::channel(16);
        requests
            .send(first)
            .await
            .expect("room for the first request");
        let mut subscriber = self.subscriber.clone();
        let opening = tokio::spawn(async move {
            let outgoing = ReceiverStream::new(outgoing);
            Ok(subscriber.streaming_pull(outgoing).await?.into_inner())
        });
        Stream {
            requests,
            responses: Responses::Opening(opening),
        }
    }
}

/// A client's end of a `StreamingPull`.
pub(crate) struct Stream {
    pub(crate) requests: mpsc::Sender<StreamingPullRequest>,
    responses: Responses,
}

/// The state of the responses. Google's own emulator sends the headers only with the first message,
/// so creating the stream does not wait for them.
enum Responses {
    Opening(JoinHandle<Result<Streaming<StreamingPullResponse>, Status>>),
    Open(Box<Streaming<StreamingPullResponse>>),
}

impl Stream {
    /// Waits for the response headers.
    pub(crate) async fn opened(&mut self) -> Result<&mut Streaming<StreamingPullResponse>, Status> {
        if let Responses::Opening(opening) = &mut self.responses {
            let opened = tokio::time::timeout(PATIENCE, opening).await;
            let opened = opened
                .expect("the headers come in time")
                .expect("no panic")?;
            self.responses = Responses::Open(Box::new(opened));
        }
        match &mut self.responses {
            Responses::Open(responses) => Ok(responses),
            Responses::Opening(_) => unreachable!("opened above"),
        }
    }

    /// Returns the next response, even if it is empty.
    pub(crate) async fn response(&mut self) -> Result<StreamingPullResponse, Status> {
        let next = tokio::time::timeout(PATIENCE, self.opened().await?.message());
        let response = next
            .await
            .expect("a response or a heartbeat comes in time")?;
        Ok(response.expect("the stream continues"))
    }

    /// Returns at least `count` messages, from as many responses as needed.
    pub(crate) async fn messages(&mut self, count: usize) -> Vec<ReceivedMessage> {
        let mut received = Vec::new();
        while received.len() < count {
            let response = self.response().await.expect("the stream continues");
            received.extend(response.received_messages);
        }
        received
    }

    pub(crate) async fn acknowledge(&self, ack_ids: Vec<String>) {
        let request = StreamingPullRequest {
            ack_ids,
            ..Default::default()
        };
        self.requests
            .send(request)
            .await
            .expect("the stream is open");
    }

    pub(crate) async fn nack(&self, ack_ids: Vec<String>) {
        let request = StreamingPullRequest {
            modify_deadline_seconds: vec![0; ack_ids.len()],
            modify_deadline_ack_ids: ack_ids,
            ..Default::default()
        };
        self.requests
            .send(request)
            .await
            .expect("the stream is open");
    }

    /// Returns the error with which the stream ends.
    pub(crate) async fn failure(&mut self) -> Status {
        loop {
            if let Err(status) = self.response().await {
                return status;
            }
        }
    }
}

/// The ack ids of received messages.
pub(crate) fn ack_ids(received: &[ReceivedMessage]) -> Vec<String> {
    received
        .iter()
        .map(|message| message.ack_id.clone())
        .collect()
}
