//! One transaction of a writer: its SQL in parts, with pauses in between, and its end.
//!
//! The payload of every event contains its transaction's label (`t`). The judges use the label to
//! connect a row with what its writer knows about the transaction. Events of an aggregate take
//! their version from the aggregate's row. The lock on this row orders the transactions that write
//! events of the aggregate.

use std::fmt::Write;
use std::ops::RangeInclusive;
use std::time::Duration;

use crate::plan::{KINDS, WorkloadPlan};
use crate::random::Random;

/// Number of rows of a big transaction, enough to stress the relay, its batches and the server's
/// reorder buffer.
const BIG: RangeInclusive<u64> = 500..=2_500;

/// Size of a large payload, which is near Pub/Sub's limit of 10 MB for a request.
const LARGE_ROW_BYTES: u64 = 9_000_000;

/// The id of the refused event in this transaction of this writer.
pub(crate) fn refused_id(writer: u64, transaction: u64) -> String {
    format!("bad00000-0000-4000-8000-{writer:04x}{transaction:08x}")
}

/// The shape of a transaction. The report of a run counts the transactions of each shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Shape {
    HotKeys,
    ManyKeys,
    NoKey,
    Emit,
    Big,
    LargeRow,
    RolledBack,
    Savepoints,
    Subtransactions,
    Prepared,
    Failing,
    Empty,
    /// A transaction with an event that Pub/Sub refuses.
    Refused,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ending {
    Commit,
    Rollback,
    /// Two-phase commit: the transaction is prepared under this name, and committed or rolled back
    /// after a pause.
    Prepare {
        gid: String,
        pause: Duration,
        commit: bool,
    },
}

/// A transaction that is ready to run.
#[derive(Debug, Clone)]
pub(super) struct Transaction {
    pub(super) shape: Shape,
    pub(super) label: String,
    /// The SQL after BEGIN, in parts. The writer sends them one after another and pauses for
    /// `pause` in between.
    pub(super) parts: Vec<String>,
    pub(super) pause: Duration,
    pub(super) ending: Ending,
}

impl Transaction {
    /// Draws the next transaction of a writer.
    pub(super) fn draw(
        database: &str,
        label: String,
        poison: Option<String>,
        plan: &WorkloadPlan,
        random: &mut Random,
    ) -> Self {
        let drawn = random.weighted(&[
            (40, Shape::HotKeys),
            (8, Shape::ManyKeys),
            (6, Shape::NoKey),
            (4, Shape::Emit),
            (1, Shape::Big),
            (2 * u64::from(plan.large_rows), Shape::LargeRow),
            (10, Shape::RolledBack),
            (8, Shape::Savepoints),
            (6, Shape::Subtransactions),
            (6, Shape::Prepared),
            (3, Shape::Failing),
            (6, Shape::Empty),
        ]);
        let shape = poison.as_ref().map_or(drawn, |_| Shape::Refused);
        let mut sql = Sql {
            label: &label,
            hot_keys: plan.hot_keys,
            refused_id: poison.unwrap_or_default(),
            random,
        };
        let parts = sql.parts(shape);
        let ending = match shape {
            Shape::RolledBack => Ending::Rollback,
            Shape::Prepared => Ending::Prepare {
                gid: format!("{database}-{label}"),
                pause: random.millis(0..=60),
                commit: random.per_mille(700),
            },
            _ => Ending::Commit,
        };
        let pause = if random.per_mille(100) {
            random.millis(1..=60)
        } else {
            Duration::ZERO
        };
        Self {
            shape,
            label,
            parts,
            pause,
            ending,
        }
    }
}

/// Generates the SQL of a transaction.
struct Sql<'a> {
    label: &'a str,
    hot_keys: u64,
    /// The id of the event that Pub/Sub refuses in a transaction of [`Shape::Refused`].
    refused_id: String,
    random: &'a mut Random,
}

