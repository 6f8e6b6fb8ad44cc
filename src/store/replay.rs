//! The tables of `postrider replay`: `outbox.replay` with a row for each replay, and
//! `outbox.replay_event` with its events until they have been published again.
//!
//! An event is released to the relay by its row in outbox.dispatch, as an event in quarantine is. So the
//! relay needs no other query for it.

use decoder::Lsn;
use slot_manager::quoted_literal;
use tokio_postgres::Row;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::PgLsn;

use super::dispatch::history::RecordPlace;
use super::dispatch::pruning::GO;
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;

/// The record of a row `w`: the one in quarantine, or else the last one that was published. `records` is
/// 0 if it has none.
pub(crate) const RECORD_TO_REPLAY: &str = "\
    select (r.state is not null)::int::bigint as records, r.* \
    from (select 1) one left join lateral ( \
        select d.state, d.topic, d.ordering_key, d.commit_lsn, d.ordinal, d.committed_at, d.attempts \
        from outbox.dispatch d where d.event_id = w.id \
        order by d.state in ('quarantined', 'released') desc, d.state = 'published' desc, \
            d.commit_lsn desc, d.ordinal desc limit 1) r on true";

/// Releases the events of one group. Returns how many it picked, and how many of these are released: the
/// others are no longer published. Picks none of a key that has events in quarantine, or being released:
/// the relay would release the former, and mix the latter with these.
const RELEASE: &str = "\
    with busy as ( \
        select from outbox.dispatch q \
        where q.state in ('quarantined', 'released') and $3::text <> '' \
          and coalesce(q.topic, '') = $2::text and coalesce(q.ordering_key, '') = $3::text limit 1), \
    picked as materialized ( \
        select e.commit_lsn, e.ordinal from outbox.replay_event e \
        where e.replay = $1 and e.topic = $2 and e.ordering_key = $3 and e.dispatched_at is null \
          and not exists (select from busy) \
        order by e.commit_lsn, e.ordinal limit $4), \
    published as materialized ( \
        select d.commit_lsn, d.ordinal, d.dispatched_at \
        from picked p join outbox.dispatch d using (commit_lsn, ordinal) \
        where d.state = 'published' for update of d), \
    released as ( \
        update outbox.dispatch d set state = 'released', replay = $1 from published p \
        where d.commit_lsn = p.commit_lsn and d.ordinal = p.ordinal returning 1), \
    noted as ( \
        update outbox.replay_event e set dispatched_at = p.dispatched_at from published p \
        where e.replay = $1 and e.topic = $2 and e.ordering_key = $3 \
          and e.commit_lsn = p.commit_lsn and e.ordinal = p.ordinal), \
    left_out as ( \
        delete from outbox.replay_event e using picked p \
        where e.replay = $1 and e.topic = $2 and e.ordering_key = $3 \
          and e.commit_lsn = p.commit_lsn and e.ordinal = p.ordinal \
          and not exists (select from published o \
                          where o.commit_lsn = p.commit_lsn and o.ordinal = p.ordinal) \
        returning 1), \
    counted as ( \
        update outbox.replay set not_sent = not_sent + (select count(*) from left_out) \
        where name = $1 and exists (select from left_out)) \
    select (select count(*) from picked), (select count(*) from released)";

/// Removes the released events that have an outcome, and counts it. The relay changes `dispatched_at`
/// when it records one.
const SETTLE: &str = "\
    with settled as materialized ( \
        select e.topic, e.ordering_key, e.commit_lsn, e.ordinal, \
            case when d.state = 'published' and d.dispatched_at <> e.dispatched_at then 'sent' \
                 when d.state = 'quarantined' then 'quarantined' else 'not_sent' end as outcome \
        from outbox.replay_event e left join outbox.dispatch d using (commit_lsn, ordinal) \
        where e.replay = $1 and e.dispatched_at is not null and d.state is distinct from 'released'), \
    gone as ( \
        delete from outbox.replay_event e using settled s \
        where e.replay = $1 and e.topic = s.topic and e.ordering_key = s.ordering_key \
          and e.commit_lsn = s.commit_lsn and e.ordinal = s.ordinal) \
    update outbox.replay r set \
        sent = sent + (select count(*) from settled where outcome = 'sent'), \
        quarantined = quarantined + (select count(*) from settled where outcome = 'quarantined'), \
        not_sent = not_sent + (select count(*) from settled where outcome = 'not_sent') \
    where name = $1 returning sent, quarantined, not_sent";

/// A replay.
#[derive(Debug)]
pub(crate) struct ReplayRow {
    pub(crate) name: String,
    /// Which events, as JSON.
    pub(crate) criteria: String,
    /// Events committed from here on are not replayed.
    pub(crate) until: Lsn,
    /// Whether all events are selected.
    pub(crate) is_selected: bool,
    pub(crate) has_ended: bool,
}

/// A topic and an ordering key; both may be empty.
pub(crate) type ReplayGroup = (String, String);

/// Begins a replay with this name.
///
/// # Errors
/// `setting-invalid` when the name is taken; `schema-missing` before migration 0016; database errors.
pub(crate) async fn begin(sql: &Sql, name: &str, criteria: &str, until: Lsn) -> Result<ReplayRow> {
    let statement = "insert into outbox.replay (name, criteria, until_lsn) values ($1, $2, $3)";
    let until_lsn = PgLsn::from(until.as_u64());
    match sql
        .execute(statement, &[&name, &criteria, &until_lsn])
        .await
    {
        Ok(_) => Ok(ReplayRow {
            name: name.to_owned(),
            criteria: criteria.to_owned(),
            until,
            is_selected: false,
            has_ended: false,
        }),
        Err(error) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => {
            let what = format!("there is a replay called {name} already");
            Err(Error::new(Code::SettingInvalid, what)
                .hint("choose another --name, or continue that replay with --resume"))
        }
        Err(error) => Err(unmigrated(error)),
    }
}

