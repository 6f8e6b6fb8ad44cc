//! Reads and writes `outbox.capture`, which has one row per captured table.

mod adoption;
mod id_suffixes;
pub(crate) mod recovery_progress;
mod resolved;

use std::collections::BTreeMap;

use decoder::Lsn;
use slot_manager::{QualifiedName, SlotName};
use tokio_postgres::types::{PgLsn, ToSql};
use tokio_postgres::{GenericClient, Row};

use crate::error::{Code, Error, Result};
use crate::postgres::Snapshot;
pub(crate) use adoption::{adopt, read_as_adopted};
pub(crate) use id_suffixes::IdSuffixes;
pub(crate) use recovery_progress::RecoveryProgress;
pub(crate) use resolved::{Resolved, resolve};

const SELECT: &str = "\
    SELECT identity, schema_name, table_name, table_oid, slot, since::text, floor::text, floor_seq, \
        numbering, partitions, has_inserted_xid, added_xids::text[], recorded_from::text, \
        publication, since_lsn, id_suffixes::text, adoptions, detached, unread::text, \
        recovery_progress::text, uncaptured::text, settled::text \
    FROM outbox.capture ORDER BY identity";

/// The columns of a new row, each with the cast of its parameter.
const INSERTED: [(&str, &str); 16] = [
    ("identity", ""),
    ("schema_name", ""),
    ("table_name", ""),
    ("table_oid", ""),
    ("slot", ""),
    ("since", "::text::pg_snapshot"),
    ("floor", "::text::xid8"),
    ("floor_seq", ""),
    ("numbering", ""),
    ("partitions", ""),
    ("has_inserted_xid", ""),
    ("instance", ""),
    ("publication", ""),
    ("since_lsn", ""),
    ("id_suffixes", "::text::jsonb"),
    ("recorded_from", "::text::xid8"),
];

/// Updates the table's name and OID if the recorded OID is still `$7`. Otherwise another session has already
/// updated the row. `captured_at` becomes the time at which the record got its present name (see `adoption`).
const MOVE: &str = "\
    UPDATE outbox.capture SET schema_name = $2, table_name = $3, table_oid = $4, captured_at = now(), \
        partitions = CASE WHEN table_oid = $4 THEN partitions END, \
        id_suffixes = $5::text::jsonb, detached = $6 \
    WHERE identity = $1 AND table_oid = $7";

const ADD_XIDS: &str = "\
    UPDATE outbox.capture SET has_inserted_xid = true, added_xids = $2::text[]::xid8[] \
    WHERE identity = $1";

/// Gives tables to slot `$2`. If the previous owner did not record published events, rows below the floor may
/// lack a record. The statement then raises `recorded_from` to the floor, to tell the new owner that records
/// of these rows may be missing.
const TAKE_OVER: &str = "\
    UPDATE outbox.capture c SET slot = $2, since_lsn = NULL, \
        recorded_from = CASE WHEN EXISTS ( \
            SELECT FROM outbox.relay r WHERE r.slot = c.slot AND r.dispatch = 'exceptions') \
            THEN greatest(floor, recorded_from) ELSE recorded_from END \
    WHERE slot <> $2 AND identity = ANY ($1)";

const FULL_FROM_HERE: &str = "\
    UPDATE outbox.capture SET recorded_from = greatest(floor, recorded_from) WHERE slot = $1";

