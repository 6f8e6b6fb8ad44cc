//! The service `google.pubsub.v1.Subscriber`: manages subscriptions and pulls messages from them.
//!
//! `StreamingPull` is in `streaming_pull.rs`. The emulator does not support snapshots. tonic
//! answers UNIMPLEMENTED to methods that are missing here.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use prost::Message;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::limits::MAX_ACK_REQUEST_BYTES;
use crate::names;
use crate::proto::seek_request::Target;
use crate::proto::{self, StreamingPullRequest};
use crate::publisher::check_paths;
use crate::registry::{Registry, page};
use crate::services::subscriber_server::Subscriber;
use crate::streaming_pull;
use crate::subscription::{FlowControl, MUTABLE_FIELDS, Subscription};
use crate::wire::{PullResponse, StreamingPullResponse};

/// How long a unary pull waits for a first message before it gives up and answers without messages.
const PULL_WAIT: Duration = Duration::from_secs(5);

type Answered<T> = Result<Response<T>, Status>;

/// The gRPC service for subscribers.
#[derive(Debug)]
pub(crate) struct SubscriberService {
    pub(crate) registry: Arc<Registry>,
}

#[tonic::async_trait]
impl Subscriber for SubscriberService {
    type StreamingPullStream = ReceiverStream<Result<StreamingPullResponse, Status>>;

    async fn create_subscription(
        &self,
        request: Request<proto::Subscription>,
    ) -> Answered<proto::Subscription> {
        self.registry
            .create_subscription(request.into_inner())
            .map(Response::new)
    }

    async fn get_subscription(
        &self,
        request: Request<proto::GetSubscriptionRequest>,
    ) -> Answered<proto::Subscription> {
        let subscription = self
            .registry
            .subscription(&request.get_ref().subscription)?;
        Ok(Response::new(subscription.resource()))
    }

    async fn update_subscription(
        &self,
        request: Request<proto::UpdateSubscriptionRequest>,
    ) -> Answered<proto::Subscription> {
        let proto::UpdateSubscriptionRequest {
            subscription,
            update_mask,
        } = request.into_inner();
        let wanted =
            subscription.ok_or_else(|| Status::invalid_argument("No subscription was given."))?;
        let paths = update_mask.map(|mask| mask.paths).unwrap_or_default();
        let subscription = self.registry.subscription(&wanted.name)?;
        check_paths(&paths, MUTABLE_FIELDS)?;
        subscription.update(&wanted, &paths).map(Response::new)
    }

    async fn list_subscriptions(
        &self,
        request: Request<proto::ListSubscriptionsRequest>,
    ) -> Answered<proto::ListSubscriptionsResponse> {
        let request = request.get_ref();
        names::check_project(&request.project)?;
        let all = self.registry.subscriptions_of(&request.project);
        let (subscriptions, next_page_token) = page(
            all,
            |subscription| &subscription.name,
            request.page_size,
            &request.page_token,
        );
        let response = proto::ListSubscriptionsResponse {
            subscriptions,
            next_page_token,
        };
        Ok(Response::new(response))
    }

    async fn delete_subscription(
        &self,
        request: Request<proto::DeleteSubscriptionRequest>,
    ) -> Answered<()> {
        self.registry
            .delete_subscription(&request.get_ref().subscription)
            .map(Response::new)
    }

    async fn modify_ack_deadline(
        &self,
        request: Request<proto::ModifyAckDeadlineRequest>,
    ) -> Answered<()> {
        let request = request.get_ref();
        check_ack_request(request.encoded_len(), &request.ack_ids)?;
        let subscription = self.registry.subscription(&request.subscription)?;
        let seconds = std::iter::repeat_n(request.ack_deadline_seconds, request.ack_ids.len());
        subscription
            .modify_ack_deadline(&request.ack_ids, seconds)
            .map(Response::new)
    }

    async fn acknowledge(&self, request: Request<proto::AcknowledgeRequest>) -> Answered<()> {
        let request = request.get_ref();
        check_ack_request(request.encoded_len(), &request.ack_ids)?;
        let subscription = self.registry.subscription(&request.subscription)?;
        subscription
            .acknowledge(&request.ack_ids)
            .map(Response::new)
    }

