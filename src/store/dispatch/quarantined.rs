//! The relay's queries on the quarantine: which keys are blocked, which events are released, and the
//! updates between the states.
//!
//! Every statement that searches for rows uses the partial index `dispatch_quarantine`, so polling costs
//! next to nothing while the quarantine is empty, however large the table is. A group is a topic and an ordering
//! key, and an empty string stands for null, as it does in the index. Queries for groups jump through the index
//! from one group to the next, without reading all rows of a group.

use std::collections::HashMap;

use decoder::PgTimestamp;
use slot_manager::table;
use tokio_postgres::Row;

use crate::error::{Code, Error, Result};
use crate::event::{CommittedAt, EventId, EventPosition, EventRef, Group, OrderingKey, Standing};
use crate::postgres::Sql;
use crate::store::position;

/// The relay stops with `quarantine-full` in two cases: more keys than this number would be blocked, or one session has
/// put more bad events than this number into quarantine without blocking a key. That many bad events probably have a
/// common cause. The relay stops before it puts all traffic into quarantine. In memory, 100,000 keys of usual length
/// take about 20 MB.
pub(crate) const MAX_BLOCKED: usize = 100_000;

/// Counting stops at this number, because nobody needs to know a higher number exactly.
const COUNTED: i64 = 1_000_000;

/// Counting the events of one key stops at this number.
pub(crate) const COUNTED_PER_KEY: i64 = 1_000;

/// Number of keys that [`oldest_keys`] considers, in the order of topic and key. The limit keeps the query fast,
/// because each key costs a search in the index.
const SEARCHED_KEYS: i64 = 1_000;

/// Microseconds between the Unix epoch (1970) and PostgreSQL's epoch (2000).
const PG_EPOCH_MICROS: i64 = 946_684_800_000_000;

/// An SQL condition that selects the groups after the group with topic `$2` and key `$3`.
const BEYOND: &str = "AND (coalesce(d.topic, ''), coalesce(d.ordering_key, '')) > ($2, $3)";

/// Returns a query for the first row of each group that has rows in `state`, ordered by group. The query begins
/// with the first group that fulfils the SQL condition `which`.
fn groups_sql(state: &str, which: &str) -> String {
    format!(
        "WITH RECURSIVE g AS ( \
             (SELECT d.* FROM outbox.dispatch d WHERE d.state = '{state}' {which} \
              ORDER BY coalesce(d.topic, ''), coalesce(d.ordering_key, ''), d.commit_lsn, d.ordinal \
              LIMIT 1) \
             UNION ALL \
             SELECT n.* FROM g, LATERAL ( \
                 SELECT d.* FROM outbox.dispatch d WHERE d.state = '{state}' \
                   AND (coalesce(d.topic, ''), coalesce(d.ordering_key, '')) \
                     > (coalesce(g.topic, ''), coalesce(g.ordering_key, '')) \
                 ORDER BY coalesce(d.topic, ''), coalesce(d.ordering_key, ''), \
                          d.commit_lsn, d.ordinal \
                 LIMIT 1) n) \
         SELECT coalesce(topic, ''), coalesce(ordering_key, ''), commit_lsn, ordinal, event_id, \
                source_id, error, message_id IS NOT NULL FROM g LIMIT $1"
    )
}

/// Reads released rows of one group. A released event with a message id was published before and is being
/// replayed, and the last column has the name of its replay. The column `replay` is read through JSON, because
/// a database that is not migrated yet does not have the column.
const PAGE: &str = "\
    SELECT commit_lsn, ordinal, event_id, source_id, committed_at, error, \
        CASE WHEN message_id IS NOT NULL THEN coalesce(to_jsonb(d) ->> 'replay', '') END \
    FROM outbox.dispatch d \
    WHERE state = 'released' AND coalesce(topic, '') = $1 AND coalesce(ordering_key, '') = $2 \
      AND (commit_lsn, ordinal) > ($3, $4) \
    ORDER BY commit_lsn, ordinal LIMIT $5";

