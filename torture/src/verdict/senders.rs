//! Checks that a relay does not send an event again after it has certainly read or written the event's dispatch row
//! (guarantee G3).
//!
//! Before a session of a relay streams, it reads the dispatch rows of all events after the slot's position. It does
//! not read them again. So the relay knows these rows:
//!
//! - The rows that existed when its process started.
//! - The rows of the events that it has sent itself.
//!
//! The check ignores:
//!
//! - Rows that the connection of another relay commits after the start of this relay's process. For example, the
//!   connection of a killed relay may do so. This relay may not know such rows.
//! - Events that were released from quarantine. A relay must send them although they have a dispatch row.
//! - Requests that a frozen relay had in its buffers. The relay cannot take them back.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use pubsub_emulator::Attempt;

use super::stragglers::lay_in_a_frozen_relay;
use super::{Evidence, Violation, quarantine};
use crate::log::Life;
use crate::plan::Release;

pub(super) fn check(evidence: &Evidence) -> Vec<Violation> {
    let recorded_by = recording_attempts(evidence);
    let lives = &evidence.log.lives;
    let released = match evidence.quarantine.release {
        Release::Never => HashSet::new(),
        Release::AtTheEnd | Release::UnderWay => quarantine::concerned(evidence),
    };
    let mut violations = Vec::new();
    let sent_knowingly = |attempt: &&Attempt| !lay_in_a_frozen_relay(evidence, attempt);
    for attempt in evidence.attempts.iter().filter(sent_knowingly) {
        let event_ids = attempt.event_ids.iter().flatten();
        for event_id in event_ids.filter(|id| !released.contains(&***id)) {
            let Some(recorded_at) = evidence.recorded_at.get(&**event_id) else {
                continue;
            };
            let Some(sender) = sender(lives, attempt.received) else {
                continue;
            };
            let is_its_own = recorded_by
                .get(&**event_id)
                .is_some_and(|sent| self::sender(lives, *sent) == Some(sender));
            let knows_until = if is_its_own {
                attempt.received
            } else {
                sender.born
            };
            if *recorded_at < knows_until {
                violations.push(Violation::SentAfterRecorded {
                    event_id: event_id.to_string(),
                    attempt: attempt.sequence,
                });
            }
        }
    }
    violations
}

/// For each event, the time at which the emulator received the message whose id is in the event's
/// dispatch row.
fn recording_attempts(evidence: &Evidence) -> HashMap<&str, Duration> {
    let mut by_message: HashMap<u64, Duration> = HashMap::new();
    for attempt in &evidence.attempts {
        if let Some(first) = attempt.first_message_id {
            let ids = first..first + attempt.event_ids.len() as u64;
            by_message.extend(ids.map(|id| (id, attempt.received)));
        }
    }
    let sent = |id: Option<u64>| by_message.get(&id?).copied();
    evidence
        .records
        .iter()
        .filter_map(|record| Some((record.event_id.as_str(), sent(record.message_id)?)))
        .collect()
}

/// Returns the relay that was the sender at the time `at`: the last relay that had logged that it streams.
/// Returns `None` if this relay was already dead: the sender may then be the next relay, which can send requests
/// before it logs that it streams.
fn sender(lives: &[Life], at: Duration) -> Option<&Life> {
    let last_word = |life: &Life| life.streams.iter().rev().find(|said| **said <= at).copied();
    let last = lives
        .iter()
        .filter_map(|life| Some((last_word(life)?, life)))
        .max_by_key(|(said, _)| *said);
    last.map(|(_, life)| life)
        .filter(|life| life.died.is_none_or(|died| at < died))
}
