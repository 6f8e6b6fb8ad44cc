//! Tests of the judges of quarantined events.

use super::*;

/// Evidence in which Pub/Sub refuses e2. If `whole_key` is true, e2 and e3 are set aside, otherwise only e2.
fn refused(whole_key: bool, release: Release) -> Evidence {
    let mut evidence = evidence();
    evidence.quarantine = Quarantine {
        refused: ["e2".to_owned()].into(),
        whole_key,
        release,
        set_aside: HashSet::new(),
    };
    set_aside(&mut evidence, 1);
    if whole_key {
        set_aside(&mut evidence, 2);
    }
    evidence
}

/// Sets the event with this index aside: changes its record and removes its attempts.
fn set_aside(evidence: &mut Evidence, index: usize) {
    let record = &mut evidence.records[index];
    record.state = "quarantined".to_owned();
    record.message_id = None;
    let id = record.event_id.clone();
    let others = |attempt: &Attempt| attempt.event_ids[0].as_deref() != Some(&*id);
    evidence.attempts.retain(others);
    evidence.quarantine.set_aside.insert(id);
}

/// Publishes the event with this index in the attempt `sequence`, received at `received_ms`.
fn publish(evidence: &mut Evidence, index: usize, sequence: u64, received_ms: u64) {
    let record = &mut evidence.records[index];
    record.state = "published".to_owned();
    record.message_id = Some(sequence);
    let copy = attempt(sequence, received_ms, &record.event_id);
    evidence.attempts.push(copy);
}

#[test]
fn an_event_that_is_set_aside_without_a_reason_is_a_violation() {
    let mut evidence = evidence();
    set_aside(&mut evidence, 2);
    // The slot has confirmed the event, so the judges also complain that it was not stored.
    assert!(matches!(
        violations(&evidence)[0],
        Violation::ConfirmedBeforeStored { .. }
    ));
    evidence.samples.clear();
    assert_eq!(
        texts(&evidence),
        ["dispatch row of event e3: it was set aside without a reason"]
    );
}

#[test]
fn a_refused_event_is_set_aside_with_the_events_behind_it_or_alone() {
    for whole_key in [true, false] {
        let clean = refused(whole_key, Release::Never);
        assert_eq!(texts(&clean), [""; 0]);
        let mut other = refused(whole_key, Release::Never);
        other.quarantine.whole_key = !whole_key;
        other.samples.clear();
        let found = texts(&other);
        let what = if whole_key {
            "it was set aside without a reason"
        } else {
            "it was not set aside"
        };
        assert_eq!(found, [format!("dispatch row of event e3: {what}")]);
    }
    let mut published = refused(true, Release::Never);
    published.quarantine.set_aside.remove("e2");
    publish(&mut published, 1, 7, 400);
    assert!(texts(&published).contains(&"dispatch row of event e2: it was not set aside".into()));
    let mut discarded = refused(true, Release::Never);
    discarded.records[1].state = "discarded".to_owned();
    assert_eq!(
        texts(&discarded),
        ["dispatch row of event e2: it is discarded in the end"]
    );
}

#[test]
fn another_key_does_not_wait_behind_a_refused_event() {
    let mut evidence = refused(true, Release::Never);
    evidence.events[2].key = "other".to_owned();
    evidence.samples.clear();
    assert_eq!(
        texts(&evidence),
        ["dispatch row of event e3: it was set aside without a reason"]
    );
}

#[test]
fn released_events_are_published_completely_and_in_order() {
    let release = |order: [usize; 2]| {
        let mut evidence = refused(true, Release::AtTheEnd);
        for (at, index) in (0..).zip(order) {
            publish(&mut evidence, index, 7 + at, 400 + 10 * at);
        }
        judge(&evidence)
    };
    let verdict = release([1, 2]);
    assert!(verdict.is_clean(), "{:?}", verdict.violations);
    assert_eq!(verdict.set_aside, 2);
    assert!(release([2, 1]).swapped() > 0);
    let found = texts(&refused(true, Release::UnderWay));
    assert!(
        found
            .iter()
            .any(|text| text.contains("it is quarantined, though"))
    );
}

#[test]
fn an_event_released_alone_may_come_late_but_never_before_earlier_events() {
    let mut late = refused(false, Release::AtTheEnd);
    publish(&mut late, 1, 7, 400);
    assert_eq!(texts(&late), [""; 0]);
    let mut early = refused(false, Release::AtTheEnd);
    publish(&mut early, 1, 7, 400);
    for attempt in &mut early.attempts {
        // Now the events are stored in the order e2, e1, e3.
        attempt.first_message_id = attempt.first_message_id.map(|id| (id + 1) % 8);
    }
    for record in &mut early.records {
        record.message_id = record.message_id.map(|id| (id + 1) % 8);
    }
    assert_eq!(judge(&early).swapped(), 1, "{:?}", texts(&early));
}

#[test]
fn an_event_with_a_record_may_be_sent_only_if_it_was_released() {
    let mut released = refused(true, Release::AtTheEnd);
    released.log.lives = vec![Life {
        pid: 1,
        born: ms(350),
        died: None,
        streams: vec![ms(360)],
        ..Life::default()
    }];
    publish(&mut released, 1, 7, 400);
    publish(&mut released, 2, 8, 410);
    assert_eq!(texts(&released), [""; 0]);
    let mut sent = refused(true, Release::Never);
    sent.log.lives = released.log.lives;
    // Pub/Sub refused the event again.
    let mut again = attempt(7, 400, "e2");
    (again.stored, again.first_message_id) = (None, None);
    again.answer = Answer::Error(Code::InvalidArgument);
    sent.attempts.push(again);
    let expected = Violation::SentAfterRecorded {
        event_id: "e2".to_owned(),
        attempt: 7,
    };
    assert_eq!(violations(&sent), [expected]);
}
