//! Releases the selected events of a replay, so that the relay publishes them. Also counts the outcomes that the relay
//! has recorded for these events.

use tokio_postgres::Row;
use tokio_postgres::types::{PgLsn, ToSql};

use super::{ReplayGroup, count, unmigrated};
use crate::error::Result;
use crate::event::EventPosition;
use crate::postgres::Sql;
use crate::store::position;

/// Reads the next unreleased events of a group, in commit order.
const NEXT_EVENTS: &str = "\
    select commit_lsn, ordinal from outbox.replay_event \
    where replay = $1 and topic = $2 and ordering_key = $3 and dispatched_at is null \
    order by commit_lsn, ordinal limit $4";

/// Waits until no other replay is releasing events of this key. A statement sees only changes that were committed
/// before it began, so the lock has a statement of its own. The statements after it see the other replay's changes.
const LOCK_GROUP: &str = "\
    select pg_advisory_xact_lock(pg_catalog.hashtextextended($1::text || chr(10) || $2::text, 1886352239))";

/// Returns whether the key has quarantined or released events. If it has, the replay of this key must wait.
/// Otherwise the relay would mix the other released events with ours, and would also release the quarantined
/// events.
const IS_BUSY: &str = "\
    select exists (select from outbox.dispatch d where d.state = 'quarantined' \
            and coalesce(d.topic, '') = $1 and coalesce(d.ordering_key, '') = $2) \
        or exists (select from outbox.dispatch d where d.state = 'released' \
            and coalesce(d.topic, '') = $1 and coalesce(d.ordering_key, '') = $2)";

/// Releases published events, and adds the last message of each event to its `earlier_messages`. At most ten
/// messages stay there: the first and the last nine. The last message is already in `earlier_messages` if an
/// earlier replay released the event but did not publish it, and is then not added again.
const RELEASE: &str = "\
    update outbox.dispatch d set state = 'released', replay = $1, \
        earlier_messages = case \
            when d.message_id is null or coalesce(d.earlier_messages, '[]') \
                @> jsonb_build_array(jsonb_build_object('message_id', d.message_id)) \
            then d.earlier_messages \
            else case when jsonb_array_length(coalesce(d.earlier_messages, '[]')) < 10 \
                      then coalesce(d.earlier_messages, '[]') else d.earlier_messages - 1 end \
                || jsonb_build_array(jsonb_build_object( \
                    'message_id', d.message_id, 'replay', d.replay, 'published_at', \
                    to_char(d.dispatched_at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'))) \
            end \
    from unnest($2::pg_lsn[], $3::int[]) u (commit_lsn, ordinal) \
    where d.commit_lsn = u.commit_lsn and d.ordinal = u.ordinal and d.state = 'published' \
    returning d.commit_lsn, d.ordinal, d.dispatched_at";

const NOTE: &str = "\
    update outbox.replay_event e set dispatched_at = u.dispatched_at \
    from unnest($4::pg_lsn[], $5::int[], $6::timestamptz[]) u (commit_lsn, ordinal, dispatched_at) \
    where e.replay = $1 and e.topic = $2 and e.ordering_key = $3 \
      and e.commit_lsn = u.commit_lsn and e.ordinal = u.ordinal";

/// Removes from the replay the given events that `RELEASE` has not released.
const LEAVE_OUT: &str = "\
    delete from outbox.replay_event e using unnest($4::pg_lsn[], $5::int[]) u (commit_lsn, ordinal) \
    where e.replay = $1 and e.topic = $2 and e.ordering_key = $3 \
      and e.commit_lsn = u.commit_lsn and e.ordinal = u.ordinal and e.dispatched_at is null";

