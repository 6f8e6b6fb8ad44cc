//! Tests the texts, codes and hints of errors.

use super::*;
use crate::event::{CommittedAt, EventPosition};
use outbox_event::TableIdentity;

fn event(fault: EventFault) -> MapError {
    MapError::Event(Box::new(EventError {
        table: "outbox.events".into(),
        event_id: Some("42".to_owned()),
        at: CommittedAt::default(),
        fault,
        known: FaultyRow {
            event_id: crate::mapping::event_id::id_of_position(
                &TableIdentity::new("outbox.events"),
                EventPosition::default(),
            ),
            topic: None,
            ordering_key: OrderingKey::UNORDERED,
        },
    }))
}

#[test]
fn an_error_names_table_event_position_limit_and_size() {
    let error = event(EventFault::OverLimit {
        limit: Limit::OrderingKey,
        found: 1_025,
    });
    assert_eq!(
        error.to_string(),
        "event 42 of table outbox.events at commit 0/0, ordinal 0: its ordering key has 1025 \
         bytes, but Pub/Sub accepts at most 1024"
    );
    assert_eq!(error.code(), "event-invalid");
    assert!(error.hint().contains("bucketed"));
}

#[test]
fn an_event_without_a_readable_id_must_be_inserted_again() {
    let fault = || EventFault::Unreadable {
        column: "id".to_owned(),
        problem: "invalid byte sequence".to_owned(),
    };
    let MapError::Event(mut error) = event(fault()) else {
        unreachable!("an event")
    };
    assert!(error.hint().contains("release the event"));
    error.event_id = None;
    let hint = error.hint();
    assert!(hint.contains("insert the event again") && hint.contains("discard"));
}

#[test]
fn only_a_message_too_large_for_any_request_is_event_too_large() {
    let large = event(EventFault::OverLimit {
        limit: Limit::Request,
        found: 10_000_001,
    });
    assert_eq!(large.code(), "event-too-large");
    let many = event(EventFault::OverLimit {
        limit: Limit::Attributes,
        found: 101,
    });
    assert_eq!(many.code(), "event-invalid");
}

#[test]
fn the_error_about_a_missing_column_lists_the_rest_and_how_to_switch_it_off() {
    let error = MapError::ColumnMissing {
        table: "public.outbox".to_owned(),
        column: "event_type".to_owned(),
        setting: "columns.event_type".to_owned(),
        present: vec!["id".to_owned(), "type".to_owned()],
    };
    assert!(
        error
            .to_string()
            .ends_with("its published columns are id, type")
    );
    assert!(error.hint().contains("or to \"\""));
    assert_eq!(error.code(), "column-missing");
}

#[test]
fn an_error_is_small_enough_to_be_returned_for_every_row() {
    assert!(size_of::<Box<EventError>>() == 8 && size_of::<MapError>() <= 112);
}
