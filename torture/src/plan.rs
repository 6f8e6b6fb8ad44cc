//! Everything that happens in one schedule, decided by the seed before anything starts.
//!
//! A plan is plain data: what is written, the relay's settings, and the faults with the moments at which
//! they happen. A replay of a schedule has the same transactions, and the same faults in the same order
//! at the same planned moments. Only the scheduling of threads and processes differs.

mod steps;
mod table;

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use crate::fault::Fault;
use crate::random::Random;
use crate::verdict::FromTable;
pub(crate) use table::{Encoding, TablePlan};

/// The kinds of aggregates. Each kind has its own topic.
pub(crate) const KINDS: [&str; 3] = ["order", "invoice", "parcel"];

/// Everything about one schedule.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) index: u64,
    pub(crate) fault_family: FaultFamily,
    pub(crate) relay: RelayPlan,
    pub(crate) workload: WorkloadPlan,
    pub(crate) table: TablePlan,
    /// If true, no relay runs while the writers write, so the next relay finds a backlog.
    pub(crate) backlog: bool,
    /// How long Pub/Sub delays each answer, so that faults find requests in flight.
    pub(crate) answer_delay: Duration,
    /// The age at which Pub/Sub sends GOAWAY on a connection. `None` means never.
    pub(crate) goaway: Option<Duration>,
    /// When the events that Pub/Sub refuses are released from quarantine.
    pub(crate) release: Release,
    pub(crate) steps: Vec<Step>,
    /// Random numbers for the writers and everything else in the schedule.
    pub(crate) random: Random,
}

/// The family of faults of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum FaultFamily {
    /// No crashes: only clean stops, ended sessions, a locked dispatch table and refusals by Pub/Sub. With
    /// `dispatch = full`, only few of these faults can explain a duplicate (see `verdict::duplicates`).
    Gentle,
    /// Mostly `kill -9` of the relay.
    Crashes,
    /// Crashes of the relay, and a Pub/Sub that fails requests, withholds answers or cuts connections.
    Pubsub,
    /// Crashes of the relay, and a PostgreSQL that stops, crashes and cuts connections.
    Postgres,
    /// Two relays. One of them, usually the active one, is killed, stopped, frozen or cut off from PostgreSQL.
    Standby,
    /// Crashes of the relay, and networks that stall, drop, delay and break.
    Network,
    /// Crashes of the relay, and a slot that is dropped, recreated or invalidated by the server.
    Loss,
    /// For a while, the relay gets no rows of the outbox table. The publication is dropped or lacks the table, or a
    /// relay whose settings name another table reads the slot.
    Publication,
    /// A captured table that is recreated, swapped for a copy, or gets a row that is too long for the relay.
    Tables,
    /// A database whose encoding accepts bytes that PostgreSQL cannot convert to UTF-8. The stream cannot
    /// deliver rows with such bytes.
    Bytes,
    /// All kinds of faults of the relay, Pub/Sub, PostgreSQL and the networks.
    Everything,
}

/// When the refused events are released from quarantine. Pub/Sub stops refusing them right before their release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Release {
    Never,
    /// After everything else is delivered.
    AtTheEnd,
    /// By a step of the plan. Events that are quarantined after this step are released at the end.
    UnderWay,
}