/// Looks up the next 2,000 released events of a replay. Removes those that now have an outcome, and adds their
/// outcomes to the totals. An event has an outcome once its record is no longer `released`. If the record is
/// `published`, a changed `dispatched_at` shows that the relay has sent the event again.
const SETTLE: &str = "\
    with looked as materialized ( \
        select e.topic, e.ordering_key, e.commit_lsn, e.ordinal, e.dispatched_at \
        from outbox.replay_event e \
        where e.replay = $1 and e.dispatched_at is not null \
          and (e.commit_lsn, e.ordinal) > ($2::pg_lsn, $3::int) \
        order by e.commit_lsn, e.ordinal limit 2000), \
    settled as materialized ( \
        select l.*, case when d.state = 'published' and d.dispatched_at <> l.dispatched_at then 'sent' \
                         when d.state = 'quarantined' then 'quarantined' else 'not_sent' end as outcome \
        from looked l left join outbox.dispatch d \
            on d.commit_lsn = l.commit_lsn and d.ordinal = l.ordinal \
        where d.state is distinct from 'released'), \
    gone as ( \
        delete from outbox.replay_event e using settled s \
        where e.replay = $1 and e.topic = s.topic and e.ordering_key = s.ordering_key \
          and e.commit_lsn = s.commit_lsn and e.ordinal = s.ordinal), \
    counted as ( \
        update outbox.replay r set \
            sent = sent + (select count(*) from settled where outcome = 'sent'), \
            quarantined = quarantined + (select count(*) from settled where outcome = 'quarantined'), \
            not_sent = not_sent + (select count(*) from settled where outcome = 'not_sent') \
        where name = $1 returning sent, quarantined, not_sent) \
    select c.sent, c.quarantined, c.not_sent, (select count(*) from settled), \
        (select count(*) from looked), last.commit_lsn, last.ordinal \
    from counted c left join \
        (select commit_lsn, ordinal from looked order by 1 desc, 2 desc limit 1) last on true";

/// Maximum number of events that one statement releases.
const RELEASED_IN_A_STATEMENT: i64 = 1_000;

/// The outcomes of a replay's events so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ReplayCounts {
    pub(crate) sent: u64,
    /// Number of events that Pub/Sub refused when they were replayed.
    pub(crate) quarantined: u64,
    /// Number of events that were not sent, because their record was gone or no longer `published`, or because
    /// an earlier event of the key was refused.
    pub(crate) not_sent: u64,
}

/// Returns how many selected events are not released yet, and how many released events have no outcome
/// yet.
///
/// # Errors
/// Database errors.
pub(crate) async fn count_waiting(sql: &Sql, name: &str) -> Result<(u64, u64)> {
    let statement = "select count(*) filter (where dispatched_at is null), count(dispatched_at) \
                     from outbox.replay_event where replay = $1";
    let row = sql.query_one(statement, &[&name]).await?;
    Ok((count(&row, 0), count(&row, 1)))
}

