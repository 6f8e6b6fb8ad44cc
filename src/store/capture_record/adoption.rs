//! Adopts the capture records of another cluster, or of a later state of this server.

use tokio_postgres::GenericClient;

use super::{CaptureRecord, read};
use crate::error::Result;

/// Defines `here`: the tables that exist under a recorded name, each with the identity of its record. `$1` says whether
/// the records come from a later state of this server.
///
/// - Records of another cluster: tables get other OIDs when a dump is restored, so only the name counts. After a
///   rotation, two records may have one name. The table belongs to the record that got the name last.
/// - Records of a later state: in that state, the table may have been renamed or recreated. So an existing table belongs
///   to the record that lists its OID. If none does, the name decides.
const HERE: &str = "\
    here AS ( \
        SELECT t.oid, (SELECT k.identity FROM named k \
            WHERE k.named_oid = t.oid OR $1 AND (k.table_oid = t.oid OR k.id_suffixes ? t.oid::text) \
            ORDER BY ($1 AND k.table_oid = t.oid) DESC, ($1 AND coalesce(k.id_suffixes ? t.oid::text, false)) DESC, \
                k.captured_at DESC, k.identity = k.schema_name || '.' || k.table_name DESC LIMIT 1) AS identity \
        FROM (SELECT DISTINCT named_oid FROM named WHERE named_oid IS NOT NULL) t (oid))";

/// Defines `named`: the records, each with the OID of the table that has the recorded name now.
const NAMED: &str = "\
    named AS ( \
        SELECT c.*, pg_catalog.to_regclass(pg_catalog.format('%I.%I', c.schema_name, c.table_name))::oid AS named_oid \
        FROM outbox.capture c)";

/// An SQL expression for the OID of the table of the record `c`. If no existing table belongs to the record, the result
/// is the recorded OID for a later state, and 0 for another cluster, where any table may have the recorded OID.
const OID_HERE: &str = "\
    coalesce((SELECT here.oid FROM here WHERE here.identity = c.identity \
              ORDER BY here.oid = c.table_oid DESC, here.oid LIMIT 1), \
        CASE WHEN $1 AND c.table_oid NOT IN (SELECT here.oid FROM here) THEN c.table_oid ELSE 0::oid END)";

/// An SQL expression for the suffix of the table `table_oid`. It must have the same value as
/// [`IdSuffixes::of`](super::IdSuffixes::of) for this OID.
const SUFFIX: &str = "\
    CASE WHEN id_suffixes IS NULL THEN '' ELSE coalesce(id_suffixes ->> table_oid::text, \
        '@' || CASE WHEN adoptions > 0 THEN adoptions || '.' ELSE '' END || table_oid) END";

/// Resets the floors of all records and replaces their OIDs, because the values from another cluster or from a later
/// state of this server are not valid here. The next audit or recovery then covers all rows except those that `since`
/// excludes.
///
/// `is_later` says whether the records come from a later state of this database. If so, the recorded OIDs of former
/// tables may be valid, so the next audit or recovery also covers these tables:
///
/// - the recorded partitions that are no longer part of their table
/// - the settled tables, because the outcomes of their rows may have been recorded only in the later state
///
/// # Errors
/// Database errors.
pub(crate) async fn adopt(sql: &impl GenericClient, is_later: bool) -> Result<()> {
    let statement = format!(
        "WITH {NAMED}, {HERE} \
         UPDATE outbox.capture c SET floor = '0', floor_seq = NULL, numbering = NULL, \
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
             id_suffixes = jsonb_build_object(({OID_HERE})::text, {SUFFIX}) \
                 || CASE WHEN $1 THEN coalesce(id_suffixes, '{{}}') ELSE '{{}}' END, \
             table_oid = {OID_HERE}"
    );
    sql.execute(&statement, &[&is_later]).await?;
    Ok(())
}

/// Reads all records, and replaces their OIDs with those that [`adopt`] will set. `is_later` says whether they come
/// from a later state of this server.
///
/// # Errors
/// The errors of [`read`].
pub(crate) async fn read_as_adopted(
    sql: &impl GenericClient,
    is_later: bool,
) -> Result<Vec<CaptureRecord>> {
    let statement =
        format!("WITH {NAMED}, {HERE} SELECT identity, {OID_HERE} FROM outbox.capture c");
    let oids = sql.query(&statement, &[&is_later]).await?;
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
