//! The drains that are measured. Each scenario has an aim, and two sides that are compared: the
//! baseline and ours. Each side is a program with its backlog.

use std::path::Path;

use crate::backlog::Backlog;
use crate::contestant::{Build, Contestant, DISPATCH, Link, START_ALL};
use crate::cores::Cores;
use crate::report::Aim;

const ROW: Option<u64> = Some(1);
const HUNDRED: Option<u64> = Some(100);
const ONE_TRANSACTION: Option<u64> = None;
const THOUSAND_KEYS: Option<u64> = Some(1_000);
const OWN_KEYS: Option<u64> = None;

/// Two drains that are compared with each other.
#[derive(Debug)]
pub(crate) struct Scenario {
    pub(crate) name: String,
    pub(crate) baseline: Side,
    pub(crate) ours: Side,
    pub(crate) unit: Unit,
    pub(crate) cores: Cores,
    pub(crate) aim: Aim,
    /// The aim for the CPU time of our program, as a fraction of the CPU time of the baseline.
    pub(crate) cpu_aim: Option<f64>,
    /// A setting that the scenario needs. The scenario is skipped if this build of the relay does not
    /// have the setting.
    pub(crate) needs: Option<&'static str>,
    /// Whether the scenario takes so long that it runs only with `--full`.
    pub(crate) full_only: bool,
    /// Number of pairs of drains per run. The times of short drains vary more, so short drains need
    /// more pairs.
    pub(crate) pairs: u32,
}

impl Scenario {
    /// Returns the same scenario with another build of the relay as its baseline. `None` if our
    /// side is not the relay.
    pub(crate) fn against(self, binary: &'static Path) -> Option<Self> {
        let baseline = Side {
            contestant: self.ours.contestant.of_build(binary)?,
            ..self.ours
        };
        Some(Self {
            baseline,
            aim: Aim::None,
            ..self
        })
    }
}

/// One side of a scenario.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Side {
    pub(crate) contestant: Contestant,
    pub(crate) backlog: Backlog,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    Events,
    /// Events per second, counted from the moment when a walsender serves the slot, so that the
    /// start of the program does not count.
    EventsStreamed,
    Requests,
    /// Megabytes of payload text per second.
    Megabytes,
}

impl Unit {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Events => "events/s",
            Self::EventsStreamed => "events/s streamed",
            Self::Requests => "requests/s",
            Self::Megabytes => "MB/s",
        }
    }
}

/// All scenarios. A backlog has `events` rows unless the scenario needs another number.
pub(crate) fn all(events: u64) -> Vec<Scenario> {
    let mut all = Vec::new();
    reading(events, &mut all);
    sessions(events, &mut all);
    delivering(events, &mut all);
    many_keys(events, &mut all);
    late_answers(events, &mut all);
    payloads(events, &mut all);
    lengths(events, &mut all);
    from_the_table(events, &mut all);
    all
}

/// A scenario in which both sides drain the same backlog.
fn scenario(
    name: impl Into<String>,
    backlog: Backlog,
    baseline: Contestant,
    ours: Contestant,
    aim: Aim,
) -> Scenario {
    let side = |contestant| Side {
        contestant,
        backlog,
    };
    Scenario {
        name: name.into(),
        baseline: side(baseline),
        ours: side(ours),
        unit: Unit::Events,
        cores: Cores::Shared,
        aim,
        cpu_aim: None,
        needs: None,
        full_only: false,
        pairs: 1,
    }
}

/// Adds scenarios in which nothing is published: our side reads, decodes and maps the events.
fn reading(events: u64, all: &mut Vec<Scenario>) {
    for (link, name, aim, cpu_aim) in [
        (Link::Tcp, "null-tcp", Aim::RatioAtLeast(1.3), Some(0.5)),
        (Link::Socket, "null-socket", Aim::RatioAtLeast(1.0), None),
    ] {
        for (rows, shape) in [(ROW, "1-row"), (HUNDRED, "100-row")] {
            let backlog = Backlog::new(events, rows, THOUSAND_KEYS);
            let (theirs, ours) = (Contestant::Recvlogical(link), Contestant::Null(link));
            all.push(Scenario {
                cpu_aim,
                ..scenario(format!("{name}-{shape}"), backlog, theirs, ours, aim)
            });
        }
    }
}

/// Adds scenarios that compare our replication session with the session of another crate.
fn sessions(events: u64, all: &mut Vec<Scenario>) {
    for (rows, shape) in [(ROW, "1-row"), (HUNDRED, "100-row")] {
        let backlog = Backlog::new(events, rows, THOUSAND_KEYS);
        let (theirs, ours) = (Contestant::Pgwire(Link::Tcp), Contestant::Null(Link::Tcp));
        let name = format!("pgwire-{shape}");
        all.push(scenario(
            name,
            backlog,
            theirs,
            ours,
            Aim::RatioAtLeast(1.0),
        ));
    }
}

/// Adds scenarios in which the relay publishes: with a dispatch row for each event, and with
/// `dispatch = exceptions`.
fn delivering(events: u64, all: &mut Vec<Scenario>) {
    for (name, setting, least) in [("full", None, 0.80), ("exceptions", Some(DISPATCH), 0.95)] {
        for (rows, shape) in [
            (ROW, "1-row"),
            (HUNDRED, "100-row"),
            (ONE_TRANSACTION, "one-transaction"),
        ] {
            let backlog = Backlog::new(events, rows, THOUSAND_KEYS);
            let relay = Contestant::Relay {
                setting,
                delay_ms: 0,
                build: Build::This,
            };
            let theirs = Contestant::Recvlogical(Link::Tcp);
            let aim = Aim::RatioAtLeast(least);
            all.push(Scenario {
                needs: setting.map(|_| "dispatch"),
                ..scenario(format!("{name}-{shape}"), backlog, theirs, relay, aim)
            });
        }
    }
}

