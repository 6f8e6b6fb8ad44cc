//! Everything that happens in one schedule, decided by the seed before anything starts.
//!
//! A plan is plain data: what is written, the relay's settings, and the faults with their moments.
//! A replay of a schedule has the same transactions, and the same faults in the same order at the
//! same planned moments. Only the scheduling of threads and processes differs.

mod steps;
mod table;

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use crate::fault::Fault;
use crate::random::Random;
use crate::verdict::FromTable;
pub(crate) use table::TablePlan;

/// The kinds of aggregates. Each kind has a topic of its own.
pub(crate) const KINDS: [&str; 3] = ["order", "invoice", "parcel"];

/// Everything about one schedule.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) index: u64,
    pub(crate) temper: Temper,
    pub(crate) relay: RelayPlan,
    pub(crate) workload: WorkloadPlan,
    pub(crate) table: TablePlan,
    /// The relay begins its work only when the writers have finished, so it works off a backlog.
    pub(crate) backlog: bool,
    /// How long Pub/Sub delays each answer, so that faults find requests in flight.
    pub(crate) answer_delay: Duration,
    /// Pub/Sub sends GOAWAY to each connection that reaches this age.
    pub(crate) goaway: Option<Duration>,
    /// When events that Pub/Sub refuses are released.
    pub(crate) release: Release,
    pub(crate) steps: Vec<Step>,
    /// Random numbers for the writers and everything else in the schedule.
    pub(crate) random: Random,
}

/// The family of faults of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Temper {
    /// No crashes: only clean stops, ended sessions, a locked dispatch table and refusals by
    /// Pub/Sub. With `dispatch = full`, few of these faults explain a duplicate (see
    /// `verdict::duplicates`).
    Gentle,
    /// Mostly `kill -9` of the relay.
    Crashes,
    /// Crashes of the relay, and a Pub/Sub that misbehaves.
    Pubsub,
    /// Crashes of the relay, and a PostgreSQL that stops, crashes and cuts connections.
    Postgres,
    /// Two relays. One of them, usually the active relay, is killed, stopped, frozen or cut off
    /// from PostgreSQL.
    Standby,
    /// Crashes of the relay, and networks that stall, drop, delay and break.
    Network,
    /// Crashes of the relay, and a slot that is dropped, recreated or invalidated by the server.
    Loss,
    /// A publication that is altered, or dropped and recreated, while rows are written. Or a relay
    /// without the outbox table in its settings.
    Publication,
    /// A captured table that is recreated, swapped for a copy, or gets a row that is too long for
    /// the relay.
    Tables,
    /// Crashes of the relay, and Pub/Sub, PostgreSQL and networks that misbehave.
    Everything,
}

/// When refusals are lifted and quarantined events released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Release {
    Never,
    /// After everything else is delivered.
    AtTheEnd,
    /// By a step of the plan. Events that are quarantined later are released at the end.
    UnderWay,
}

/// The relay's settings.
#[derive(Debug, Clone)]
pub(crate) struct RelayPlan {
    /// How many relays share the slot.
    pub(crate) count: usize,
    pub(crate) in_flight_requests: u64,
    pub(crate) in_flight_mib: u64,
    pub(crate) channels: u64,
    pub(crate) publish_timeout: Duration,
    pub(crate) wal_sender_timeout: Duration,
    /// Whether a refused event makes the later events of its key wait.
    pub(crate) quarantines_key: bool,
    /// `dispatch = exceptions`: published events have no record, unless they were quarantined and
    /// released.
    pub(crate) exceptions: bool,
    /// `ordering = bucketed(n)`: aggregates share keys.
    pub(crate) buckets: Option<u64>,
}

/// What the writers write.
#[derive(Debug, Clone)]
pub(crate) struct WorkloadPlan {
    pub(crate) writers: u64,
    /// Transactions per writer.
    pub(crate) transactions: u64,
    /// The longest pause of a writer between two transactions, in milliseconds.
    pub(crate) pause_ms: u64,
    pub(crate) hot_keys: u64,
    pub(crate) ddl: bool,
    pub(crate) noise: bool,
    pub(crate) large_rows: bool,
    /// The table has partitions, and rows are moved between them.
    pub(crate) moves_rows: bool,
    /// `logical_decoding_work_mem` of the walsender, in kB. With a small value, the walsender
    /// spills transactions to disk.
    pub(crate) decoding_work_mem_kb: u64,
    /// The transactions with an event that Pub/Sub refuses, as pairs (number of the writer, number
    /// of the transaction).
    pub(crate) poison: BTreeSet<(u64, u64)>,
}

