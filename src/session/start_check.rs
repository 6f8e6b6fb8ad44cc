//! Checks once, before the first session, whether the settings of every captured table fit the table's
//! columns.
//!
//! The stream describes a table only just before its first row, but the relay should find wrong
//! settings earlier. All other problems, such as an unreachable server or a missing table, are left to
//! the session, which retries if a retry can help.

use std::time::Duration;

use crate::capture::table;
use crate::error::{Error, Result};
use crate::mapping::{MapError, Mapper};
use crate::postgres::connect;
use crate::settings::Settings;

/// Statement timeout of catalog queries.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns an error if the settings of a captured table do not fit the table's columns.
///
/// # Errors
/// `setting-invalid`.
pub(super) async fn settings_fit_the_tables(settings: &Settings) -> Result<()> {
    let Ok(Some(fault)) = first_fault(settings).await else {
        return Ok(());
    };
    Err(fault.into())
}

async fn first_fault(settings: &Settings) -> Result<Option<MapError>, Error> {
    let sql = connect(settings.database()?, "postrider", STATEMENT_TIMEOUT).await?;
    for table in &settings.tables {
        let Some(described) = table::describe(&sql, &table.table).await? else {
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
