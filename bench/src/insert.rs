//! Measures how much the columns `inserted_xid` and `seq`, and the index on `seq`, add to the cost of an
//! INSERT.
//!
//! The benchmark inserts the same rows into `outbox.events` and into copies of this table that lack one
//! column, both columns, or the index. The tables take turns. Commits do not wait for the disk, because
//! that wait would hide the cost.

use std::time::Instant;

use serde_json::json;
use tokio_postgres::Client;

use crate::database::Database;
use crate::process;
use crate::report::{Aim, Line};
use crate::sample::median;

/// Number of turns of each table in one run. With many short turns, other work on the machine affects all
/// tables about equally. With a few long turns, the other work could slow down a single table.
const TURNS: u32 = 10;

/// Maximum cost of an INSERT of a client into `outbox.events`, as a multiple of its cost in the baseline table, which
/// lacks `inserted_xid`, `seq` and the index on `seq`.
const AIM: f64 = 1.15;

struct Variant {
    /// Names the columns and the index that the table has, for the report.
    name: &'static str,
    table: &'static str,
    /// Columns of `outbox.events` that the table lacks.
    lacks: &'static [&'static str],
}

/// The compared tables. The first table is the baseline, and the last table is `outbox.events` itself.
const VARIANTS: [Variant; 4] = [
    Variant {
        name: "neither column",
        table: "public.events_0",
        lacks: &["inserted_xid", "seq"],
    },
    Variant {
        name: "inserted_xid",
        table: "public.events_1",
        lacks: &["seq"],
    },
    Variant {
        name: "inserted_xid and seq, no index",
        table: "public.events_2",
        lacks: &[],
    },
    Variant {
        name: "inserted_xid, seq and its index",
        table: "outbox.events",
        lacks: &[],
    },
];

/// Returns a statement that creates the table `$1` with the primary key of `outbox.events` and all its
/// columns except the columns `$2`.
const CREATE: &str = "\
    SELECT format('CREATE TABLE %s (%s, PRIMARY KEY (id))', $1::text, \
           string_agg(format('%I %s %s %s', a.attname, format_type(a.atttypid, a.atttypmod), \
                             'DEFAULT ' || pg_get_expr(d.adbin, d.adrelid), \
                             CASE WHEN a.attnotnull THEN 'NOT NULL' END), ', ' ORDER BY a.attnum)) \
    FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum \
    WHERE a.attrelid = 'outbox.events'::regclass AND a.attnum > 0 AND NOT a.attisdropped \
      AND a.attname::text <> ALL ($2)";

/// How the benchmark inserts the rows. Each row is a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Writer {
    /// A client sends a prepared INSERT for each row, as services do.
    Service,
    /// One `DO` block inserts all rows. No time is spent on messages between client and server, so the
    /// INSERT itself is a larger part of the measured cost.
    Block,
}

impl Writer {
    pub(crate) const ALL: [Self; 2] = [Self::Service, Self::Block];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Service => "insert",
            Self::Block => "insert-in-a-block",
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Self::Service => "us/row, prepared INSERT of a client",
            Self::Block => "us/row, DO block",
        }
    }

    fn aim(self) -> Aim {
        match self {
            Self::Service => Aim::RatioAtMost(AIM),
            Self::Block => Aim::None,
        }
    }

    async fn write(self, client: &Client, table: &str, rows: u64) -> Result<(), String> {
        let row = |payload: &str, key: &str, version: &str| {
            format!(
                "INSERT INTO {table} (aggregatetype, aggregateid, event_type, version, payload) \
                 VALUES ('order', {key}, 'OrderPlaced', {version}, {payload})"
            )
        };
        let debug = |e| format!("{e:?}");
        match self {
            Self::Service => {
                let insert = row("$3::text::jsonb", "$1::text", "$2::bigint");
                let insert = client.prepare(&insert).await.map_err(debug)?;
                let payload = format!("{{\"order\": 1, \"note\": \"{}\"}}", "x".repeat(100));
                for n in 0..i64::try_from(rows).unwrap_or(i64::MAX) {
                    let key = format!("k-{}", n % 1_000);
                    let written = client.execute(&insert, &[&key, &n, &payload]).await;
                    written.map_err(debug)?;
                }
                Ok(())
            }
            Self::Block => {
                let payload = "jsonb_build_object('order', i, 'note', repeat('x', 100))";
                let insert = row(payload, "'k-' || (i % 1000)", "i");
                let block = format!(
                    "DO $$ BEGIN FOR i IN 1..{rows} LOOP {insert}; COMMIT; END LOOP; END $$"
                );
                client.batch_execute(&block).await.map_err(debug)
            }
        }
    }
}

/// The cost of one row, in microseconds.
#[derive(Debug, Clone, Copy)]
struct Cost {
    /// CPU time of the PostgreSQL process.
    cpu: f64,
    /// Elapsed time.
    wall: f64,
}

