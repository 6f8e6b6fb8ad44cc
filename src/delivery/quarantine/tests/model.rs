//! The quarantine of one key, against a model of everything around it: stream, lane, Pub/Sub, writer,
//! table, an operator, and crashes.

use super::*;

/// Rows per page in the model.
const MODEL_PAGE: usize = 3;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Row {
    Published,
    Quarantined,
    Released,
    /// Released, and published before.
    Replayed,
}

#[derive(Debug)]
struct World {
    quarantine: Quarantine,
    table: BTreeMap<u32, Row>,
    writer: VecDeque<Record>,
    lane: VecDeque<Event>,
    /// Events that Pub/Sub refuses.
    bad: BTreeSet<u32>,
    /// Events that cannot be mapped, and get a dead letter.
    unmappable: BTreeSet<u32>,
    letters: VecDeque<EventRef>,
    published: Vec<u32>,
    next: u32,
    asked: Option<QuarantineQuery>,
}

impl World {
    fn new() -> Self {
        Self {
            quarantine: Quarantine::new(OnBadEvent::QuarantineKey),
            table: BTreeMap::new(),
            writer: VecDeque::new(),
            lane: VecDeque::new(),
            bad: BTreeSet::new(),
            unmappable: BTreeSet::new(),
            letters: VecDeque::new(),
            published: Vec::new(),
            next: 1,
            asked: None,
        }
    }

    fn arrive_unmappable(&mut self, n: u32) {
        let origin = event(n, Standing::New).origin;
        self.quarantine.set_aside(&group(), &origin).unwrap();
        if self.quarantine.is_releasing(&group()) {
            self.unhold();
        }
        self.quarantine.letter_sent(&group());
        self.letters.push_back(origin);
    }

    fn letter_ends(&mut self) {
        let Some(origin) = self.letters.pop_front() else {
            return;
        };
        let outcome = if self.quarantine.is_releasing(&group()) {
            Outcome::Released
        } else {
            Outcome::Quarantined
        };
        self.record(origin, outcome("cannot be mapped".into()));
        self.quarantine.letter_ended(&group());
    }

    fn arrive(&mut self, n: u32) {
        if self.unmappable.contains(&n) {
            return self.arrive_unmappable(n);
        }
        let Group {
            topic,
            ordering_key,
        } = group();
        let event = event(n, Standing::New);
        let at = place(&event.origin);
        match self.quarantine.admit(&topic, &ordering_key, at) {
            Admission::Open => self.lane.push_back(event),
            Admission::Quarantined(why) => self.record(event.origin, Outcome::Quarantined(why)),
            Admission::Released(why) => self.record(event.origin, Outcome::Released(why)),
            Admission::Held => self.quarantine.hold(topic, ordering_key, event),
        }
    }

    fn record(&mut self, origin: EventRef, outcome: Outcome) {
        let record = Record {
            topic: Some(group().topic),
            ordering_key: group().ordering_key,
            at: SystemTime::UNIX_EPOCH,
            events: vec![origin],
            outcome,
        };
        self.quarantine.handed(&record);
        self.writer.push_back(record);
    }

    fn write(&mut self) {
        let Some(record) = self.writer.pop_front() else {
            return;
        };
        let row = match record.outcome {
            Outcome::Published(_) => Row::Published,
            Outcome::Quarantined(_) => Row::Quarantined,
            Outcome::Released(_) => Row::Released,
        };
        let event = &record.events[0];
        match event.standing {
            Standing::New => self.table.entry(event.ordinal).or_insert(row),
            Standing::Released => self.table.entry(event.ordinal).insert_entry(row).into_mut(),
            Standing::Repeated => unreachable!("the model repeats nothing"),
        };
        self.quarantine.durable(1);
    }

    /// Pub/Sub stores or refuses the first event of the lane.
    fn publish(&mut self) {
        let Some(event) = self.lane.pop_front() else {
            return;
        };
        let n = event.origin.ordinal;
        if !self.bad.contains(&n) {
            self.published.push(n);
            return self.record(event.origin, Outcome::Published(MessageIds::default()));
        }
        self.quarantine.set_aside(&group(), &event.origin).unwrap();
        let behind = std::mem::take(&mut self.lane);
        self.record(event.origin, Outcome::Quarantined("bad".into()));
        self.fail();
        for event in behind {
            match event.origin.standing {
                Standing::New => {
                    let why = self.quarantine.waits_for(&group());
                    self.record(event.origin, Outcome::Quarantined(why));
                }
                Standing::Released => {
                    self.quarantine.left_lane(place(&event.origin));
                    self.fail();
                }
                Standing::Repeated => unreachable!("the model repeats nothing"),
            }
        }
    }

    fn fail(&mut self) {
        for held in self.quarantine.fail(&group()) {
            self.record(held.origin, Outcome::Quarantined("waits".into()));
        }
    }

    fn unhold(&mut self) {
        for (_, why, events) in self.quarantine.unhold() {
            for event in events {
                self.record(event.origin, Outcome::Released(why.clone()));
            }
        }
    }