const MARK: &str = "\
    UPDATE outbox.dispatch SET state = 'released' \
    WHERE state = 'quarantined' AND coalesce(topic, '') = $1 AND coalesce(ordering_key, '') = $2";

/// Ends the release of a group's events. They become `quarantined` again, except replayed events, which have a
/// message id and become `published` again.
const SEND_BACK: &str = "\
    UPDATE outbox.dispatch \
    SET state = CASE WHEN message_id IS NULL THEN 'quarantined' ELSE 'published' END \
    WHERE state = 'released' AND coalesce(topic, '') = $1 AND coalesce(ordering_key, '') = $2";

const VANISHED: &str = "\
    SELECT u.number FROM unnest($1::text[], $2::text[]) WITH ORDINALITY u (topic, key, number) \
    WHERE NOT EXISTS (SELECT FROM outbox.dispatch d WHERE d.state = 'quarantined' \
              AND coalesce(d.topic, '') = u.topic AND coalesce(d.ordering_key, '') = u.key) \
      AND NOT EXISTS (SELECT FROM outbox.dispatch d WHERE d.state = 'released' \
              AND coalesce(d.topic, '') = u.topic AND coalesce(d.ordering_key, '') = u.key)";

/// Counts the events in quarantine, up to `$1`. Replayed events, which have a message id, are not in
/// quarantine.
const COUNT: &str = "\
    SELECT count(*) FROM (SELECT FROM outbox.dispatch \
    WHERE state IN ('quarantined', 'released') AND message_id IS NULL LIMIT $1) q";

const ONLY_REPLAYED: &str = "\
    SELECT NOT EXISTS (SELECT FROM outbox.dispatch \
        WHERE state = 'released' AND coalesce(topic, '') = $1 AND coalesce(ordering_key, '') = $2 \
          AND message_id IS NULL)";

const LEAVE_PUBLISHED: &str = "\
    UPDATE outbox.dispatch SET state = 'published' \
    WHERE commit_lsn = $1 AND ordinal = $2 AND state = 'released'";

/// The reason that the relay records for an event that it releases itself: only a release blocks the event's key, or
/// the event's message is no longer in memory.
pub(crate) const BEHIND_A_RELEASE: &str = "waits for earlier events that are released";

#[derive(Debug)]
pub(crate) struct ReleasedRow {
    pub(crate) origin: EventRef,
    pub(crate) kind: ReleasedKind,
}

/// Why an event is released.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReleasedKind {
    /// The event was in quarantine, or arrived while quarantined events of its key were being released.
    Quarantined,
    /// The event was published before, and the replay with this name publishes it again.
    Replayed(String),
    /// The relay itself has released the event, for the reason [`BEHIND_A_RELEASE`].
    New,
}

/// An ordering key with quarantined or released events.
#[derive(Debug)]
pub(crate) struct BlockedKey {
    pub(crate) group: Group,
    /// The position of the key's first quarantined or released event.
    pub(crate) since: EventPosition,
    /// The id of the key's first quarantined or released event.
    pub(crate) first: EventId,
    /// Whether the key has quarantined events. If not, it has only released events.
    pub(crate) is_quarantined: bool,
    /// Whether the first event was published before and is being replayed.
    pub(crate) is_replayed: bool,
}

/// Returns all ordering keys with quarantined or released events.
///
/// # Errors
/// `schema-missing` before migration 0005; `quarantine-full` when there are more than `limit` keys.
pub(crate) async fn blocked_keys(sql: &Sql, limit: usize) -> Result<Vec<BlockedKey>> {
    if !table::exists(sql, "outbox.dispatch_quarantine").await? {
        return Err(Error::new(
            Code::SchemaMissing,
            "the index outbox.dispatch_quarantine (migration 0005) does not exist",
        ));
    }
    let mut keys: HashMap<Group, BlockedKey> = HashMap::new();
    for state in ["quarantined", "released"] {
        let most = i64::try_from(limit).unwrap_or(i64::MAX).saturating_add(1);
        let rows = sql.query(&groups_sql(state, ""), &[&most]).await?;
        for row in rows.iter().filter(|row| group(row).is_ordered()) {
            let key = keys.entry(group(row)).or_insert_with(|| blocked_key(row));
            if position::read(row, 2) < key.since {
                *key = BlockedKey {
                    is_quarantined: key.is_quarantined,
                    ..blocked_key(row)
                };
            }
            key.is_quarantined |= state == "quarantined";
        }
        if keys.len() > limit {
            return Err(Error::new(
                Code::QuarantineFull,
                format!("more than {limit} keys have events in quarantine"),
            ));
        }
    }
    Ok(keys.into_values().collect())
}

