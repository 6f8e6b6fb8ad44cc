//! Maps a sample of a table's rows with the relay's own mapping, to check that the rows can become
//! messages.
//!
//! The description of the table comes from the catalog, in the form in which the stream would
//! describe it. The sample has the rows with the highest ids, or any rows if PostgreSQL cannot sort
//! the ids. The sample leaves payloads out. `pubsub` looks up the topics of the sample.

use std::collections::BTreeSet;

use decoder::{OwnedRelation, Value};
use printable::printable;
use slot_manager::table::is_unique;
use slot_manager::{Finding, Severity, quoted_identifier};
use tokio_postgres::Row;

use crate::capture::table::{self, Description};
use crate::error::{Error, Result};
use crate::event::CommittedAt;
use crate::mapping::{MapError, Mapper, TableSettings};
use crate::ops::finding::{finding, finding_with_remedy, from_error};
use crate::postgres::Sql;

/// Maximum number of rows in the sample, enough to include every usual kind of event.
const SAMPLE: usize = 500;

/// Short, because the sample is optional: do not sort a table whose id has no index.
const SAMPLE_TIMEOUT: &str = "set statement_timeout = '2s'";

/// Replaces the project in topic names if no project is set. The topics are then not looked up.
const NO_PROJECT: &str = "no-project";

/// The findings and topics of one table.
#[derive(Debug, Default)]
pub(super) struct MappingCheck {
    pub(super) findings: Vec<Finding>,
    /// Full names of the topics in the sample and in the settings.
    pub(super) topics: BTreeSet<String>,
}

/// Checks one captured table. Returns nothing for a missing table, because the check of the
/// publication reports it.
pub(super) async fn check(
    sql: &Sql,
    settings: &TableSettings,
    project: &str,
) -> Result<MappingCheck> {
    let Some(described) = table::describe(sql, &settings.table).await? else {
        return Ok(MappingCheck::default());
    };
    let Description { relation, types } = described;
    let project = if project.is_empty() {
        NO_PROJECT
    } else {
        project
    };
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
    let mut topics = plain_topics(settings, project);
    let unique = not_unique(sql, settings, mapper.table_columns().id).await?;
    let by_id = mapper.table_columns().id_has_order;
    let rows = match sample(sql, &relation, settings, by_id).await {
        Ok(rows) => rows,
        Err(error) => {
            let error = Error::from(error);
            let what = format!("no sample of {} could be read: {error}", settings.table);
            let not_sampled = finding(Severity::Info, "events-not-sampled", what);
            let findings = unique.into_iter().chain([not_sampled]).collect();
            return Ok(MappingCheck { findings, topics });
        }
    };
    let mut refused = Vec::new();
    for row in &rows {
        let values: Vec<Value<'_>> = (0..relation.columns.len())
            .map(|i| match row.try_get(i) {
                Ok(Some(text)) => Value::Text(str::as_bytes(text)),
                Ok(None) => Value::Null,
                Err(_) => Value::Text(table::NOT_UTF8),
            })
            .collect();
        match mapper.map_row(&values, CommittedAt::default()) {
            Ok(mapped) => {
                topics.insert(mapped.topic.to_string());
            }
            Err(error) => refused.push(error),
        }
    }
    let mapping = judge(settings, rows.len(), &refused);
    Ok(MappingCheck {
        findings: unique.into_iter().chain([mapping]).collect(),
        topics,
    })
}

/// Warns if two rows can have the same id, because the relay records an event's outcome under its id.
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

/// Returns the topics that the settings name without a column. We know these topics even if the
/// table is empty.
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

/// Reads up to [`SAMPLE`] rows as text, with the columns in the order of the table and null instead
/// of the payload.
async fn sample(
    sql: &Sql,
    relation: &OwnedRelation,
    settings: &TableSettings,
    by_id: bool,
) -> Result<Vec<Row>, tokio_postgres::Error> {
    let payload = settings.columns.payload.as_deref().unwrap_or("payload");
    let id = settings.columns.id.as_deref().unwrap_or("id");
    let columns: Vec<String> = relation
        .columns
        .iter()
        .map(|column| {
            if column.name == payload {
                "null::text".to_owned()
            } else {
                // `format` prints values as the stream sends them. A cast to text prints some types
                // differently.
                let name = quoted_identifier(&column.name);
                // `is not null` would be false for a composite value that contains a null.
                format!("case when {name} is distinct from null then format('%s', {name}) end")
            }
        })
        .collect();
    sql.batch_execute(SAMPLE_TIMEOUT).await?;
    let order = if by_id {
        format!("order by {} desc", quoted_identifier(id))
    } else {
        String::new()
    };
    let statement = format!(
        "select {} from {} {order} limit {SAMPLE}",
        columns.join(", "),
        settings.table
    );
    sql.query(&statement, &[]).await
}

fn judge(settings: &TableSettings, rows: usize, refused: &[MapError]) -> Finding {
    let table = &settings.table;
    let Some(first) = refused.first() else {
        let what = match rows {
            0 => format!("the settings of {table} fit its columns; the table is empty"),
            rows => format!("the settings of {table} fit its columns and {rows} sampled events"),
        };
        return finding(Severity::Ok, "mapping", what);
    };
    let (reason, hint) = match first {
        MapError::Event(event) => {
            let id = event.event_id.as_deref().unwrap_or("unknown");
            let reason = format!("{} (event {})", event.fault, printable(id));
            (reason, first.hint())
        }
        MapError::ColumnMissing { .. } | MapError::Setting { .. } => {
            (first.to_string(), first.hint())
        }
    };
    let what = format!(
        "{} of {rows} sampled events of {table} cannot be published, for example: {reason}",
        refused.len()
    );
    finding_with_remedy(Severity::Warning, "event-invalid", what, hint)
}