/// Former tables whose rows all have an outcome, by OID. The position is the end of the WAL when the relay found
/// this out. The commits of all their rows lie before this position.
pub(crate) type SettledTables = BTreeMap<u32, Lsn>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CaptureRecord {
    /// The table's name `schema.table` when it was first captured (`schema.table#2` and so on if another
    /// record had that name already). Event ids are derived from the identity.
    pub(crate) identity: String,
    /// The table's current name.
    pub(crate) table: QualifiedName,
    pub(crate) oid: u32,
    /// The slot that owns the table. The relay on this slot publishes the table's rows.
    pub(crate) slot: String,
    /// The snapshot with which the capture of the table began. Rows visible in this snapshot are never
    /// published. `None` if all rows are published, however old they are.
    pub(crate) since: Option<Snapshot>,
    /// A transaction number: all rows of older transactions are resolved.
    pub(crate) floor: u64,
    /// Rows up to this `seq` usually belong to transactions before `floor`. The number is only a hint for the
    /// start of a scan, because a service may choose its own `seq`, or draw the number long before it inserts
    /// the row.
    pub(crate) floor_seq: Option<i64>,
    /// The sequence that filled the column `seq` when `floor_seq` was recorded. If another sequence has
    /// replaced it since, new rows may have lower numbers, and `floor_seq` is no longer valid.
    pub(crate) numbering: Option<String>,
    /// The OIDs of the table's partitions when the capture began, or when an audit or a recovery last
    /// recorded them, ascending and separated by commas. `None` if they are unknown.
    pub(crate) partitions: Option<String>,
    /// Whether the table has the column `inserted_xid`.
    pub(crate) has_inserted_xid: bool,
    /// The transactions that added the column `inserted_xid`. Rows that are older than the column have one of
    /// these transactions as their `inserted_xid`, not the transaction that inserted them. Empty unless the
    /// column was added after the capture began.
    pub(crate) added_xids: Vec<u64>,
    /// A transaction number. All rows of older transactions are resolved, but some of them may have been
    /// published without a record. So a missing record says nothing about these rows.
    pub(crate) recorded_from: u64,
    /// Fingerprint of the publication when the capture began. `None` if an older version of Postrider
    /// wrote the record.
    pub(crate) publication: Option<String>,
    /// The WAL position at which a command began the capture. A slot that starts at or before this position
    /// streams all rows that we must publish. `None` if a relay or an older version of Postrider began the
    /// capture. Also `None` once the table was given to another slot or adopted.
    pub(crate) since_lsn: Option<Lsn>,
    /// An event id is computed from the identity, a suffix and the row's id. A table that was dropped and created again
    /// keeps this record, but its rows need other event ids than the rows of the earlier table. So each later table has
    /// a suffix of its own; the first has none. Only a copy of a table keeps the suffix of the original.
    pub(crate) id_suffixes: IdSuffixes,
    /// The OIDs of tables that no longer belong to the captured table, but may still have unresolved rows:
    /// former partitions, and physical tables that were the captured table before. Also new partitions that no audit
    /// or recovery has covered yet (`claim::noted_partitions`), which have no effect while they are attached.
    pub(crate) detached: Vec<u32>,
    /// The tables of `detached` that a recovery or the auditor could not read, each with the floor from which
    /// it must be read later.
    pub(crate) unread: BTreeMap<u32, u64>,
    /// Partitions that were captured until the settings named another table: the OID of each, and its floor
    /// at that time. A relay that captures such a partition again publishes its rows from this floor on.
    pub(crate) uncaptured: BTreeMap<u32, u64>,
    /// Tables that were in `detached` until all their rows had an outcome. Audits and recoveries no longer read
    /// these tables. The relay still has to know them, for two reasons. An event in quarantine may need its row
    /// there. And the rows come back if the table is attached again or gets its name back.
    pub(crate) settled: SettledTables,
    /// Whether the record was adopted, usually after a dump was restored. The `xmin` of a restored row is the
    /// transaction of the restore, not of the original insert.
    pub(crate) is_adopted: bool,
    /// The rows of the table that an unfinished recovery has resolved.
    pub(crate) recovery_progress: Option<RecoveryProgress>,
}

impl CaptureRecord {
    fn from_row(row: &Row) -> Result<Self> {
        let since: Option<&str> = row.get(5);
        let since_lsn: Option<PgLsn> = row.get(14);
        let added: Vec<&str> = row.get(11);
        Ok(Self {
            identity: row.get(0),
            table: QualifiedName {
                schema: row.get(1),
                name: row.get(2),
            },
            oid: row.get(3),
            slot: row.get(4),
            since: since.map(str::parse).transpose()?,
            floor: xid(row.get(6))?,
            floor_seq: row.get(7),
            numbering: row.get(8),
            partitions: row.get(9),
            has_inserted_xid: row.get(10),
            added_xids: added.into_iter().map(xid).collect::<Result<_>>()?,
            recorded_from: xid(row.get(12))?,
            publication: row.get(13),
            since_lsn: since_lsn.map(|lsn| Lsn::new(lsn.into())),
            id_suffixes: IdSuffixes::read(row.get(3), row.get(15), row.get(16))?,
            detached: row.get(17),
            unread: floors(row.get(18))?,
            recovery_progress: RecoveryProgress::read(row.get(19))?,
            uncaptured: floors(row.get(20))?,
            settled: settled(row.get(21))?,
            is_adopted: row.get::<_, i32>(16) > 0,
        })
    }