/// A key in quarantine, with its events.
#[derive(Debug)]
pub(crate) struct WaitingGroup {
    pub(crate) group: Group,
    /// The id of the key's first event in quarantine.
    pub(crate) first: EventId,
    /// Why the first event is in quarantine.
    pub(crate) error: Option<String>,
    /// Number of the key's events in quarantine. Stops counting at [`COUNTED_PER_KEY`].
    pub(crate) events: i64,
    /// How long ago the first event was committed, by the server's clock.
    pub(crate) oldest_seconds: f64,
}

/// Returns the `limit` keys that have waited longest since the commit of their first quarantined event. Looks only at
/// the first [`SEARCHED_KEYS`] keys in the order of topic and key. Events without an ordering key count as one key
/// per topic.
///
/// # Errors
/// Database errors.
pub(crate) async fn oldest_keys(sql: &Sql, limit: i64) -> Result<Vec<WaitingGroup>> {
    let statement = format!(
        "SELECT k.topic, k.ordering_key, k.event_id, k.source_id, k.error, \
             (SELECT count(*) FROM (SELECT FROM outbox.dispatch d WHERE d.state = 'quarantined' \
                  AND coalesce(d.topic, '') = k.topic AND coalesce(d.ordering_key, '') = k.ordering_key \
                  LIMIT {COUNTED_PER_KEY}) n), \
             extract(epoch FROM clock_timestamp() - f.committed_at)::float8 \
         FROM ({}) k (topic, ordering_key, commit_lsn, ordinal, event_id, source_id, error, is_replayed) \
         JOIN outbox.dispatch f ON f.commit_lsn = k.commit_lsn AND f.ordinal = k.ordinal \
         ORDER BY f.committed_at, k.commit_lsn, k.ordinal LIMIT $2",
        groups_sql("quarantined", "")
    );
    let rows = sql.query(&statement, &[&SEARCHED_KEYS, &limit]).await?;
    let waiting = |row: &Row| WaitingGroup {
        group: group(row),
        first: event_id(row, 2),
        error: row.get(4),
        events: row.get(5),
        oldest_seconds: row.get::<_, f64>(6).max(0.0),
    };
    Ok(rows.iter().map(waiting).collect())
}

fn blocked_key(row: &Row) -> BlockedKey {
    BlockedKey {
        group: group(row),
        since: position::read(row, 2),
        first: event_id(row, 4),
        is_quarantined: false,
        is_replayed: row.get(7),
    }
}

/// Returns up to `limit` groups that have released events, ordered by topic and key. The boolean says
/// whether the group's first released event is being replayed. With `after`, returns only groups that
/// sort after that group.
///
/// # Errors
/// Database errors.
pub(crate) async fn released_groups(
    sql: &Sql,
    after: Option<&Group>,
    limit: i64,
) -> Result<Vec<(Group, bool)>> {
    let rows = match after {
        None => sql.query(&groups_sql("released", ""), &[&limit]).await?,
        Some(after) => {
            let (topic, key) = (&*after.topic, after.ordering_key.as_str());
            let statement = groups_sql("released", BEYOND);
            sql.query(&statement, &[&limit, &topic, &key]).await?
        }
    };
    Ok(rows.iter().map(|row| (group(row), row.get(7))).collect())
}