/// Returns whom this replay waits for, at most three: the names of other replays, and `None` for a release from
/// quarantine. The replay cannot release its events of a key while the key has events that somebody else has released
/// and that have no outcome yet.
///
/// # Errors
/// Database errors.
pub(crate) async fn released_by_others(sql: &Sql, name: &str) -> Result<Vec<Option<String>>> {
    let statement = "select distinct case when d.message_id is not null then d.replay end as replay \
                     from outbox.dispatch d \
                     where d.state = 'released' and d.replay is distinct from $1 \
                       and exists (select from outbox.replay_event e \
                         where e.replay = $1 and e.dispatched_at is null \
                           and e.topic = coalesce(d.topic, '') \
                           and e.ordering_key = coalesce(d.ordering_key, '')) \
                     order by 1 limit 3";
    let rows = sql.query(statement, &[&name]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// The result of one poll of the released events.
#[derive(Debug)]
pub(crate) struct Settled {
    /// The totals of the whole replay so far.
    pub(crate) counts: ReplayCounts,
    /// Number of polled events that have an outcome.
    pub(crate) settled: u64,
    /// The position after which the next poll continues. `None` if the next poll starts from the
    /// beginning.
    pub(crate) next: Option<EventPosition>,
}

/// Polls the next 2,000 released events after the position `after`. Counts the events that have an
/// outcome, and removes them from `outbox.replay_event`.
///
/// # Errors
/// Database errors.
pub(crate) async fn settle(sql: &Sql, name: &str, after: Option<EventPosition>) -> Result<Settled> {
    let after = after.unwrap_or_default();
    let (commit, ordinal) = position::columns(after);
    let row = sql.query_one(SETTLE, &[&name, &commit, &ordinal]).await?;
    let looked = count(&row, 4);
    Ok(Settled {
        counts: ReplayCounts {
            sent: count(&row, 0),
            quarantined: count(&row, 1),
            not_sent: count(&row, 2),
        },
        settled: count(&row, 3),
        next: (looked == 2_000).then(|| position::read(&row, 5)),
    })
}

/// Returns the next group after `after` that has selected events to release.
///
/// # Errors
/// Database errors.
pub(crate) async fn next_group(
    sql: &Sql,
    name: &str,
    after: Option<&ReplayGroup>,
) -> Result<Option<ReplayGroup>> {
    let row = match after {
        Some((topic, key)) => {
            let statement = "select topic, ordering_key from outbox.replay_event \
                 where replay = $1 and dispatched_at is null and (topic, ordering_key) > ($2, $3) \
                 order by topic, ordering_key limit 1";
            sql.query_opt(statement, &[&name, topic, key]).await?
        }
        None => {
            let statement = "select topic, ordering_key from outbox.replay_event \
                 where replay = $1 and dispatched_at is null order by topic, ordering_key limit 1";
            sql.query_opt(statement, &[&name]).await?
        }
    };
    Ok(row.map(|row| (row.get(0), row.get(1))))
}

/// Releases the selected events of a group in one transaction: all of them if the group has an ordering
/// key, otherwise up to 1,000. Returns how many events were taken from the selection, and how many of
/// these were released. An event whose record is no longer `published` is taken but not released. Does
/// nothing while the ordering key has quarantined or released events.
///
/// # Errors
/// Database errors. After an error nothing is released, but the connection still has an open transaction, so the
/// caller must close the connection.
pub(crate) async fn release(sql: &Sql, name: &str, group: &ReplayGroup) -> Result<(u64, u64)> {
    let (topic, key) = group;
    sql.batch_execute("begin").await?;
    let mut totals = (0, 0);
    if key.is_empty() {
        totals = release_some(sql, name, group).await?;
    } else {
        sql.query_one(LOCK_GROUP, &[topic, key]).await?;
        let is_busy: bool = sql.query_one(IS_BUSY, &[topic, key]).await?.get(0);
        let mut left = u64::from(!is_busy);
        while left > 0 {
            let released;
            (left, released) = release_some(sql, name, group).await?;
            totals = (totals.0 + left, totals.1 + released);
        }
    }
    sql.batch_execute("commit").await?;
    Ok(totals)
}

/// Releases up to 1,000 more events of a group.
async fn release_some(sql: &Sql, name: &str, (topic, key): &ReplayGroup) -> Result<(u64, u64)> {
    let next = sql
        .query(NEXT_EVENTS, &[&name, topic, key, &RELEASED_IN_A_STATEMENT])
        .await?;
    if next.is_empty() {
        return Ok((0, 0));
    }
    let (commits, ordinals) = places(&next);
    let released = sql.query(RELEASE, &[&name, &commits, &ordinals]).await;
    let released = released.map_err(unmigrated)?;
    let times: Vec<std::time::SystemTime> = released.iter().map(|row| row.get(2)).collect();
    let (released_commits, released_ordinals) = places(&released);
    let parameters: [&(dyn ToSql + Sync); 6] = [
        &name,
        topic,
        key,
        &released_commits,
        &released_ordinals,
        &times,
    ];
    sql.execute(NOTE, &parameters).await?;
    if released.len() < next.len() {
        let parameters: [&(dyn ToSql + Sync); 5] = [&name, topic, key, &commits, &ordinals];
        let left_out = sql.execute(LEAVE_OUT, &parameters).await?;
        let counting = "update outbox.replay set not_sent = not_sent + $2 where name = $1";
        let left_out = i64::try_from(left_out).unwrap_or_default();
        sql.execute(counting, &[&name, &left_out]).await?;
    }
    Ok((next.len() as u64, released.len() as u64))
}

/// Returns the positions of rows, as one array per column (commit LSN and ordinal).
fn places(rows: &[Row]) -> (Vec<PgLsn>, Vec<i32>) {
    rows.iter()
        .map(|row| (row.get::<_, PgLsn>(0), row.get::<_, i32>(1)))
        .unzip()
}
