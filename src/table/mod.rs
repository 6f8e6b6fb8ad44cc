//! Captured tables read over SQL, for what the stream does not bring: rows from before the slot,
//! of a gap in the publication, or in quarantine.
//!
//! A row is described and mapped as the stream's rows are, so that the message is the same. The
//! caller writes the rest of the statement and says where the event stands. Values must come as
//! their types print them, as in the stream: read them with simple queries only.
//!
//! Not here: which rows are read, and when.

mod column_types;

use std::sync::Arc;

use decoder::{Oid, OwnedColumn, OwnedRelation, PgTimestamp, ReplicaIdentity, Value};
use slot_manager::shard::KEY_TYPES;
use slot_manager::{QualifiedName, Shard, quoted_identifier, quoted_literal};
use tokio_postgres::SimpleQueryRow;
use tokio_postgres::error::{Error as PgError, SqlState};

use crate::dispatch::Resolved;
use crate::error::{Code, Error, Result};
use crate::lanes::{Event, EventRef};
use crate::map::{
    ColumnTypes, EventId, EventPosition, MapError, Mapper, OrderColumn, OrderingKey, TableIdentity,
    TableSettings, TimeKind, ValueOrder,
};
use crate::postgres::Sql;
use crate::watermark::CommitLsn;

pub(crate) use column_types::{look_up as look_up_types, look_up_apart as look_up_types_apart};

/// A generated column counts where a publication sends it, which PostgreSQL does from 18 on.
const COLUMNS: &str = "\
    select a.attname::text, a.atttypid, a.atttypmod \
    from pg_catalog.pg_attribute a \
    join pg_catalog.pg_class c on c.oid = a.attrelid and c.relkind in ('r', 'p') \
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
    where n.nspname = $1 and c.relname = $2 \
      and a.attnum > 0 and not a.attisdropped \
      and (a.attgenerated = '' \
           or current_setting('server_version_num')::int >= 180000 and exists ( \
               select from pg_catalog.pg_publication_tables p \
               where p.schemaname = $1 and p.tablename = $2 \
                 and pg_catalog.to_jsonb(p) -> 'attnames' ? a.attname::text)) \
    order by a.attnum";

/// Stands for text that is not UTF-8, whose bytes the driver does not give; it is none either.
pub(crate) const NOT_UTF8: &[u8] = &[0xFF];

/// Microseconds between the Unix epoch and PostgreSQL's.
const PG_EPOCH: &str = "946684800000000";

/// A table as the stream would describe it, and the types of its columns.
#[derive(Debug)]
pub(crate) struct Description {
    pub(crate) relation: OwnedRelation,
    pub(crate) types: ColumnTypes,
}

/// Describes a table from the catalog as the stream would; `None` when there is none.
///
/// # Errors
/// Those of a statement.
pub(crate) async fn describe(sql: &Sql, table: &QualifiedName) -> Result<Option<Description>> {
    let rows = sql.query(COLUMNS, &[&table.schema, &table.name]).await?;
    let columns: Vec<OwnedColumn> = rows
        .iter()
        .map(|row| OwnedColumn {
            is_key: false,
            name: row.get(0),
            type_oid: Oid(row.get(1)),
            type_modifier: row.get(2),
        })
        .collect();
    if columns.is_empty() {
        return Ok(None);
    }
    let relation = OwnedRelation {
        oid: Oid(0),
        namespace: table.schema.clone(),
        name: table.name.clone(),
        replica_identity: ReplicaIdentity::Default,
        columns,
    };
    let types = look_up_types(sql, &relation, &ColumnTypes::default()).await?;
    Ok(Some(Description { relation, types }))
}

/// A row of a table as an event, with the lane that it belongs to.
#[derive(Debug)]
pub(crate) struct TableEvent {
    pub(crate) topic: Arc<str>,
    pub(crate) ordering_key: OrderingKey,
    pub(crate) event: Event,
}

