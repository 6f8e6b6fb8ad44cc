//! Checks whether the publication carries every row of the captured tables.
//!
//! PostgreSQL uses a publication as it was at the WAL position being decoded. Rows written while the
//! publication did not exist, or did not include the table, are never streamed. PostgreSQL does not report
//! such rows. PostgreSQL 18 reports a missing publication, but only in a warning. So the relay checks by
//! itself every few seconds, with one cheap statement, and confirms nothing while there is a [`Problem`].
//! [`PublicationState::has_changed_since`] finds a change that was undone between two checks.
//!
//! See <https://www.postgresql.org/docs/current/sql-createpublication.html>.

use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

use crate::slot::get;
use crate::{QualifiedName, SlotError, sql};

mod problem;

pub use problem::Problem;

/// A table whose inserts must be streamed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapturedTable {
    /// The table; for a partitioned table, its root.
    pub name: QualifiedName,
    /// The columns that are needed from each row.
    pub columns: Vec<String>,
}

/// The state of a publication at one moment, and of the captured tables in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicationState {
    /// Its name.
    pub name: String,
    /// Its properties; `None` when it does not exist.
    pub publication: Option<Publication>,
    /// The captured tables, in the order of the request.
    pub tables: Vec<TableState>,
    fingerprint: String,
}

/// A publication's own properties.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Publication {
    /// Its OID, which changes when it is dropped and created again.
    pub oid: u32,
    /// `FOR ALL TABLES`.
    pub all_tables: bool,
    /// Whether inserts are published.
    pub inserts: bool,
    /// Whether updates, deletes or truncates are published too.
    pub other_changes: bool,
    /// Whether rows of partitions are published as rows of the root.
    pub via_partition_root: bool,
}

/// The state of one captured table in the publication.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableState {
    /// The table as requested.
    pub wanted: CapturedTable,
    /// Its OID; `None` when the table does not exist.
    pub oid: Option<u32>,
    /// Whether it is partitioned.
    pub is_partitioned: bool,
    /// The OIDs of its partitions that hold rows, ascending.
    pub partitions: Vec<u32>,
    /// Whether rows are stored in tables that inherit from it, such as the chunks of a TimescaleDB
    /// hypertable. Such rows are streamed under the names of those tables.
    pub has_children: bool,
    /// A table whose rows PostgreSQL never streams, either this table or one of its partitions: the kind, such
    /// as `unlogged table`, and the name.
    pub unstreamed: Option<(String, QualifiedName)>,
    /// Another captured table, of which this table is a partition.
    pub captured_root: Option<QualifiedName>,
    /// Its columns.
    pub columns: Vec<String>,
    /// The generated columns that PostgreSQL cannot publish: all of them before PostgreSQL 18, and
    /// those that are not stored from 18 on.
    pub never_published: Vec<String>,
    /// Whether the server can publish stored generated columns, as PostgreSQL 18 does.
    pub stored_are_published: bool,
    /// The stored generated columns, if the server can publish them.
    pub generated: Vec<String>,
    /// How the table is published; `None` when it is not in the publication.
    pub published: Option<PublishedTable>,
    /// Whether a removal from the publication leaves a trace, even if the table is added again.
    pub traced: bool,
}

/// How a table is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedTable {
    /// Rows that do not satisfy this condition are not published.
    pub row_filter: Option<String>,
    /// The published columns; `None` on PostgreSQL 14, which always publishes all of them.
    pub columns: Option<Vec<String>>,
    /// Whether the publication has a column list for it.
    pub has_column_list: bool,
}

/// The column that names the transaction which inserted a row. A table that has this column must publish it,
/// because the identity of an event is derived from this column.
const INSERTED_XID: &str = "inserted_xid";

/// Maximum number of attempts to read a publication that somebody drops and creates again all the time.
const ATTEMPTS: u32 = 5;

/// Reads the state of a publication, with one statement.
///
/// # Errors
/// [`SlotError::Database`].
pub async fn inspect(
    client: &Client,
    publication: &str,
    tables: &[CapturedTable],
) -> Result<PublicationState, SlotError> {
    let schemas: Vec<&str> = tables.iter().map(|t| t.name.schema.as_str()).collect();
    let names: Vec<&str> = tables.iter().map(|t| t.name.name.as_str()).collect();
    let parameters: [(&(dyn ToSql + Sync), Type); 3] = [
        (&publication, Type::TEXT),
        (&schemas, Type::TEXT_ARRAY),
        (&names, Type::TEXT_ARRAY),
    ];
    let mut attempts = 1;
    let rows = loop {
        match client.query_typed(sql::PUBLICATION, &parameters).await {
            Err(error) if is_of_a_dropped_object(&error) && attempts < ATTEMPTS => attempts += 1,
            answer => break answer.map_err(SlotError::database("reading the publication"))?,
        }
    };
    let properties = rows
        .first()
        .map(Publication::from_row)
        .transpose()?
        .flatten();
    let mut fingerprint = String::new();
    for row in &rows {
        fingerprint += get(row, "fingerprint")?;
        fingerprint.push(';');
    }
    let states = tables
        .iter()
        .zip(&rows)
        .map(|(table, row)| TableState::from_row(table, row));
    Ok(PublicationState {
        name: publication.to_owned(),
        publication: properties,
        tables: states.collect::<Result<_, _>>()?,
        fingerprint,
    })
}

