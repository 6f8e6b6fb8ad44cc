//! Notices that a configured name belongs to another table than when the session claimed the tables: a table was
//! created again, or tables have swapped their names. The session then has to end, because it would publish rows
//! under the settings of another table. The next session claims the tables under their present names, and thereby
//! decides which topics and event ids their rows get.

use decoder::OwnedRelation;
use slot_manager::{QualifiedName, table};

use crate::capture::table::is_current_apart;
use crate::error::{Code, Error, Result};
use crate::mapping::TableSettings;
use crate::postgres::{Sql, Target};

/// Returns an error if a configured name now belongs to another table than the one that the session claimed under this
/// name. `claimed` has the OIDs of the claimed tables, in the order of `tables`. A missing table is not an error here.
///
/// # Errors
/// `slot-busy`; database errors.
pub(crate) async fn refuse_replaced(
    sql: &Sql,
    tables: &[TableSettings],
    claimed: &[u32],
) -> Result<()> {
    for (TableSettings { table: name, .. }, claimed) in tables.iter().zip(claimed) {
        let now = table::oid(sql, name).await?;
        if now.is_some_and(|now| now != *claimed) {
            return Err(replaced(name));
        }
    }
    Ok(())
}

/// Checks a table that the stream describes under a configured name, but with another OID than the session claimed
/// under that name. Reads the catalogue over a new connection. There are two cases:
///
/// - The described table has the name now. Returns an error, because the next session must claim this table.
/// - The described table was dropped or renamed after its rows were written. Returns no error.
///
/// # Errors
/// `slot-busy`; connection and database errors.
pub(crate) async fn refuse_current(target: &Target, relation: &OwnedRelation) -> Result<()> {
    if is_current_apart(target, relation).await? {
        let name = QualifiedName::new(&*relation.namespace, &*relation.name);
        return Err(replaced(&name));
    }
    Ok(())
}

fn replaced(name: &QualifiedName) -> Error {
    let what = format!("{name} is another table than when this session began");
    Error::new(Code::SlotBusy, what).hint("no action needed: a new session captures its rows")
}
