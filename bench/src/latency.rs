//! Measures the latency from commit to delivery, at a steady rate of one-row transactions.
//!
//! A latency begins at the commit time that the server records for the row
//! (`track_commit_timestamp`). The server takes this time before it flushes the commit to disk, so
//! the latencies of both programs include the flush. A latency ends when the message arrives at the
//! emulator, or when we read the row from the output of `pg_recvlogical`. All times come from the
//! same clock, the clock of this machine.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde_json::json;
use tokio_postgres::Client;

use crate::contestant::SLOT;
use crate::cores::Cores;
use crate::database::Database;
use crate::output::Output;
use crate::peers::Emulator;
use crate::process;
use crate::report::{Aim, Line};
use crate::sample::median;

/// A steady rate, and the delay of the emulator's answers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// Rows per second.
    rate: u64,
    delay_ms: u64,
    /// The aim for the 99th percentile.
    aim: Aim,
}

impl Pace {
    pub(crate) const ALL: [Self; 5] = [
        Self::new(100, 0, Aim::None),
        Self::new(1_000, 0, Aim::AboveBaselineAtMost(2.0)),
        Self::new(10_000, 0, Aim::None),
        Self::new(1_000, 20, Aim::None),
        Self::new(1_000, 100, Aim::None),
    ];

    const fn new(rate: u64, delay_ms: u64, aim: Aim) -> Self {
        Self {
            rate,
            delay_ms,
            aim,
        }
    }

    pub(crate) fn name(self) -> String {
        let Self { rate, delay_ms, .. } = self;
        match delay_ms {
            0 => format!("latency-{rate}"),
            _ => format!("latency-{rate}-after-{delay_ms}-ms"),
        }
    }
}

/// The percentiles that are reported, in thousandths, and their names.
const PERCENTILES: [(usize, &str); 3] = [(500, "p50"), (990, "p99"), (999, "p99.9")];

/// A run starts one session for each 50 rows per second, but at least one and at most `MAX_WRITERS` sessions.
/// One session alone would be too slow for a high rate, because each commit waits for its flush, which may take
/// milliseconds.
const ROWS_PER_WRITER: u64 = 50;
const MAX_WRITERS: u64 = 64;

/// Length of the first part of a run, whose rows are not measured because connections are still
/// being opened.
const WARM_UP: Duration = Duration::from_secs(1);

/// How long to wait, after the last commit, for rows that have not arrived. Also the time limit for
/// the start of streaming.
const ARRIVAL_LIMIT: Duration = Duration::from_secs(60);

/// The start of every row's id. The next twelve digits are the row's number.
pub(crate) const ID_PREFIX: &str = "00000000-0000-4000-8000-";

/// The latencies of one run in milliseconds, sorted.
struct Run {
    latencies: Vec<f64>,
    written_per_second: f64,
}

/// Measures the latencies at one pace. Returns a line for each percentile.
pub(crate) async fn measure(pace: Pace, runs: u32, length: Duration) -> Result<Vec<Line>, String> {
    let Pace { rate, aim, .. } = pace;
    let database = Database::start(&process::binary()).await?;
    let (mut baseline, mut ours) = (Vec::new(), Vec::new());
    let mut first_row = 0;
    for run in 1..=runs {
        let mut turns = [false, true];
        if run % 2 == 0 {
            turns.reverse();
        }
        for is_ours in turns {
            let rows = first_row..first_row + rate * length.as_secs();
            first_row = rows.end;
            if is_ours {
                ours.push(relay(&database, pace, rows).await?)
            } else {
                baseline.push(recvlogical(&database, rate, rows).await?)
            }
        }
        eprintln!(
            "  run {run}: p99 of pg_recvlogical {:.2} ms, of ours {:.2} ms",
            baseline.last().map_or(f64::NAN, |run| run.percentile(990)),
            ours.last().map_or(f64::NAN, |run| run.percentile(990)),
        );
    }
    let line = |(thousandth, name): (usize, &str)| {
        let of = |runs: &[Run]| median(runs.iter().map(|run| run.percentile(thousandth)));
        let pairs = baseline.iter().zip(&ours);
        Line {
            scenario: format!("{} {name}", pace.name()),
            unit: "ms",
            baseline_is: "commit to the output of pg_recvlogical".into(),
            ours_is: "commit to the emulator".into(),
            baseline: of(&baseline),
            ours: of(&ours),
            ratio: median(pairs.map(|(b, o)| o.percentile(thousandth) / b.percentile(thousandth))),
            aim: if name == "p99" { aim } else { Aim::None },
            cpu_aim: None,
            costs: None,
            runs: ours.len(),
            samples: json!({
                "baseline": baseline.iter().map(|r| r.percentile(thousandth)).collect::<Vec<_>>(),
                "ours": ours.iter().map(|r| r.percentile(thousandth)).collect::<Vec<_>>(),
            }),
            note: match name {
                "p99" => too_slow(rate, baseline.iter().chain(&ours)),
                _ => None,
            },
        }
    };
    Ok(PERCENTILES.into_iter().map(line).collect())
}

fn too_slow<'a>(rate: u64, runs: impl Iterator<Item = &'a Run>) -> Option<String> {
    let slowest = runs
        .map(|run| run.written_per_second)
        .fold(f64::INFINITY, f64::min);
    (slowest < 0.95 * rate as f64)
        .then(|| format!("the server committed only {slowest:.0} rows a second"))
}

impl Run {
    fn percentile(&self, thousandth: usize) -> f64 {
        let last = self.latencies.len().saturating_sub(1);
        let at = (self.latencies.len() * thousandth).div_ceil(1_000);
        let value = self.latencies.get(at.saturating_sub(1).min(last));
        value.copied().unwrap_or(f64::NAN)
    }
}