/// A fault and its moment.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) when: When,
    pub(crate) fault: Fault,
}

/// A moment, relative to the end of the previous step.
#[derive(Debug, Clone, Copy)]
pub(crate) enum When {
    After(Duration),
    /// When Pub/Sub has stored this many more messages.
    Stored(u64),
}

impl Plan {
    /// The plan of schedule `index` of `seed`.
    pub(crate) fn draw(seed: u64, index: u64) -> Self {
        let mut random = Random::of_schedule(seed, index);
        let temper = random.weighted(&[
            (8, Temper::Gentle),
            (30, Temper::Crashes),
            (18, Temper::Pubsub),
            (9, Temper::Postgres),
            (8, Temper::Standby),
            (8, Temper::Network),
            (9, Temper::Loss),
            (5, Temper::Publication),
            (6, Temper::Tables),
            (9, Temper::Everything),
        ]);
        let has_poison = !temper.loses_rows() && random.per_mille(180);
        let quarantines_key = random.per_mille(650);
        let release = match (has_poison, quarantines_key) {
            (false, _) => Release::Never,
            (true, true) => random.pick(&[Release::Never, Release::AtTheEnd, Release::UnderWay]),
            // Never `UnderWay`: an event that is quarantined alone is published after later events
            // of its key, in no defined order with other released events.
            (true, false) => random.pick(&[Release::Never, Release::AtTheEnd]),
        };
        let mut steps = steps::draw(temper, release, &mut random);
        let writes_beside_faults = matches!(temper, Temper::Publication | Temper::Tables);
        let backlog = !writes_beside_faults && random.per_mille(250);
        let mut beside = random.clone().fork();
        let exceptions = beside.per_mille(330);
        if exceptions {
            steps::keep_undelivered_rows(&mut steps);
        }
        let mut relay = RelayPlan {
            quarantines_key,
            exceptions,
            ..RelayPlan::draw(temper, &steps, &mut random)
        };
        let says_goaway = beside.per_mille(200);
        let goaway = says_goaway.then(|| beside.millis(50..=1_000));
        // The judges check quarantined and late events by ordering key, so aggregates share keys
        // (buckets) only in schedules without such events.
        let can_share_keys = !has_poison && !temper.loses_rows();
        if can_share_keys && beside.per_mille(200) {
            relay.buckets = Some(beside.pick(&[1, 2, 8]));
        }
        let table = TablePlan::draw(temper.loses_rows(), &mut beside);
        let mut workload = WorkloadPlan::draw(temper, has_poison, &mut random);
        // Rows are not moved with `exceptions`, because without records the relay cannot tell
        // whether a moved row was delivered. Where the stream omits rows, they are not moved
        // either, because the relay may mistake an omitted row for a moved one.
        let can_move = !exceptions && !matches!(temper, Temper::Tables | Temper::Publication);
        let late = |step: &Step| step.fault.leaves_late_rows();
        let can_move = can_move && !steps.iter().any(late);
        workload.moves_rows = beside.per_mille(180) && can_move;
        Self {
            index,
            temper,
            relay,
            workload,
            table,
            backlog,
            answer_delay: if backlog {
                random.millis(1..=8)
            } else {
                random.pick(&[0, 0, 1, 3, 10].map(Duration::from_millis))
            },
            goaway,
            release,
            steps,
            random,
        }
    }

    /// Whether rows may have to be delivered from their table.
    pub(crate) fn loses_rows(&self) -> bool {
        self.temper.loses_rows()
    }

    /// Whether rows that the stream left out are delivered after later rows of their key. Without
    /// records (`exceptions`), a lost slot does not cause this, because the relay notices that the
    /// slot was recreated before it reads from the slot.
    pub(crate) fn leaves_late_rows(&self) -> bool {
        let late = |step: &Step| match step.fault {
            Fault::SlotLost(..) if self.relay.exceptions => false,
            _ => step.fault.leaves_late_rows(),
        };
        self.steps.iter().any(late)
    }

    /// Which events may be read from the table.
    pub(crate) fn reads_from_table(&self) -> FromTable {
        let needs_new_slot = |step: &Step| step.fault.needs_new_slot();
        match (
            self.leaves_late_rows(),
            self.steps.iter().any(needs_new_slot),
        ) {
            (true, _) => FromTable::Late,
            (false, true) => FromTable::InOrder,
            (false, false) => FromTable::Never,
        }
    }
}

impl Temper {
    fn loses_rows(self) -> bool {
        matches!(self, Temper::Loss | Temper::Publication | Temper::Tables)
    }
}

