//! Topics: is one there, does anything subscribe to it, and make one.
//!
//! Over the same gRPC connections as `Publish`. Google's own client library speaks REST for these
//! calls, which emulators need not offer.

use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::publisher_client::PublisherClient;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::{
    GetTopicRequest, ListTopicSubscriptionsRequest, Topic,
};
use tonic::{Code as GrpcCode, Request, Status};

use super::channel::Channel;
use super::connection::Connection;
use super::{Credentials, Publisher, failure::Failure};
use crate::error::{Error, Result};

/// Administers topics. Names are full throughout: `projects/P/topics/T`.
#[derive(Debug, Clone)]
pub(crate) struct Topics {
    channel: Channel,
    credentials: Credentials,
}

impl Topics {
    /// Over one of the publisher's connections.
    pub(crate) fn new(publisher: &Publisher) -> Self {
        Self {
            channel: publisher.channels[0].clone(),
            credentials: publisher.credentials.clone(),
        }
    }

    /// Makes a topic; one that is there already is as good.
    ///
    /// # Errors
    /// `pubsub-permission`, `pubsub-unreachable`.
    pub(crate) async fn create(&self, topic: &str) -> Result<()> {
        let request = self
            .request(
                Topic {
                    name: topic.into(),
                    ..Topic::default()
                },
                topic,
            )
            .await?;
        match self.client(topic).await?.create_topic(request).await {
            Ok(_) => {
                tracing::info!(topic, "created the topic");
                Ok(())
            }
            Err(status) if status.code() == GrpcCode::AlreadyExists => Ok(()),
            Err(status) => Err(error(&status, topic)),
        }
    }

    /// Whether the topic exists.
    ///
    /// # Errors
    /// `pubsub-permission`, `pubsub-unreachable`.
    pub(crate) async fn exists(&self, topic: &str) -> Result<bool> {
        let request = self
            .request(
                GetTopicRequest {
                    topic: topic.into(),
                },
                topic,
            )
            .await?;
        match self.client(topic).await?.get_topic(request).await {
            Ok(_) => Ok(true),
            Err(status) if status.code() == GrpcCode::NotFound => Ok(false),
            Err(status) => Err(error(&status, topic)),
        }
    }

    /// Whether anything subscribes to the topic, which otherwise keeps nothing.
    ///
    /// # Errors
    /// `topic-missing`, `pubsub-permission`, `pubsub-unreachable`.
    pub(crate) async fn has_subscription(&self, topic: &str) -> Result<bool> {
        let message = ListTopicSubscriptionsRequest {
            topic: topic.into(),
            page_size: 1,
            ..ListTopicSubscriptionsRequest::default()
        };
        let request = self.request(message, topic).await?;
        match self
            .client(topic)
            .await?
            .list_topic_subscriptions(request)
            .await
        {
            Ok(page) => Ok(!page.into_inner().subscriptions.is_empty()),
            Err(status) => Err(error(&status, topic)),
        }
    }

    async fn client(&self, topic: &str) -> Result<PublisherClient<Connection>> {
        let connection = self.channel.connection().await;
        let connection = connection.map_err(|status| error(&status, topic))?;
        Ok(PublisherClient::new(connection))
    }

    async fn request<T>(&self, message: T, topic: &str) -> Result<Request<T>> {
        let metadata = self
            .credentials
            .metadata()
            .await
            .map_err(|failure| super::error(&failure, topic))?;
        let mut request = Request::new(message);
        *request.metadata_mut() = metadata;
        Ok(request)
    }
}

fn error(status: &Status, topic: &str) -> Error {
    super::error(&Failure::from_status(status), topic)
}