async fn recvlogical(
    database: &Database,
    rate: u64,
    rows: std::ops::Range<u64>,
) -> Result<Run, String> {
    begin_anew(database).await?;
    let mut output = Output::start(&database.url())?;
    wait_until_streaming(database).await?;
    let written_per_second = write(database, rate, rows.clone()).await?;
    let arrivals = output
        .arrivals(rows.end - rows.start, ARRIVAL_LIMIT)
        .await?;
    drop(output);
    finish(database, rows, rate, &arrivals, written_per_second).await
}

async fn relay(database: &Database, pace: Pace, rows: std::ops::Range<u64>) -> Result<Run, String> {
    let Pace { rate, delay_ms, .. } = pace;
    begin_anew(database).await?;
    let emulator = Emulator::start(delay_ms, true, Cores::Shared)?;
    let mut relay = process::relay(&process::binary(), &database.url(), &emulator.host)?;
    wait_until_streaming(database).await?;
    let written_per_second = write(database, rate, rows.clone()).await?;
    let end = database.wal_position().await?;
    let began = Instant::now();
    while !database.observe(SLOT, &end).await?.drained {
        relay.usage()?;
        if began.elapsed() > ARRIVAL_LIMIT {
            return Err("the relay does not catch up".into());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let arrivals = emulator.finish()?.arrivals;
    drop(relay);
    finish(database, rows, rate, &arrivals, written_per_second).await
}

/// Empties the tables and creates a new slot, so that each run begins in the same state.
async fn begin_anew(database: &Database) -> Result<(), String> {
    // `replica` switches off the trigger that protects the table against TRUNCATE.
    const EMPTY: &str = "SET session_replication_role = replica; TRUNCATE outbox.events; \
                         RESET session_replication_role";
    database.execute(EMPTY).await?;
    database.forget().await?;
    database.new_slot(SLOT).await
}

async fn wait_until_streaming(database: &Database) -> Result<(), String> {
    let began = Instant::now();
    while database.observe(SLOT, "0/0").await?.walsender.is_none() {
        if began.elapsed() > ARRIVAL_LIMIT {
            return Err("nobody streams".into());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// Commits the rows at this rate, one transaction per row. Returns the achieved rate, in rows per
/// second.
async fn write(database: &Database, rate: u64, rows: std::ops::Range<u64>) -> Result<f64, String> {
    let writers = (rate / ROWS_PER_WRITER).clamp(1, MAX_WRITERS);
    let mut clients = Vec::new();
    for _ in 0..writers {
        clients.push(database.connect().await?);
    }
    let began = Instant::now();
    let count = rows.end - rows.start;
    let mut tasks = tokio::task::JoinSet::new();
    for (client, first) in clients.into_iter().zip(rows.clone()) {
        let due =
            move |row: u64| began + Duration::from_micros((row - rows.start) * 1_000_000 / rate);
        let mine = (first..rows.end).step_by(usize::try_from(writers).map_err(|e| e.to_string())?);
        tasks.spawn(write_some(client, mine, due));
    }
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(|e| e.to_string())??;
    }
    Ok(count as f64 / began.elapsed().as_secs_f64())
}

async fn write_some(
    client: Client,
    rows: impl Iterator<Item = u64>,
    due: impl Fn(u64) -> Instant,
) -> Result<(), String> {
    let insert = "INSERT INTO outbox.events (id, aggregatetype, aggregateid, event_type, payload) \
                  VALUES ($1::text::uuid, 'order', $2, 'OrderPlaced', \
                          jsonb_build_object('note', repeat('x', 100)))";
    let error = |e: tokio_postgres::Error| format!("{e:?}");
    let insert = client.prepare(insert).await.map_err(error)?;
    for row in rows {
        tokio::time::sleep_until(due(row).into()).await;
        let (id, key) = (id(row), format!("k-{}", row % 1_000));
        client.execute(&insert, &[&id, &key]).await.map_err(error)?;
    }
    Ok(())
}

fn id(row: u64) -> String {
    format!("{ID_PREFIX}{row:012}")
}

/// Returns the latency of every row after the warm-up, from the row's commit time to its arrival.
/// Returns an error if one of these rows did not arrive.
async fn finish(
    database: &Database,
    rows: std::ops::Range<u64>,
    rate: u64,
    arrivals: &HashMap<String, i64>,
    written_per_second: f64,
) -> Result<Run, String> {
    database.free_slot(SLOT).await?;
    let measured = rows.start + rate * WARM_UP.as_secs()..rows.end;
    let committed = database
        .client()
        .query(
            "SELECT id::text, \
                    (extract(epoch from pg_xact_commit_timestamp(xmin)) * 1000000)::bigint \
             FROM outbox.events WHERE id >= $1::text::uuid AND id < $2::text::uuid",
            &[&id(measured.start), &id(measured.end)],
        )
        .await
        .map_err(|e| format!("{e:?}"))?;
    if committed.len() as u64 != measured.end - measured.start {
        return Err(format!("{} rows were committed", committed.len()));
    }
    let mut latencies = Vec::with_capacity(committed.len());
    for row in committed {
        let (id, at): (String, i64) = (row.get(0), row.get(1));
        let arrived = arrivals
            .get(&id)
            .ok_or_else(|| format!("row {id} did not arrive"))?;
        latencies.push((arrived - at) as f64 / 1_000.0);
    }
    latencies.sort_by(f64::total_cmp);
    Ok(Run {
        latencies,
        written_per_second,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let run = Run {
            latencies: (1..=1_000).map(f64::from).collect(),
            written_per_second: 0.0,
        };
        assert_eq!(run.percentile(500), 500.0);
        assert_eq!(run.percentile(990), 990.0);
        assert_eq!(run.percentile(999), 999.0);
    }
}
