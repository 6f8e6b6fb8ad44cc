//! Checks that the journal of a correct publisher under random faults is clean.

use super::*;

/// The outcome of one request of a correct publisher.
#[derive(Debug, Clone)]
enum Fate {
    Answered,
    StoredThenFailed,
    Failed,
    Withheld,
    /// Stored and answered, but then the publisher crashes and restarts this many events earlier.
    Crash(usize),
}

fn fates() -> impl Strategy<Value = Vec<(usize, usize, Fate)>> {
    let fate = prop_oneof![
        4 => Just(Fate::Answered),
        1 => Just(Fate::StoredThenFailed),
        1 => Just(Fate::Failed),
        1 => Just(Fate::Withheld),
        1 => (0..5_usize).prop_map(Fate::Crash),
    ];
    vec((0..3_usize, 1..4_usize, fate), 1..60)
}

const KEYS: [&str; 3] = ["a", "b", "c"];

/// Simulates a correct publisher, which sends the events of each key in order and repeats requests
/// that were not answered with message ids. Returns the journal, and the events that should have
/// been published.
fn correct_history(fates: &[(usize, usize, Fate)]) -> (Script, Expected) {
    let mut script = Script::default();
    let mut next = [0_usize; 3];
    let mut reached = [0_usize; 3];
    for (key, size, fate) in fates {
        let from = next[*key];
        let to = from + size;
        let events: Vec<String> = (from..to).map(|n| format!("{}{n}", KEYS[*key])).collect();
        let events: Vec<&str> = events.iter().map(String::as_str).collect();
        let failed = Answer::Error(Code::Unavailable);
        let (stored, answer) = match fate {
            Fate::Answered | Fate::Crash(_) => (true, Answer::MessageIds),
            Fate::StoredThenFailed => (true, failed),
            Fate::Failed => (false, failed),
            Fate::Withheld => (true, Answer::Never),
        };
        script = script.attempt(KEYS[*key], &events, stored, answer);
        if stored {
            reached[*key] = reached[*key].max(to);
        }
        match fate {
            Fate::Answered => next[*key] = to,
            Fate::Crash(back) => next[*key] = to.saturating_sub(*back),
            Fate::StoredThenFailed | Fate::Failed | Fate::Withheld => {}
        }
    }
    let expected = KEYS
        .iter()
        .zip(reached)
        .filter(|(_, reached)| *reached > 0)
        .map(|(key, reached)| {
            (
                Stream::new(TOPIC, *key),
                (0..reached).map(|n| format!("{key}{n}")).collect(),
            )
        })
        .collect();
    (script, expected)
}

proptest! {
    #[test]
    fn a_correct_publisher_is_never_blamed(fates in fates()) {
        let (script, expected) = correct_history(&fates);
        let report = check(&script.attempts, &expected);
        prop_assert!(report.is_clean(), "{}", report);
    }

    #[test]
    fn an_event_taken_out_of_a_history_is_missing(fates in fates(), pick in any::<prop::sample::Index>()) {
        let (mut script, expected) = correct_history(&fates);
        let events: Vec<_> =
            expected.iter().flat_map(|(stream, ids)| ids.iter().map(move |id| (stream, id))).collect();
        prop_assume!(!events.is_empty());
        let (stream, event_id) = events[pick.index(events.len())];
        for attempt in &mut script.attempts {
            let kept = attempt.event_ids.iter().filter(|id| id.as_deref() != Some(event_id.as_str()));
            attempt.event_ids = kept.cloned().collect();
        }
        let report = check(&script.attempts, &expected);
        let missing = Violation::Missing { stream: stream.clone(), event_id: event_id.clone() };
        prop_assert!(report.violations.contains(&missing), "{}", report);
    }

    #[test]
    fn two_events_swapped_throughout_a_history_are_out_of_order(
        fates in fates(), pick in any::<prop::sample::Index>(),
    ) {
        let (mut script, expected) = correct_history(&fates);
        let pairs: Vec<_> = expected.values().flat_map(|ids| ids.windows(2)).collect();
        prop_assume!(!pairs.is_empty());
        let pair = pairs[pick.index(pairs.len())];
        for attempt in &mut script.attempts {
            let swapped = attempt.event_ids.iter().map(|id| match id.as_deref() {
                Some(id) if id == pair[0] => Some(pair[1].as_str().into()),
                Some(id) if id == pair[1] => Some(pair[0].as_str().into()),
                _ => id.clone(),
            });
            attempt.event_ids = swapped.collect();
        }
        let report = check(&script.attempts, &expected);
        let found = report.violations.iter().any(|v| matches!(v, Violation::OutOfOrder { .. }));
        prop_assert!(found, "{}", report);
    }
}