/// Adds scenarios in which each row has its own key, and scenarios whose baseline uses Google's
/// Publisher.
fn many_keys(events: u64, all: &mut Vec<Scenario>) {
    let own = Backlog::new(events, ROW, OWN_KEYS);
    let least = Aim::RatioAtLeast(0.90);
    // Use fewer events in the two scenarios with late answers, to save time. They are slow, because the relay
    // sends only a limited number of requests at a time.
    let fewer = Backlog::new(events / 4, ROW, OWN_KEYS);
    let few = Backlog::new(events / 20, ROW, OWN_KEYS);
    for (name, backlog, delay_ms, cores, aim) in [
        ("own-keys", own, 0, Cores::Shared, Aim::None),
        (
            "own-keys-database-apart",
            own,
            0,
            Cores::DatabaseApart,
            least,
        ),
        ("own-keys-after-20-ms", fewer, 20, Cores::Shared, least),
        ("own-keys-after-100-ms", few, 100, Cores::Shared, least),
    ] {
        let bare = Contestant::Bare { delay_ms };
        let relay = Contestant::Relay {
            setting: None,
            delay_ms,
            build: Build::This,
        };
        all.push(Scenario {
            unit: Unit::Requests,
            cores,
            ..scenario(name, backlog, bare, relay, aim)
        });
    }
    let bucketed = Contestant::Relay {
        setting: Some(("POSTRIDER_ORDERING", "bucketed(256)")),
        delay_ms: 0,
        build: Build::This,
    };
    let thousand = Backlog::new(events, ROW, THOUSAND_KEYS);
    let mut buckets = scenario("bucketed", own, Contestant::RELAY, bucketed, least);
    buckets.baseline.backlog = thousand;
    all.push(buckets);
    for (name, keys) in [
        ("official-1000-keys", THOUSAND_KEYS),
        ("official-own-keys", OWN_KEYS),
    ] {
        let backlog = Backlog::new(events, HUNDRED, keys);
        let official = Contestant::Official;
        all.push(scenario(
            name,
            backlog,
            official,
            Contestant::RELAY,
            Aim::None,
        ));
    }
}

fn late_answers(events: u64, all: &mut Vec<Scenario>) {
    let backlog = Backlog::new(events, ROW, THOUSAND_KEYS);
    for delay_ms in [20, 100] {
        let late = Contestant::Relay {
            setting: None,
            delay_ms,
            build: Build::This,
        };
        let name = format!("answers-after-{delay_ms}-ms");
        let aim = Aim::RatioAtLeast(0.90);
        all.push(scenario(name, backlog, Contestant::RELAY, late, aim));
    }
}

/// Adds scenarios with payloads of many sizes. The payloads of a backlog add up to at most 4 kB
/// times `events`, so that a drain of large payloads takes about as long as a drain of small
/// payloads. No transaction is larger than a megabyte.
fn payloads(events: u64, all: &mut Vec<Scenario>) {
    for (name, bytes, rows) in [
        ("payload-100-B", 100, 100),
        ("payload-1-kB", 1_000, 100),
        ("payload-10-kB", 10_000, 10),
        ("payload-1-MB", 1_000_000, 1),
    ] {
        let count = events.min(events * 4_000 / bytes);
        let backlog = Backlog::new(count, Some(rows), THOUSAND_KEYS).with_noise(bytes);
        let theirs = Contestant::Recvlogical(Link::Tcp);
        let aim = Aim::RatioAtLeast(0.85);
        all.push(Scenario {
            unit: Unit::Megabytes,
            ..scenario(name, backlog, theirs, Contestant::RELAY, aim)
        });
    }
}

/// Adds scenarios in which the relay drains a tenth of the normal backlog, and ten times the normal backlog. The
/// baseline is the same relay with the normal backlog, so the ratio shows whether the rate depends on the length
/// of the backlog. The aim is a ratio near 1.
fn lengths(events: u64, all: &mut Vec<Scenario>) {
    let backlog = |events| Backlog::new(events, ROW, THOUSAND_KEYS);
    for (name, count, full_only, pairs) in [
        ("a-tenth", events / 10, false, 3),
        ("ten-times", events * 10, true, 1),
    ] {
        let (theirs, aim) = (backlog(events), Aim::Within(0.10));
        let mut lengths = scenario(
            name,
            backlog(count),
            Contestant::RELAY,
            Contestant::RELAY,
            aim,
        );
        lengths.baseline.backlog = theirs;
        lengths.full_only = full_only;
        lengths.pairs = pairs;
        lengths.unit = Unit::EventsStreamed;
        all.push(lengths);
    }
}

/// Adds a scenario in which the relay reads the rows from the table, at its first start with `start = all`.
fn from_the_table(events: u64, all: &mut Vec<Scenario>) {
    let ours = Contestant::Relay {
        setting: Some(START_ALL),
        delay_ms: 0,
        build: Build::This,
    };
    let backlog = Backlog::new(events, ROW, THOUSAND_KEYS);
    let aim = Aim::RatioAtLeast(0.5);
    all.push(scenario("start-all", backlog, Contestant::RELAY, ours, aim));
}