/// Reads rows of one captured table. In its statements the table is called `e`.
#[derive(Debug)]
pub(crate) struct TableReader {
    mapper: Mapper,
    columns: usize,
    /// Place of the column that says when an event happened.
    occurred_at: Option<usize>,
    table: String,
    /// What is selected of a row.
    selected: String,
    order: String,
    event_id: String,
    id: String,
    /// How ids compare.
    id_order: ValueOrder,
    /// The age in seconds of the oldest event among the rows, as an aggregate; `None` when the
    /// table does not tell.
    oldest_age: Option<String>,
    /// `schema.table:` in front of ids that are not uuids.
    source_prefix: Option<String>,
    source_id: String,
    /// The condition that a row is in the share of this relay; `None` without shards.
    share: Option<String>,
}

impl TableReader {
    /// Looks the table up in the catalog and resolves its mapping, for the rows of one shard.
    /// `identity` stands for the table in the identities of its events.
    ///
    /// # Errors
    /// `publication-drift` when there is no such table, `column-missing`, `setting-invalid`, also
    /// for a key that shards cannot share out; those of a statement.
    pub(crate) async fn resolve(
        sql: &Sql,
        settings: &TableSettings,
        identity: &TableIdentity,
        project: &str,
        shard: Option<Shard>,
    ) -> Result<Self> {
        let table = &settings.table;
        let Description { relation, types } = describe(sql, table).await?.ok_or_else(|| {
            Error::new(Code::PublicationDrift, format!("there is no table {table}"))
        })?;
        let row = sql
            .query_one(
                "select current_setting('track_commit_timestamp') = 'on'",
                &[],
            )
            .await?;
        let mapper = Mapper::resolve(&relation, &types, settings, identity, project)?;
        let share = shard.map(|shard| share_sql(shard, &relation, settings));
        Ok(Self {
            share: share.transpose()?,
            ..Self::new(mapper, &relation, table, identity, row.get(0))
        })
    }

    fn new(
        mapper: Mapper,
        relation: &OwnedRelation,
        table: &QualifiedName,
        identity: &TableIdentity,
        has_commit_time: bool,
    ) -> Self {
        let of = |name: &str| format!("e.{}", quoted_identifier(name));
        let known = mapper.table_columns();
        let id = of(known.id);
        // `format` prints a value as the stream does; a cast to text prints some types otherwise.
        let (event_id, source_id) = match known.id_is_uuid {
            true => (id.clone(), "null::text".to_owned()),
            false => (
                format!(
                    // `is not null` is false for a row with a null in it.
                    "case when {id} is distinct from null \
                     then outbox.event_uuid({}, format('%s', {id})) end",
                    quoted_literal(identity.as_str())
                ),
                format!(
                    "{} || format('%s', {id})",
                    quoted_literal(&format!("{identity}:"))
                ),
            ),
        };
        let commit_time = has_commit_time.then_some("pg_xact_commit_timestamp(e.xmin)");
        let occurred_at = known.occurred_at.map(|column| of(column.name));
        let names = || relation.columns.iter().map(|c| c.name.as_str());
        let occurred_at_name = known.occurred_at.map(|column| column.name);
        let occurred_at_place = names().position(|name| occurred_at_name == Some(name));
        let oldest_age = occurred_at
            .as_deref()
            .and_then(|time| oldest_age(time, known.time_kind));
        let has_order = |column: &OrderColumn<'_>| column.order != ValueOrder::None;
        let by_time = known.occurred_at.filter(has_order).and(occurred_at);
        let times: Vec<&str> = commit_time.into_iter().chain(["now()"]).collect();
        let committed = format!(
            "(extract(epoch from coalesce({})) * 1000000)::bigint - {PG_EPOCH}",
            times.join(", ")
        );
        let columns: Vec<String> = relation.columns.iter().map(|c| of(&c.name)).collect();
        // A sequence shows the order of insertion better than a clock; a uuid does not at all.
        let order = [
            known
                .aggregate_id
                .map(|key| by_key(&of(key.name), key.order)),
            known
                .version
                .map(|version| by_version(&of(version.name), version.order)),
            commit_time.map(|time| format!("{time} nulls first")),
            known.id_is_number.then_some(id),
            by_time,
            Some("e.tableoid, e.ctid".to_owned()),
        ];
        Self {
            columns: columns.len(),
            occurred_at: occurred_at_place,
            table: table.to_string(),
            selected: format!("{}, {committed}", columns.join(", ")),
            order: order.into_iter().flatten().collect::<Vec<_>>().join(", "),
            event_id,
            source_prefix: (!known.id_is_uuid).then(|| format!("{identity}:")),
            id: of(known.id),
            id_order: known.id_order,
            oldest_age,
            source_id,
            share: None,
            mapper,
        }
    }

