//! Creates topics, and checks whether a topic exists, has a subscription, and may be published to.
//!
//! These calls use one of the gRPC connections of `Publish`. Google's own client library makes them
//! over REST, which emulators might not offer.

use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::{
    GetTopicRequest, ListTopicSubscriptionsRequest, ListTopicSubscriptionsResponse, Topic,
};
use prost::Message;
use tonic::{Code as GrpcCode, Status};

use super::body::RequestBody;
use super::channel::Channel;
use super::failure::Failure;
use super::{Credentials, LOG_TARGET, Publisher};

const CREATE: &str = "/google.pubsub.v1.Publisher/CreateTopic";
const GET: &str = "/google.pubsub.v1.Publisher/GetTopic";
const LIST_SUBSCRIPTIONS: &str = "/google.pubsub.v1.Publisher/ListTopicSubscriptions";
const TEST_PERMISSIONS: &str = "/google.iam.v1.IAMPolicy/TestIamPermissions";

/// The permission that is needed to publish.
const PUBLISH: &str = "pubsub.topics.publish";

/// `google.iam.v1.TestIamPermissionsRequest`.
#[derive(Clone, PartialEq, Message)]
struct TestIamPermissionsRequest {
    #[prost(string, tag = "1")]
    resource: String,
    #[prost(string, repeated, tag = "2")]
    permissions: Vec<String>,
}

/// `google.iam.v1.TestIamPermissionsResponse`: the requested permissions that the caller has.
#[derive(Clone, PartialEq, Message)]
struct TestIamPermissionsResponse {
    #[prost(string, repeated, tag = "1")]
    permissions: Vec<String>,
}

/// Administers topics. All topic names are full names: `projects/P/topics/T`.
#[derive(Debug, Clone)]
pub struct TopicAdmin {
    channel: Channel,
    credentials: Credentials,
}

impl TopicAdmin {
    /// Creates an administrator that uses one of the connections of `publisher`.
    pub fn new(publisher: &Publisher) -> Self {
        Self {
            channel: publisher.channels[0].clone(),
            credentials: publisher.credentials.clone(),
        }
    }

    /// Checks that the credentials give an access token. Does nothing if the endpoint needs none.
    ///
    /// # Errors
    /// A [`Failure`] of the step [`Credentials`](super::FailedStep::Credentials).
    pub async fn check_credentials(&self) -> Result<(), Failure> {
        self.credentials.headers().await.map(|_| ())
    }

    /// Creates a topic; an existing one counts as success.
    ///
    /// # Errors
    /// A [`Failure`], for example because a permission is missing.
    pub async fn create(&self, topic: &str) -> Result<(), Failure> {
        let request = Topic {
            name: topic.into(),
            ..Topic::default()
        };
        match self.call::<Topic>(CREATE, &request).await {
            Ok(_) => {
                tracing::info!(target: LOG_TARGET, topic, "created the topic");
                Ok(())
            }
            Err(failure) if failure.grpc_code() == Some(GrpcCode::AlreadyExists) => Ok(()),
            Err(failure) => Err(failure),
        }
    }

    /// Whether the topic exists.
    ///
    /// # Errors
    /// A [`Failure`], for example because a permission is missing.
    pub async fn exists(&self, topic: &str) -> Result<bool, Failure> {
        let request = GetTopicRequest {
            topic: topic.into(),
        };
        match self.call::<Topic>(GET, &request).await {
            Ok(_) => Ok(true),
            Err(failure) if failure.grpc_code() == Some(GrpcCode::NotFound) => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    /// Whether the topic has a subscription. Pub/Sub does not keep messages of a topic without a
    /// subscription.
    ///
    /// # Errors
    /// A [`Failure`], for example because the topic or a permission is missing.
    pub async fn has_subscription(&self, topic: &str) -> Result<bool, Failure> {
        let request = ListTopicSubscriptionsRequest {
            topic: topic.into(),
            page_size: 1,
            ..ListTopicSubscriptionsRequest::default()
        };
        let page = self.call::<ListTopicSubscriptionsResponse>(LIST_SUBSCRIPTIONS, &request);
        Ok(!page.await?.subscriptions.is_empty())
    }

    /// Whether we may publish to the topic. `None` if the server says that the topic does not exist, or if
    /// the server is an emulator that does not support this call. Pub/Sub reveals that a topic does not exist
    /// only to callers with a further permission. All other callers get `false` for a missing topic.
    ///
    /// # Errors
    /// A [`Failure`], for example because Pub/Sub does not answer.
    pub async fn may_publish(&self, topic: &str) -> Result<Option<bool>, Failure> {
        let request = TestIamPermissionsRequest {
            resource: topic.into(),
            permissions: vec![PUBLISH.into()],
        };
        let asking = self.call::<TestIamPermissionsResponse>(TEST_PERMISSIONS, &request);
        match asking.await {
            Ok(answer) => Ok(Some(answer.permissions.iter().any(|one| one == PUBLISH))),
            Err(failure) => match failure.grpc_code() {
                Some(GrpcCode::Unimplemented | GrpcCode::NotFound) => Ok(None),
                _ => Err(failure),
            },
        }
    }

    async fn call<A: Message + Default>(
        &self,
        method: &'static str,
        request: &impl Message,
    ) -> Result<A, Failure> {
        let headers = self.credentials.headers().await?;
        let connection = self.channel.connection().await;
        let connection = connection.map_err(|status| Failure::connect(&status))?;
        let call = async {
            let answer = connection
                .unary(method, headers, RequestBody::of(request))
                .await?;
            A::decode(answer).map_err(|e| Status::internal(e.to_string()))
        };
        call.await.map_err(|status| Failure::from_status(&status))
    }
}
