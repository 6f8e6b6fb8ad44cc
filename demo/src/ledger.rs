//! The record of what the demonstration has seen: the events that writers committed, the copies
//! that the subscriber received, and whether the events of each order arrived in sequence. This
//! module does no IO. The caller passes the time.
//!
//! **Not here:** the final verdict, which also looks at the database (see [`crate::verdict`]).

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use serde::Serialize;
use uuid::Uuid;

/// The number of an order in the shop. The ordering key is this number as text.
pub(crate) type OrderId = i32;

/// One step of an order. The versions of an order count up from 1 without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Step {
    pub(crate) order: OrderId,
    pub(crate) version: i64,
}

/// One received copy of an event.
#[derive(Debug, Clone)]
pub(crate) struct Arrival {
    pub(crate) step: Step,
    pub(crate) event_id: Uuid,
    /// The message id of Pub/Sub. A redelivered message has the same id as before. If the relay
    /// publishes an event again, the new message has a different id.
    pub(crate) message_id: String,
    pub(crate) at: Instant,
}

/// Totals since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Totals {
    pub(crate) committed: u64,
    pub(crate) transactions: u64,
    pub(crate) rolled_back: u64,
    pub(crate) rolled_back_transactions: u64,
    /// Events for which at least one copy has arrived.
    pub(crate) delivered: u64,
    /// Further copies of delivered events, with a different message id, because the relay published the
    /// event again.
    pub(crate) repeated: u64,
    /// Messages that Pub/Sub redelivered.
    pub(crate) redelivered: u64,
    /// First copies that arrived out of sequence. A first copy is in sequence if its version is one above the
    /// highest version that has arrived for the same [`OrderId`].
    pub(crate) out_of_order: u64,
    /// Messages that are not events of the demonstration.
    pub(crate) unreadable: u64,
}

impl Totals {
    /// Number of received messages, without those that count as redelivered.
    pub(crate) fn messages(&self) -> u64 {
        self.delivered + self.repeated + self.unreadable
    }

    /// Events that are not delivered yet. Saturates at zero, because a copy can arrive before its writer
    /// has counted the commit.
    pub(crate) fn behind(&self) -> u64 {
        self.committed.saturating_sub(self.delivered)
    }
}

/// Changes since the previous call of [`Ledger::window`].
#[derive(Debug, Default)]
pub(crate) struct Window {
    pub(crate) committed: u64,
    pub(crate) delivered: u64,
    /// The time from sending COMMIT to receiving the message, for each first copy.
    pub(crate) latencies: Vec<Duration>,
}

/// Everything that the demonstration has seen.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    totals: Totals,
    at_last_look: Totals,
    latencies: Vec<Duration>,
    /// When the writer sent COMMIT, for each event that has not arrived yet.
    sent: HashMap<Step, Instant>,
    /// For each event, the id of the message that contained its first copy.
    first_message: HashMap<Uuid, String>,
    first_copies: BTreeMap<OrderId, FirstCopies>,
    goal: Option<Goal>,
}

/// A number of delivered events for which the demonstration waits.
#[derive(Debug)]
struct Goal {
    delivered: u64,
    reached: Option<Instant>,
}

#[derive(Debug, Default)]
struct FirstCopies {
    last_version: i64,
    event_ids: Vec<Uuid>,
}

impl Ledger {
    /// Notes that a writer is about to send COMMIT for these steps.
    pub(crate) fn committing(&mut self, steps: &[Step], at: Instant) {
        self.sent.extend(steps.iter().map(|step| (*step, at)));
    }

    /// Notes that a transaction with this many events was committed.
    pub(crate) fn committed(&mut self, events: usize) {
        self.totals.committed += events as u64;
        self.totals.transactions += 1;
    }

    /// Notes that a transaction with this many events was rolled back on purpose.
    pub(crate) fn rolled_back(&mut self, events: usize) {
        self.totals.rolled_back += events as u64;
        self.totals.rolled_back_transactions += 1;
    }

    /// Notes that the subscriber has received a copy of an event.
    pub(crate) fn received(&mut self, arrival: Arrival) {
        let Arrival {
            step,
            event_id,
            message_id,
            at,
        } = arrival;
        if let Some(first) = self.first_message.get(&event_id) {
            if *first == message_id {
                self.totals.redelivered += 1;
            } else {
                self.totals.repeated += 1;
            }
            return;
        }
        self.first_message.insert(event_id, message_id);
        self.totals.delivered += 1;
        if let Some(sent) = self.sent.remove(&step) {
            self.latencies.push(at.saturating_duration_since(sent));
        }
        let order = self.first_copies.entry(step.order).or_default();
        if step.version != order.last_version + 1 {
            self.totals.out_of_order += 1;
        }
        order.last_version = order.last_version.max(step.version);
        order.event_ids.push(event_id);
        self.check_goal(at);
    }

    fn check_goal(&mut self, now: Instant) {
        if let Some(goal) = &mut self.goal
            && goal.reached.is_none()
            && self.totals.delivered >= goal.delivered
        {
            goal.reached = Some(now);
        }
    }

    /// Sets the goal: as many events are delivered as have been committed until now.
    pub(crate) fn set_goal(&mut self, now: Instant) {
        self.goal = Some(Goal {
            delivered: self.totals.committed,
            reached: None,
        });
        self.check_goal(now);
    }