    /// The statement for the row of one event; `None` when it cannot be of this table.
    pub(crate) fn find_sql(&self, event_id: &EventId) -> Option<String> {
        let id = match (&event_id.source_id, &self.source_prefix) {
            (None, None) => event_id.to_string(),
            (Some(source_id), Some(prefix)) => source_id.strip_prefix(prefix.as_str())?.to_owned(),
            (Some(_), None) | (None, Some(_)) => return None,
        };
        let (column, id) = (&self.id, quoted_literal(&id));
        let is_same = match (&self.source_prefix, self.id_order) {
            (None, _) => format!("{column} = {id}"),
            // Equal values of some types differ in their text, such as 1.0 and 1.00.
            (Some(_), ValueOrder::OfType | ValueOrder::OfText) => {
                format!("{column} = {id} and format('%s', {column}) = {id}")
            }
            (Some(_), ValueOrder::None) => format!("format('%s', {column}) = {id}"),
        };
        Some(format!("{} where {is_same}", self.select_sql()))
    }

    /// An aggregate over rows: the age in seconds of the oldest event, by the server's clock.
    /// `None` when the table does not tell when an event happened.
    pub(crate) fn oldest_age_sql(&self) -> Option<&str> {
        self.oldest_age.as_deref()
    }

    /// `select … from table e`, to be completed and run as a simple query.
    pub(crate) fn select_sql(&self) -> String {
        format!("select {} from {} e", self.selected, self.table)
    }

    /// The same with one more column, which [`more`](Self::more) reads.
    pub(crate) fn select_more_sql(&self, column: &str) -> String {
        format!("select {}, {column} from {} e", self.selected, self.table)
    }

    /// The column that was asked for beside the row.
    pub(crate) fn more<'r>(&self, row: &'r SimpleQueryRow) -> Option<&'r str> {
        row.try_get(self.columns + 1).ok().flatten()
    }

    /// The table, as SQL takes it.
    pub(crate) fn table_sql(&self) -> &str {
        &self.table
    }

    /// What to order by: rows of one key in their order. By version where there is one, else by
    /// the order of commits as far as the table shows it.
    pub(crate) fn order_sql(&self) -> &str {
        &self.order
    }

    /// The expression for the id by which outbox.dispatch knows the row; null for a row that has
    /// no id.
    pub(crate) fn event_id_sql(&self) -> &str {
        &self.event_id
    }

    /// The expression for the column `source_id` of outbox.dispatch; null for an id that is a
    /// uuid.
    pub(crate) fn source_id_sql(&self) -> &str {
        &self.source_id
    }

    /// The condition that a row has no outcome and is this relay's to deliver.
    pub(crate) fn lacks_outcome(&self, resolved: &Resolved) -> String {
        let lacks_outcome = resolved.lacks_outcome(&self.event_id);
        match &self.share {
            Some(share) => format!("{share} and {lacks_outcome}"),
            None => lacks_outcome,
        }
    }

    /// When the event of a row that [`select_sql`](Self::select_sql) brought happened, as its
    /// column says.
    pub(crate) fn occurred_at<'r>(&self, row: &'r SimpleQueryRow) -> Option<&'r str> {
        row.try_get(self.occurred_at?).ok().flatten()
    }

    /// Makes the event of a row that [`select_sql`](Self::select_sql) brought, standing at
    /// `commit` and `ordinal`.
    ///
    /// # Errors
    /// [`MapError::Event`] when the row cannot become a message; also when its payload is text that
    /// is not UTF-8, which the stream alone brings.
    pub(crate) fn event(
        &mut self,
        row: &SimpleQueryRow,
        commit: CommitLsn,
        ordinal: u32,
    ) -> Result<TableEvent, MapError> {
        let values: Vec<Value<'_>> = (0..self.columns)
            .map(|i| match row.try_get(i) {
                Ok(Some(text)) => Value::Text(text.as_bytes()),
                Ok(None) => Value::Null,
                Err(_) => Value::Text(NOT_UTF8),
            })
            .collect();
        let micros = row.try_get(self.columns).ok().flatten();
        let micros = micros.and_then(|text| text.parse().ok());
        let commit_time = PgTimestamp::from_micros(micros.unwrap_or_default());
        let at = EventPosition {
            commit_lsn: commit.lsn(),
            ordinal,
            commit_time,
        };
        let mapped = match row.try_get(self.mapper.payload_position()) {
            Ok(_) => self.mapper.map_row(&values, at)?,
            // Other columns are looked at when they are mapped.
            Err(_) => return Err(self.mapper.payload_not_utf8(&values, at)),
        };
        let origin = EventRef::new(commit, ordinal, commit_time, mapped.event_id);
        Ok(TableEvent {
            topic: mapped.topic,
            ordering_key: mapped.ordering_key,
            event: Event {
                origin,
                message: mapped.message,
            },
        })
    }
}

