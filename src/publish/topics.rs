//! Topics, through Google's own client: is one there, and make one.

use google_cloud_pubsub::client::TopicAdmin;

use super::Credentials;
use crate::error::{Code, Error, Result};
use crate::settings::Endpoint;

/// Administers topics. Names are full throughout: `projects/P/topics/T`.
#[derive(Debug, Clone)]
pub(crate) struct Topics {
    admin: TopicAdmin,
}

impl Topics {
    /// # Errors
    /// `pubsub-endpoint` when no client can be made for it.
    pub(crate) async fn new(endpoint: &Endpoint, credentials: &Credentials) -> Result<Self> {
        let url = match endpoint {
            Endpoint::Emulator(host) => format!("http://{host}"),
            Endpoint::Service(url) => url.clone(),
        };
        let admin = TopicAdmin::builder()
            .with_endpoint(&url)
            .with_credentials(credentials.google())
            .build()
            .await
            .map_err(|e| {
                Error::new(Code::PubsubEndpoint, format!("cannot use {url}")).caused_by(e)
            })?;
        Ok(Self { admin })
    }

    /// Makes a topic; one that is there already is as good.
    ///
    /// # Errors
    /// `pubsub-permission`, `pubsub-unreachable`.
    pub(crate) async fn create(&self, topic: &str) -> Result<()> {
        match self.admin.create_topic().set_name(topic).send().await {
            Ok(_) => {
                tracing::info!(topic, "created the topic");
                Ok(())
            }
            Err(e) if has_code(&e, "ALREADY_EXISTS") => Ok(()),
            Err(e) => Err(error(e, &format!("cannot create topic {topic}"))),
        }
    }

    /// Whether the topic exists.
    ///
    /// # Errors
    /// `pubsub-permission`, `pubsub-unreachable`.
    pub(crate) async fn exists(&self, topic: &str) -> Result<bool> {
        match self.admin.get_topic().set_topic(topic).send().await {
            Ok(_) => Ok(true),
            Err(e) if has_code(&e, "NOT_FOUND") => Ok(false),
            Err(e) => Err(error(e, &format!("cannot look up topic {topic}"))),
        }
    }

    /// Whether anything subscribes to the topic, which otherwise keeps nothing.
    ///
    /// # Errors
    /// `pubsub-permission`, `pubsub-unreachable`.
    pub(crate) async fn has_subscription(&self, topic: &str) -> Result<bool> {
        let list = self.admin.list_topic_subscriptions().set_topic(topic).set_page_size(1);
        match list.send().await {
            Ok(page) => Ok(!page.subscriptions.is_empty()),
            Err(e) => Err(error(e, &format!("cannot list the subscriptions of {topic}"))),
        }
    }
}

fn has_code(error: &google_cloud_pubsub::Error, name: &str) -> bool {
    error.status().is_some_and(|status| status.code.name() == name)
}

fn error(error: google_cloud_pubsub::Error, what: &str) -> Error {
    let code = match error.status().map(|status| status.code.name()) {
        Some("PERMISSION_DENIED") => Code::PubsubPermission,
        Some("UNAUTHENTICATED") => Code::PubsubUnauthenticated,
        Some("NOT_FOUND") => Code::TopicMissing,
        _ if error.is_authentication() => Code::PubsubUnauthenticated,
        _ => Code::PubsubUnreachable,
    };
    Error::new(code, what.to_owned()).caused_by(error)
}
