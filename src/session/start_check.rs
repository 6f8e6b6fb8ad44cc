//! Checks once, before the first session, whether the settings of every captured table fit the table's
//! columns. Also reads why the previous relay has stopped.
//!
//! The stream describes a table only just before the table's first row, but the relay should find wrong
//! settings earlier. The check ignores all other problems, such as an unreachable server or a missing
//! table. The session reports these problems, and retries if a retry can help.

use std::time::{Duration, Instant};

use crate::capture::table;
use crate::condition::{Condition, State, Trouble};
use crate::error::{Error, Result};
use crate::mapping::{MapError, Mapper};
use crate::postgres::{Sql, connect};
use crate::settings::Settings;
use crate::store::relay_row::shown;

/// Statement timeout of catalogue queries. Short, because this check delays the first session.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns an error if the settings of a captured table do not fit the table's columns. Otherwise returns the trouble
/// that ended the previous relay, if the relay's row has it.
///
/// # Errors
/// `setting-invalid`.
pub(super) async fn settings_fit_the_tables(settings: &Settings) -> Result<Option<Trouble>> {
    let Ok(sql) = connected(settings).await else {
        return Ok(None);
    };
    let said = shown::last_condition(&sql, &settings.slot).await;
    let earlier = said.ok().flatten().and_then(ended_with);
    match first_fault(&sql, settings).await {
        Ok(Some(fault)) => Err(fault.into()),
        Ok(None) | Err(_) => Ok(earlier),
    }
}

async fn connected(settings: &Settings) -> Result<Sql> {
    connect(settings.database()?, "postrider", STATEMENT_TIMEOUT).await
}

/// Returns the trouble that stopped the previous relay, if `said` is the condition of a stopped relay.
fn ended_with(said: Condition) -> Option<Trouble> {
    let lasted = Duration::try_from_secs_f64(said.for_seconds).ok()?;
    (said.state == State::Broken).then_some(())?;
    Some(Trouble {
        code: said.code?.parse().ok()?,
        what: said.what?,
        hint: said.hint.unwrap_or_default(),
        since: Instant::now().checked_sub(lasted)?,
    })
}

async fn first_fault(sql: &Sql, settings: &Settings) -> Result<Option<MapError>, Error> {
    for table in &settings.tables {
        let Some(described) = table::describe(sql, &table.table).await? else {
            continue;
        };
        let (relation, types) = (&described.relation, &described.types);
        let project = settings.project()?;
        match Mapper::resolve(relation, types, table, &table.identity(), project) {
            Err(fault @ MapError::Setting { .. }) => return Ok(Some(fault)),
            // The check of the publication reports a missing column in more detail.
            Ok(_) | Err(MapError::ColumnMissing { .. } | MapError::Event(_)) => {}
        }
    }
    Ok(None)
}