/// What to order by so that rows of one key stand together. The key is its text, and not every type
/// has an order.
fn by_key(column: &str, order: ValueOrder) -> String {
    match order {
        ValueOrder::OfType | ValueOrder::OfText => column.to_owned(),
        ValueOrder::None => format!("format('%s', {column}) collate \"C\""),
    }
}

/// What to order by so that versions count up: whole numbers in a text by their value.
fn by_version(column: &str, order: ValueOrder) -> String {
    match order {
        ValueOrder::OfType | ValueOrder::None => column.to_owned(),
        ValueOrder::OfText => format!(
            "case when {column}::text ~ '^[0-9]{{1,255}}$' then {column}::text::numeric end, {column}"
        ),
    }
}

/// The age in seconds of the oldest of the times in `column`; infinite times have none. Computed from
/// numbers: an interval of the farthest times does not fit.
fn oldest_age(column: &str, kind: TimeKind) -> Option<String> {
    let time = match kind {
        TimeKind::Instant => column.to_owned(),
        TimeKind::Utc => format!("{column} at time zone 'UTC'"),
        TimeKind::Unknown => return None,
    };
    Some(format!(
        "(extract(epoch from clock_timestamp()) \
          - extract(epoch from min({time}) filter (where isfinite({column}))))::float8"
    ))
}

/// What an error of a statement over a captured table means. The statement is written for the table
/// as the catalog has shown it, and the server plans it for the table as it is. What is missing for
/// good is seen when the columns are resolved the next time.
pub(crate) fn altered_since(error: PgError) -> Error {
    match error.code() {
        // Operators and casts are those of the types that the columns had.
        Some(
            &SqlState::UNDEFINED_COLUMN
            | &SqlState::UNDEFINED_TABLE
            | &SqlState::UNDEFINED_FUNCTION
            | &SqlState::DATATYPE_MISMATCH
            | &SqlState::CANNOT_COERCE,
        ) => Error::new(
            Code::SlotBusy,
            "a table was altered since the relay looked at its columns",
        )
        .caused_by(error)
        .hint("no action needed: the relay looks at them again"),
        _ => error.into(),
    }
}

/// The condition that a row of `e` is in the share.
///
/// # Errors
/// `setting-invalid`: rows cannot be shared out by that column.
pub(crate) fn share_sql(
    shard: Shard,
    relation: &OwnedRelation,
    settings: &TableSettings,
) -> Result<String> {
    let key = settings.share_key();
    let column = relation.columns.iter().find(|column| column.name == key);
    let name = format!("e.{}", quoted_identifier(key));
    let share = column.and_then(|column| shard.share_sql(&name, column.type_oid.0));
    share.ok_or_else(|| {
        Error::new(
            Code::SettingInvalid,
            format!(
                "rows of {} cannot be shared out by their column {key}",
                settings.table
            ),
        )
        .hint(format!(
            "let columns.aggregateid be a column of type {}, or leave the setting `shard` out",
            KEY_TYPES.map(|(_, name, _)| name).join(", ")
        ))
    })
}