    fn ask(&mut self) {
        if self.asked.is_none() {
            self.asked = self.quarantine.command();
        }
    }

    fn replace(&mut self, from: Row, to: Row) {
        for row in self.table.values_mut().filter(|row| **row == from) {
            *row = to;
        }
    }

    fn answer(&mut self) {
        match self.asked.take() {
            None => {}
            Some(QuarantineQuery::Mark(group)) => {
                self.replace(Row::Quarantined, Row::Released);
                self.quarantine.marked(&group);
            }
            Some(QuarantineQuery::SendBack(group)) => {
                self.replace(Row::Released, Row::Quarantined);
                self.replace(Row::Replayed, Row::Published);
                self.quarantine.sent_back(&group);
            }
            Some(QuarantineQuery::Page(group, after)) => {
                let released = |row: &Row| matches!(row, Row::Released | Row::Replayed);
                let rows = self.table.iter().filter(|(_, row)| released(row));
                let page: Vec<u32> = rows
                    .map(|(n, _)| *n)
                    .filter(|n| (1, *n) > after)
                    .take(MODEL_PAGE)
                    .collect();
                for n in &page {
                    let event = event(*n, Standing::Released);
                    let at = place(&event.origin);
                    if self.quarantine.read(&group, at) {
                        self.quarantine.goes_to_lane(&group, at, 1);
                        self.lane.push_back(event);
                    }
                }
                let unblocked = self.quarantine.page_ended(&group, page.len());
                self.lane.extend(unblocked.into_iter().flat_map(|unblocked| unblocked.held));
            }
        }
    }

    fn look(&mut self) {
        let released = |row: &Row| matches!(row, Row::Released | Row::Replayed);
        if self.table.values().any(released) {
            self.quarantine.release(group());
        }
    }

    /// An operator replays the published events of a range. Returns them, unless the key has events in
    /// quarantine, or a release is under way.
    fn replay(&mut self, range: std::ops::Range<u32>) -> Vec<u32> {
        if self.table.values().any(|row| *row != Row::Published) {
            return Vec::new();
        }
        let mut replayed = Vec::new();
        for (n, row) in self.table.range_mut(range) {
            if *row == Row::Published {
                *row = Row::Replayed;
                replayed.push(*n);
            }
        }
        replayed
    }

    /// A crash: events without a row are lost in memory, and the stream brings them again.
    fn crash(&mut self) {
        self.quarantine = Quarantine::new(OnBadEvent::QuarantineKey);
        self.writer.clear();
        self.lane.clear();
        self.letters.clear();
        self.asked = None;
        let waiting = self.table.iter().find(|(_, row)| **row != Row::Published);
        if let Some((n, _)) = waiting {
            self.quarantine.block(group(), (1, *n), &n.to_string());
        }
        for n in (1..self.next)
            .filter(|n| !self.table.contains_key(n))
            .collect::<Vec<_>>()
        {
            self.arrive(n);
        }
    }

    /// From now on nothing fails, and everything is released.
    fn settle(&mut self) {
        self.bad.clear();
        for _ in 0..10_000 {
            self.look();
            self.ask();
            self.answer();
            self.publish();
            self.letter_ends();
            self.write();
            let at_rest = self.writer.is_empty() && self.lane.is_empty() && self.letters.is_empty();
            if at_rest && self.quarantine.releases.is_empty() {
                if self.table.values().all(|row| *row == Row::Published) {
                    return;
                }
                self.replace(Row::Quarantined, Row::Released);
            }
        }
        panic!("it does not settle: {self:?}");
    }
}

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
            Step::Ask => self.ask(),
            Step::Answer => self.answer(),
            Step::Operator => self.replace(Row::Quarantined, Row::Released),
            Step::Look => self.look(),
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
    Ask,
    Answer,
    Operator,
    Look,
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
        6 => Just(Step::Ask),
        6 => Just(Step::Answer),
        2 => Just(Step::Operator),
        4 => Just(Step::Look),
        1 => Just(Step::Unhold),
        1 => Just(Step::Heal),
        1 => Just(Step::Crash),
        1 => replay(),
    ]
}

fn replay() -> impl Strategy<Value = Step> {
    (1_u32..20, 1_u32..20).prop_map(|(from, events)| Step::Replay(from, events))
}

/// What happens while nothing fails.
fn healthy_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => Just(Step::Arrive { bad: false }),
        6 => Just(Step::Write),
        6 => Just(Step::Publish),
        6 => Just(Step::Ask),
        6 => Just(Step::Answer),
        4 => Just(Step::Look),
        1 => Just(Step::Unhold),
        2 => replay(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn whatever_is_released_and_when_a_key_is_published_completely_and_in_order(
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
        prop_assert_eq!(world.quarantine.blocked(), 0);
        prop_assert!(world.quarantine.in_lanes.is_empty());
        prop_assert_eq!(world.quarantine.bytes_in_lanes, 0);
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
