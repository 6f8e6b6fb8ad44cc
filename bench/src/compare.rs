//! Measures a scenario: both sides drain their backlogs in turn. The medians of all runs become a line of the
//! report.

use std::path::PathBuf;

use crate::backlog::Backlog;
use crate::cores::Cores;
use crate::database::Database;
use crate::drain::drain;
use crate::report::Line;
use crate::sample::{Sample, costs, median};
use crate::scenario::{Scenario, Side, Unit};

/// Servers with a loaded backlog, which later scenarios can use again.
#[derive(Default)]
pub(crate) struct Stock {
    loaded: Vec<Loaded>,
}

struct Loaded {
    backlog: Backlog,
    /// The path of the `postrider` binary whose `init` created the schema in this database. A binary of another
    /// version may need another schema.
    schema: PathBuf,
    database: Database,
    /// The WAL position at which the backlog ends.
    end: String,
    /// The cores on which the server runs.
    cores: Cores,
}

impl Loaded {
    fn is_for(&self, side: &Side) -> bool {
        self.backlog == side.backlog && self.schema == side.contestant.schema()
    }
}

impl Stock {
    /// Makes sure that a server is loaded with the backlog of this side.
    async fn load(&mut self, side: &Side) -> Result<(), String> {
        if self.loaded.iter().any(|loaded| loaded.is_for(side)) {
            return Ok(());
        }
        let (backlog, schema) = (side.backlog, side.contestant.schema());
        eprintln!("  writing {}", backlog.describe());
        let database = Database::start(&schema).await?;
        let end = database.load(&backlog).await?;
        self.loaded.push(Loaded {
            backlog,
            schema,
            database,
            end,
            cores: Cores::Shared,
        });
        Ok(())
    }

    /// Drops all servers that none of these scenarios needs.
    pub(crate) fn keep_for<'a>(&mut self, scenarios: impl Iterator<Item = &'a Scenario>) {
        let needed: Vec<_> = scenarios.flat_map(|s| [&s.baseline, &s.ours]).collect();
        self.loaded
            .retain(|loaded| needed.iter().any(|side| loaded.is_for(side)));
    }

    async fn drain(&mut self, side: &Side, cores: Cores) -> Result<Sample, String> {
        let mut loaded = self.loaded.iter_mut();
        let loaded = loaded.find(|loaded| loaded.is_for(side));
        let loaded = loaded.expect("invariant: it was loaded");
        if loaded.cores != cores {
            cores.settle(&loaded.database).await?;
            loaded.cores = cores;
        }
        let Loaded {
            backlog,
            database,
            end,
            ..
        } = loaded;
        drain(side.contestant, database, backlog, end, cores).await
    }
}

/// Drains the backlogs of both sides `runs` times. Returns the line of the report.
pub(crate) async fn compare(
    scenario: &Scenario,
    stock: &mut Stock,
    runs: u32,
) -> Result<Line, String> {
    stock.load(&scenario.baseline).await?;
    stock.load(&scenario.ours).await?;
    let cores = scenario.cores;
    let (mut baseline, mut ours) = (Vec::new(), Vec::new());
    for run in 1..=runs {
        // The two sides take turns in going first, so that a trend over time affects both sides
        // equally.
        if run % 2 == 1 {
            baseline.push(stock.drain(&scenario.baseline, cores).await?);
            ours.push(stock.drain(&scenario.ours, cores).await?);
        } else {
            ours.push(stock.drain(&scenario.ours, cores).await?);
            baseline.push(stock.drain(&scenario.baseline, cores).await?);
        }
        if let (Some(theirs), Some(our)) = (baseline.last(), ours.last()) {
            eprintln!(
                "  run {run}: baseline {:.0}/s, ours {:.0}/s",
                theirs.rate(),
                our.rate()
            );
        }
    }
    Ok(line(scenario, &baseline, &ours))
}

fn line(scenario: &Scenario, baseline: &[Sample], ours: &[Sample]) -> Line {
    let value = |side: &Side, sample: &Sample| match scenario.unit {
        Unit::Events | Unit::Requests => sample.rate(),
        Unit::EventsStreamed => sample.events as f64 / sample.streamed_seconds,
        Unit::Megabytes => sample.rate() * side.backlog.text_bytes() as f64 / 1e6,
    };
    let (their_side, our_side) = (&scenario.baseline, &scenario.ours);
    let pairs = baseline.iter().zip(ours);
    Line {
        scenario: scenario.name.clone(),
        unit: scenario.unit.name(),
        baseline_is: describe(their_side, our_side),
        ours_is: describe(our_side, their_side),
        baseline: median(baseline.iter().map(|s| value(their_side, s))),
        ours: median(ours.iter().map(|s| value(our_side, s))),
        ratio: median(pairs.map(|(theirs, our)| value(our_side, our) / value(their_side, theirs))),
        aim: scenario.aim,
        cpu_aim: scenario.cpu_aim,
        costs: Some(costs(baseline, ours)),
        runs: ours.len(),
        samples: serde_json::json!({
            "backlog": our_side.backlog.describe(),
            "baseline": baseline.iter().map(Sample::to_json).collect::<Vec<_>>(),
            "ours": ours.iter().map(Sample::to_json).collect::<Vec<_>>(),
        }),
        note: stopped(baseline),
    }
}

/// The name of the side's program, with the backlog if the two sides have different backlogs.
fn describe(side: &Side, other: &Side) -> String {
    let who = side.contestant.describe();
    if side.backlog == other.backlog {
        who
    } else {
        format!("{who}: {}", side.backlog.describe())
    }
}

fn stopped(baseline: &[Sample]) -> Option<String> {
    let sample = baseline.iter().find(|sample| !sample.complete)?;
    Some(format!(
        "the baseline was stopped at {:.1} GiB of memory, after {} events",
        sample.program.peak_rss_kib as f64 / f64::from(1 << 20),
        sample.events
    ))
}
