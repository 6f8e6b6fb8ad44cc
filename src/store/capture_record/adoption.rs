//! Adopts the capture records of another cluster, or of a later state of this server.

use tokio_postgres::GenericClient;

use super::{CaptureRecord, read};
use crate::error::Result;

/// An SQL expression for the OID of a record's table, for records that come from another cluster. Tables get other
/// OIDs when a dump is restored, so the expression looks up the table by the recorded name. After a rotation, two
/// records may have one name: the table belongs to the record that got the name last. If no table belongs to the
/// record, the result is the recorded OID, or 0 if that OID now belongs to the table of another record.
const OID_HERE: &str = "\
    coalesce(CASE WHEN c.identity = ( \
            SELECT k.identity FROM outbox.capture k \
            WHERE (k.schema_name, k.table_name) = (c.schema_name, c.table_name) \
            ORDER BY k.captured_at DESC, k.identity = k.schema_name || '.' || k.table_name LIMIT 1) \
        THEN pg_catalog.to_regclass(pg_catalog.format('%I.%I', c.schema_name, c.table_name))::oid END, \
        CASE WHEN c.table_oid NOT IN ( \
            SELECT o.oid FROM outbox.capture k, \
                pg_catalog.to_regclass(pg_catalog.format('%I.%I', k.schema_name, k.table_name)) o (oid) \
            WHERE o.oid IS NOT NULL) THEN c.table_oid ELSE 0::oid END)";

/// An SQL expression for the suffix of the table `table_oid`. It must have the same value as
/// [`IdSuffixes::of`](super::IdSuffixes::of) for this OID.
const SUFFIX: &str = "\
    CASE WHEN id_suffixes IS NULL THEN '' ELSE coalesce(id_suffixes ->> table_oid::text, \
        '@' || CASE WHEN adoptions > 0 THEN adoptions || '.' ELSE '' END || table_oid) END";

/// Resets the floors of all records and replaces their OIDs, because the values from another cluster or from a later
/// state of this server are not valid here. The next audit or recovery then covers all rows except those that `since`
/// excludes.
///
/// `keeps_detached` says that the records come from a later state of this database. The recorded OIDs of former tables
/// may then be valid, so the next audit or recovery also covers these tables:
///
/// - the recorded partitions that are no longer part of their table
/// - the settled tables, because the outcomes of their rows may have been recorded only in the later state
///
/// # Errors
/// Database errors.
pub(crate) async fn adopt(sql: &impl GenericClient, keeps_detached: bool) -> Result<()> {
    let statement = format!(
        "UPDATE outbox.capture c SET floor = '0', floor_seq = NULL, numbering = NULL, \
             partitions = NULL, unread = '{{}}', since_lsn = NULL, \
             detached = CASE WHEN $1 THEN array( \
                 SELECT DISTINCT o FROM unnest( \
                     detached || coalesce(string_to_array(partitions, ',')::oid[], '{{}}') \
                         || array(SELECT k::oid FROM jsonb_object_keys(settled) k)) o ORDER BY o) \
                 ELSE '{{}}' END, \
             settled = '{{}}', \
             uncaptured = CASE WHEN $1 THEN ( \
                 SELECT coalesce(jsonb_object_agg(u.key, 0), '{{}}') FROM jsonb_each(uncaptured) u) \
                 ELSE '{{}}' END, \
             recorded_from = '0', recovery_progress = NULL, adoptions = adoptions + 1, \
             id_suffixes = CASE WHEN $1 THEN coalesce(id_suffixes, '{{}}') ELSE '{{}}' END \
                 || jsonb_build_object(({OID_HERE})::text, {SUFFIX}), table_oid = {OID_HERE}"
    );
    sql.execute(&statement, &[&keeps_detached]).await?;
    Ok(())
}

/// Reads all records, and replaces their OIDs with those that [`adopt`] will set.
///
/// # Errors
/// The errors of [`read`].
pub(crate) async fn read_as_adopted(sql: &impl GenericClient) -> Result<Vec<CaptureRecord>> {
    let statement = format!("SELECT identity, {OID_HERE} FROM outbox.capture c");
    let oids = sql.query(&statement, &[]).await?;
    let oid = |identity: &str| {
        let row = oids.iter().find(|row| row.get::<_, &str>(0) == identity);
        row.map_or(0, |row| row.get(1))
    };
    let records = read(sql).await?.into_iter().map(|record| CaptureRecord {
        oid: oid(&record.identity),
        is_adopted: true,
        ..record
    });
    Ok(records.collect())
}
