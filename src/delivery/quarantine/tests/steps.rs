//! Takes random steps of the model, and checks the properties that must hold after any sequence of them.

use super::model::{Row, World};
use super::*;

impl World {
    fn take(&mut self, step: Step) {
        match step {
            Step::Arrive { bad } => {
                if bad {
                    self.bad.insert(self.next);
                }
                self.next += 1;
                self.arrive(self.next - 1);
            }
            Step::ArriveUnmappable => {
                self.unmappable.insert(self.next);
                self.bad.insert(self.next);
                self.next += 1;
                self.arrive(self.next - 1);
            }
            Step::LetterEnds => self.letter_ends(),
            Step::Write => self.write(),
            Step::Publish => self.publish(),
            Step::ReleaserRequest => self.ask(),
            Step::Answer => self.answer(),
            Step::Operator => self.replace(Row::Quarantined, Row::Released),
            Step::Poll => self.poll(),
            Step::Unhold => self.unhold(),
            Step::Heal => self.bad.clear(),
            Step::Crash => self.crash(),
            Step::Replay(from, events) => {
                self.replay(from..from + events);
            }
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Arrive { bad: bool },
    ArriveUnmappable,
    LetterEnds,
    Write,
    Publish,
    ReleaserRequest,
    Answer,
    Operator,
    Poll,
    Unhold,
    Heal,
    Crash,
    Replay(u32, u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => prop::bool::weighted(0.2).prop_map(|bad| Step::Arrive { bad }),
        1 => Just(Step::ArriveUnmappable),
        2 => Just(Step::LetterEnds),
        6 => Just(Step::Write),
        6 => Just(Step::Publish),
        6 => Just(Step::ReleaserRequest),
        6 => Just(Step::Answer),
        2 => Just(Step::Operator),
        4 => Just(Step::Poll),
        1 => Just(Step::Unhold),
        1 => Just(Step::Heal),
        1 => Just(Step::Crash),
        1 => replay(),
    ]
}

fn replay() -> impl Strategy<Value = Step> {
    (1_u32..20, 1_u32..20).prop_map(|(from, events)| Step::Replay(from, events))
}

/// A step in which nothing fails.
fn healthy_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => Just(Step::Arrive { bad: false }),
        6 => Just(Step::Write),
        6 => Just(Step::Publish),
        6 => Just(Step::ReleaserRequest),
        6 => Just(Step::Answer),
        4 => Just(Step::Poll),
        1 => Just(Step::Unhold),
        2 => replay(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_key_is_published_completely_and_in_order_whatever_is_released_and_when(
        steps in prop::collection::vec(step(), 0..200),
    ) {
        let mut world = World::new();
        let (mut crashed, mut replayed) = (false, false);
        for step in steps {
            match step {
                Step::Crash => {
                    crashed = true;
                    world.crash();
                }
                Step::Replay(from, events) => {
                    replayed |= !world.replay(from..from + events).is_empty();
                }
                step => world.take(step),
            }
        }
        world.settle();
        let mut seen = BTreeSet::new();
        let first: Vec<u32> = world.published.iter().copied().filter(|n| seen.insert(*n)).collect();
        prop_assert_eq!(&first, &(1..world.next).collect::<Vec<_>>());
        prop_assert!(
            crashed || replayed || first.len() == world.published.len(),
            "no duplicates without a crash"
        );
        prop_assert_eq!(world.quarantine.keys.count(), 0);
        prop_assert!(world.quarantine.in_lanes.is_empty());
        prop_assert_eq!(world.quarantine.in_lanes.bytes(), 0);
    }

    #[test]
    fn replayed_events_come_in_order_with_no_other_event_of_their_key_between_them(
        steps in prop::collection::vec(healthy_step(), 0..200),
        blocks in any::<bool>(),
    ) {
        let mut world = World::new();
        if !blocks {
            world.quarantine = Quarantine::new(OnBadEvent::QuarantineEvent);
        }
        let mut replays = Vec::new();
        for step in steps {
            if let Step::Replay(from, events) = step {
                let replayed = world.replay(from..from + events);
                if !replayed.is_empty() {
                    replays.push((world.published.len(), replayed));
                }
            } else {
                world.take(step);
            }
        }
        world.settle();
        for (since, replayed) in &replays {
            let mut later = world.published[*since..].windows(replayed.len());
            prop_assert!(later.any(|block| block == replayed), "{replays:?} {:?}", world.published);
        }
        let copies: usize = replays.iter().map(|(_, replayed)| replayed.len()).sum();
        prop_assert_eq!(world.published.len(), world.next as usize - 1 + copies);
    }
}