/// Inserts `rows` rows into each table in each of `runs` runs. Returns two lines for each table except
/// the baseline: its CPU time and its elapsed time, compared with the baseline.
pub(crate) async fn measure(writer: Writer, runs: u32, rows: u64) -> Result<Vec<Line>, String> {
    let database = Database::start(&process::binary()).await?;
    // Nobody reads the slot here, so the slot would make the server keep gigabytes of WAL.
    database.free_slot(crate::database::ORIGIN).await?;
    for variant in &VARIANTS[..VARIANTS.len() - 1] {
        let create = database
            .client()
            .query_one(CREATE, &[&variant.table, &variant.lacks])
            .await;
        let create: String = create.map_err(|e| format!("{e:?}"))?.get(0);
        database.execute(&create).await?;
    }
    let mut costs: [Vec<Cost>; VARIANTS.len()] = Default::default();
    let rows = (rows / u64::from(TURNS)).max(1);
    for round in 0..(runs * TURNS) as usize {
        for turn in 0..VARIANTS.len() {
            // Each round begins with another table, so that no table always goes first.
            let nth = (round + turn) % VARIANTS.len();
            costs[nth].push(insert(&database, writer, VARIANTS[nth].table, rows).await?);
        }
        if (round + 1) % TURNS as usize == 0 {
            let last = costs.iter().filter_map(|costs| costs.last());
            let cpu: Vec<String> = last.map(|cost| format!("{:.1}", cost.cpu)).collect();
            eprintln!("  {} us of CPU per row", cpu.join(", "));
        }
    }
    Ok(lines(writer, &costs))
}

/// Empties the table, and measures how much it costs to insert `rows` rows in a new session.
async fn insert(
    database: &Database,
    writer: Writer,
    table: &str,
    rows: u64,
) -> Result<Cost, String> {
    // `replica` switches off the trigger of `outbox.events` that refuses TRUNCATE.
    let empty = format!(
        "SET session_replication_role = replica; TRUNCATE {table}; RESET session_replication_role; CHECKPOINT"
    );
    database.execute(&empty).await?;
    let client = database.connect().await?;
    let session = "SET synchronous_commit = off; SELECT 1";
    client
        .batch_execute(session)
        .await
        .map_err(|e| format!("{e:?}"))?;
    let pid = client
        .query_one("SELECT pg_backend_pid()", &[])
        .await
        .map_err(|e| format!("{e:?}"))?;
    let pid = u32::try_from(pid.get::<_, i32>(0)).map_err(|e| e.to_string())?;
    // Fill the caches of the new session before the measurement.
    writer.write(&client, table, rows / 20 + 1).await?;
    let used = || process::cpu_of_single_thread(pid).ok_or("the session has ended");
    let (before, began) = (used()?, Instant::now());
    writer.write(&client, table, rows).await?;
    let per_row = |seconds: f64| seconds * 1e6 / rows as f64;
    Ok(Cost {
        wall: per_row(began.elapsed().as_secs_f64()),
        cpu: per_row(used()? - before),
    })
}

/// Reads one of the two figures of a [`Cost`].
type Figure = fn(&Cost) -> f64;

fn lines(writer: Writer, costs: &[Vec<Cost>; VARIANTS.len()]) -> Vec<Line> {
    let figures: [(&str, Figure); 2] = [("CPU", |c| c.cpu), ("time", |c| c.wall)];
    let [baseline, others @ ..] = costs;
    let line = |(what, figure): (&str, Figure), nth: usize, ours: &[Cost]| {
        let pairs = baseline.iter().zip(ours);
        let lowest = |costs: &[Cost]| costs.iter().map(figure).fold(f64::INFINITY, f64::min);
        let (low_baseline, low_ours) = (lowest(baseline), lowest(ours));
        Line {
            scenario: format!("{} {what}: {}", writer.name(), VARIANTS[nth].name),
            unit: writer.unit(),
            baseline_is: VARIANTS[0].name.into(),
            ours_is: VARIANTS[nth].name.into(),
            baseline: median(baseline.iter().map(figure)),
            ours: median(ours.iter().map(figure)),
            ratio: median(pairs.map(|(theirs, ours)| figure(ours) / figure(theirs))),
            aim: if nth == VARIANTS.len() - 1 {
                writer.aim()
            } else {
                Aim::None
            },
            cpu_aim: None,
            costs: None,
            runs: ours.len(),
            samples: json!({
                "baseline": baseline.iter().map(figure).collect::<Vec<_>>(),
                "ours": ours.iter().map(figure).collect::<Vec<_>>(),
            }),
            note: Some(format!(
                "the lowest of {} turns: {low_ours:.2} against {low_baseline:.2} us, ratio {:.3}",
                ours.len(),
                low_ours / low_baseline
            )),
        }
    };
    let all = others
        .iter()
        .zip(1..)
        .flat_map(|(ours, nth)| figures.map(|figure| line(figure, nth, ours)));
    all.collect()
}
