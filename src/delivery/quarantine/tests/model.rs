//! A model of everything around the quarantine of one key: the stream, the lane, Pub/Sub, the writer, the
//! table, an operator, and crashes.

use super::*;
use crate::event::EventPosition;

/// Rows per page in the model.
const MODEL_PAGE: usize = 3;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Row {
    Published,
    Quarantined,
    Released,
    /// Released again by a replay, after it was published.
    Replayed,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) quarantine: Quarantine,
    pub(super) table: BTreeMap<u32, Row>,
    pub(super) writer: VecDeque<Record>,
    pub(super) lane: VecDeque<Event>,
    /// Events that Pub/Sub refuses.
    pub(super) bad: BTreeSet<u32>,
    /// Events whose rows cannot become messages, and that get a dead letter.
    pub(super) unmappable: BTreeSet<u32>,
    pub(super) letters: VecDeque<EventRef>,
    pub(super) published: Vec<u32>,
    pub(super) next: u32,
    pub(super) asked: Option<QuarantineQuery>,
}

impl World {
    pub(super) fn new() -> Self {
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

    pub(super) fn arrive_unmappable(&mut self, n: u32) {
        let origin = event(n, Standing::New).origin;
        self.quarantine.set_aside(&group(), &origin).unwrap();
        if self.quarantine.releases.is_releasing(&group()) {
            self.unhold();
        }
        self.quarantine.letter_sent(&group());
        self.letters.push_back(origin);
    }

    pub(super) fn letter_ends(&mut self) {
        let Some(origin) = self.letters.pop_front() else {
            return;
        };
        let outcome = if self.quarantine.releases.is_releasing(&group()) {
            Outcome::Released
        } else {
            Outcome::Quarantined
        };
        self.record(origin, outcome("cannot be mapped".into()));
        self.quarantine.letter_ended(&group());
    }

    pub(super) fn arrive(&mut self, n: u32) {
        if self.unmappable.contains(&n) {
            return self.arrive_unmappable(n);
        }
        let Group {
            topic,
            ordering_key,
        } = group();
        let event = event(n, Standing::New);
        let at = event.origin.position;
        match self.quarantine.admit(&topic, &ordering_key, at) {
            Admission::Open => self.lane.push_back(event),
            Admission::Quarantined(why) => self.record(event.origin, Outcome::Quarantined(why)),
            Admission::Released(why) => self.record(event.origin, Outcome::Released(why)),
            Admission::Held => self.quarantine.releases.hold(topic, ordering_key, event),
        }
    }

    pub(super) fn record(&mut self, origin: EventRef, outcome: Outcome) {
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

    pub(super) fn write(&mut self) {
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
            Standing::New => self.table.entry(event.position.ordinal).or_insert(row),
            Standing::Released => self
                .table
                .entry(event.position.ordinal)
                .insert_entry(row)
                .into_mut(),
            Standing::NeedsNoRow => unreachable!("the model repeats nothing"),
        };
        self.quarantine.durable(1);
    }

    /// Pub/Sub stores or refuses the first event of the lane.
    pub(super) fn publish(&mut self) {
        let Some(event) = self.lane.pop_front() else {
            return;
        };
        let n = event.origin.position.ordinal;
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
                    let why = self.quarantine.keys.waits_for(&group());
                    self.record(event.origin, Outcome::Quarantined(why));
                }
                Standing::Released => {
                    self.quarantine.left_lane(event.origin.position);
                    self.fail();
                }
                Standing::NeedsNoRow => unreachable!("the model repeats nothing"),
            }
        }
    }

    pub(super) fn fail(&mut self) {
        for held in self.quarantine.fail(&group()) {
            self.record(held.origin, Outcome::Quarantined("waits".into()));
        }
    }

    pub(super) fn unhold(&mut self) {
        for (_, why, events) in self.quarantine.unhold() {
            for event in events {
                self.record(event.origin, Outcome::Released(why.clone()));
            }
        }
    }

    pub(super) fn ask(&mut self) {
        if self.asked.is_none() {
            self.asked = self.quarantine.command();
        }
    }

    pub(super) fn replace(&mut self, from: Row, to: Row) {
        for row in self.table.values_mut().filter(|row| **row == from) {
            *row = to;
        }
    }

    pub(super) fn answer(&mut self) {
        match self.asked.take() {
            None => {}
            Some(QuarantineQuery::Mark(group))
                if !self.table.values().any(|row| *row == Row::Released) =>
            {
                self.quarantine.releases.only_replayed(&group);
            }
            Some(QuarantineQuery::Mark(group)) => {
                self.replace(Row::Quarantined, Row::Released);
                self.quarantine.releases.marked(&group);
            }
            Some(QuarantineQuery::SendBack(group)) => {
                self.replace(Row::Released, Row::Quarantined);
                self.replace(Row::Replayed, Row::Published);
                self.quarantine.releases.sent_back(&group);
            }
            Some(QuarantineQuery::Page(group, after)) => {
                let released = |row: &Row| matches!(row, Row::Released | Row::Replayed);
                let rows = self.table.iter().filter(|(_, row)| released(row));
                let page: Vec<u32> = rows
                    .map(|(n, _)| *n)
                    .filter(|n| EventPosition::for_tests(1, *n) > after)
                    .take(MODEL_PAGE)
                    .collect();
                for n in &page {
                    let event = event(*n, Standing::Released);
                    let at = event.origin.position;
                    if self.quarantine.read(&group, at) {
                        self.quarantine.goes_to_lane(at, in_lane(&group));
                        self.lane.push_back(event);
                    }
                }
                let unblocked = self.quarantine.page_ended(&group, page.len());
                self.lane
                    .extend(unblocked.into_iter().flat_map(|unblocked| unblocked.held));
            }
        }
    }

    pub(super) fn poll(&mut self) {
        let released = |row: &Row| matches!(row, Row::Released | Row::Replayed);
        if let Some(first) = self.table.values().find(|row| released(row)) {
            let is_replay = *first == Row::Replayed;
            self.quarantine.release(group(), is_replay);
        }
    }

    /// An operator replays the published events of a range. Returns these events. Replays nothing if the
    /// key has events in quarantine, or if a release is under way.
    pub(super) fn replay(&mut self, range: std::ops::Range<u32>) -> Vec<u32> {
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

    /// Simulates a crash: events without a row are lost from memory, and PostgreSQL sends them again.
    pub(super) fn crash(&mut self) {
        self.quarantine = Quarantine::new(OnBadEvent::QuarantineKey);
        self.writer.clear();
        self.lane.clear();
        self.letters.clear();
        self.asked = None;
        let waiting = self.table.iter().find(|(_, row)| **row != Row::Published);
        let is_quarantined = self.table.values().any(|row| *row == Row::Quarantined);
        match waiting {
            Some((n, Row::Replayed)) if !is_quarantined => {
                self.quarantine
                    .keys
                    .block_for_release(group(), EventPosition::for_tests(1, *n));
            }
            Some((n, _)) => {
                self.quarantine
                    .keys
                    .block(group(), EventPosition::for_tests(1, *n), &n.to_string())
            }
            None => {}
        }
        for n in (1..self.next)
            .filter(|n| !self.table.contains_key(n))
            .collect::<Vec<_>>()
        {
            self.arrive(n);
        }
    }

    /// Runs until everything is published. From here on nothing fails, and everything is released.
    pub(super) fn settle(&mut self) {
        self.bad.clear();
        for _ in 0..10_000 {
            self.poll();
            self.ask();
            self.answer();
            self.publish();
            self.letter_ends();
            self.write();
            let at_rest = self.writer.is_empty() && self.lane.is_empty() && self.letters.is_empty();
            if at_rest && self.quarantine.releases.by_group.is_empty() {
                if self.table.values().all(|row| *row == Row::Published) {
                    return;
                }
                self.replace(Row::Quarantined, Row::Released);
            }
        }
        panic!("it does not settle: {self:?}");
    }
}
