//! Tests of the watermark: each rule by itself, and all rules against a simple model.

mod model;

use super::*;

fn lsn(n: u64) -> Lsn {
    Lsn::new(n)
}

fn started_at(n: u64) -> Watermark {
    Watermark::new(Confirmable::by_slot(lsn(n)))
}

fn transaction(watermark: &mut Watermark, commit: u64, end: u64, events: u64) -> CommitLsn {
    let name = CommitLsn::new(lsn(commit));
    watermark.begin(name, PgTimestamp::from_micros(commit as i64), commit as u32);
    (0..events).for_each(|_| watermark.add_event());
    watermark.commit(lsn(end));
    name
}

#[test]
fn a_later_transaction_resolved_first_does_not_pass_an_earlier_one() {
    let mut watermark = started_at(10);
    let first = transaction(&mut watermark, 20, 25, 2);
    let second = transaction(&mut watermark, 30, 35, 1);
    watermark.resolve(second, 1);
    watermark.resolve(first, 1);
    assert_eq!(watermark.confirmable().lsn(), lsn(10));
    watermark.resolve(first, 1);
    assert_eq!(watermark.confirmable().lsn(), lsn(35));
}

#[test]
fn a_keepalive_after_unresolved_events_is_confirmed_only_once_they_are_resolved() {
    let mut watermark = started_at(10);
    let first = transaction(&mut watermark, 20, 25, 1);
    watermark.keepalive(lsn(90));
    assert_eq!(watermark.confirmable().lsn(), lsn(10));
    watermark.resolve(first, 1);
    assert_eq!(watermark.confirmable().lsn(), lsn(90));
}

#[test]
fn a_keepalive_on_an_idle_stream_is_confirmed() {
    let mut watermark = started_at(10);
    watermark.keepalive(lsn(90));
    assert_eq!(watermark.confirmable().lsn(), lsn(90));
}

#[test]
fn an_open_transaction_holds_the_watermark_even_if_its_events_so_far_are_resolved() {
    let mut watermark = started_at(10);
    let name = CommitLsn::new(lsn(20));
    watermark.begin(name, PgTimestamp::from_micros(0), 0);
    watermark.add_event();
    watermark.resolve(name, 1);
    watermark.keepalive(lsn(19));
    assert_eq!(watermark.confirmable().lsn(), lsn(10));
    watermark.commit(lsn(25));
    assert_eq!(watermark.confirmable().lsn(), lsn(25));
}

#[test]
fn a_transaction_without_events_is_confirmed_at_its_end() {
    let mut watermark = started_at(10);
    transaction(&mut watermark, 20, 25, 0);
    assert_eq!(watermark.confirmable().lsn(), lsn(25));
}

#[test]
fn one_stuck_event_keeps_few_entries_however_many_events_pass_it() {
    let mut watermark = started_at(1);
    transaction(&mut watermark, 20, 25, 1);
    for n in 3..10_000 {
        let name = transaction(&mut watermark, n * 10, n * 10 + 5, 1);
        watermark.resolve(name, 1);
    }
    assert_eq!(watermark.pending_transactions(), 1);
    assert!(watermark.pending.len() <= 2 * (1 + KEPT));
    assert_eq!(watermark.confirmable().lsn(), lsn(1));
}
