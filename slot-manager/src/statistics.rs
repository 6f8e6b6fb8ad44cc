//! Counts the rows inserted into tables, from PostgreSQL's cumulative statistics.
//!
//! The statistics lag behind by up to a second, and a crash of the server resets them. So use them
//! for rates, not for exact counts.

use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::slot::get;
use crate::{QualifiedName, SlotError, sql};

/// Counts the rows inserted into these tables and their partitions since the statistics were reset.
/// A table that does not exist counts as empty.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn inserted_rows(client: &Client, tables: &[QualifiedName]) -> Result<u64, SlotError> {
    let names: Vec<String> = tables.iter().map(ToString::to_string).collect();
    let rows = client
        .query_typed(sql::INSERTED_ROWS, &[(&names, Type::TEXT_ARRAY)])
        .await
        .map_err(SlotError::database("counting inserted rows"))?;
    let inserted: i64 = match rows.first() {
        Some(row) => get(row, "rows")?,
        None => 0,
    };
    Ok(inserted.unsigned_abs())
}