/// The replay with this name.
///
/// # Errors
/// `schema-missing` before migration 0016; database errors.
pub(crate) async fn find(sql: &Sql, name: &str) -> Result<Option<ReplayRow>> {
    let statement = "select name, criteria, until_lsn, selected_at is not null, ended_at is not null \
                     from outbox.replay where name = $1";
    let row = sql
        .query_opt(statement, &[&name])
        .await
        .map_err(unmigrated)?;
    Ok(row.map(|row| ReplayRow {
        name: row.get(0),
        criteria: row.get(1),
        until: Lsn::new(row.get::<_, PgLsn>(2).into()),
        is_selected: row.get(3),
        has_ended: row.get(4),
    }))
}

fn unmigrated(error: tokio_postgres::Error) -> Error {
    if error.code() == Some(&SqlState::UNDEFINED_TABLE) {
        let what = "the table outbox.replay (migration 0016) does not exist";
        Error::new(Code::SchemaMissing, what)
    } else {
        error.into()
    }
}

/// The names of the replays that have not ended, newest first.
///
/// # Errors
/// Database errors.
pub(crate) async fn unfinished(sql: &Sql) -> Result<Vec<String>> {
    let statement =
        "select name from outbox.replay where ended_at is null order by requested_at desc limit 10";
    let rows = sql.query(statement, &[]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// The INSERT that selects the judged rows of a page.
pub(crate) fn select_sql(name: &str) -> String {
    format!(
        "insert into outbox.replay_event (replay, topic, ordering_key, commit_lsn, ordinal) \
         select {}, coalesce(j.topic, ''), coalesce(j.ordering_key, ''), j.commit_lsn, j.ordinal \
         from judged j where j.verdict = '{GO}' on conflict do nothing returning 1",
        quoted_literal(name)
    )
}

/// Selects one event.
///
/// # Errors
/// Database errors.
pub(crate) async fn select_one(
    sql: &Sql,
    name: &str,
    (topic, key): &ReplayGroup,
    place: RecordPlace,
) -> Result<()> {
    let statement = "insert into outbox.replay_event (replay, topic, ordering_key, commit_lsn, ordinal) \
                     values ($1, $2, $3, $4, $5) on conflict do nothing";
    let commit = PgLsn::from(place.commit);
    sql.execute(statement, &[&name, topic, key, &commit, &place.ordinal])
        .await?;
    Ok(())
}

/// All events of the replay are selected.
///
/// # Errors
/// Database errors.
pub(crate) async fn selected(sql: &Sql, name: &str) -> Result<()> {
    let statement = "update outbox.replay set selected_at = now() where name = $1";
    sql.execute(statement, &[&name]).await?;
    Ok(())
}

/// The replay has ended, or is cancelled. Returns how many selected events were not released.
///
/// # Errors
/// Database errors.
pub(crate) async fn end(sql: &Sql, name: &str) -> Result<u64> {
    let ending = "update outbox.replay set ended_at = now() where name = $1";
    sql.execute(ending, &[&name]).await?;
    let (selected, _) = count_waiting(sql, name).await?;
    let leaving = "delete from outbox.replay_event where replay = $1";
    sql.execute(leaving, &[&name]).await?;
    Ok(selected)
}

/// How many selected events are not released yet, and how many released events have no outcome yet.
///
/// # Errors
/// Database errors.
pub(crate) async fn count_waiting(sql: &Sql, name: &str) -> Result<(u64, u64)> {
    let statement = "select count(*) filter (where dispatched_at is null), count(dispatched_at) \
                     from outbox.replay_event where replay = $1";
    let row = sql.query_one(statement, &[&name]).await?;
    Ok((count(&row, 0), count(&row, 1)))
}

/// How many released events have no outcome yet.
///
/// # Errors
/// Database errors.
pub(crate) async fn count_released(sql: &Sql, name: &str) -> Result<u64> {
    let statement = "select count(*) from outbox.replay_event \
                     where replay = $1 and dispatched_at is not null";
    Ok(count(&sql.query_one(statement, &[&name]).await?, 0))
}

fn count(row: &Row, column: usize) -> u64 {
    u64::try_from(row.get::<_, i64>(column)).unwrap_or_default()
}

/// What became of the events of a replay so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ReplayCounts {
    pub(crate) sent: u64,
    /// Refused by Pub/Sub this time.
    pub(crate) quarantined: u64,
    /// Left out: no longer published, without a row, or behind a refused event.
    pub(crate) not_sent: u64,
}

/// Counts the outcomes since the last call. Returns the totals of the replay.
///
/// # Errors
/// Database errors.
pub(crate) async fn settle(sql: &Sql, name: &str) -> Result<ReplayCounts> {
    let row = sql.query_one(SETTLE, &[&name]).await?;
    Ok(ReplayCounts {
        sent: count(&row, 0),
        quarantined: count(&row, 1),
        not_sent: count(&row, 2),
    })
}

/// The next group with selected events, after this one.
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

/// Releases the events of a group: all of them if it has an ordering key, at most `limit` otherwise.
/// Returns how many events it picked, and how many of these are released: the others are no longer
/// published. Picks none while the key has events in quarantine or being released.
///
/// # Errors
/// Database errors.
pub(crate) async fn release(
    sql: &Sql,
    name: &str,
    (topic, key): &ReplayGroup,
    limit: i64,
) -> Result<(u64, u64)> {
    let limit = key.is_empty().then_some(limit);
    let row = sql.query_one(RELEASE, &[&name, topic, key, &limit]).await?;
    Ok((count(&row, 0), count(&row, 1)))
}
