//! Compares the lanes, step by step, with a plain model: a list of events per key, at most one
//! request per key in flight, failed requests first, and one limit on requests in flight.

use std::collections::BTreeMap;

use proptest::sample::Index;

use super::*;

const TOPICS: [&str; 2] = ["projects/p/topics/a", "projects/p/topics/b"];

#[derive(Debug, Clone)]
enum Step {
    Push {
        topic: usize,
        key: u8,
    },
    Send {
        worthwhile: bool,
    },
    Finish(Index),
    Fail {
        which: Index,
        pause_ms: u64,
        load: Load,
    },
    Wait {
        ms: u64,
    },
}

fn failed_load() -> impl Strategy<Value = Load> {
    prop::sample::select(vec![
        Load::Keep,
        Load::Keep,
        Load::Reduce,
        Load::NotSent,
        Load::Broken,
    ])
}

fn step() -> impl Strategy<Value = Step> {
    let worthwhile = prop::bool::weighted(0.2);
    let fail = (any::<Index>(), 0u64..50, failed_load());
    prop_oneof![
        5 => (0..TOPICS.len(), 0u8..5).prop_map(|(topic, key)| Step::Push { topic, key }),
        4 => worthwhile.prop_map(|worthwhile| Step::Send { worthwhile }),
        3 => any::<Index>().prop_map(Step::Finish),
        2 => fail.prop_map(|(which, pause_ms, load)| Step::Fail { which, pause_ms, load }),
        1 => (0u64..40).prop_map(|ms| Step::Wait { ms }),
    ]
}

type Key = (String, String);

/// The expected state of one lane, as far as a caller can see it.
#[derive(Debug, Default)]
struct Model {
    /// All events that were ever pushed.
    pushed: Vec<u32>,
    /// The events that Pub/Sub has stored.
    stored: Vec<u32>,
    /// Events that wait for their first request.
    queue: Vec<u32>,
    in_flight: bool,
    /// The failed request: when it is retried, its events, and its attempts so far.
    failed: Option<(Instant, Vec<u32>, u32)>,
}

impl Model {
    fn has_work(&self) -> bool {
        !self.queue.is_empty() || self.in_flight || self.failed.is_some()
    }

    fn may_send(&self, now: Instant) -> bool {
        match &self.failed {
            Some((at, ..)) => *at <= now,
            None => !self.in_flight && !self.queue.is_empty(),
        }
    }
}

fn key_of(request: &Request) -> Key {
    let key = &request.key;
    (key.topic.to_string(), key.ordering_key.as_str().to_owned())
}

/// The lanes under test, and the model of each key.
struct World {
    now: Instant,
    lanes: Lanes,
    models: BTreeMap<Key, Model>,
    in_flight: Vec<Request>,
    /// The maximum of `limit`.
    most: usize,
    /// The present limit on requests in flight.
    limit: usize,
    /// Set while no request reaches Pub/Sub. The `Instant` is the time at which the next attempt may start. Once that
    /// attempt has started, no other attempt may start for the `Duration`.
    probing: Option<(Duration, Instant)>,
    /// When the test last called `Lanes::next_request`.
    asked_at: Option<Instant>,
}

impl World {
    fn new(limit: usize) -> Self {
        Self {
            now: Instant::now(),
            lanes: Lanes::new(limit),
            models: BTreeMap::new(),
            in_flight: Vec::new(),
            most: limit,
            limit,
            probing: None,
            asked_at: None,
        }
    }

    fn model(&mut self, request: &Request) -> &mut Model {
        self.models.get_mut(&key_of(request)).unwrap()
    }

    fn push(&mut self, topic: usize, key: u8, n: u32) {
        let key = format!("k{key}");
        let ordering_key = OrderingKey::from(key.as_str());
        self.lanes
            .push(TOPICS[topic].into(), ordering_key, event(n));
        let model = self
            .models
            .entry((TOPICS[topic].to_owned(), key))
            .or_default();
        model.pushed.push(n);
        model.queue.push(n);
    }

