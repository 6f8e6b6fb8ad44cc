//! Tests of the judges when aggregates share a key.

use super::*;
use crate::verdict::buckets;

/// Events of two aggregates in one request, as published with one bucket.
fn shared() -> Evidence {
    let mut evidence = evidence();
    evidence.buckets = Some(1);
    for (event, (key, version)) in evidence
        .events
        .iter_mut()
        .zip([("a", 1), ("b", 1), ("a", 2)])
    {
        event.key = key.to_owned();
        event.version = version;
    }
    evidence.attempts.truncate(1);
    let request = &mut evidence.attempts[0];
    request.ordering_key = "bucket-0".into();
    request.event_ids = ["e1", "e2", "e3"].map(|id| Some(id.into())).into();
    for record in &mut evidence.records {
        record.key = "bucket-0".to_owned();
    }
    evidence
}

#[test]
fn a_bucket_is_found_by_the_published_hash() {
    // The test vectors of FNV-1a: "" and "a".
    assert_eq!(
        buckets::key("", u64::MAX),
        format!("bucket-{}", 0xcbf2_9ce4_8422_2325_u64)
    );
    assert_eq!(
        buckets::key("a", u64::MAX),
        format!("bucket-{}", 0xaf63_dc4c_8601_ec8c_u64)
    );
}

#[test]
fn each_aggregate_of_a_bucket_keeps_its_order() {
    let verdict = judge(&shared());
    assert!(verdict.is_clean(), "{:?}", verdict.violations);
    assert_eq!((verdict.attempts, verdict.stored_messages), (1, 3));
    let mut evidence = shared();
    evidence.attempts[0].event_ids = ["e2", "e1", "e3"].map(|id| Some(id.into())).into();
    evidence.records[0].message_id = Some(1);
    evidence.records[1].message_id = Some(0);
    assert!(judge(&evidence).is_clean(), "a and b have no common order");
    evidence.attempts[0].event_ids = ["e3", "e2", "e1"].map(|id| Some(id.into())).into();
    assert!(judge(&evidence).swapped() >= 1);
}

#[test]
fn an_event_in_a_wrong_bucket_is_found() {
    let mut evidence = shared();
    evidence.attempts[0].ordering_key = "bucket-1".into();
    assert_eq!(judge(&evidence).lost(), 3);
    // With `dispatch = exceptions`, no record shows the wrong bucket, only the requests do.
    let mut evidence = shared();
    evidence.exceptions = true;
    evidence.records.clear();
    assert!(judge(&evidence).is_clean());
    evidence.attempts[0].ordering_key = "a".into();
    assert_eq!(judge(&evidence).lost(), 3);
    let mut evidence = shared();
    evidence.records[0].key = "a".to_owned();
    assert!(!judge(&evidence).is_clean());
}

#[test]
fn two_concurrent_requests_of_a_bucket_are_found() {
    let mut evidence = shared();
    let mut second = evidence.attempts[0].clone();
    evidence.attempts[0].event_ids = ["e1"].map(|id| Some(id.into())).into();
    second.event_ids = ["e2", "e3"].map(|id| Some(id.into())).into();
    second.sequence = 1;
    second.first_message_id = Some(1);
    evidence.attempts.push(second);
    let found = violations(&evidence);
    let together = |violation: &Violation| {
        matches!(
            violation,
            Violation::Delivery(checks::Violation::InFlightTogether { .. })
        )
    };
    assert!(found.iter().any(together), "{found:?}");
}
