//! Reads names that belong to the whole cluster, such as those of roles and databases.
//!
//! PostgreSQL stores such a name in the encoding of the database where somebody created it, and never converts
//! it. So in a UTF-8 database, the name of another database can consist of bytes that are not UTF-8.

use std::error::Error;

use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, Type};

use crate::SlotError;

struct ShownName(String);

impl<'a> FromSql<'a> for ShownName {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(String::from_utf8_lossy(raw).into_owned()))
    }

    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::TEXT | Type::NAME)
    }
}

/// Reads the name of a role, of a database or of a prepared transaction, to show it. Replaces bytes that are not
/// UTF-8, so such a name never makes a statement fail.
pub(crate) fn shown(row: &Row, column: &str) -> Result<Option<String>, SlotError> {
    let name: Option<ShownName> = row
        .try_get(column)
        .map_err(SlotError::database("reading a name"))?;
    Ok(name.map(|name| name.0))
}
