//! Checks that exactly the right events are set aside (guarantee G10): the refused events and, with
//! `quarantine_key`, the later events of their keys.

use std::collections::{HashMap, HashSet};

use super::{Event, Evidence, Violation};
use crate::plan::Release;

/// Which events Pub/Sub refuses in this plan, what the relay should do with them, and which events the relay has set
/// aside.
#[derive(Debug)]
pub(crate) struct Quarantine {
    /// Ids of the events that Pub/Sub refuses. The writers may not have written all of these events.
    pub(crate) refused: HashSet<String>,
    /// Whether later events of a key wait behind a refused event (`quarantine_key`).
    pub(crate) whole_key: bool,
    pub(crate) release: Release,
    /// Ids of events that were still set aside after everything else was delivered.
    pub(crate) set_aside: HashSet<String>,
}

impl Default for Quarantine {
    /// A plan in which Pub/Sub refuses nothing.
    fn default() -> Self {
        Self {
            refused: HashSet::new(),
            whole_key: true,
            release: Release::Never,
            set_aside: HashSet::new(),
        }
    }
}

pub(super) fn check(evidence: &Evidence) -> Vec<Violation> {
    let Quarantine {
        release, set_aside, ..
    } = &evidence.quarantine;
    let concerned = concerned(evidence);
    let mut violations = Vec::new();
    let mut complain = |event_id: &str, what: String| {
        violations.push(Violation::Record {
            event_id: event_id.to_owned(),
            what,
        });
    };
    for event in &evidence.events {
        let (is_aside, is_due) = (
            set_aside.contains(&event.id),
            concerned.contains(&*event.id),
        );
        if is_aside && !is_due {
            complain(&event.id, "it was set aside without a reason".to_owned());
        }
        // If the release is a step of the plan, Pub/Sub may accept an event that it would have refused
        // earlier, so the event need not be set aside.
        if is_due && !is_aside && *release != Release::UnderWay {
            complain(&event.id, "it was not set aside".to_owned());
        }
    }
    for record in evidence.records.iter().filter(|r| !r.is_published()) {
        let id = &record.event_id;
        if *release != Release::Never {
            let what = format!("it is {}, though it was cured and released", record.state);
            complain(id, what);
        } else if record.state != "quarantined" || !set_aside.contains(id) {
            complain(id, format!("it is {} in the end", record.state));
        }
    }
    violations
}

/// Refused events, and events that wait behind a refused event.
pub(super) fn concerned(evidence: &Evidence) -> HashSet<&str> {
    let quarantine = &evidence.quarantine;
    let is_refused = |event: &&Event| quarantine.refused.contains(&event.id);
    let key = |event: &Event| (event.topic.clone(), event.key.clone());
    let mut blocked: HashMap<(String, String), i64> = HashMap::new();
    for event in evidence.events.iter().filter(is_refused) {
        let first = blocked.entry(key(event)).or_insert(event.version);
        *first = event.version.min(*first);
    }
    let waits = |event: &Event| {
        let first = blocked.get(&key(event));
        let is_behind = first.is_some_and(|first| event.version > *first);
        quarantine.whole_key && !event.key.is_empty() && is_behind
    };
    let events = evidence.events.iter();
    events
        .filter(|event| is_refused(event) || waits(event))
        .map(|event| event.id.as_str())
        .collect()
}

/// Events that may be published after later events of their key, because they were quarantined and released
/// without these later events.
pub(super) fn late(evidence: &Evidence) -> impl Iterator<Item = &str> {
    let Quarantine {
        refused,
        whole_key,
        release,
        ..
    } = &evidence.quarantine;
    let is_late = !whole_key && *release != Release::Never;
    let events = evidence.events.iter();
    events
        .filter(move |event| is_late && refused.contains(&event.id))
        .map(|event| event.id.as_str())
}