    /// Returns the OIDs of tables that may have unresolved rows but are no longer partitions.
    /// `partitions` has the OIDs of the table's present partitions.
    pub(crate) fn former_partitions(&self, partitions: &str) -> Vec<u32> {
        let oids = |list: &str| -> Vec<u32> {
            list.split(',').filter_map(|oid| oid.parse().ok()).collect()
        };
        let now = oids(partitions);
        let mut former = self.detached.clone();
        former.extend(self.partitions.as_deref().map(oids).unwrap_or_default());
        former.retain(|oid| !now.contains(oid));
        former.sort_unstable();
        former.dedup();
        former
    }

    /// Whether the table with this OID belongs or belonged to the captured table: as one of its partitions, or
    /// because it was the captured table before.
    pub(crate) fn had(&self, oid: u32) -> bool {
        self.id_suffixes.knows(oid) || self.former_partitions("").contains(&oid)
    }
}

/// Reads the records of all slots.
///
/// # Errors
/// `schema-missing` when `outbox.capture` does not exist; database errors.
pub(crate) async fn read(sql: &impl GenericClient) -> Result<Vec<CaptureRecord>> {
    let rows = sql.query(SELECT, &[]).await?;
    rows.iter().map(CaptureRecord::from_row).collect()
}

/// Returns the lowest [`CaptureRecord::since_lsn`] of the slot's tables.
pub(crate) fn since_lsn(records: &[CaptureRecord], slot: &SlotName) -> Option<Lsn> {
    let of_slot = records.iter().filter(|known| known.slot == slot.as_str());
    of_slot.filter_map(|known| known.since_lsn).min()
}

/// Inserts the records of newly captured tables in one statement, so that a failure leaves none of them behind: the
/// identity of a record may depend on the other new tables. Skips records that another relay on the same slot has
/// inserted.
///
/// # Errors
/// Database errors.
pub(crate) async fn insert(
    sql: &impl GenericClient,
    records: &[CaptureRecord],
    instance: &str,
) -> Result<()> {
    if records.is_empty() {
        return Ok(());
    }
    let mut values: Vec<Box<dyn ToSql + Sync + Send + '_>> = Vec::new();
    for record in records {
        let row: [Box<dyn ToSql + Sync + Send + '_>; INSERTED.len()] = [
            Box::new(&record.identity),
            Box::new(&record.table.schema),
            Box::new(&record.table.name),
            Box::new(record.oid),
            Box::new(&record.slot),
            Box::new(record.since.as_ref().map(Snapshot::to_string)),
            Box::new(record.floor.to_string()),
            Box::new(record.floor_seq),
            Box::new(&record.numbering),
            Box::new(&record.partitions),
            Box::new(record.has_inserted_xid),
            Box::new(instance),
            Box::new(&record.publication),
            Box::new(record.since_lsn.map(|lsn| PgLsn::from(lsn.as_u64()))),
            Box::new(record.id_suffixes.to_json()),
            Box::new(record.recorded_from.to_string()),
        ];
        values.extend(row);
    }
    let parameters = values.iter().map(|value| &**value as &(dyn ToSql + Sync));
    let parameters: Vec<_> = parameters.collect();
    sql.execute(&insert_sql(records.len()), &parameters).await?;
    Ok(())
}

/// Returns the statement that inserts this number of rows.
fn insert_sql(rows: usize) -> String {
    let columns: Vec<&str> = INSERTED.iter().map(|(column, _)| *column).collect();
    let row = |n: usize| {
        let parameters = INSERTED.iter().zip(n * INSERTED.len() + 1..);
        let parameters = parameters.map(|((_, cast), number)| format!("${number}{cast}"));
        format!("({})", parameters.collect::<Vec<_>>().join(", "))
    };
    let rows: Vec<String> = (0..rows).map(row).collect();
    format!(
        "INSERT INTO outbox.capture ({}) VALUES {} ON CONFLICT DO NOTHING",
        columns.join(", "),
        rows.join(", ")
    )
}

