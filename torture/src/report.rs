//! The output of a run: a line for each schedule, and the totals.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;

use crate::fault::{Fault, Loss, Outage, Replacement, Side, Unpublished};
use crate::plan::Release;
use crate::schedule::Outcome;
use crate::verdict::Cause;
use crate::workload::Shape;

/// Totals over all schedules of a run.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) schedules: u64,
    /// A summary of each failed schedule.
    pub(crate) failures: Vec<String>,
    pub(crate) took: Duration,
    faults: BTreeMap<&'static str, u64>,
    transactions: BTreeMap<Shape, u64>,
    events: u64,
    stored_messages: u64,
    attempts: u64,
    polls: u64,
    lost: u64,
    swapped: u64,
    duplicates: BTreeMap<Cause, u64>,
    exceptions: u64,
    bucketed: u64,
    goaway: u64,
    with_poison: u64,
    history: u64,
    captured_by_relay: u64,
    lagging_slot: u64,
    moves_rows: u64,
    set_aside: u64,
    released: u64,
    from_table: u64,
    recoveries: u64,
    longest: Duration,
}

impl Totals {
    pub(crate) fn add(&mut self, outcome: &Outcome) {
        let verdict = &outcome.verdict;
        self.schedules += 1;
        for occurrence in &outcome.occurrences {
            *self.faults.entry(name(&occurrence.fault)).or_default() += 1;
        }
        for (shape, count) in &outcome.written.transactions {
            *self.transactions.entry(*shape).or_default() += count;
        }
        self.events += verdict.events;
        self.stored_messages += verdict.stored_messages;
        self.attempts += verdict.attempts;
        self.polls += outcome.polls;
        self.lost += verdict.lost();
        self.swapped += verdict.swapped();
        for (cause, count) in &verdict.duplicates {
            *self.duplicates.entry(*cause).or_default() += count;
        }
        self.exceptions += u64::from(outcome.plan.relay.exceptions);
        self.bucketed += u64::from(outcome.plan.relay.buckets.is_some());
        self.goaway += u64::from(outcome.plan.goaway.is_some());
        self.with_poison += u64::from(!outcome.plan.workload.poison.is_empty());
        let table = &outcome.plan.table;
        self.history += u64::from(table.history > 0);
        self.captured_by_relay += u64::from(table.captured_by_relay);
        self.lagging_slot += u64::from(table.lagging_slot);
        self.moves_rows += u64::from(outcome.plan.workload.moves_rows);
        self.set_aside += verdict.set_aside;
        if outcome.plan.release != Release::Never {
            self.released += verdict.set_aside;
        }
        self.from_table += verdict.from_table;
        self.recoveries += outcome.recoveries;
        self.longest = self.longest.max(outcome.took);
    }

    fn rows(&self) -> Vec<(String, u64)> {
        let mut rows = vec![
            ("schedules".to_owned(), self.schedules),
            ("schedules failed".to_owned(), self.failures.len() as u64),
        ];
        rows.extend(self.faults.iter().map(|(name, n)| ((*name).to_owned(), *n)));
        rows.push(("transactions".to_owned(), self.transactions.values().sum()));
        let shapes = self.transactions.iter();
        rows.extend(shapes.map(|(shape, n)| (format!("  {shape:?}"), *n)));
        rows.extend([
            ("events committed".to_owned(), self.events),
            ("messages stored".to_owned(), self.stored_messages),
            ("publish requests".to_owned(), self.attempts),
            ("polls of the slot".to_owned(), self.polls),
            ("schedules without records".to_owned(), self.exceptions),
            ("schedules with buckets".to_owned(), self.bucketed),
            ("schedules with GOAWAY".to_owned(), self.goaway),
            ("schedules with refused events".to_owned(), self.with_poison),
            ("schedules with a history".to_owned(), self.history),
            (
                "schedules captured by the relay".to_owned(),
                self.captured_by_relay,
            ),
            (
                "schedules with a lagging slot".to_owned(),
                self.lagging_slot,
            ),
            ("schedules with moved rows".to_owned(), self.moves_rows),
            ("events set aside".to_owned(), self.set_aside),
            ("  released in the end".to_owned(), self.released),
            ("recoveries".to_owned(), self.recoveries),
            ("events read from the table".to_owned(), self.from_table),
            ("events lost".to_owned(), self.lost),
            ("events swapped".to_owned(), self.swapped),
            ("duplicates".to_owned(), self.duplicates.values().sum()),
        ]);
        let causes = self.duplicates.iter();
        rows.extend(causes.map(|(cause, n)| (format!("  {cause}"), *n)));
        rows
    }

