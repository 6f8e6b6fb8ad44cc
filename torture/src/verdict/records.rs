//! Checks the dispatch table: there is one row for each event, the row names a message that exists,
//! and the positions of the rows are in commit order. With `dispatch = exceptions`, only events that
//! are or were set aside have a row.

use std::collections::{HashMap, HashSet};

use super::{Event, Evidence, FromTable, Record, Violation, quarantine};

pub(super) fn check(evidence: &Evidence) -> Vec<Violation> {
    let events: HashMap<&str, &Event> = evidence
        .events
        .iter()
        .map(|event| (event.id.as_str(), event))
        .collect();
    let messages = messages(evidence);
    let mut violations = Vec::new();
    let mut recorded: HashSet<&str> = HashSet::new();
    for record in &evidence.records {
        let mut complain = |what: &str| {
            violations.push(Violation::Record {
                event_id: record.event_id.clone(),
                what: what.to_owned(),
            });
        };
        let is_first = recorded.insert(&record.event_id);
        // Two relays may each write a row for the same event, if the slot is dropped while the first relay
        // runs. The second relay takes a snapshot and publishes all rows that have no record in this snapshot.
        // The first relay may commit its last records just after the snapshot.
        let is_of_two_relays = evidence.relays > 1 && record.is_from_table();
        if !is_first && !is_of_two_relays {
            complain("it is not the only one");
        }
        let Some(event) = events.get(record.event_id.as_str()) else {
            complain("the outbox has no such event");
            continue;
        };
        // The module `quarantine` judges events that are set aside, so check only published events here.
        if record.is_published() {
            let message = record.message_id.map(|id| (record.event_id.as_str(), id));
            if !message.is_some_and(|message| messages.contains(&message)) {
                complain("Pub/Sub has no message of that id for this event");
            }
            if record.topic != event.topic || record.key != evidence.ordering_key(event) {
                complain("it names another topic or ordering key");
            }
        }
    }
    if evidence.exceptions {
        let concerned = quarantine::concerned(evidence);
        let without_reason = recorded.iter().filter(|id| !concerned.contains(**id));
        violations.extend(without_reason.map(|id| Violation::Record {
            event_id: (*id).to_owned(),
            what: "it was never set aside, and should have none".to_owned(),
        }));
    }
    let unrecorded = evidence.events.iter().filter(|_| !evidence.exceptions);
    for event in unrecorded {
        if !recorded.contains(event.id.as_str()) {
            violations.push(Violation::Record {
                event_id: event.id.clone(),
                what: "there is none".to_owned(),
            });
        }
    }
    violations.extend(out_of_order(evidence, &events));
    violations
}

/// The event id and message id of every stored message.
fn messages(evidence: &Evidence) -> HashSet<(&str, u64)> {
    let mut messages = HashSet::new();
    for attempt in &evidence.attempts {
        let Some(first) = attempt.first_message_id else {
            continue;
        };
        for (event_id, id) in attempt.event_ids.iter().zip(first..) {
            messages.extend(event_id.as_deref().map(|event_id| (event_id, id)));
        }
    }
    messages
}

/// Checks the positions of events in the WAL, which a restarting relay uses to skip delivered events. Within
/// a key the positions must grow with the version. A position must be before the known end of the event's
/// transaction, unless the relay read the event from its table: such an event gets the position at which the
/// relay read it. With [`FromTable::Late`], events from the table are not checked at all.
fn out_of_order(evidence: &Evidence, events: &HashMap<&str, &Event>) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut last: HashMap<(&str, &str), (i64, &Record)> = HashMap::new();
    let mut places: Vec<(&Record, &Event)> = evidence
        .records
        .iter()
        .filter(|record| !(record.is_from_table() && evidence.from_table == FromTable::Late))
        .filter_map(|record| Some((record, *events.get(record.event_id.as_str())?)))
        .collect();
    places.sort_by_key(|(record, _)| (record.commit_lsn, record.ordinal));
    for (record, event) in places {
        let mut complain = |what: String| {
            violations.push(Violation::Record {
                event_id: record.event_id.clone(),
                what,
            });
        };
        let end = evidence.committed_by.get(&event.transaction);
        if end.is_some_and(|end| record.commit_lsn >= *end) && !record.is_from_table() {
            complain("its position in the WAL is past the end of its transaction".to_owned());
        }
        if event.key.is_empty() {
            continue;
        }
        let stream = (event.topic.as_str(), event.key.as_str());
        if let Some((version, before)) = last.insert(stream, (event.version, record))
            && version >= event.version
            && before.event_id != record.event_id
        {
            complain(format!(
                "by its position in the WAL it comes after event {}, which is later in its key",
                before.event_id
            ));
        }
    }
    violations
}
