//! Tests of the judges of dispatch rows.

use super::*;

/// Applies `change` to the dispatch rows and returns the violations in them.
fn complaints(change: impl FnOnce(&mut Vec<Record>)) -> Vec<String> {
    let mut evidence = evidence();
    // Remove the samples, because this test is not about confirmed positions.
    evidence.samples.clear();
    change(&mut evidence.records);
    let what = |violation: Violation| match violation {
        Violation::Record { event_id, what } => format!("{event_id}: {what}"),
        other => format!("{other}"),
    };
    violations(&evidence).into_iter().map(what).collect()
}

#[test]
fn every_event_has_exactly_one_correct_dispatch_row() {
    let found = complaints(|records| drop(records.pop()));
    assert_eq!(found, ["e3: there is none"]);
    let found = complaints(|records| {
        let mut second = records[2].clone();
        second.ordinal = 2;
        records.push(second);
    });
    assert!(
        found.contains(&"e3: it is not the only one".to_owned()),
        "{found:?}"
    );
    let found = complaints(|records| records[1].message_id = Some(0));
    assert_eq!(
        found,
        ["e2: Pub/Sub has no message of that id for this event"]
    );
    let found = complaints(|records| records[1].message_id = None);
    assert_eq!(
        found,
        ["e2: Pub/Sub has no message of that id for this event"]
    );
    let found = complaints(|records| records[1].key = "other".to_owned());
    assert_eq!(found, ["e2: it names another topic or ordering key"]);
    let found = complaints(|records| {
        records.push(Record {
            event_id: "ghost".to_owned(),
            commit_lsn: 9_000,
            ..records[0].clone()
        });
    });
    assert_eq!(found, ["ghost: the outbox has no such event"]);
}

#[test]
fn the_position_of_a_dispatch_row_follows_the_order_of_commits() {
    let found = complaints(|records| {
        records[1].commit_lsn = 1_000;
        records[1].ordinal = 0;
    });
    let [found] = &found[..] else {
        panic!("{found:?}")
    };
    assert!(found.starts_with("e1: by its position in the WAL it comes after event e2"));
    let found = complaints(|records| records[1].commit_lsn = 2_030);
    assert_eq!(
        found,
        ["e2: its position in the WAL is past the end of its transaction"]
    );
}