/// Whether an object was dropped while the statement ran, although its snapshot still shows the
/// object. PostgreSQL 16 and newer may report this as an internal error ("cache lookup failed").
fn is_of_a_dropped_object(error: &tokio_postgres::Error) -> bool {
    let code = error.code();
    code == Some(&SqlState::UNDEFINED_OBJECT) || code == Some(&SqlState::INTERNAL_ERROR)
}

impl Publication {
    fn from_row(row: &Row) -> Result<Option<Self>, SlotError> {
        let Some(oid) = get(row, "oid")? else {
            return Ok(None);
        };
        let updates: bool = get(row, "pubupdate")?;
        let deletes: bool = get(row, "pubdelete")?;
        let truncates: bool = get(row, "pubtruncate")?;
        Ok(Some(Self {
            oid,
            all_tables: get(row, "puballtables")?,
            inserts: get(row, "pubinsert")?,
            other_changes: updates || deletes || truncates,
            via_partition_root: get(row, "pubviaroot")?,
        }))
    }
}

impl TableState {
    fn from_row(wanted: &CapturedTable, row: &Row) -> Result<Self, SlotError> {
        let published: bool = get(row, "published")?;
        let name = |schema: &str, name: &str| {
            let (schema, name): (Option<String>, Option<String>) =
                (get(row, schema)?, get(row, name)?);
            let both = schema.zip(name);
            Ok::<_, SlotError>(both.map(|(schema, name)| QualifiedName::new(schema, name)))
        };
        let kind: Option<String> = get(row, "unstreamed_kind")?;
        Ok(Self {
            unstreamed: kind.zip(name("unstreamed_schema", "unstreamed_name")?),
            captured_root: name("root_schema", "root_name")?,
            wanted: wanted.clone(),
            oid: get(row, "table_oid")?,
            is_partitioned: get(row, "partitioned")?,
            partitions: get(row, "partitions")?,
            columns: get(row, "table_columns")?,
            never_published: get(row, "never_published")?,
            has_children: get(row, "has_children")?,
            stored_are_published: get(row, "stored_are_published")?,
            generated: get(row, "generated")?,
            traced: get::<Option<bool>>(row, "traced")? == Some(true),
            published: published
                .then(|| {
                    Ok::<_, SlotError>(PublishedTable {
                        row_filter: get(row, "row_filter")?,
                        columns: get(row, "published_columns")?,
                        has_column_list: get(row, "has_column_list")?,
                    })
                })
                .transpose()?,
        })
    }

    /// Why no publication can carry every row of the table.
    fn unfit(&self) -> Option<Problem> {
        let table = self.wanted.name.clone();
        if let Some((kind, part)) = self.unstreamed.clone() {
            return Some(Problem::NotStreamed { table, kind, part });
        }
        if let Some(root) = self.captured_root.clone() {
            return Some(Problem::CapturedTwice { table, root });
        }
        self.has_children.then_some(Problem::Inherited { table })
    }

