//! The service `google.pubsub.v1.Publisher`: manages topics and publishes messages to them.
//!
//! A publish has these steps: read the request and enter it in the journal, choose an injected fault (which refuses the
//! request at once, or changes the answer), check the service's rules, store the messages, answer. The emulator does
//! not support schemas, ingestion or snapshots. tonic answers UNIMPLEMENTED to methods that are missing here.

use std::future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prost::Message;
use tonic::{Code, Request, Response, Status};

use crate::connections::Peer;
use crate::faults::{self, Verdict};
use crate::journal::{self, Answer, Entry};
use crate::limits::{self, Refusal};
use crate::names::{self, Kind};
use crate::proto::{self, PublishResponse};
use crate::registry::{Registry, page};
use crate::services::publisher_server::Publisher;
use crate::wire::{MessageView, PublishRequest};

type Answered<T> = Result<Response<T>, Status>;

/// The gRPC service for publishers.
#[derive(Debug)]
pub(crate) struct PublisherService {
    pub(crate) registry: Arc<Registry>,
}

#[tonic::async_trait]
impl Publisher for PublisherService {
    async fn publish(&self, request: Request<PublishRequest>) -> Answered<PublishResponse> {
        let peer = request.extensions().get().copied();
        self.publish_from(peer, request.get_ref())
            .await
            .map(Response::new)
    }

    async fn create_topic(&self, request: Request<proto::Topic>) -> Answered<proto::Topic> {
        self.registry
            .create_topic(request.into_inner())
            .map(Response::new)
    }

    async fn get_topic(&self, request: Request<proto::GetTopicRequest>) -> Answered<proto::Topic> {
        if self.registry.faults.are_topics_hidden() {
            return Err(Status::permission_denied("User not authorized."));
        }
        let name = &request.get_ref().topic;
        if let Some(refusal) = self.registry.faults.refusal(name) {
            return Err(refusal);
        }
        let topic = self.registry.topic(name)?;
        Ok(Response::new(topic.resource()))
    }

    async fn update_topic(
        &self,
        request: Request<proto::UpdateTopicRequest>,
    ) -> Answered<proto::Topic> {
        let proto::UpdateTopicRequest { topic, update_mask } = request.into_inner();
        let wanted = topic.ok_or_else(|| Status::invalid_argument("No topic was given."))?;
        let paths = update_mask.map(|mask| mask.paths).unwrap_or_default();
        let topic = self.registry.topic(&wanted.name)?;
        check_paths(&paths, &["labels", "message_retention_duration"])?;
        let changed = topic.change(|resource| {
            for path in &paths {
                match path.as_str() {
                    "labels" => resource.labels.clone_from(&wanted.labels),
                    _ => resource.message_retention_duration = wanted.message_retention_duration,
                }
            }
        });
        Ok(Response::new(changed))
    }

    async fn list_topics(
        &self,
        request: Request<proto::ListTopicsRequest>,
    ) -> Answered<proto::ListTopicsResponse> {
        let request = request.get_ref();
        names::check_project(&request.project)?;
        let topics = self.registry.topics_of(&request.project);
        let (topics, next_page_token) = page(
            topics,
            |topic| &topic.name,
            request.page_size,
            &request.page_token,
        );
        Ok(Response::new(proto::ListTopicsResponse {
            topics,
            next_page_token,
        }))
    }

    async fn list_topic_subscriptions(
        &self,
        request: Request<proto::ListTopicSubscriptionsRequest>,
    ) -> Answered<proto::ListTopicSubscriptionsResponse> {
        let request = request.get_ref();
        let mut names: Vec<String> = self
            .registry
            .topic(&request.topic)?
            .subscriptions()
            .iter()
            .map(|subscription| subscription.name().to_owned())
            .collect();
        names.sort();
        let (subscriptions, next_page_token) =
            page(names, |name| name, request.page_size, &request.page_token);
        let response = proto::ListTopicSubscriptionsResponse {
            subscriptions,
            next_page_token,
        };
        Ok(Response::new(response))
    }

    async fn delete_topic(&self, request: Request<proto::DeleteTopicRequest>) -> Answered<()> {
        self.registry
            .delete_topic(&request.get_ref().topic)
            .map(Response::new)
    }

