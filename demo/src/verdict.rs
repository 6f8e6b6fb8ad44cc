//! The verdict at the end: compares the events that the subscriber received with the database. This
//! module does no IO.
//!
//! The expected state comes from the database, not from the writers' counters. It consists of the
//! committed events and of the business table, in which each order's version is the number of its
//! events.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;
use uuid::Uuid;

use crate::ledger::{Ledger, OrderId};

/// The committed state, according to the database.
#[derive(Debug, Default)]
pub(crate) struct Committed {
    /// The events of each order, sorted by version.
    pub(crate) events: BTreeMap<OrderId, Vec<Uuid>>,
    /// The version of each order in the business table.
    pub(crate) versions: BTreeMap<OrderId, i64>,
    /// Events without a row in `outbox.dispatch`.
    pub(crate) unrecorded: u64,
}

/// The number of violations of each kind.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Verdict {
    /// Committed events that never arrived.
    pub(crate) lost: u64,
    /// Events whose first copy arrived after a later event of the same shop order.
    pub(crate) out_of_order: u64,
    /// Events that arrived but are not in the database: they were rolled back, or did not come from the
    /// writers. Messages that are not events of the demonstration count too.
    pub(crate) never_committed: u64,
    /// Orders whose version in the business table differs from the number of events that arrived
    /// for them.
    pub(crate) wrong_orders: u64,
    /// Events without a dispatch row.
    pub(crate) unrecorded: u64,
}

impl Verdict {
    /// Compares the ledger with the database.
    pub(crate) fn reach(ledger: &Ledger, committed: &Committed) -> Self {
        let mut verdict = Self {
            never_committed: ledger.totals().unreadable,
            unrecorded: committed.unrecorded,
            ..Self::default()
        };
        for order in ledger
            .orders()
            .filter(|order| !committed.events.contains_key(order))
        {
            verdict.never_committed += ledger.first_copies(order).len() as u64;
        }
        for (order, events) in &committed.events {
            verdict.add_order(ledger.first_copies(*order), events);
        }
        for (order, version) in &committed.versions {
            let arrived = ledger.first_copies(*order).len() as u64;
            verdict.wrong_orders += u64::from(arrived != version.unsigned_abs());
        }
        verdict
    }

    fn add_order(&mut self, arrived: &[Uuid], committed: &[Uuid]) {
        let places: HashMap<&Uuid, usize> = committed
            .iter()
            .enumerate()
            .map(|(place, id)| (id, place))
            .collect();
        let mut found = 0;
        let mut last = None;
        for place in arrived.iter().map(|id| places.get(id).copied()) {
            match place {
                None => self.never_committed += 1,
                Some(place) => {
                    found += 1;
                    self.out_of_order += u64::from(last > Some(place));
                    last = last.max(Some(place));
                }
            }
        }
        self.lost += committed.len() as u64 - found;
    }

    /// Whether there are no violations.
    pub(crate) fn is_good(&self) -> bool {
        *self == Self::default()
    }

    /// The violations as text.
    pub(crate) fn complaint(&self) -> String {
        let parts = [
            (self.lost, "lost"),
            (self.out_of_order, "out of order"),
            (self.never_committed, "delivered but never committed"),
            (self.wrong_orders, "orders that disagree with their events"),
            (self.unrecorded, "without a dispatch row"),
        ];
        let told = parts.iter().filter(|(count, _)| *count > 0);
        told.map(|(count, what)| format!("{count} {what}"))
            .collect::<Vec<_>>()
            .join(", ")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::ledger::{Arrival, Step};

    const ORDER: OrderId = 7;

    fn id(version: u64) -> Uuid {
        Uuid::from_u128(u128::from(version))
    }

    fn received(versions: &[u64]) -> Ledger {
        let mut ledger = Ledger::default();
        for (n, version) in versions.iter().enumerate() {
            ledger.received(Arrival {
                step: Step {
                    order: ORDER,
                    version: version.cast_signed(),
                },
                event_id: id(*version),
                message_id: n.to_string(),
                at: Instant::now(),
            });
        }
        ledger
    }

    /// A committed state in which `ORDER` has the versions 1 to `last`.
    fn committed(last: u64) -> Committed {
        Committed {
            events: [(ORDER, (1..=last).map(id).collect())].into(),
            versions: [(ORDER, last.cast_signed())].into(),
            unrecorded: 0,
        }
    }

    fn verdict(arrived: &[u64], last: u64) -> Verdict {
        Verdict::reach(&received(arrived), &committed(last))
    }

    #[test]
    fn the_verdict_is_good_if_every_event_arrived_once_and_in_order() {
        assert!(verdict(&[1, 2, 3], 3).is_good());
    }

    #[test]
    fn a_repeated_block_is_good() {
        assert!(verdict(&[1, 2, 1, 2, 3], 3).is_good());
    }

    #[test]
    fn a_missing_event_is_lost_and_its_order_is_wrong() {
        for arrived in [&[1, 3][..], &[1, 2], &[2, 3]] {
            let expected = Verdict {
                lost: 1,
                wrong_orders: 1,
                ..Verdict::default()
            };
            assert_eq!(verdict(arrived, 3), expected, "{arrived:?}");
        }
    }

    #[test]
    fn an_order_without_any_arrival_is_lost() {
        let expected = Verdict {
            lost: 3,
            wrong_orders: 1,
            ..Verdict::default()
        };
        assert_eq!(verdict(&[], 3), expected);
    }

    #[test]
    fn a_swapped_pair_is_out_of_order() {
        assert_eq!(
            verdict(&[1, 3, 2], 3),
            Verdict {
                out_of_order: 1,
                ..Verdict::default()
            }
        );
    }

    #[test]
    fn an_event_that_was_rolled_back_must_not_arrive() {
        let expected = Verdict {
            never_committed: 1,
            wrong_orders: 1,
            ..Verdict::default()
        };
        assert_eq!(verdict(&[1, 2, 99], 2), expected);
        let nothing = Verdict::reach(&received(&[1, 2]), &Committed::default());
        assert_eq!(nothing.never_committed, 2);
    }

    #[test]
    fn an_event_without_a_dispatch_row_is_a_violation() {
        let committed = Committed {
            unrecorded: 4,
            ..committed(1)
        };
        let verdict = Verdict::reach(&received(&[1]), &committed);
        assert_eq!(verdict.complaint(), "4 without a dispatch row");
    }
}
