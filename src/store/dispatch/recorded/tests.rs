//! Tests which events are skipped after a restart, with examples and against a model.

use proptest::prelude::*;

use super::*;
use crate::event::EventPosition;
use crate::store::relay_row::record_keeping::tests::PARTIAL;

fn at(commit: u64, ordinal: u32) -> EventPosition {
    EventPosition::for_tests(commit, ordinal)
}

fn row(commit: u64, ordinal: u32) -> DispatchRow {
    let position = at(commit, ordinal);
    DispatchRow {
        position,
        event_id: id(position, true),
        is_published: true,
    }
}

fn recorded(rows: &[DispatchRow], last: Option<u64>) -> EarlierOutcomes {
    EarlierOutcomes {
        page: rows.to_vec().into(),
        ids: rows.iter().map(|row| row.event_id).collect(),
        read_to: EventPosition::default(),
        last: last.map(Lsn::new),
        from_tables_before: None,
        records: RecordKeeping::COMPLETE,
    }
}

fn look_up(recorded: &mut EarlierOutcomes, commit: u64, ordinal: u32) -> Option<Lookup> {
    let at = at(commit, ordinal);
    recorded.look_up(at, &id(at, true))
}

#[test]
fn only_recorded_events_are_skipped() {
    let mut recorded = recorded(&[row(10, 2), row(30, 1)], None);
    assert_eq!(look_up(&mut recorded, 10, 1), Some(Lookup::New));
    assert_eq!(look_up(&mut recorded, 10, 2), Some(Lookup::Done));
    assert_eq!(look_up(&mut recorded, 20, 1), Some(Lookup::New));
    assert_eq!(look_up(&mut recorded, 30, 1), Some(Lookup::Done));
    assert!(recorded.is_over());
    assert_eq!(look_up(&mut recorded, 30, 2), Some(Lookup::New));
}

#[test]
fn rows_of_events_that_the_stream_does_not_bring_are_ignored() {
    let mut recorded = recorded(&[row(10, 1), row(10, 2), row(30, 1)], None);
    assert_eq!(look_up(&mut recorded, 30, 1), Some(Lookup::Done));
}

#[test]
fn a_keepalive_after_the_last_row_ends_the_lookup_even_if_its_event_never_comes() {
    let mut recorded = recorded(&[row(10, 2), row(20, 3)], Some(50));
    assert_eq!(look_up(&mut recorded, 10, 2), Some(Lookup::Done));
    // The commit that begins exactly at 20 has not arrived yet, so its row must stay.
    recorded.passed(Lsn::new(20));
    assert_eq!(recorded.page.len(), 1);
    recorded.passed(Lsn::new(50));
    assert!(!recorded.is_over());
    recorded.passed(Lsn::new(51));
    assert!(recorded.is_over());
}

#[test]
fn a_transaction_decoded_with_more_or_fewer_rows_is_looked_up_by_id() {
    let rows = [row(10, 1), row(10, 4)];
    let mut more = recorded(&rows, None);
    assert_eq!(more.look_up(at(10, 1), &[99; 16]), None);
    let mut fewer = recorded(&rows, None);
    let fourth = id(at(10, 4), true);
    assert_eq!(fewer.look_up(at(10, 2), &[99; 16]), Some(Lookup::New));
    assert_eq!(fewer.look_up(at(10, 3), &fourth), None);
}

#[test]
fn an_id_used_in_two_tables_means_two_events() {
    let mut recorded = recorded(&[row(10, 1), row(20, 1)], None);
    assert_eq!(look_up(&mut recorded, 10, 1), Some(Lookup::Done));
    let found = recorded.look_up(at(10, 2), &id(at(10, 1), true));
    assert_eq!(found, Some(Lookup::New));
}

#[test]
fn with_dispatch_exceptions_published_events_repeat_and_quarantined_ones_do_not() {
    let aside = DispatchRow {
        is_published: false,
        ..row(20, 1)
    };
    let mut recorded = EarlierOutcomes {
        records: PARTIAL,
        ..recorded(&[row(10, 1), aside], None)
    };
    assert_eq!(look_up(&mut recorded, 10, 1), Some(Lookup::Repeated));
    assert_eq!(look_up(&mut recorded, 20, 1), Some(Lookup::Done));
    assert!(recorded.is_over());
}

#[test]
fn the_next_page_is_read_once_the_stream_is_past_this_one() {
    let recorded = recorded(&[row(10, 1), row(20, 5)], Some(50));
    let needs = |commit, ordinal| recorded.needs_page(at(commit, ordinal));
    assert!(!needs(10, 1) && !needs(20, 5));
    assert!(needs(20, 6) && needs(50, 1));
    assert!(!needs(60, 1));
}

/// A table of rows, and a stream that starts again from an earlier position.
#[derive(Debug, Clone)]
struct Restart {
    /// The position of each event, and the row at that position: the event's own row (`Some(true)`), the
    /// row of another event (`Some(false)`), or no row.
    events: Vec<(EventPosition, Option<bool>)>,
    /// The positions of rows whose events the stream does not contain.
    strangers: Vec<EventPosition>,
    page: usize,
}

fn restart() -> impl Strategy<Value = Restart> {
    let position = || (1u64..40, 1u32..6).prop_map(|(commit, ordinal)| at(commit, ordinal));
    let row = prop_oneof![
        3 => Just(Some(true)), 1 => Just(Some(false)), 2 => Just(None),
    ];
    (
        prop::collection::btree_map(position(), row, 0..80),
        prop::collection::btree_set(position(), 0..20),
        1usize..8,
    )
        .prop_map(|(events, mut strangers, page)| {
            strangers.retain(|position| !events.contains_key(position));
            Restart {
                events: events.into_iter().collect(),
                strangers: strangers.into_iter().collect(),
                page,
            }
        })
}

fn id(at: EventPosition, is_same: bool) -> [u8; 16] {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&at.commit.lsn().as_u64().to_be_bytes());
    id[8..12].copy_from_slice(&at.ordinal.to_be_bytes());
    id[15] = u8::from(!is_same);
    id
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// Reads pages from a list, as [`EarlierOutcomes::read_page`] reads them from a server.
    #[test]
    fn an_event_is_skipped_if_and_only_if_its_own_row_is_at_its_position(restart in restart()) {
        let mut table: Vec<DispatchRow> = restart
            .events
            .iter()
            .filter_map(|&(position, row)| Some((position, row?)))
            .chain(restart.strangers.iter().map(|&position| (position, true)))
            .map(|(position, is_same)| DispatchRow {
                position,
                event_id: id(position, is_same),
                is_published: true,
            })
            .collect();
        table.sort_by_key(|row| row.position);
        let mut recorded = recorded(&[], table.last().map(|row| row.position.commit.lsn().as_u64()));
        for (position, row) in restart.events {
            while recorded.needs_page(position) {
                let read_to = recorded.read_to;
                let rest = table.iter().filter(|row| row.position > read_to);
                recorded.page = rest.take(restart.page).copied().collect();
                recorded.ids = recorded.page.iter().map(|row| row.event_id).collect();
                if recorded.page.len() < restart.page {
                    recorded.last = None;
                }
                if let Some(row) = recorded.page.back() {
                    recorded.read_to = row.position;
                }
            }
            let expected = match row {
                Some(true) => Some(Lookup::Done),
                Some(false) => None,
                None => Some(Lookup::New),
            };
            prop_assert_eq!(recorded.look_up(position, &id(position, true)), expected);
            prop_assert!(recorded.page.len() <= restart.page);
        }
    }
}
