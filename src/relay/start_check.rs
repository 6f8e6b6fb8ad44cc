//! What is looked at once, before the first session: whether the settings of every captured table fit
//! its columns.
//!
//! The stream describes a table before its first row only, and settings that cannot be right must not
//! wait for that. Whatever else is wrong, such as a server that is away or a table that is missing, is
//! the session's to find, which tries again where that helps.

use std::time::Duration;

use super::Relay;
use crate::error::{Error, Result};
use crate::map::{MapError, Mapper};
use crate::postgres::{answer_within, connect};
use crate::table;

/// For the look at the catalog.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Of a connection that leads nowhere; the server's own limit comes first.
const LIMIT: Duration = Duration::from_secs(12);

/// Looks at every captured table.
///
/// # Errors
/// `setting-invalid`.
pub(super) async fn settings_fit_the_tables(relay: &Relay) -> Result<()> {
    let Ok(Some(fault)) = answer_within(LIMIT, first_fault(relay)).await else {
        return Ok(());
    };
    Err(fault.into())
}

async fn first_fault(relay: &Relay) -> Result<Option<MapError>, Error> {
    let settings = &relay.settings;
    let sql = connect(settings.database()?, "postrider", STATEMENT_TIMEOUT).await?;
    for table in &settings.tables {
        let Some(described) = table::describe(&sql, &table.table).await? else {
            continue;
        };
        let (relation, types) = (&described.relation, &described.types);
        let project = settings.project()?;
        match Mapper::resolve(relation, types, table, &table.identity(), project) {
            Err(fault @ MapError::Setting { .. }) => return Ok(Some(fault)),
            // The look at the publication says more of a missing column.
            Ok(_) | Err(MapError::ColumnMissing { .. } | MapError::Event(_)) => {}
        }
    }
    Ok(None)
}
