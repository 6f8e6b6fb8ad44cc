//! Maps a sample of a table's rows with the relay's own mapping, to check that the rows can become
//! messages.
//!
//! The description of the table comes from the catalogue, in the form that the replication stream uses.
//! `sample` reads the rows, and `pubsub` looks up their topics.

use std::collections::BTreeSet;

use printable::printable;
use slot_manager::table::is_unique;
use slot_manager::{Finding, Severity, quoted_identifier};

use super::sample::{SampledTable, TableSample};
use crate::capture::claim::Captured;
use crate::capture::table::{self, Description};
use crate::error::{Error, Result};
use crate::event::CommittedAt;
use crate::mapping::{MapError, Mapper, TableSettings};
use crate::ops::finding::{finding, finding_with_remedy, from_error};
use crate::postgres::Sql;
use crate::settings::{OnBadEvent, Settings};

/// The project in topic names if no project is set. The check then does not look the topics up.
const NO_PROJECT: &str = "no-project";

/// The findings and topics of one table. The topics have their full names.
#[derive(Debug, Default)]
pub(super) struct MappingCheck {
    pub(super) findings: Vec<Finding>,
    /// The topics of events that wait for delivery.
    pub(super) waiting_topics: BTreeSet<String>,
    /// The topics of the other sampled events, and the configured topics.
    pub(super) topics: BTreeSet<String>,
}

/// An event of the sample that cannot become a message.
struct RefusedEvent {
    error: MapError,
    /// Whether the event waits for delivery.
    waits: bool,
}

/// Checks one captured table. Returns nothing for a missing table, because the check of the
/// publication reports it. `captured` is the table with its capture record, if that is known.
pub(super) async fn check(
    sql: &Sql,
    all: &Settings,
    settings: &TableSettings,
    captured: Option<&Captured>,
) -> Result<MappingCheck> {
    let Some(described) = table::describe(sql, &settings.table).await? else {
        return Ok(MappingCheck::default());
    };
    let Description { relation, types } = described;
    let project = all.project().unwrap_or(NO_PROJECT);
    let mut mapper =
        match Mapper::resolve(&relation, &types, settings, &settings.identity(), project) {
            Ok(mapper) => mapper,
            Err(error) => {
                let findings = vec![from_error(&Error::from(error))];
                return Ok(MappingCheck {
                    findings,
                    ..MappingCheck::default()
                });
            }
        };
    let mut checked = MappingCheck {
        topics: plain_topics(settings, project),
        ..MappingCheck::default()
    };
    let unique = not_unique(sql, settings, mapper.table_columns().id).await?;
    checked.findings.extend(unique);
    let sampled = SampledTable::new(sql, &relation, settings, &mapper, captured).await;
    let sample = match sampled.read().await {
        Ok(sample) => sample,
        Err(error) => {
            let what = format!("no sample of {} could be read", settings.table);
            checked.findings.push(not_sampled(what, error));
            return Ok(checked);
        }
    };
    let refused = checked.add_topics(&mut mapper, &sample);
    let judged = judge(settings, all.on_bad_event, sample.rows.len(), &refused);
    checked.findings.push(judged);
    if let Some(error) = sample.waiting_unread {
        let what = format!(
            "the events of {} that wait could not be read",
            settings.table
        );
        checked.findings.push(not_sampled(what, error));
    }
    Ok(checked)
}

impl MappingCheck {
    /// Adds the topics of the sample. Returns the events that cannot become messages.
    fn add_topics(&mut self, mapper: &mut Mapper, sample: &TableSample) -> Vec<RefusedEvent> {
        let mut refused = Vec::new();
        for row in &sample.rows {
            match mapper.map_row(&row.values(), CommittedAt::default()) {
                Ok(mapped) if row.waits => {
                    self.waiting_topics.insert(mapped.topic.to_string());
                }
                Ok(mapped) => {
                    self.topics.insert(mapped.topic.to_string());
                }
                Err(error) => refused.push(RefusedEvent {
                    error,
                    waits: row.waits,
                }),
            }
        }
        for row in &sample.topics {
            let topic = mapper.topic_of(&row.values());
            self.waiting_topics
                .extend(topic.map(|topic| topic.to_string()));
        }
        refused
    }
}

fn not_sampled(what: String, error: tokio_postgres::Error) -> Finding {
    let error = Error::from(error);
    finding(
        Severity::Info,
        "events-not-sampled",
        format!("{what}: {error}"),
    )
}

/// Warns if two rows can have the same id. The relay records outcomes by id, so the record of the first row
/// would also count as the record of the second.
async fn not_unique(sql: &Sql, settings: &TableSettings, id: &str) -> Result<Option<Finding>> {
    let table = &settings.table;
    let is_unique = is_unique(sql, table, id).await?;
    Ok((is_unique == Some(false)).then(|| {
        finding_with_remedy(
            Severity::Warning,
            "id-not-unique",
            format!(
                "two rows of {table} can have the same {id}: the second event may then count as \
                 delivered although only the first one was published"
            ),
            format!(
                "create unique index concurrently on {table} ({})",
                quoted_identifier(id)
            ),
        )
    }))
}

/// Returns the configured topics whose names do not depend on a column. These topics are known even if
/// the table is empty.
fn plain_topics(settings: &TableSettings, project: &str) -> BTreeSet<String> {
    let template = Some(&settings.topic).filter(|topic| topic.columns().next().is_none());
    let plain = template.map(ToString::to_string);
    let full = |topic: String| {
        if topic.contains('/') {
            topic
        } else {
            format!("projects/{project}/topics/{topic}")
        }
    };
    plain
        .into_iter()
        .chain(settings.topic_rules.values().cloned())
        .map(full)
        .collect()
}

fn judge(
    settings: &TableSettings,
    on_bad_event: OnBadEvent,
    rows: usize,
    refused: &[RefusedEvent],
) -> Finding {
    let table = &settings.table;
    let waiting = refused.iter().find(|event| event.waits);
    let Some(first) = waiting.or(refused.first()) else {
        let what = match rows {
            0 => format!("the settings of {table} fit its columns; the table is empty"),
            rows => format!("the settings of {table} fit its columns and {rows} sampled events"),
        };
        return finding(Severity::Ok, "mapping", what);
    };
    let (reason, hint) = match &first.error {
        MapError::Event(event) => {
            let id = event.event_id.as_deref().unwrap_or("unknown");
            let reason = format!("{} (event {})", event.fault, printable(id));
            (reason, first.error.hint())
        }
        error @ (MapError::ColumnMissing { .. } | MapError::Setting { .. }) => {
            (error.to_string(), error.hint())
        }
    };
    let halts = first.waits && on_bad_event == OnBadEvent::Halt;
    let (severity, waits) = match (first.waits, halts) {
        (_, true) => (
            Severity::Error,
            ", and the relay stops at such an event (on_bad_event = halt)",
        ),
        (true, false) => (Severity::Warning, ", and waits for delivery"),
        (false, false) => (Severity::Warning, ""),
    };
    let what = format!(
        "{} of {rows} sampled events of {table} cannot be published, for example: {reason}{waits}",
        refused.len()
    );
    finding_with_remedy(severity, "event-invalid", what, hint)
}
