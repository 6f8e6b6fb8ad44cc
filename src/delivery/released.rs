//! Publishes events that operators have released from quarantine. Polls `outbox.dispatch` for such events every two
//! seconds, and puts them into their lanes. The module `quarantine` describes the steps of a release.

use std::time::{Duration, Instant};

use bytes::Bytes;

use super::bad_events::reason;
use super::outcomes::EventOutcomes;
use super::quarantine::{Admission, InLane, QuarantineAnswer, Releaser, ReleaserRequest};
use super::{Delivery, flow_control, until};
use crate::capture::table::TableEvent;
use crate::error::{Code, Error, Result};
use crate::event::{Event, EventRef, Group, Standing};
use crate::metrics::KindLabel;
use crate::store::dispatch::quarantined::BEHIND_A_RELEASE;
use crate::store::dispatch::{Outcome, Record};

/// Time between two polls for events that an operator has released or discarded. The operator sees an effect
/// after about this time.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Time between two counts of the events in quarantine, unless the relay counts at every poll (see [`CHEAP_COUNT`]).
const COUNT_INTERVAL: Duration = Duration::from_secs(30);

/// If the last count is below this number, a count is cheap. The relay then counts at every poll, as long as it
/// knows of an event in quarantine.
const CHEAP_COUNT: i64 = 1_000;

/// Pause after a failed query.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// One poll checks at most this many blocked keys, which takes the server about 5 ms. The next poll continues
/// with the keys that follow.
const KEYS_PER_POLL: usize = 1_000;

/// Decides when to send a request to the [`Releaser`], and which one. The releaser queries `outbox.dispatch`.
#[derive(Debug)]
pub(super) struct Releases {
    releaser: Releaser,
    /// Whether a request to the releaser is still unanswered. The releaser gets only one request at a time.
    asked: bool,
    /// Whether releases may begin: the stream must be past every event that earlier sessions recorded. Before that,
    /// an earlier event of the same key might not have arrived yet, and a released event could overtake it.
    allowed: bool,
    next_poll: Instant,
    next_count: Instant,
    /// Events in quarantine at the last count.
    counted: i64,
    /// After a failed query: the next request to the releaser waits until this time.
    not_before: Option<Instant>,
    /// Number of blocked keys checked so far in this round of polls.
    keys_checked: usize,
}

impl Releases {
    pub(super) fn new(releaser: Releaser) -> Self {
        let now = Instant::now();
        Self {
            releaser,
            asked: false,
            allowed: false,
            next_poll: now,
            next_count: now,
            counted: 0,
            not_before: None,
            keys_checked: 0,
        }
    }

    /// Waits for the next answer of the releaser. Returns `None` if the next request to the releaser becomes due
    /// first. While `has_room` is false, takes no answer, because an answer may contain an event. Cancel-safe.
    pub(super) async fn woken(&mut self, has_room: bool) -> Option<QuarantineAnswer> {
        let due = match (self.asked || !self.allowed, self.not_before) {
            (true, _) => None,
            (false, Some(pause)) => Some(pause),
            (false, None) => Some(self.next_poll),
        };
        tokio::select! {
            biased;
            found = self.releaser.found(), if has_room => Some(found),
            () = until(due) => None,
        }
    }
}

impl Delivery {
    /// Allows releases to begin, because the stream is past every event that earlier sessions recorded.
    pub(crate) fn allow_releases(&mut self) {
        self.releases.allowed = true;
    }

