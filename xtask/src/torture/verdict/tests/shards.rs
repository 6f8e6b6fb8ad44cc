//! Two shards.

use super::*;

/// e1 and e3 are of one shard, e2 of the other.
fn shared_out() -> Evidence {
    let mut evidence = evidence();
    evidence.shards = 2;
    for (record, ordinal) in evidence.records.iter_mut().zip([2, 3, 2]) {
        record.ordinal = ordinal;
    }
    evidence.samples.clear();
    evidence
}

#[test]
fn the_slot_of_a_shard_stands_for_its_events_alone() {
    let at = |shard, ms_at, confirmed, records_below| Sample {
        shard,
        at: ms(ms_at),
        confirmed,
        records_below,
    };
    let mut evidence = shared_out();
    // Past e2, which is the other's and not stored yet.
    evidence.samples.push(at(0, 150, 2_040, 1));
    assert_eq!(texts(&evidence), [""; 0]);
    evidence.samples[0] = at(1, 150, 2_040, 1);
    assert_eq!(violations(&evidence).len(), 1);
    evidence.samples[0] = at(0, 350, 3_040, 1);
    assert_eq!(violations(&evidence).len(), 1, "e3 has no record by then");
}

#[test]
fn what_a_shard_had_to_know_is_not_held_against_the_other() {
    let mut evidence = shared_out();
    let life = |seat, born, streams| Life {
        pid: 1 + seat as u32,
        seat,
        born: ms(born),
        died: None,
        streams: vec![ms(streams)],
    };
    // The relay of e3 was there when it was recorded; the other one came later.
    evidence.log.lives = vec![life(0, 10, 20), life(1, 380, 390)];
    evidence.recorded_at.insert("e3".to_owned(), ms(370));
    evidence.attempts.push(attempt(3, 400, "e3"));
    evidence.records[2].message_id = Some(99);
    let is_meant = |violation: &Violation| matches!(violation, Violation::SentAfterRecorded { .. });
    assert!(!violations(&evidence).iter().any(is_meant));
    evidence.log.lives[0].born = ms(375);
    assert!(violations(&evidence).iter().any(is_meant));
}