    pub(crate) fn print_table(&self, seed: u64) {
        println!("{:40} {:>12}", "seed", seed);
        for (name, count) in self.rows() {
            println!("{name:40} {count:>12}");
        }
        println!("{:40} {:>12.0}", "seconds", self.took.as_secs_f64());
        println!(
            "{:40} {:>12.1}",
            "longest schedule, seconds",
            self.longest.as_secs_f64()
        );
    }

    pub(crate) fn print_json(&self, seed: u64) {
        let counts: serde_json::Map<String, serde_json::Value> = self
            .rows()
            .into_iter()
            .map(|(name, count)| (name.trim().to_owned(), json!(count)))
            .collect();
        println!(
            "{}",
            json!({
                "seed": seed,
                "seconds": self.took.as_secs_f64(),
                "longest schedule": self.longest.as_secs_f64(),
                "counts": counts,
            })
        );
    }
}

/// The name under which the totals count a fault.
fn name(fault: &Fault) -> &'static str {
    match fault {
        Fault::Kill(_) => "kill -9 of a relay",
        Fault::Stop(_) => "SIGTERM to a relay",
        Fault::Freeze(_) => "SIGSTOP to a relay",
        Fault::TerminateWalsender => "walsender terminated",
        Fault::TerminateSql => "SQL sessions terminated",
        Fault::LockDispatch(_) => "dispatch table locked",
        Fault::Server(Outage::Fast, _) => "PostgreSQL restarted, fast",
        Fault::Server(Outage::Immediate, _) => "PostgreSQL restarted, immediate",
        Fault::Server(Outage::Kill9, _) => "kill -9 of PostgreSQL",
        Fault::Publish(..) | Fault::PublishFor(..) | Fault::TopicGone(..) => {
            "faults of Pub/Sub's answers"
        }
        Fault::CutPubsub | Fault::RefusePubsub(_) => "Pub/Sub cut off",
        Fault::SlotLost(_, Loss::Dropped) => "slot dropped",
        Fault::SlotLost(_, Loss::Recreated) => "slot recreated",
        Fault::SlotLost(_, Loss::Invalidated) => "slot invalidated",
        Fault::Gap(_, Unpublished::TableOut, _) => "table out of the publication",
        Fault::Gap(_, Unpublished::PublicationDropped, _) => "publication recreated",
        Fault::Gap(_, Unpublished::NotInSettings, _) => "table out of the settings",
        Fault::Replaced(_, Replacement::Copied) => "table swapped for a copy",
        Fault::Replaced(_, Replacement::Recreated) => "table recreated",
        Fault::TooLong => "row too long for the stream",
        Fault::Undecodable(_) => "row without a form in UTF-8",
        Fault::Release => "released from quarantine under way",
        Fault::Network(Side::Postgres, ..) => "network to PostgreSQL disturbed",
        Fault::Network(Side::Pubsub, ..) => "network to Pub/Sub disturbed",
    }
}

/// Formats the outcome of a schedule as one line.
pub(crate) fn line(outcome: &Outcome) -> String {
    let verdict = &outcome.verdict;
    let relay = &outcome.plan.relay;
    let mode = [
        relay.exceptions.then(|| " *".to_owned()),
        relay.buckets.map(|buckets| format!(" #{buckets}")),
    ];
    let mode: String = mode.into_iter().flatten().collect();
    format!(
        "schedule {:>5}  {:15}  {:>6} events  {:>6} stored  {:>5.1} s  {}",
        outcome.plan.index,
        format!("{:?}{mode}", outcome.plan.fault_family),
        verdict.events,
        verdict.stored_messages,
        outcome.took.as_secs_f64(),
        match verdict.violations.len() {
            0 => "ok".to_owned(),
            count => format!("FAILED: {count} violations"),
        }
    )
}