    /// When the goal was reached; `None` if it is not reached yet.
    pub(crate) fn goal_reached(&self) -> Option<Instant> {
        self.goal.as_ref().and_then(|goal| goal.reached)
    }

    /// Notes that the subscriber has received a message that is not an event of the demonstration.
    pub(crate) fn received_unreadable(&mut self) {
        self.totals.unreadable += 1;
    }

    /// Totals since the start.
    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    /// Returns the changes since the previous call.
    pub(crate) fn window(&mut self) -> Window {
        let before = std::mem::replace(&mut self.at_last_look, self.totals);
        Window {
            committed: self.totals.committed - before.committed,
            delivered: self.totals.delivered - before.delivered,
            latencies: std::mem::take(&mut self.latencies),
        }
    }

    /// The events of an order in the order in which their first copies arrived.
    pub(crate) fn first_copies(&self, order: OrderId) -> &[Uuid] {
        self.first_copies
            .get(&order)
            .map_or(&[], |copies| &copies.event_ids)
    }

    /// The orders of which at least one event has arrived.
    pub(crate) fn orders(&self) -> impl Iterator<Item = OrderId> {
        self.first_copies.keys().copied()
    }
}

/// Returns a percentile by the nearest-rank method. For example, with 200 values the 99th percentile is the 198th
/// smallest value. Returns `None` if there are no values.
pub(crate) fn percentile(values: &mut [Duration], percent: usize) -> Option<Duration> {
    let rank = (values.len() * percent).div_ceil(100).max(1);
    (rank <= values.len()).then(|| *values.select_nth_unstable(rank - 1).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The arrival of a message with the event that sets `order` to `version`.
    fn arrival(order: OrderId, version: i64, message_id: &str) -> Arrival {
        Arrival {
            step: Step { order, version },
            event_id: Uuid::from_u64_pair(u64::from(order.unsigned_abs()), version.unsigned_abs()),
            message_id: message_id.into(),
            at: Instant::now(),
        }
    }

    fn totals_after(arrivals: &[(OrderId, i64, &str)]) -> Totals {
        let mut ledger = Ledger::default();
        for (order, version, message_id) in arrivals {
            ledger.received(arrival(*order, *version, message_id));
        }
        ledger.totals()
    }

    #[test]
    fn orders_may_be_interleaved() {
        let totals = totals_after(&[(1, 1, "a"), (2, 1, "b"), (2, 2, "c"), (1, 2, "d")]);
        assert_eq!(
            totals,
            Totals {
                delivered: 4,
                ..Totals::default()
            }
        );
    }

    #[test]
    fn a_swapped_pair_is_out_of_order() {
        assert!(totals_after(&[(1, 1, "a"), (1, 3, "b"), (1, 2, "c")]).out_of_order > 0);
        assert!(totals_after(&[(1, 2, "a"), (1, 1, "b")]).out_of_order > 0);
    }

    #[test]
    fn a_skipped_version_is_noticed_when_the_next_one_arrives() {
        assert_eq!(
            totals_after(&[(1, 1, "a"), (1, 3, "b"), (1, 4, "c")]).out_of_order,
            1
        );
    }

    #[test]
    fn a_repeated_block_is_not_out_of_order() {
        let totals = totals_after(&[
            (1, 1, "a"),
            (1, 2, "b"),
            (1, 1, "c"),
            (1, 2, "d"),
            (1, 3, "e"),
        ]);
        assert_eq!(
            totals,
            Totals {
                delivered: 3,
                repeated: 2,
                ..Totals::default()
            }
        );
    }

    #[test]
    fn a_redelivered_message_is_not_a_second_publish() {
        let totals = totals_after(&[(1, 1, "a"), (1, 1, "a"), (1, 1, "b")]);
        assert_eq!(
            (totals.redelivered, totals.repeated, totals.delivered),
            (1, 1, 1)
        );
    }

    #[test]
    fn latency_counts_from_the_commit_to_the_first_copy_only() {
        let mut ledger = Ledger::default();
        let sent = Instant::now();
        ledger.committing(
            &[Step {
                order: 1,
                version: 1,
            }],
            sent,
        );
        for (message_id, ms) in [("a", 5), ("b", 900)] {
            let at = sent + Duration::from_millis(ms);
            ledger.received(Arrival {
                at,
                ..arrival(1, 1, message_id)
            });
        }
        assert_eq!(ledger.window().latencies, [Duration::from_millis(5)]);
        assert!(
            ledger.window().latencies.is_empty(),
            "each latency is returned once"
        );
    }

    #[test]
    fn the_goal_is_reached_when_all_committed_events_have_arrived() {
        let mut ledger = Ledger::default();
        let start = Instant::now();
        ledger.committed(2);
        ledger.set_goal(start);
        ledger.received(arrival(1, 1, "a"));
        assert_eq!(ledger.goal_reached(), None);
        ledger.received(Arrival {
            at: start,
            ..arrival(1, 2, "b")
        });
        ledger.received(arrival(1, 3, "c"));
        assert_eq!(ledger.goal_reached(), Some(start));
    }

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let mut values: Vec<_> = (1..=200).rev().map(Duration::from_millis).collect();
        assert_eq!(
            percentile(&mut values, 50),
            Some(Duration::from_millis(100))
        );
        assert_eq!(
            percentile(&mut values, 99),
            Some(Duration::from_millis(198))
        );
        assert!(percentile(&mut values[..1], 99).is_some());
        assert_eq!(percentile(&mut [], 50), None);
    }
}