impl Sql<'_> {
    fn parts(&mut self, shape: Shape) -> Vec<String> {
        match shape {
            Shape::HotKeys | Shape::RolledBack | Shape::Prepared => {
                let keys = self.random.within(1..=3);
                (0..keys).map(|_| self.some_hot()).collect()
            }
            Shape::ManyKeys => vec![self.many_keys(1..=40)],
            Shape::NoKey => vec![self.no_key()],
            Shape::Emit => vec![self.emit()],
            Shape::Big => {
                let rows = self.random.within(BIG);
                vec![self.hot(rows), self.many_keys(50..=250), self.some_hot()]
            }
            Shape::LargeRow => vec![self.large_row(), self.some_hot()],
            Shape::Savepoints => self.savepoints(),
            Shape::Subtransactions => vec![self.subtransactions()],
            Shape::Failing => vec![self.some_hot(), "SELECT 1 / 0".to_owned()],
            Shape::Refused => self.refused(),
            Shape::Empty => self.random.pick(&[
                vec![],
                vec!["SELECT txid_current()".to_owned()],
                vec!["INSERT INTO shop.noise VALUES (1, 'alone')".to_owned()],
            ]),
        }
    }

    fn aggregate(&mut self) -> (&'static str, u64) {
        let kind = self.random.pick(&KINDS);
        (kind, self.random.within(1..=self.hot_keys))
    }

    fn some_hot(&mut self) -> String {
        let rows = self.random.weighted(&[(6, 1), (2, 2), (1, 5), (1, 25)]);
        self.hot(rows)
    }

    /// SQL that inserts `rows` events of one aggregate.
    fn hot(&mut self, rows: u64) -> String {
        self.hot_with_ids(rows, "gen_random_uuid()")
    }

    /// SQL that inserts several events. Pub/Sub refuses one of them, at a random index.
    fn refused(&mut self) -> Vec<String> {
        let id = std::mem::take(&mut self.refused_id);
        let rows = self.random.within(1..=6);
        let bad = self.random.within(1..=rows);
        let ids = format!("CASE i WHEN {bad} THEN '{id}'::uuid ELSE gen_random_uuid() END");
        let (kind, label) = (self.random.pick(&KINDS), self.label);
        let elsewhere = |key: &str| {
            format!(
                "INSERT INTO outbox.events \
                     (id, aggregatetype, aggregateid, event_type, version, payload) \
                 SELECT {ids}, '{kind}', {key}, 'Refused', i, jsonb_build_object('t', '{label}') \
                 FROM generate_series(1, {rows}) i ORDER BY i"
            )
        };
        let refused = match self.random.within(0..=5) {
            0 => elsewhere("NULL"),
            1 => elsewhere(&format!("'own-{label}'")),
            _ => self.hot_with_ids(rows, &ids),
        };
        vec![self.some_hot(), refused, self.some_hot()]
    }

    fn hot_with_ids(&mut self, rows: u64, ids: &str) -> String {
        let (kind, id) = self.aggregate();
        let (label, pad) = (self.label, self.random.pick(&[0, 10, 200, 2_000]));
        format!(
            "WITH a AS (UPDATE shop.aggregate SET version = version + {rows} \
                 WHERE kind = '{kind}' AND id = 'hot-{id}' RETURNING version) \
             INSERT INTO outbox.events \
                 (id, aggregatetype, aggregateid, event_type, version, payload) \
             SELECT {ids}, '{kind}', 'hot-{id}', 'Changed', a.version - {rows} + i, \
                 jsonb_build_object('t', '{label}', 'pad', repeat('x', {pad})) \
             FROM a, generate_series(1, {rows}) i ORDER BY i"
        )
    }

    /// SQL that inserts events that each have a different key.
    fn many_keys(&mut self, rows: RangeInclusive<u64>) -> String {
        let (kind, rows) = (self.random.pick(&KINDS), self.random.within(rows));
        let label = self.label;
        format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
             SELECT '{kind}', 'own-{label}-' || i, 'Placed', 1, jsonb_build_object('t', '{label}') \
             FROM generate_series(1, {rows}) i"
        )
    }

    /// SQL that inserts events without a key. They have no order.
    fn no_key(&mut self) -> String {
        let (kind, rows) = (self.random.pick(&KINDS), self.random.within(1..=10));
        let label = self.label;
        format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, payload) \
             SELECT '{kind}', NULL, 'Seen', jsonb_build_object('t', '{label}') \
             FROM generate_series(1, {rows}) i"
        )
    }

    /// SQL that writes an event with `outbox.emit`, the function that services may use.
    fn emit(&mut self) -> String {
        let ((kind, id), label) = (self.aggregate(), self.label);
        format!(
            "WITH a AS (UPDATE shop.aggregate SET version = version + 1 \
                 WHERE kind = '{kind}' AND id = 'hot-{id}' RETURNING version) \
             SELECT outbox.emit('{kind}', 'hot-{id}', 'Emitted', \
                 jsonb_build_object('t', '{label}'), '{{\"by\": \"emit\"}}', a.version) FROM a"
        )
    }

    fn large_row(&mut self) -> String {
        let label = self.label;
        format!(
            "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
             VALUES ('order', 'own-{label}-0', 'Scanned', 1, \
                 jsonb_build_object('t', '{label}', 'pad', repeat('x', {LARGE_ROW_BYTES})))"
        )
    }

    /// A transaction in which some savepoints are rolled back.
    fn savepoints(&mut self) -> Vec<String> {
        let mut parts = vec![self.some_hot()];
        for n in 0..self.random.within(1..=3) {
            let undone = self.random.per_mille(600);
            let inner = self.some_hot();
            let end = if undone { "ROLLBACK TO" } else { "RELEASE" };
            parts.push(format!("SAVEPOINT s{n}; {inner}; {end} SAVEPOINT s{n}"));
        }
        parts.push(self.some_hot());
        parts
    }

    /// SQL with PL/pgSQL blocks that have exception handlers. Each block is a subtransaction, and some of them
    /// fail. Of 120 blocks about 84 succeed, more than the 64 subtransactions that the server caches per
    /// session.
    fn subtransactions(&mut self) -> String {
        let blocks = self.random.pick(&[3, 10, 120]);
        let mut sql = String::from("DO $$ BEGIN ");
        for _ in 0..blocks {
            let fails = self.random.per_mille(300);
            let (inner, error) = (self.hot(1), if fails { "PERFORM 1 / 0; " } else { "" });
            // Writing to a String cannot fail.
            let _ = write!(
                sql,
                "BEGIN {inner}; {error}EXCEPTION WHEN division_by_zero THEN NULL; END; "
            );
        }
        sql + "END $$"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_occurs_and_only_some_end_in_a_commit() {
        let mut random = Random::new(11);
        let plan = WorkloadPlan {
            writers: 1,
            transactions: 1,
            pause_ms: 0,
            hot_keys: 2,
            ddl: false,
            noise: false,
            large_rows: true,
            moves_rows: false,
            decoding_work_mem_kb: 64,
            poison: [(1, 7)].into(),
        };
        let drawn: Vec<Transaction> = (0..2_000)
            .map(|n| {
                let poison = plan.poison.contains(&(1, n)).then(|| refused_id(1, n));
                Transaction::draw("db", format!("1-{n}"), poison, &plan, &mut random)
            })
            .collect();
        let mut shapes: Vec<Shape> = drawn.iter().map(|transaction| transaction.shape).collect();
        shapes.sort();
        shapes.dedup();
        assert_eq!(shapes.len(), 13);
        assert!(drawn[7].parts[1].contains(&refused_id(1, 7)));
        let prepared = |wanted| {
            let is = |t: &&Transaction| matches!(&t.ending, Ending::Prepare { commit, .. } if *commit == wanted);
            drawn.iter().filter(is).count()
        };
        assert!(prepared(true) > 0 && prepared(false) > 0);
        assert!(drawn.iter().any(|t| t.ending == Ending::Rollback));
    }
}