    /// Sends the next request to the [`Releaser`], if one is due and no answer is outstanding.
    pub(super) fn ask(&mut self) {
        let now = Instant::now();
        let (releases, outcomes) = (&mut self.releases, &mut self.outcomes);
        if releases.asked || !releases.allowed {
            return;
        }
        if releases.not_before.is_some_and(|at| at > now) {
            return;
        }
        releases.not_before = None;
        let ask = if releases.next_poll <= now {
            let (blocked, durable) = outcomes
                .quarantine
                .settled(releases.keys_checked, KEYS_PER_POLL);
            releases.keys_checked = match blocked.len() {
                KEYS_PER_POLL => releases.keys_checked + KEYS_PER_POLL,
                _ => 0,
            };
            let is_cheap = releases.counted < CHEAP_COUNT;
            let is_any = releases.counted > 0 || outcomes.quarantine.is_any();
            let count = releases.next_count <= now || is_cheap && is_any;
            if count {
                releases.next_count = now + COUNT_INTERVAL;
                if outcomes.letters.none_in_flight() {
                    outcomes.quarantine.counting();
                }
            }
            releases.next_poll = now + POLL_INTERVAL;
            Some(ReleaserRequest::Poll {
                blocked,
                durable,
                count,
            })
        } else {
            outcomes.quarantine.command().map(ReleaserRequest::Do)
        };
        if let Some(ask) = ask {
            releases.asked = true;
            releases.releaser.ask(ask);
        }
    }

    pub(super) fn on_found(&mut self, found: QuarantineAnswer) -> Result<()> {
        match found {
            QuarantineAnswer::Event {
                group,
                event,
                is_new,
            } => return self.take_released(group, event, is_new),
            QuarantineAnswer::Lost(group, origin, error) => {
                self.outcomes.lost(&group, origin, &error);
                return Ok(());
            }
            QuarantineAnswer::Polled {
                released,
                vanished,
                durable,
                count,
            } => {
                for (group, is_replay) in released {
                    self.outcomes.quarantine.release(group, is_replay);
                }
                for group in vanished {
                    if self.outcomes.quarantine.vanished(&group, durable) {
                        tracing::info!(
                            topic = &*group.topic,
                            key = group.ordering_key.as_str(),
                            "the quarantine of this key is empty: its events are published again"
                        );
                    }
                }
                if let Some(count) = count {
                    self.outcomes
                        .metrics
                        .events_in_quarantine
                        .set(Some(count as f64));
                    self.releases.counted = count;
                    self.outcomes
                        .quarantine
                        .counted(usize::try_from(count).unwrap_or(0));
                }
            }
            QuarantineAnswer::Marked(group) => self.outcomes.quarantine.releases.marked(&group),
            QuarantineAnswer::OnlyReplayed(group) => {
                self.outcomes.quarantine.releases.only_replayed(&group)
            }
            QuarantineAnswer::SentBack(group) => {
                self.outcomes.quarantine.releases.sent_back(&group)
            }
            QuarantineAnswer::PageEnded(group, rows) => self.page_ended(&group, rows),
            QuarantineAnswer::Failed(error) => {
                self.releases.not_before = Some(Instant::now() + RETRY_PAUSE);
                if let Some(more) = self
                    .outcomes
                    .log
                    .due(("cannot read releases", error.code()))
                {
                    tracing::warn!(
                        code = %error.code(), hint = error.hint_text(), since_last = more,
                        "cannot process released events, retrying: {error}"
                    );
                }
            }
            QuarantineAnswer::Died => {
                let what = "the task that reads released events ended unexpectedly";
                return Err(Error::new(Code::Internal, what));
            }
        }
        self.releases.asked = false;
        Ok(())
    }

    /// Takes an event whose message is no longer in memory. The relay later reads the event's row from the table and
    /// makes the message again.
    pub(crate) fn take_without_message(&mut self, group: Group, origin: EventRef) {
        self.outcomes.take_without_message(group, origin);
    }

    fn page_ended(&mut self, group: &Group, rows: usize) {
        let Some(unblocked) = self.outcomes.quarantine.page_ended(group, rows) else {
            return;
        };
        if unblocked.was_in_quarantine {
            tracing::info!(
                topic = &*group.topic,
                key = group.ordering_key.as_str(),
                "all events of this key are released from quarantine: publishing its new events"
            );
        }
        for event in unblocked.held {
            let Group {
                topic,
                ordering_key,
            } = group.clone();
            self.lanes.push(topic, ordering_key, event);
        }
    }