    async fn pull(&self, request: Request<proto::PullRequest>) -> Answered<PullResponse> {
        let request = request.get_ref();
        let subscription = self.registry.subscription(&request.subscription)?;
        #[allow(deprecated, reason = "old clients still set it")]
        let immediately = request.return_immediately;
        pull(&subscription, request.max_messages, immediately)
            .await
            .map(Response::new)
    }

    async fn streaming_pull(
        &self,
        request: Request<Streaming<StreamingPullRequest>>,
    ) -> Answered<Self::StreamingPullStream> {
        let responses = streaming_pull::start(Arc::clone(&self.registry), request.into_inner());
        Ok(Response::new(responses))
    }

    async fn modify_push_config(
        &self,
        request: Request<proto::ModifyPushConfigRequest>,
    ) -> Answered<()> {
        let request = request.get_ref();
        self.registry.subscription(&request.subscription)?;
        match &request.push_config {
            Some(push) if *push != proto::PushConfig::default() => {
                Err(crate::registry::unsupported_field("push_config"))
            }
            Some(_) | None => Ok(Response::new(())),
        }
    }

    async fn seek(&self, request: Request<proto::SeekRequest>) -> Answered<proto::SeekResponse> {
        let request = request.into_inner();
        let subscription = self.registry.subscription(&request.subscription)?;
        match request.target {
            None => Err(Status::invalid_argument(
                "The seek request names no target.",
            )),
            Some(Target::Snapshot(_)) => Err(crate::registry::unsupported_field("snapshot")),
            Some(Target::Time(time)) => {
                let time = SystemTime::try_from(time)
                    .map_err(|_| Status::invalid_argument("The seek time is out of range."))?;
                if time < SystemTime::now() - SEEK_TOLERANCE {
                    return Err(Status::unimplemented(
                        "This emulator does not keep acknowledged messages, so it cannot seek \
                         into the past. Seek to the present to drop the backlog.",
                    ));
                }
                subscription.seek(time)?;
                Ok(Response::new(proto::SeekResponse {}))
            }
        }
    }
}

/// How far in the past the target of a seek may be and still count as "now". Without this
/// tolerance, a seek to the client's current time would fail, because some time passes until the
/// request arrives, and because the clocks can differ.
const SEEK_TOLERANCE: Duration = Duration::from_secs(10);

pub(crate) async fn pull(
    subscription: &Subscription,
    max_messages: i32,
    immediately: bool,
) -> Result<PullResponse, Status> {
    let at_most = usize::try_from(max_messages).unwrap_or_default();
    if at_most == 0 {
        return Err(Status::invalid_argument(format!(
            "The value for max_messages is too small. You passed {max_messages} in the request, \
             but the minimum value is 1."
        )));
    }
    let consumer = subscription.connect("");
    let seconds = subscription.resource().ack_deadline_seconds;
    let ack_deadline = Duration::from_secs(u64::from(seconds.unsigned_abs()));
    let flow_control = FlowControl {
        max_messages: Some(at_most),
        max_bytes: None,
    };
    let wait = if immediately {
        Duration::ZERO
    } else {
        PULL_WAIT
    };
    let give_up = tokio::time::Instant::now() + wait;
    loop {
        let changed = subscription.changed().notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        let taken = subscription.take(consumer, ack_deadline, flow_control)?;
        if !taken.messages.is_empty() || tokio::time::Instant::now() >= give_up {
            return Ok(PullResponse {
                received_messages: taken.messages,
            });
        }
        let next_expiry = taken.next_expiry.map(tokio::time::Instant::from_std);
        let wake = next_expiry.map_or(give_up, |expiry| expiry.min(give_up));
        // Try again after a notification, and also after the timeout, because by then a lease has
        // expired or the wait is over.
        let _ = tokio::time::timeout_at(wake, changed).await;
    }
}

pub(crate) fn check_ack_request(bytes: usize, ack_ids: &[String]) -> Result<(), Status> {
    if ack_ids.is_empty() {
        return Err(Status::invalid_argument("No ack ids specified."));
    }
    if bytes > MAX_ACK_REQUEST_BYTES {
        return Err(Status::invalid_argument(format!(
            "Request payload size exceeds the limit: {MAX_ACK_REQUEST_BYTES} bytes."
        )));
    }
    Ok(())
}