    async fn detach_subscription(
        &self,
        request: Request<proto::DetachSubscriptionRequest>,
    ) -> Answered<proto::DetachSubscriptionResponse> {
        self.registry
            .detach_subscription(&request.get_ref().subscription)?;
        Ok(Response::new(proto::DetachSubscriptionResponse {}))
    }
}

/// What to do after the messages were stored.
enum Then {
    Answer,
    AnswerAfter(Duration),
    AnswerFewer,
    Fail(Code),
    Never,
}

impl PublisherService {
    async fn publish_from(
        &self,
        peer: Option<Peer>,
        request: &PublishRequest,
    ) -> Result<PublishResponse, Status> {
        let read: Result<Vec<_>, _> = request
            .messages
            .iter()
            .map(|message| MessageView::parse(message))
            .collect();
        let messages = read.as_deref().unwrap_or_default();
        let mut entry = self.registry.journal.enter(peer, &request.topic, messages);

        let then = match self.judge(request, messages) {
            Verdict::Proceed => Then::Answer,
            Verdict::Delay(delay) => Then::AnswerAfter(delay),
            Verdict::FewerIds => Then::AnswerFewer,
            Verdict::StoreThenFail(code) => Then::Fail(code),
            Verdict::StoreThenNeverAnswer => Then::Never,
            Verdict::Fail(code) => return refuse(entry, injected(code)),
            Verdict::FailSaying(code, message) => {
                return refuse(entry, Status::new(code, message));
            }
            Verdict::FailWithReason(reason) => return refuse(entry, reason.into()),
            Verdict::NeverAnswer => return future::pending().await,
        };
        if read.is_err() {
            return refuse(entry, Refusal::Malformed.into());
        }
        let first_id = match self.store(request, messages) {
            Ok(first_id) => first_id,
            Err(status) => return refuse(entry, status),
        };
        entry.stored(first_id);

        let mut ids = first_id..first_id + messages.len() as u64;
        let mut answer = Answer::MessageIds;
        match then {
            Then::Answer => {}
            Then::AnswerAfter(delay) => tokio::time::sleep(delay).await,
            Then::AnswerFewer => {
                ids.end = ids.end.saturating_sub(1).max(ids.start);
                answer = Answer::FewerIds;
            }
            Then::Fail(code) => return refuse(entry, injected(code)),
            Then::Never => return future::pending().await,
        }
        let response = PublishResponse {
            message_ids: ids.map(|id| id.to_string()).collect(),
        };
        entry.answered(answer);
        Ok(response)
    }

    fn judge(&self, request: &PublishRequest, messages: &[MessageView<'_>]) -> Verdict {
        let has_event = |event_id: &str| {
            messages
                .iter()
                .any(|message| journal::event_id(*message) == Some(event_id))
        };
        let request = faults::Request {
            topic: &request.topic,
            ordering_key: messages.first().map_or("", |message| message.ordering_key),
            messages: messages.len(),
            has_event: &has_event,
        };
        self.registry.faults.judge(&request, Instant::now())
    }

    fn store(&self, request: &PublishRequest, messages: &[MessageView<'_>]) -> Result<u64, Status> {
        names::check(Kind::Topic, &request.topic)?;
        limits::check_publish(request.encoded_len(), messages)?;
        let topic = self.registry.topic(&request.topic)?;
        Ok(topic.publish(&self.registry.next_message_id, messages))
    }
}

fn refuse(entry: Entry, status: Status) -> Result<PublishResponse, Status> {
    entry.answered(Answer::Error(status.code()));
    Err(status)
}

fn injected(code: Code) -> Status {
    Status::new(
        code,
        format!(
            "Injected by the emulator's fault script: {}.",
            code.description()
        ),
    )
}

/// Refuses an update of any field that is not in `allowed`.
pub(crate) fn check_paths(paths: &[String], allowed: &[&str]) -> Result<(), Status> {
    if paths.is_empty() {
        return Err(Status::invalid_argument(
            "The update_mask in the request is empty. Name the fields to update.",
        ));
    }
    match paths.iter().find(|path| !allowed.contains(&path.as_str())) {
        None => Ok(()),
        Some(path) => Err(Status::invalid_argument(format!(
            "Invalid update_mask provided in the request: the field {path:?} cannot be updated \
             here. Fields that can: {}.",
            allowed.join(", ")
        ))),
    }
}
