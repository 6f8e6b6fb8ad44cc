//! Brings events back from quarantine. Polls the table every two seconds for events that operators
//! have released, and moves them into the lanes in the steps that `quarantine` describes.

use std::time::{Duration, Instant};

use bytes::Bytes;

use super::bad_events::reason;
use super::quarantine::{Admission, InLane, QuarantineAnswer, Releaser, ReleaserRequest};
use super::{Delivery, flow_control, until};
use crate::capture::table::TableEvent;
use crate::error::{Code, Error, Result};
use crate::event::{Event, EventRef, Group, Standing};
use crate::metrics::KindLabel;
use crate::store::dispatch::quarantined::BEHIND_A_RELEASE;
use crate::store::dispatch::{Outcome, Record};

/// Poll interval for released or discarded events.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Time between two counts of the events in quarantine.
const COUNT_INTERVAL: Duration = Duration::from_secs(30);

/// Fewer events than this are counted at every poll.
const CHEAP_COUNT: i64 = 1_000;

/// Pause after a failure.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Maximum number of blocked keys that one poll checks. These checks take 5 ms of the server's time.
const KEYS_PER_POLL: usize = 1_000;

/// Decides when to ask the [`Releaser`], and what.
#[derive(Debug)]
pub(super) struct Releases {
    releaser: Releaser,
    /// Whether an answer is outstanding.
    asked: bool,
    /// Whether the stream is past everything that earlier sessions recorded. Before that, events that
    /// come before a released event may not have arrived yet.
    allowed: bool,
    next_poll: Instant,
    next_count: Instant,
    /// Events in quarantine at the last count.
    counted: i64,
    /// Ask nothing before this time.
    not_before: Option<Instant>,
    /// Blocked keys checked so far in this round.
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

    /// Waits for the next answer; returns `None` when it is time to ask. Cancel-safe.
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
    /// Notes that the stream is past everything that earlier sessions recorded: releases may begin.
    pub(crate) fn allow_releases(&mut self) {
        self.releases.allowed = true;
    }

    /// Asks the next question that is due, if no answer is outstanding.
    pub(super) fn ask(&mut self) {
        let now = Instant::now();
        let releases = &mut self.releases;
        if releases.asked || !releases.allowed {
            return;
        }
        if releases.not_before.is_some_and(|at| at > now) {
            return;
        }
        releases.not_before = None;
        let ask = if releases.next_poll <= now {
            let (blocked, durable) = self
                .quarantine
                .settled(releases.keys_checked, KEYS_PER_POLL);
            releases.keys_checked = match blocked.len() {
                KEYS_PER_POLL => releases.keys_checked + KEYS_PER_POLL,
                _ => 0,
            };
            let is_cheap = releases.counted < CHEAP_COUNT;
            let is_any = releases.counted > 0 || self.quarantine.keys.count() > 0;
            let count = releases.next_count <= now || is_cheap && is_any;
            if count {
                releases.next_count = now + COUNT_INTERVAL;
                if self.letters.none_in_flight() {
                    self.quarantine.counting();
                }
            }
            releases.next_poll = now + POLL_INTERVAL;
            Some(ReleaserRequest::Poll {
                blocked,
                durable,
                count,
            })
        } else {
            self.quarantine.command().map(ReleaserRequest::Do)
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
                self.lost(&group, origin, &error);
                return Ok(());
            }
            QuarantineAnswer::Polled {
                released,
                vanished,
                durable,
                count,
            } => {
                for (group, is_replay) in released {
                    self.quarantine.release(group, is_replay);
                }
                for group in vanished {
                    if self.quarantine.vanished(&group, durable) {
                        tracing::info!(
                            topic = &*group.topic,
                            key = group.ordering_key.as_str(),
                            "the quarantine of this key is empty: its events are published again"
                        );
                    }
                }
                if let Some(count) = count {
                    self.metrics.events_in_quarantine.set(Some(count as f64));
                    self.releases.counted = count;
                    self.quarantine.counted(usize::try_from(count).unwrap_or(0));
                }
            }
            QuarantineAnswer::Marked(group) => self.quarantine.releases.marked(&group),
            QuarantineAnswer::OnlyReplayed(group) => self.quarantine.releases.only_replayed(&group),
            QuarantineAnswer::SentBack(group) => self.quarantine.releases.sent_back(&group),
            QuarantineAnswer::PageEnded(group, rows) => self.page_ended(&group, rows),
            QuarantineAnswer::Failed(error) => {
                self.releases.not_before = Some(Instant::now() + RETRY_PAUSE);
                if let Some(more) = self.log.due(error.code()) {
                    tracing::warn!(
                        code = %error.code(), hint = error.hint_text(), since_last = more,
                        "cannot read the quarantine, retrying: {error}"
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

    /// Takes over an event whose message is no longer in memory. The event is recorded as released, so
    /// its message is read from the table, and later events of its key wait behind it.
    pub(crate) fn take_without_message(&mut self, group: Group, origin: EventRef) {
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

    fn page_ended(&mut self, group: &Group, rows: usize) {
        let Some(unblocked) = self.quarantine.page_ended(group, rows) else {
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

    /// Puts a released event into its lane, behind the events of its key that were released before.
    /// If the event now belongs to another key, and that key is blocked, sets the event aside
    /// instead.
    fn take_released(&mut self, group: Group, found: TableEvent, is_new: bool) -> Result<()> {
        let TableEvent {
            topic,
            ordering_key,
            event,
        } = found;
        let at = event.origin.position;
        if !self.quarantine.read(&group, at) {
            return Ok(());
        }
        self.flow.take(&event);
        let own = *topic == *group.topic && ordering_key == group.ordering_key;
        let lane = InLane {
            group: group.clone(),
            bytes: flow_control::weight(&event),
            is_new,
        };
        self.quarantine.goes_to_lane(at, lane);
        // With new settings the event may have another key, and that key may be blocked too.
        let admission = if own {
            Admission::Open
        } else {
            self.quarantine.admit(&topic, &ordering_key, at)
        };
        match admission {
            Admission::Open => self.lanes.push(topic, ordering_key, event),
            Admission::Quarantined(why) => {
                self.set_aside_behind(topic, ordering_key, event, Outcome::Quarantined(why));
            }
            Admission::Released(why) => {
                self.set_aside_behind(topic, ordering_key, event, Outcome::Released(why));
            }
            Admission::Held => {
                self.unhold();
                let why = self.quarantine.keys.waits_for(&group);
                self.set_aside_behind(topic, ordering_key, event, Outcome::Released(why));
            }
        }
        Ok(())
    }

    /// Handles a released row whose event cannot be sent. The row goes back into quarantine, and so do the
    /// rows of its key behind it.
    fn lost(&mut self, group: &Group, origin: EventRef, error: &Error) {
        if !self.quarantine.read(group, origin.position) {
            return;
        }
        tracing::error!(
            code = %error.code(), event = origin.event_id.shown(), hint = error.hint_text(),
            "cannot release an event from quarantine: {error}"
        );
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
