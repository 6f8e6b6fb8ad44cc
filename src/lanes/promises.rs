//! Compares the lanes, step by step, with a plain model: a list of events per key, at most one
//! request of it in flight, and failed requests first.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;

const TOPICS: [&str; 2] = ["projects/p/topics/a", "projects/p/topics/b"];

#[derive(Debug, Clone)]
enum Step {
    Push { topic: usize, key: u8 },
    Send,
    Finish(Index),
    Fail { which: Index, pause_ms: u64 },
    Wait { ms: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0..TOPICS.len(), 0u8..4).prop_map(|(topic, key)| Step::Push { topic, key }),
        4 => Just(Step::Send),
        3 => any::<Index>().prop_map(Step::Finish),
        2 => (any::<Index>(), 0u64..50).prop_map(|(which, pause_ms)| Step::Fail { which, pause_ms }),
        1 => (0u64..40).prop_map(|ms| Step::Wait { ms }),
    ]
}

type Key = (String, String);

/// What a lane must look like from the outside.
#[derive(Debug, Default)]
struct Model {
    queue: Vec<u32>,
    on_its_way: bool,
    /// The failed request: when it is retried, its events, and its attempts so far.
    failed: Option<(Instant, Vec<u32>, u32)>,
}

impl Model {
    fn has_work(&self) -> bool {
        !self.queue.is_empty() || self.on_its_way || self.failed.is_some()
    }

    fn may_send(&self, now: Instant) -> bool {
        match &self.failed {
            Some((at, ..)) => *at <= now,
            None => !self.on_its_way && !self.queue.is_empty(),
        }
    }
}

fn key_of(request: &Request) -> Key {
    let key = &request.key;
    (key.topic.to_string(), key.ordering_key.as_str().to_owned())
}

fn ordinals(request: &Request) -> Vec<u32> {
    let events = request.events.iter();
    events.map(|event| event.origin.ordinal).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn at_every_step_the_lanes_match_a_list_per_key(
        steps in prop::collection::vec(step(), 0..200), limit in 1usize..5,
    ) {
        let mut now = Instant::now();
        let mut lanes = Lanes::new(limit);
        let mut models: BTreeMap<Key, Model> = BTreeMap::new();
        let mut on_their_way: Vec<Request> = Vec::new();
        for (n, step) in (0u32..).zip(steps) {
            match step {
                Step::Push { topic, key } => {
                    let key = format!("k{key}");
                    lanes.push(TOPICS[topic].into(), OrderingKey::from(key.as_str()), Event::for_tests(n));
                    models.entry((TOPICS[topic].to_owned(), key)).or_default().queue.push(n);
                }
                Step::Send => {
                    let is_free = on_their_way.len() < limit;
                    let expected = is_free && models.values().any(|model| model.may_send(now));
                    let request = lanes.next_request(now, Serve::All);
                    prop_assert_eq!(request.is_some(), expected, "exactly when a lane may send");
                    if let Some(request) = request {
                        let model = models.get_mut(&key_of(&request)).unwrap();
                        prop_assert!(model.may_send(now), "the lane may not send yet");
                        let (events, attempts) = match model.failed.take() {
                            Some((_, events, attempts)) => (events, attempts),
                            None => (std::mem::take(&mut model.queue), 0),
                        };
                        prop_assert_eq!(ordinals(&request), events, "a retry is unchanged");
                        prop_assert_eq!(request.failed_attempts, attempts);
                        model.on_its_way = true;
                        on_their_way.push(request);
                    }
                }
                Step::Finish(which) if !on_their_way.is_empty() => {
                    let request = on_their_way.swap_remove(which.index(on_their_way.len()));
                    models.get_mut(&key_of(&request)).unwrap().on_its_way = false;
                    lanes.finished(&request);
                }
                Step::Fail { which, pause_ms } if !on_their_way.is_empty() => {
                    let request = on_their_way.swap_remove(which.index(on_their_way.len()));
                    let again_at = now + Duration::from_millis(pause_ms);
                    let model = models.get_mut(&key_of(&request)).unwrap();
                    model.on_its_way = false;
                    model.failed = Some((again_at, ordinals(&request), request.failed_attempts + 1));
                    lanes.failed(request, again_at, Load::Keep);
                }
                Step::Wait { ms } => now += Duration::from_millis(ms),
                Step::Finish(_) | Step::Fail { .. } => {}
            }
            let count = |which: fn(&Model) -> bool| models.values().filter(|m| which(m)).count();
            prop_assert_eq!(lanes.in_flight(), on_their_way.len());
            prop_assert_eq!(lanes.len(), count(Model::has_work), "a key without work is forgotten");
            prop_assert_eq!(lanes.waiting(), count(|model| model.failed.is_some()));
        }
    }

    #[test]
    fn lanes_that_always_have_work_take_turns(keys in 2u32..20, limit in 1usize..5, rounds in 2usize..6) {
        let now = Instant::now();
        let mut lanes = Lanes::new(limit);
        let push = |lanes: &mut Lanes, key: &str| {
            lanes.push(TOPICS[0].into(), OrderingKey::from(key), Event::for_tests(1));
        };
        (0..keys).for_each(|key| push(&mut lanes, &format!("k{key}")));
        let mut on_their_way = VecDeque::new();
        let mut served = Vec::new();
        while served.len() < rounds * keys as usize {
            while let Some(request) = lanes.next_request(now, Serve::All) {
                let (_, key) = key_of(&request);
                push(&mut lanes, &key);
                served.push(key);
                on_their_way.push_back(request);
            }
            lanes.finished(&on_their_way.pop_front().unwrap());
        }
        for turn in served.chunks_exact(keys as usize) {
            let mut turn = turn.to_vec();
            turn.sort_unstable();
            turn.dedup();
            prop_assert_eq!(turn.len(), keys as usize, "a lane was served twice before another had its turn");
        }
    }
}