/// Adds the partitions `new` to `detached`, except those that an audit has added to `partitions` meanwhile.
///
/// # Errors
/// Database errors.
pub(crate) async fn note_partitions(
    sql: &impl GenericClient,
    record: &CaptureRecord,
    new: &[u32],
) -> Result<()> {
    let statement = "\
        UPDATE outbox.capture SET detached = array( \
            SELECT DISTINCT o FROM unnest(detached || $3) o \
            WHERE o <> ALL (coalesce(string_to_array(partitions, ',')::oid[], '{}')) ORDER BY o) \
        WHERE identity = $1 AND table_oid = $2";
    let parameters: [&(dyn ToSql + Sync); 3] = [&record.identity, &record.oid, &new];
    sql.execute(statement, &parameters).await?;
    Ok(())
}

/// Updates the table's name and OID after one of two changes: the table was renamed, or another table got the
/// recorded name. Does nothing if the record no longer has the OID `before`.
///
/// # Errors
/// Database errors.
pub(crate) async fn moved(
    sql: &impl GenericClient,
    record: &CaptureRecord,
    before: u32,
) -> Result<()> {
    let id_suffixes = record.id_suffixes.to_json();
    let parameters: [&(dyn ToSql + Sync); 7] = [
        &record.identity,
        &record.table.schema,
        &record.table.name,
        &record.oid,
        &id_suffixes,
        &record.detached,
        &before,
    ];
    sql.execute(MOVE, &parameters).await?;
    Ok(())
}

/// Records that the column `inserted_xid` was added after the capture began.
///
/// # Errors
/// Database errors.
pub(crate) async fn xids_added(sql: &impl GenericClient, record: &CaptureRecord) -> Result<()> {
    let xids: Vec<String> = record.added_xids.iter().map(u64::to_string).collect();
    sql.execute(ADD_XIDS, &[&record.identity, &xids]).await?;
    Ok(())
}

/// Makes the relay also publish the rows that existed before the capture of the table began.
///
/// # Errors
/// Database errors.
pub(crate) async fn capture_all(sql: &impl GenericClient, record: &CaptureRecord) -> Result<()> {
    const STATEMENT: &str = "\
        UPDATE outbox.capture SET since = NULL, floor = '0', floor_seq = NULL, numbering = NULL, \
            recovery_progress = NULL, uncaptured = '{}' \
        WHERE identity = $1";
    sql.execute(STATEMENT, &[&record.identity]).await?;
    Ok(())
}

/// Sets `recorded_from` of the slot's tables to their floors. Called when the relay begins to record every
/// event. At that time all rows below the floors are resolved, but some of them have no record.
///
/// # Errors
/// Database errors.
pub(crate) async fn full_from_here(sql: &impl GenericClient, slot: &SlotName) -> Result<()> {
    sql.execute(FULL_FROM_HERE, &[&slot.as_str()]).await?;
    Ok(())
}

/// Makes the slot the owner of the tables with these identities.
///
/// # Errors
/// Database errors.
pub(crate) async fn take_over(
    sql: &impl GenericClient,
    slot: &SlotName,
    identities: &[String],
) -> Result<()> {
    sql.execute(TAKE_OVER, &[&identities, &slot.as_str()])
        .await?;
    Ok(())
}

/// Parses a JSON object that maps the OIDs of tables to their floors.
fn floors(json: &str) -> Result<BTreeMap<u32, u64>> {
    serde_json::from_str(json).map_err(|e| {
        let what = "outbox.capture holds an invalid list of floors";
        Error::new(Code::PostgresStatement, what).caused_by(e)
    })
}

fn settled(json: &str) -> Result<SettledTables> {
    let invalid = || {
        let what = "outbox.capture holds an invalid list of settled tables";
        Error::new(Code::PostgresStatement, what)
    };
    let tables: BTreeMap<u32, String> =
        serde_json::from_str(json).map_err(|e| invalid().caused_by(e))?;
    let tables = tables.into_iter().map(|(oid, position)| {
        let position = position.parse().map_err(|e| invalid().caused_by(e));
        Ok((oid, position?))
    });
    tables.collect()
}

fn xid(text: &str) -> Result<u64> {
    text.parse().map_err(|e| {
        let what = format!("outbox.capture holds an invalid transaction id {text:?}");
        Error::new(Code::PostgresStatement, what).caused_by(e)
    })
}