    /// Puts a released event into its lane, behind the earlier released events of its key. If the event now has
    /// another topic or key, and this key is blocked, sets the event aside instead.
    fn take_released(&mut self, group: Group, found: TableEvent, is_new: bool) -> Result<()> {
        let TableEvent {
            topic,
            ordering_key,
            event,
        } = found;
        let at = event.origin.position;
        if !self.outcomes.quarantine.read(&group, at) {
            return Ok(());
        }
        self.outcomes.flow.take(&event);
        let own = *topic == *group.topic && ordering_key == group.ordering_key;
        let lane = InLane {
            group: group.clone(),
            bytes: flow_control::weight(&event),
            is_new,
        };
        self.outcomes.quarantine.goes_to_lane(at, lane);
        // The settings may have changed since the event was set aside, so the event may now have another topic or
        // key. This key may itself be blocked.
        let admission = if own {
            Admission::Open
        } else {
            match self.outcomes.quarantine.admit(&topic, &ordering_key, at) {
                Admission::Held => {
                    self.outcomes.unhold();
                    Admission::Released(self.outcomes.quarantine.keys.waits_for(&group))
                }
                admission => admission,
            }
        };
        self.put(admission, topic, ordering_key, event);
        Ok(())
    }
}

impl EventOutcomes {
    /// Takes an event whose message is no longer in memory. What happens to it depends on its key and its record:
    ///
    /// - If the event was published before, it is dropped, and still counts as published.
    /// - If an event in quarantine blocks the key, this event is recorded as quarantined.
    /// - Otherwise it is recorded as released. The relay later reads its row from the table again, makes the message
    ///   from the row, and publishes it. Until then, later events of the key wait.
    pub(super) fn take_without_message(&mut self, group: Group, origin: EventRef) {
        let event = Event {
            origin,
            message: Bytes::new(),
        };
        self.flow.take(&event);
        self.metrics.events_read.inc();
        let at = event.origin.position;
        let Group {
            topic,
            ordering_key,
        } = group.clone();
        let outcome = match self.quarantine.admit(&topic, &ordering_key, at) {
            Admission::Quarantined(why) => Outcome::Quarantined(why),
            Admission::Released(why) => Outcome::Released(why),
            Admission::Held => {
                self.unhold();
                Outcome::Released(self.quarantine.keys.waits_for(&group))
            }
            Admission::Open => {
                if group.is_ordered() && event.origin.standing == Standing::New {
                    self.quarantine.keys.block_for_release(group, at);
                }
                Outcome::Released(BEHIND_A_RELEASE.into())
            }
        };
        self.set_aside_behind(topic, ordering_key, event, outcome);
    }

    /// Handles a released event that cannot be published, because its row is gone or cannot become a
    /// message. The event goes back into quarantine, together with the later events of its key.
    fn lost(&mut self, group: &Group, origin: EventRef, error: &Error) {
        if !self.quarantine.read(group, origin.position) {
            return;
        }
        if let Some(since_last) = self.log.due(("cannot release", error.code())) {
            tracing::error!(
                code = %error.code(), event = origin.event_id.shown(), hint = error.hint_text(), since_last,
                "cannot release an event from quarantine: {error}"
            );
        }
        let kind = error.code().name();
        let quarantined = &self.metrics.events_quarantined;
        quarantined.get_or_create(&KindLabel { kind }).inc();
        self.flow.take_record();
        self.record(Record {
            topic: Some(group.topic.clone()).filter(|topic| !topic.is_empty()),
            ordering_key: group.ordering_key.clone(),
            at: self.metrics.server_clock.now(),
            events: vec![origin],
            outcome: Outcome::Quarantined(reason(error.code(), &error.to_string())),
        });
        self.fail_release(group);
    }
}
