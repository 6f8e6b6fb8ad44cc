//! Checks whether a publication publishes every row of the captured tables.
//!
//! PostgreSQL decodes each WAL position with the publication as it was at that position. If a row was
//! inserted while the publication did not exist or did not include the table, PostgreSQL never streams the
//! row, and does not report it. (PostgreSQL 18 reports a missing publication, but only as a warning.) So the
//! relay checks the publication every few seconds, with one cheap statement, and confirms nothing while there
//! is a [`Problem`]. [`PublicationState::has_changed_since`] also finds a change that was undone between two
//! checks.
//!
//! See <https://www.postgresql.org/docs/current/sql-createpublication.html>.

use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

use crate::slot::get;
use crate::{QualifiedName, SlotError, sql};

mod columns;
mod problem;

pub use problem::Problem;

/// A table whose inserts PostgreSQL must stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapturedTable {
    /// The table; for a partitioned table, its root.
    pub name: QualifiedName,
    /// The columns that the relay needs from each row.
    pub columns: Vec<String>,
    /// Columns that are needed if the table has them, unless they are generated columns.
    pub optional_columns: Vec<String>,
}

/// The state of a publication and of the captured tables in it, at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicationState {
    /// The publication's name.
    pub name: String,
    /// The publication's properties; `None` if it does not exist.
    pub publication: Option<Publication>,
    /// The captured tables, in the order in which the caller named them.
    pub tables: Vec<TableState>,
    fingerprint: String,
}

/// A publication's own properties.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Publication {
    /// The publication's OID, which changes when somebody drops the publication and creates it again.
    pub oid: u32,
    /// Whether the publication is `FOR ALL TABLES`.
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
    /// The table that the caller named.
    pub wanted: CapturedTable,
    /// The table's OID; `None` if the table does not exist.
    pub oid: Option<u32>,
    /// Whether the table is partitioned.
    pub is_partitioned: bool,
    /// The table's partitions at every level, in the order of their OIDs. Each text is `oid:transaction`: the
    /// OID of the partition, and the transaction that attached the partition.
    pub partitions: Vec<String>,
    /// Whether rows are stored in tables that inherit from this table, such as the chunks of a TimescaleDB
    /// hypertable. PostgreSQL streams such rows under the names of the inheriting tables, so the relay
    /// would miss them.
    pub has_children: bool,
    /// A relation whose rows PostgreSQL never streams: this table or one of its partitions. The text is the kind
    /// of the relation, such as `unlogged table`.
    pub unstreamed: Option<(String, QualifiedName)>,
    /// The other captured table that contains this table as a partition, if there is one.
    pub captured_root: Option<QualifiedName>,
    /// The names of the table's columns.
    pub columns: Vec<String>,
    /// The generated columns that PostgreSQL cannot publish: all generated columns before
    /// PostgreSQL 18, and virtual ones from 18 on.
    pub never_published: Vec<String>,
    /// Whether the server can publish stored generated columns, as PostgreSQL 18 does.
    pub stored_are_published: bool,
    /// The stored generated columns; empty if the server cannot publish them.
    pub generated: Vec<String>,
    /// How the table is published; `None` when it is not in the publication.
    pub published: Option<PublishedTable>,
    /// Whether the catalogue would reveal that the table was removed from the publication and added again. True if
    /// the catalogue has a row for the table's membership. Also true if the publication is `FOR ALL TABLES`, because
    /// no table can leave it. Otherwise false, for example if the table is published only through its schema.
    pub traced: bool,
}

/// How a table is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedTable {
    /// The row filter: PostgreSQL does not publish rows that do not satisfy it. `None` if there is no filter.
    pub row_filter: Option<String>,
    /// The published columns; `None` on PostgreSQL 14, which always publishes all of them.
    pub columns: Option<Vec<String>>,
    /// Whether the publication has a column list for the table.
    pub has_column_list: bool,
}

/// Maximum number of attempts to read a publication while somebody drops objects. One retry is normally enough.
/// More are needed only if somebody keeps dropping and recreating the publication.
const ATTEMPTS: u32 = 5;

/// Reads the state of a publication, with one statement. Repeats the statement if somebody drops an object
/// while it runs.
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

/// Whether the statement failed because somebody dropped an object that the statement's snapshot still shows.
/// PostgreSQL 16 and newer can report this as an internal error ("cache lookup failed").
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

    /// The OIDs of the table and of its partitions at every level; empty if the table does not exist.
    pub fn oids(&self) -> impl Iterator<Item = u32> {
        let partitions = self.partitions.iter();
        let below = partitions.filter_map(|text| text.split(':').next()?.parse().ok());
        self.oid.into_iter().chain(below)
    }

    /// The reason why no publication could publish every row of the table, if there is one.
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
            // Without `publish_via_partition_root`, the catalogue lists the partitions instead of the root, so a
            // root in the publication looks unpublished.
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
        self.columns_left_out(&publication, published)
    }
}

impl PublicationState {
    /// The reasons why rows are not streamed; empty if there are none. Contains only the first problem of each
    /// table. Another problem of the table may appear once the first is fixed.
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

    /// The problems of captured tables that no publication could publish completely, at most one for each table.
    /// A table can have such a problem even if the publication does not exist.
    #[must_use]
    pub fn unfit(&self) -> Vec<Problem> {
        self.tables.iter().filter_map(TableState::unfit).collect()
    }

    /// The captured tables that can leave the publication and come back without changing the
    /// [`fingerprint`](Self::fingerprint). The catalogue has no row about the membership of such a table, for
    /// example because the table belongs to the publication through its schema.
    pub fn untraced(&self) -> impl Iterator<Item = &QualifiedName> {
        let published = self.tables.iter().filter(|t| t.published.is_some());
        published.filter(|t| !t.traced).map(|t| &t.wanted.name)
    }

    /// A text to compare with an earlier fingerprint: the two differ exactly if
    /// [`has_changed_since`](Self::has_changed_since) is true. The text consists of OIDs and of the versions
    /// (`xmin`) of catalogue rows: in `pg_publication` the publication, and for each captured table its row type
    /// (`pg_type`), its schema (`pg_namespace`) and its membership (`pg_publication_rel`).
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Whether somebody changed something since `earlier`, even if everything looks the same again. These
    /// changes count:
    ///
    /// - The publication, or the membership of a captured table in it, was altered, dropped or recreated.
    /// - A captured table was dropped, recreated, renamed, moved to another schema or given to another owner.
    /// - The schema of a captured table was renamed or given to another owner, or its privileges were changed.
    ///
    /// Rows that were inserted since `earlier` can then be missing from the stream. Other changes to a table, such
    /// as a new column, do not count.
    ///
    /// Both states must come from the same arguments. Membership through `FOR TABLES IN SCHEMA` has no
    /// catalogue row per table, so a change of such a membership leaves no trace here.
    #[must_use]
    pub fn has_changed_since(&self, earlier: &Self) -> bool {
        self.fingerprint != earlier.fingerprint
    }

    /// Whether partitions were attached to a captured table or detached from it since `earlier`, even if the
    /// same partition was detached and attached again. Such a partition can contain rows that PostgreSQL does
    /// not stream.
    #[must_use]
    pub fn has_other_partitions_than(&self, earlier: &Self) -> bool {
        let partitions = |state: &Self| -> Vec<_> {
            let tables = state.tables.iter();
            tables.map(|table| table.partitions.clone()).collect()
        };
        partitions(self) != partitions(earlier)
    }
}
