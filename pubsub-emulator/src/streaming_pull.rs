//! `StreamingPull`: one task per stream that delivers messages and reads acknowledgements.
//!
//! A stream never gets more messages than its flow control allows. The emulator reads acknowledgements
//! even while the client is slow to read messages.
//!
//! The emulator sends the response headers before it reads the first request, because clients wait for
//! the headers. So even if the emulator refuses the first request, the stream opens and then ends with
//! an error.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::{self, Sender};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::proto::StreamingPullRequest;
use crate::proto::streaming_pull_response::SubscriptionProperties;
use crate::registry::Registry;
use crate::subscription::{ACK_DEADLINE_SECONDS, ConsumerId, FlowControl, Subscription};
use crate::wire::{ReceivedMessage, StreamingPullResponse};

/// How long a stream may stay silent. After this time an empty response is sent, so that the client
/// and the proxies on the way see that the stream is alive.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// Maximum number of responses that wait for a slow client. With more responses, the leases of
/// messages would begin long before the client reads the messages.
const RESPONSES_AHEAD: usize = 2;

type Responses = Sender<Result<StreamingPullResponse, Status>>;

/// Serves a stream in its own task, which ends with the stream.
pub(crate) fn start(
    registry: Arc<Registry>,
    requests: Streaming<StreamingPullRequest>,
) -> ReceiverStream<Result<StreamingPullResponse, Status>> {
    let (responses, stream) = mpsc::channel(RESPONSES_AHEAD);
    tokio::spawn(async move {
        if let Err(status) = serve(&registry, requests, &responses).await {
            // Ignore the result, because sending fails only if the client is gone.
            let _ = responses.send(Err(status)).await;
        }
    });
    ReceiverStream::new(stream)
}

async fn serve(
    registry: &Registry,
    mut requests: Streaming<StreamingPullRequest>,
    responses: &Responses,
) -> Result<(), Status> {
    let Some(first) = requests.message().await? else {
        return Ok(());
    };
    let subscription = registry.subscription(&first.subscription)?;
    let ack_deadline = stream_ack_deadline(first.stream_ack_deadline_seconds)?;
    apply(&subscription, &first)?;
    let consumer = Consumer {
        id: subscription.connect(&first.client_id),
        subscription: &subscription,
        ack_deadline,
        flow_control: FlowControl {
            max_messages: limit(first.max_outstanding_messages),
            max_bytes: limit(first.max_outstanding_bytes),
        },
        properties: SubscriptionProperties {
            exactly_once_delivery_enabled: false,
            message_ordering_enabled: subscription.resource().enable_message_ordering,
        },
    };
    consumer.run(requests, responses).await
}

/// One stream and its limits. Dropping it disconnects the consumer.
struct Consumer<'a> {
    id: ConsumerId,
    subscription: &'a Subscription,
    ack_deadline: Duration,
    flow_control: FlowControl,
    properties: SubscriptionProperties,
}

impl Consumer<'_> {
    async fn run(
        mut self,
        mut requests: Streaming<StreamingPullRequest>,
        responses: &Responses,
    ) -> Result<(), Status> {
        let mut next_heartbeat = Instant::now() + HEARTBEAT;
        let mut next_expiry = None;
        // Whether to look for messages now. False if the last look found none. The stream then looks again
        // after a notification or a request, when a lease ends, or when a heartbeat is due.
        let mut look = true;
        let subscription = self.subscription;
        let mut changed = Box::pin(subscription.changed().notified());
        loop {
            let wake = next_expiry.map_or(next_heartbeat, |expiry| next_heartbeat.min(expiry));
            tokio::select! {
                biased;
                () = responses.closed() => return Ok(()),
                request = requests.message() => match request? {
                    None => return Ok(()),
                    Some(request) => {
                        self.take_request(&request)?;
                        look = true;
                    }
                },
                permit = responses.reserve(), if look => {
                    let Ok(permit) = permit else { return Ok(()) };
                    // Register for notifications before taking messages, so that a message that is
                    // published in between is noticed.
                    changed.set(subscription.changed().notified());
                    changed.as_mut().enable();
                    let taken =
                        subscription.take(self.id, self.ack_deadline, self.flow_control)?;
                    next_expiry = taken.next_expiry.map(Instant::from_std);
                    look = !taken.messages.is_empty();
                    if look || Instant::now() >= next_heartbeat {
                        permit.send(Ok(self.response(taken.messages)));
                        next_heartbeat = Instant::now() + HEARTBEAT;
                    }
                }
                () = &mut changed, if !look => look = true,
                () = tokio::time::sleep_until(wake), if !look => look = true,
            }
        }
    }

    fn response(&self, received_messages: Vec<ReceivedMessage>) -> StreamingPullResponse {
        let subscription_properties = Some(self.properties);
        StreamingPullResponse {
            received_messages,
            subscription_properties,
        }
    }

    /// Handles a request after the first one of the stream: acknowledgements, changed deadlines, or
    /// a new ack deadline for the stream.
    fn take_request(&mut self, request: &StreamingPullRequest) -> Result<(), Status> {
        let only_first = [
            (!request.subscription.is_empty(), "subscription"),
            (
                request.max_outstanding_messages != 0,
                "max_outstanding_messages",
            ),
            (request.max_outstanding_bytes != 0, "max_outstanding_bytes"),
        ];
        if let Some((_, field)) = only_first.iter().find(|(set, _)| *set) {
            return Err(Status::invalid_argument(format!(
                "The field {field} may be set only in the first request of a stream."
            )));
        }
        if request.stream_ack_deadline_seconds != 0 {
            self.ack_deadline = stream_ack_deadline(request.stream_ack_deadline_seconds)?;
        }
        apply(self.subscription, request)
    }
}

impl Drop for Consumer<'_> {
    fn drop(&mut self) {
        self.subscription.disconnect(self.id);
    }
}

fn apply(subscription: &Subscription, request: &StreamingPullRequest) -> Result<(), Status> {
    if request.modify_deadline_ack_ids.len() != request.modify_deadline_seconds.len() {
        return Err(Status::invalid_argument(
            "modify_deadline_ack_ids and modify_deadline_seconds must have the same length.",
        ));
    }
    if !request.ack_ids.is_empty() {
        subscription.acknowledge(&request.ack_ids)?;
    }
    if !request.modify_deadline_ack_ids.is_empty() {
        let seconds = request.modify_deadline_seconds.iter().copied();
        subscription.modify_ack_deadline(&request.modify_deadline_ack_ids, seconds)?;
    }
    Ok(())
}

fn stream_ack_deadline(seconds: i32) -> Result<Duration, Status> {
    match u64::try_from(seconds) {
        Ok(valid) if ACK_DEADLINE_SECONDS.contains(&seconds) => Ok(Duration::from_secs(valid)),
        Ok(_) | Err(_) => Err(Status::invalid_argument(format!(
            "The value for stream_ack_deadline_seconds must be between {} and {}. You passed \
             {seconds}.",
            ACK_DEADLINE_SECONDS.start(),
            ACK_DEADLINE_SECONDS.end()
        ))),
    }
}

/// Returns the limit, or `None` (no limit) for zero and negative values.
fn limit(value: i64) -> Option<usize> {
    usize::try_from(value).ok().filter(|limit| *limit > 0)
}