    fn problem(&self, publication: &str, via_partition_root: bool) -> Option<Problem> {
        let table = self.wanted.name.clone();
        let lacking = |columns: &[String]| -> Vec<String> {
            self.wanted
                .columns
                .iter()
                .filter(|c| !columns.contains(c))
                .cloned()
                .collect()
        };
        if self.oid.is_none() {
            return Some(Problem::TableMissing { table });
        }
        if let Some(problem) = self.unfit() {
            return Some(problem);
        }
        let columns = lacking(&self.columns);
        if !columns.is_empty() {
            return Some(Problem::ColumnsMissing { table, columns });
        }
        let needed = |columns: &[String]| -> Vec<String> {
            let all = self.wanted.columns.iter();
            all.filter(|c| columns.contains(c)).cloned().collect()
        };
        let columns = needed(&self.never_published);
        if !columns.is_empty() {
            return Some(Problem::ColumnsGenerated {
                table,
                columns,
                stored_are_published: self.stored_are_published,
            });
        }
        let publication = publication.to_owned();
        let Some(published) = &self.published else {
            // Without `publish_via_partition_root`, the catalog lists the partitions instead of the root.
            return Some(if self.is_partitioned && !via_partition_root {
                Problem::NotViaPartitionRoot { publication, table }
            } else {
                Problem::TableNotPublished { publication, table }
            });
        };
        if let Some(filter) = published.row_filter.clone() {
            return Some(Problem::RowFilter {
                publication,
                table,
                filter,
            });
        }
        let sent = published.columns.as_deref()?;
        let mut columns = lacking(sent);
        let has = |columns: &[String]| columns.iter().any(|column| column == INSERTED_XID);
        if has(&self.columns) && !has(sent) {
            columns.push(INSERTED_XID.to_owned());
        }
        let is_generated = |column: &String| self.generated.contains(column);
        (!columns.is_empty()).then(|| Problem::ColumnsNotPublished {
            publication,
            table,
            needs_generated: columns.iter().any(is_generated),
            by_list: published.has_column_list || !columns.iter().all(is_generated),
            columns,
        })
    }
}

impl PublicationState {
    /// The reasons why rows are not streamed; empty when there are none. Lists only the first
    /// reason for each table, because the others cannot be found until it is fixed.
    #[must_use]
    pub fn problems(&self) -> Vec<Problem> {
        let Some(publication) = &self.publication else {
            let mut problems = self.unfit();
            let fit = self.tables.iter().filter(|t| t.unfit().is_none());
            let (there, missing): (Vec<&TableState>, Vec<&TableState>) =
                fit.partition(|t| t.oid.is_some());
            if there.is_empty() && missing.is_empty() && !problems.is_empty() {
                return problems;
            }
            let names = |tables: Vec<&TableState>| -> Vec<QualifiedName> {
                tables.iter().map(|t| t.wanted.name.clone()).collect()
            };
            let missing = names(missing).into_iter();
            problems.extend(missing.map(|table| Problem::TableMissing { table }));
            let tables = names(there);
            let needs = |state: &TableState| {
                let mut needed = state.wanted.columns.iter();
                needed.any(|column| state.generated.contains(column))
            };
            problems.push(Problem::PublicationMissing {
                publication: self.name.clone(),
                tables,
                needs_generated: self.tables.iter().any(needs),
            });
            return problems;
        };
        let inserts = (!publication.inserts).then(|| Problem::InsertsNotPublished {
            publication: self.name.clone(),
        });
        let via_root = publication.via_partition_root;
        let of_tables = self
            .tables
            .iter()
            .filter_map(|t| t.problem(&self.name, via_root));
        inserts.into_iter().chain(of_tables).collect()
    }

    /// One problem for each captured table that cannot be published completely. Does not depend on
    /// whether the publication exists.
    #[must_use]
    pub fn unfit(&self) -> Vec<Problem> {
        self.tables.iter().filter_map(TableState::unfit).collect()
    }

    /// The captured tables that belong to the publication through their schema. Such a table may
    /// have left the publication and come back without a trace in the
    /// [`fingerprint`](Self::fingerprint).
    pub fn untraced(&self) -> impl Iterator<Item = &QualifiedName> {
        let published = self.tables.iter().filter(|t| t.published.is_some());
        published.filter(|t| !t.traced).map(|t| &t.wanted.name)
    }

    /// The identities and versions of the publication, of its captured tables and of their membership, with
    /// their names. The fingerprint stays the same as long as [`has_changed_since`](Self::has_changed_since)
    /// is false. Only for comparison; it has no meaning by itself.
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Whether the publication, its membership of a captured table, or a captured table itself was
    /// altered, dropped or created again since `earlier`, even if the state is the same again. Rows
    /// written in between may be missing from the stream.
    ///
    /// Both states must come from the same arguments. Membership through `FOR TABLES IN SCHEMA` and
    /// `FOR ALL TABLES` leaves no trace per table.
    #[must_use]
    pub fn has_changed_since(&self, earlier: &Self) -> bool {
        self.fingerprint != earlier.fingerprint
    }

    /// Whether partitions were attached to a captured table or detached from it since `earlier`. A partition
    /// may contain rows that PostgreSQL does not stream.
    #[must_use]
    pub fn has_other_partitions_than(&self, earlier: &Self) -> bool {
        let partitions = |state: &Self| -> Vec<_> {
            let tables = state.tables.iter();
            tables.map(|table| table.partitions.clone()).collect()
        };
        partitions(self) != partitions(earlier)
    }
}