impl Plan {
    /// Whether the schedule needs proxies between the relays and their peers.
    pub(crate) fn needs_network(&self) -> bool {
        let is_network = |step: &Step| matches!(step.fault, Fault::Network(..));
        self.steps.iter().any(is_network)
    }
}

impl RelayPlan {
    fn draw(temper: Temper, steps: &[Step], random: &mut Random) -> Self {
        let has = |wanted: fn(&Fault) -> bool| steps.iter().any(|step| wanted(&step.fault));
        // The timeouts are short where the test must wait for an answer or a session to time out.
        // Elsewhere they are long, so that a slow machine does not look like a fault. The publish
        // timeout must be shorter than a quarter of `wal_sender_timeout`, on which the lease
        // depends.
        let (publish, lease) = match () {
            () if has(Fault::tries_the_lease) => (1, 5),
            () if has(Fault::withholds_answers) => (1, 12),
            // The relay checks the publication at least eight times per `wal_sender_timeout`.
            () if matches!(temper, Temper::Publication | Temper::Tables) => (2, 10),
            () => (10, 60),
        };
        Self {
            count: match temper {
                // The position that a clean stop records is final only if no other relay takes the slot.
                Temper::Loss if has(Fault::follows_a_clean_stop) => 1,
                Temper::Standby => 2,
                Temper::Everything => random.pick(&[1, 2]),
                Temper::Network | Temper::Loss => random.pick(&[1, 1, 2]),
                Temper::Publication
                | Temper::Tables
                | Temper::Gentle
                | Temper::Crashes
                | Temper::Pubsub
                | Temper::Postgres => 1,
            },
            in_flight_requests: random.pick(&[1, 2, 8, 64, 512]),
            in_flight_mib: random.pick(&[1, 4, 24]),
            channels: random.pick(&[1, 2, 4]),
            publish_timeout: Duration::from_secs(publish),
            wal_sender_timeout: Duration::from_secs(lease),
            quarantines_key: true,
            exceptions: false,
            buckets: None,
        }
    }
}

impl WorkloadPlan {
    fn draw(temper: Temper, has_poison: bool, random: &mut Random) -> Self {
        let writers = random.within(2..=5);
        // The writers must not finish before something happens to their table.
        let (transactions, pause_ms) = match temper {
            Temper::Publication | Temper::Tables => (random.within(30..=60), 40),
            _ => (random.within(10..=60), random.pick(&[0, 5, 20, 40])),
        };
        let mut poison = BTreeSet::new();
        while has_poison && poison.len() < 3 && (poison.is_empty() || random.per_mille(600)) {
            let writer = random.within(0..=writers - 1);
            poison.insert((writer, random.within(0..=transactions - 1)));
        }
        Self {
            writers,
            transactions,
            pause_ms,
            poison,
            hot_keys: random.pick(&[1, 2, 5, 20]),
            ddl: random.per_mille(250),
            noise: random.per_mille(400),
            large_rows: random.per_mille(40),
            moves_rows: false,
            decoding_work_mem_kb: random.pick(&[64, 64, 65_536]),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            relay, workload, ..
        } = self;
        writeln!(
            f,
            "{:?}{}{}, {} relay(s): {} requests and {} MiB in flight, {} channels, publish timeout {:?}, \
             lease {:?}{}; answers take {:?}{}",
            self.temper,
            if relay.exceptions {
                " without records"
            } else {
                ""
            },
            match relay.buckets {
                Some(buckets) => format!(" in {buckets} bucket(s)"),
                None => String::new(),
            },
            relay.count,
            relay.in_flight_requests,
            relay.in_flight_mib,
            relay.channels,
            relay.publish_timeout,
            relay.wal_sender_timeout,
            if self.backlog { "; a backlog" } else { "" },
            self.answer_delay,
            match self.goaway {
                Some(age) => format!("; GOAWAY after {age:?}"),
                None => String::new(),
            },
        )?;
        if !workload.poison.is_empty() {
            writeln!(
                f,
                "some events are refused: {} in quarantine, released {:?}",
                if relay.quarantines_key {
                    "keys"
                } else {
                    "events"
                },
                self.release,
            )?;
        }
        writeln!(f, "{:?}", self.table)?;
        write!(f, "{workload:?}")?;
        for Step { when, fault } in &self.steps {
            match when {
                When::After(pause) => write!(f, "\n  after {pause:?}: {fault}")?,
                When::Stored(more) => write!(f, "\n  {more} messages later: {fault}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