    fn send(&mut self, serve: Serve) -> Result<(), TestCaseError> {
        let now = self.now;
        self.asked_at = Some(now);
        let pauses = self.probing.is_some_and(|(_, next_start)| now < next_start);
        let is_free = self.in_flight.len() < self.limit && !pauses;
        let expected = is_free && self.models.values().any(|model| model.may_send(now));
        let Some(request) = self.lanes.next_request(now, serve) else {
            let may_wait = serve == Serve::Worthwhile;
            prop_assert!(may_wait || !expected, "a lane may send and does not");
            return Ok(());
        };
        prop_assert!(expected, "no lane may send");
        let model = self.model(&request);
        prop_assert!(model.may_send(now), "the lane may not send yet");
        let (events, attempts) = match model.failed.take() {
            Some((_, events, attempts)) => (events, attempts),
            None => (std::mem::take(&mut model.queue), 0),
        };
        model.in_flight = true;
        if let Some((pause, _)) = self.probing {
            let longer = (pause * 2).min(Duration::from_secs(1));
            self.probing = Some((longer, now + pause));
        }
        prop_assert_eq!(ordinals(&request), events, "a retry is unchanged");
        prop_assert_eq!(request.failed_attempts, attempts);
        self.in_flight.push(request);
        Ok(())
    }

    /// Takes one of the requests in flight. `choose` gets their number and returns an index.
    fn take(&mut self, choose: impl FnOnce(usize) -> usize) -> Option<Request> {
        let count = self.in_flight.len();
        let request = (count > 0).then(|| self.in_flight.swap_remove(choose(count)))?;
        self.model(&request).in_flight = false;
        Some(request)
    }

    fn finish(&mut self, request: &Request) {
        self.model(request).stored.extend(ordinals(request));
        self.limit = (self.limit * 2).min(self.most);
        self.probing = None;
        self.lanes.finished(request);
    }

    fn fail(&mut self, request: Request, pause: Duration, load: Load) {
        let again_at = self.now + pause;
        let attempts = request.failed_attempts + u32::from(load != Load::NotSent);
        self.model(&request).failed = Some((again_at, ordinals(&request), attempts));
        if load == Load::Keep {
            self.limit = (self.limit * 2).min(self.most);
            self.probing = None;
        } else {
            self.limit = (self.limit / 2).max(1);
        }
        if matches!(load, Load::NotSent | Load::Broken) && self.probing.is_none() {
            let pause = Duration::from_millis(100);
            let asked_at = self.asked_at.unwrap_or(self.now);
            self.probing = Some((pause, asked_at + pause));
        }
        self.lanes.failed(request, again_at, load);
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let count = |which: fn(&Model) -> bool| self.models.values().filter(|m| which(m)).count();
        prop_assert_eq!(self.lanes.in_flight(), self.in_flight.len());
        prop_assert_eq!(
            self.lanes.len(),
            count(Model::has_work),
            "a key without work is forgotten"
        );
        prop_assert_eq!(self.lanes.waiting(), count(|model| model.failed.is_some()));
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// Compares the lanes with the model after every step, and once more when everything is published.
    #[test]
    fn each_key_is_published_completely_and_in_order_whatever_fails(
        steps in prop::collection::vec(step(), 0..300), limit in 1usize..6,
    ) {
        let mut world = World::new(limit);
        for (n, step) in (0u32..).zip(steps) {
            match step {
                Step::Push { topic, key } => world.push(topic, key, n),
                Step::Send { worthwhile: true } => world.send(Serve::Worthwhile)?,
                Step::Send { worthwhile: false } => world.send(Serve::All)?,
                Step::Finish(which) => if let Some(request) = world.take(|count| which.index(count)) {
                    world.finish(&request);
                },
                Step::Fail { which, pause_ms, load } => {
                    if let Some(request) = world.take(|count| which.index(count)) {
                        world.fail(request, Duration::from_millis(pause_ms), load);
                    }
                }
                Step::Wait { ms } => world.now += Duration::from_millis(ms),
            }
            world.check()?;
        }
        world.now += Duration::from_secs(10);
        while !world.lanes.is_empty() {
            world.send(Serve::All)?;
            world.now += Duration::from_secs(1);
            let request = world.take(|count| count - 1);
            world.finish(&request.expect("a lane with work sends, or has a request in flight"));
            world.check()?;
        }
        for (key, model) in &world.models {
            prop_assert_eq!(&model.stored, &model.pushed, "{:?}", key);
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
        let mut in_flight = VecDeque::new();
        let mut served = Vec::new();
        while served.len() < rounds * keys as usize {
            while let Some(request) = lanes.next_request(now, Serve::All) {
                let (_, key) = key_of(&request);
                push(&mut lanes, &key);
                served.push(key);
                in_flight.push_back(request);
            }
            lanes.finished(&in_flight.pop_front().unwrap());
        }
        for turn in served.chunks_exact(keys as usize) {
            let mut turn = turn.to_vec();
            turn.sort_unstable();
            turn.dedup();
            prop_assert_eq!(turn.len(), keys as usize, "a lane was served twice before another had its turn");
        }
    }
}