/// Returns the next `limit` released rows of the group after the position `after`, in commit order.
///
/// # Errors
/// Database errors.
pub(crate) async fn page(
    sql: &Sql,
    group: &Group,
    after: EventPosition,
    limit: usize,
) -> Result<Vec<ReleasedRow>> {
    let (topic, key) = (&*group.topic, group.ordering_key.as_str());
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let (commit, ordinal) = position::columns(after);
    let rows = sql
        .query(PAGE, &[&topic, &key, &commit, &ordinal, &limit])
        .await?;
    let event = |row: &Row| {
        let committed: std::time::SystemTime = row.get(4);
        let micros = committed
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default()
            .as_micros();
        let at = CommittedAt {
            position: position::read(row, 0),
            time: PgTimestamp::from_micros(micros as i64 - PG_EPOCH_MICROS),
        };
        ReleasedRow {
            origin: EventRef {
                standing: Standing::Released,
                ..EventRef::new(at, event_id(row, 2))
            },
            kind: match (row.get(6), row.get(5)) {
                (Some(replay), _) => ReleasedKind::Replayed(replay),
                (None, Some(BEHIND_A_RELEASE)) => ReleasedKind::New,
                (None, _) => ReleasedKind::Quarantined,
            },
        }
    };
    Ok(rows.iter().map(event).collect())
}

/// Whether all released events of the group are being replayed. If so, none of them was in quarantine.
///
/// # Errors
/// Database errors.
pub(crate) async fn only_replayed(sql: &Sql, group: &Group) -> Result<bool> {
    let (topic, key) = (&*group.topic, group.ordering_key.as_str());
    Ok(sql.query_one(ONLY_REPLAYED, &[&topic, &key]).await?.get(0))
}

/// Ends the replay of one event: the state of its row becomes `published` again.
///
/// # Errors
/// Database errors.
pub(crate) async fn leave_published(sql: &Sql, origin: &EventRef) -> Result<()> {
    let (commit, ordinal) = position::columns(origin.position);
    sql.execute(LEAVE_PUBLISHED, &[&commit, &ordinal]).await?;
    Ok(())
}

/// Marks the quarantined events of the group as released.
///
/// # Errors
/// Database errors.
pub(crate) async fn mark(sql: &Sql, group: &Group) -> Result<()> {
    change(sql, MARK, group).await
}

/// Marks the released events of the group as quarantined again, or as published if they were being
/// replayed.
///
/// # Errors
/// Database errors.
pub(crate) async fn send_back(sql: &Sql, group: &Group) -> Result<()> {
    change(sql, SEND_BACK, group).await
}

async fn change(sql: &Sql, statement: &str, group: &Group) -> Result<()> {
    let (topic, key) = (&*group.topic, group.ordering_key.as_str());
    sql.execute(statement, &[&topic, &key]).await?;
    Ok(())
}

/// Returns which of these groups have no quarantined and no released events left.
///
/// # Errors
/// Database errors.
pub(crate) async fn vanished(sql: &Sql, groups: &[Group]) -> Result<Vec<Group>> {
    let topics: Vec<&str> = groups.iter().map(|group| &*group.topic).collect();
    let keys: Vec<&str> = groups.iter().map(|g| g.ordering_key.as_str()).collect();
    let rows = sql.query(VANISHED, &[&topics, &keys]).await?;
    let number = |row: &Row| usize::try_from(row.get::<_, i64>(0) - 1).ok();
    let found = rows.iter().filter_map(|row| groups.get(number(row)?));
    Ok(found.cloned().collect())
}

/// Returns how many events are in quarantine. Stops counting at a million.
///
/// # Errors
/// Database errors.
pub(crate) async fn count(sql: &Sql) -> Result<i64> {
    Ok(sql.query_one(COUNT, &[&COUNTED]).await?.get(0))
}

fn group(row: &Row) -> Group {
    Group {
        topic: row.get::<_, &str>(0).into(),
        ordering_key: OrderingKey::from(row.get::<_, &str>(1)),
    }
}

/// Reads an event id: the uuid from `column`, the source id from the next column.
fn event_id(row: &Row, column: usize) -> EventId {
    let uuid: uuid::Uuid = row.get(column);
    EventId {
        uuid: uuid.into_bytes(),
        source_id: row.get::<_, Option<String>>(column + 1).map(Into::into),
    }
}