impl Release {
    fn draw(has_poison: bool, quarantines_key: bool, random: &mut Random) -> Self {
        match (has_poison, quarantines_key) {
            (false, _) => Self::Never,
            (true, true) => random.pick(&[Self::Never, Self::AtTheEnd, Self::UnderWay]),
            // `UnderWay` is left out. The refused event is quarantined without the later events of its key, so
            // its release publishes it after them. If several such events are released in the middle of a
            // schedule, their order is not defined, and the judges could not check it.
            (true, false) => random.pick(&[Self::Never, Self::AtTheEnd]),
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct RelayPlan {
    /// How many relays share the slot.
    pub(crate) count: usize,
    pub(crate) in_flight_requests: u64,
    pub(crate) in_flight_mib: u64,
    pub(crate) channels: u64,
    pub(crate) publish_timeout: Duration,
    pub(crate) wal_sender_timeout: Duration,
    /// Whether the later events of a key wait while a refused event of the key is in quarantine.
    pub(crate) quarantines_key: bool,
    /// Whether `dispatch` is `exceptions`. In this mode published events have no record, unless they were
    /// quarantined and released.
    pub(crate) exceptions: bool,
    /// The number of buckets with `ordering = bucketed(n)`. Aggregates then share ordering keys.
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
    /// Whether the table has partitions between which rows are moved.
    pub(crate) moves_rows: bool,
    /// `logical_decoding_work_mem` of the walsender, in kB. With a small value, the walsender
    /// spills transactions to disk.
    pub(crate) decoding_work_mem_kb: u64,
    /// The transactions with an event that Pub/Sub refuses, as pairs of writer number and transaction
    /// number.
    pub(crate) poison: BTreeSet<(u64, u64)>,
}

/// A fault, and the moment at which it happens.
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
    /// Draws the plan of schedule `index` of a run with this seed.
    pub(crate) fn draw(seed: u64, index: u64) -> Self {
        let mut random = Random::of_schedule(seed, index);
        let fault_family = random.weighted(&[
            (8, FaultFamily::Gentle),
            (30, FaultFamily::Crashes),
            (18, FaultFamily::Pubsub),
            (9, FaultFamily::Postgres),
            (8, FaultFamily::Standby),
            (8, FaultFamily::Network),
            (9, FaultFamily::Loss),
            (5, FaultFamily::Publication),
            (6, FaultFamily::Tables),
            (5, FaultFamily::Bytes),
            (9, FaultFamily::Everything),
        ]);
        let has_poison = !fault_family.loses_rows() && random.per_mille(180);
        let quarantines_key = random.per_mille(650);
        let release = Release::draw(has_poison, quarantines_key, &mut random);
        let mut steps = steps::draw(fault_family, release, &mut random);
        let backlog = !fault_family.writes_beside_faults() && random.per_mille(250);
        let mut beside = random.clone().fork();
        let exceptions = beside.per_mille(330);
        if exceptions {
            steps::keep_undelivered_rows(&mut steps);
        }
        let mut relay = RelayPlan {
            quarantines_key,
            exceptions,
            ..RelayPlan::draw(fault_family, &steps, &mut random)
        };
        let says_goaway = beside.per_mille(200);
        let goaway = says_goaway.then(|| beside.millis(50..=1_000));
        // The judges check quarantined events and late events by ordering key. So aggregates share keys
        // (buckets) only in schedules without such events.
        let can_share_keys = !has_poison && !fault_family.loses_rows();
        if can_share_keys && beside.per_mille(200) {
            relay.buckets = Some(beside.pick(&[1, 2, 8]));
        }
        let table = TablePlan::draw(fault_family, &mut beside);
        let mut workload = WorkloadPlan::draw(fault_family, has_poison, &mut random);
        // Move rows between partitions only if the relay can tell a moved row from a new one. With
        // `exceptions`, no record shows that a moved row was published. If the stream omits rows, the relay may
        // mistake an omitted row for a moved one.
        let can_move = !exceptions && !fault_family.writes_beside_faults();
        let late = |step: &Step| step.fault.leaves_late_rows();
        let can_move = can_move && !steps.iter().any(late);
        workload.moves_rows = beside.per_mille(180) && can_move;
        Self {
            index,
            fault_family,
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

    /// Whether the relay may have to deliver rows from their table.
    pub(crate) fn loses_rows(&self) -> bool {
        self.fault_family.loses_rows()
    }

    /// Whether some rows may be late: the stream omits them, and the relay publishes them after later rows of their
    /// key. With `exceptions`, a recreated slot makes no row late. The relay notices the new slot before it streams.
    /// It first reads the tables, and publishes the rows that this slot omits.
    pub(crate) fn leaves_late_rows(&self) -> bool {
        let late = |step: &Step| match step.fault {
            Fault::SlotLost(..) if self.relay.exceptions => false,
            _ => step.fault.leaves_late_rows(),
        };
        self.steps.iter().any(late)
    }

    /// Which events the relay may read from the table, because the stream does not deliver them.
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

impl FaultFamily {
    fn loses_rows(self) -> bool {
        self == FaultFamily::Loss || self.writes_beside_faults()
    }

    /// Whether the faults concern the captured table or its rows. The writers must still be writing when such a
    /// fault happens.
    fn writes_beside_faults(self) -> bool {
        matches!(
            self,
            FaultFamily::Publication | FaultFamily::Tables | FaultFamily::Bytes
        )
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
    fn draw(fault_family: FaultFamily, steps: &[Step], random: &mut Random) -> Self {
        let has = |wanted: fn(&Fault) -> bool| steps.iter().any(|step| wanted(&step.fault));
        // The timeouts are short if a fault lets an answer or a session time out. Otherwise they are long, so
        // that a slow machine does not look like a fault. The publish timeout must be shorter than a quarter of
        // `wal_sender_timeout`, so that no attempt to publish outlives the lease.
        let (publish, lease) = match () {
            () if has(Fault::tries_the_lease) => (1, 5),
            () if has(Fault::withholds_answers) => (1, 12),
            // A short `wal_sender_timeout`, so that the relay finds a gap soon: within this time it checks
            // the publication at least eight times.
            () if fault_family.writes_beside_faults() => (2, 10),
            () => (10, 60),
        };
        Self {
            count: match fault_family {
                // Only one relay, because the position that a clean stop records is final only if no
                // other relay takes the slot afterwards.
                FaultFamily::Loss if has(Fault::follows_a_clean_stop) => 1,
                FaultFamily::Standby => 2,
                FaultFamily::Everything => random.pick(&[1, 2]),
                FaultFamily::Network | FaultFamily::Loss => random.pick(&[1, 1, 2]),
                FaultFamily::Publication
                | FaultFamily::Tables
                | FaultFamily::Bytes
                | FaultFamily::Gentle
                | FaultFamily::Crashes
                | FaultFamily::Pubsub
                | FaultFamily::Postgres => 1,
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
    fn draw(fault_family: FaultFamily, has_poison: bool, random: &mut Random) -> Self {
        let writers = random.within(2..=5);
        // The writers must still be writing when a fault happens that concerns the captured table or its rows.
        let (transactions, pause_ms) = if fault_family.writes_beside_faults() {
            (random.within(30..=60), 40)
        } else {
            (random.within(10..=60), random.pick(&[0, 5, 20, 40]))
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
            self.fault_family,
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
