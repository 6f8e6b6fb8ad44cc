//! Sends one of this crate's statements, unnamed and in one round trip.

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

use crate::SlotError;

/// A parameter and its type.
pub(crate) type TypedParameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// Returns every row of the answer. `action` says in an error what we were doing.
pub(crate) async fn all(
    client: &Client,
    action: &'static str,
    statement: &str,
    parameters: &[TypedParameter<'_>],
) -> Result<Vec<Row>, SlotError> {
    let rows = client.query_typed(statement, parameters).await;
    rows.map_err(SlotError::database(action))
}

/// Returns the first row of the answer, if there is one.
pub(crate) async fn first(
    client: &Client,
    action: &'static str,
    statement: &str,
    parameters: &[TypedParameter<'_>],
) -> Result<Option<Row>, SlotError> {
    let rows = all(client, action, statement, parameters).await?;
    Ok(rows.into_iter().next())
}

/// Returns the row of a statement that always returns one row.
pub(crate) async fn single(
    client: &Client,
    action: &'static str,
    statement: &str,
    parameters: &[TypedParameter<'_>],
) -> Result<Row, SlotError> {
    let row = first(client, action, statement, parameters).await?;
    Ok(row.expect("invariant: a select without FROM, or of an aggregate, gives one row"))
}
