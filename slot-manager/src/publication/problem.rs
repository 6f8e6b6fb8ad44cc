//! The ways in which a publication can fail to publish a captured table, and the remedy for each of these
//! problems.

use std::fmt;

use crate::{QualifiedName, quoted_identifier};

/// A reason why rows of a captured table are not streamed, or are streamed incompletely.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// The publication does not exist.
    PublicationMissing {
        /// The publication's name.
        publication: String,
        /// The existing tables that the publication should include.
        tables: Vec<QualifiedName>,
        /// Whether the publication must publish generated columns, which needs an option.
        needs_generated: bool,
    },
    /// Inserts are not published.
    InsertsNotPublished {
        /// The publication.
        publication: String,
    },
    /// The table does not exist.
    TableMissing {
        /// The table's name.
        table: QualifiedName,
    },
    /// The table lacks columns that are needed.
    ColumnsMissing {
        /// The table.
        table: QualifiedName,
        /// The missing columns.
        columns: Vec<String>,
    },
    /// Rows of the table are stored in tables that inherit from it, and streamed under the names of those
    /// tables.
    Inherited {
        /// The table.
        table: QualifiedName,
    },
    /// PostgreSQL never streams rows of the table, or of one of its partitions.
    NotStreamed {
        /// The table.
        table: QualifiedName,
        /// What the table or partition is, such as `unlogged table`.
        kind: String,
        /// The partition, or the table itself.
        part: QualifiedName,
    },
    /// The table is a partition of another captured table, so the same rows would be captured
    /// twice.
    CapturedTwice {
        /// The table.
        table: QualifiedName,
        /// The captured table that contains this table as a partition.
        root: QualifiedName,
    },
    /// Required columns are generated, and the server cannot publish them.
    ColumnsGenerated {
        /// The table.
        table: QualifiedName,
        /// The generated columns.
        columns: Vec<String>,
        /// Whether the server could publish the columns if they were stored.
        stored_are_published: bool,
    },
    /// The table is partitioned, and rows are published under the names of the partitions.
    NotViaPartitionRoot {
        /// The publication.
        publication: String,
        /// The table.
        table: QualifiedName,
    },
    /// The table is not in the publication.
    TableNotPublished {
        /// The publication.
        publication: String,
        /// The table.
        table: QualifiedName,
    },
    /// A row filter excludes rows.
    RowFilter {
        /// The publication.
        publication: String,
        /// The table.
        table: QualifiedName,
        /// The filter, as SQL.
        filter: String,
    },
    /// A column list excludes required columns, or required columns are generated and the
    /// publication does not publish generated columns.
    ColumnsNotPublished {
        /// The publication.
        publication: String,
        /// The table.
        table: QualifiedName,
        /// The excluded columns.
        columns: Vec<String>,
        /// Whether some of these columns are generated.
        needs_generated: bool,
        /// Whether a column list excludes these columns.
        by_list: bool,
    },
}

/// The option that makes PostgreSQL 18 and newer publish stored generated columns.
const GENERATED: &str = "publish_generated_columns = stored";

/// SQL that removes the table from the publication and adds it again without a filter or a column
/// list.
fn added_again(publication: &str, table: &QualifiedName) -> String {
    let publication = quoted_identifier(publication);
    format!(
        "alter publication {publication} drop table {table}; \
         alter publication {publication} add table {table}"
    )
}

fn with_article(kind: &str) -> String {
    if kind.starts_with('u') {
        format!("an {kind}")
    } else {
        format!("a {kind}")
    }
}

fn comma_separated(names: &[String]) -> String {
    let names: Vec<String> = names.iter().map(|name| quoted_identifier(name)).collect();
    names.join(", ")
}

fn creating(publication: &str, tables: &[QualifiedName], needs_generated: bool) -> String {
    let tables: Vec<String> = tables.iter().map(ToString::to_string).collect();
    let generated = if needs_generated {
        format!(", {GENERATED}")
    } else {
        String::new()
    };
    format!(
        "create publication {} for table {} with (publish = 'insert', \
         publish_via_partition_root = true{generated})",
        quoted_identifier(publication),
        tables.join(", ")
    )
}

/// The remedy for a table, or a partition of it, whose rows PostgreSQL never streams.
fn replacing(table: &QualifiedName, kind: &str, part: &QualifiedName) -> String {
    match (kind, part == table) {
        ("unlogged table", true) => format!(
            "alter table {part} set logged (create it again if that is refused or it is partitioned), or \
             remove it from the settings"
        ),
        ("unlogged table", false) => format!("alter table {part} set logged"),
        (_, true) => {
            format!("name an ordinary or a partitioned table instead of {part} in the settings")
        }
        (_, false) => format!(
            "alter table {table} detach partition {part}; create an ordinary table (like {table} including all); copy \
             the rows of {part} into it with every column, also inserted_xid and seq; then attach it in place of \
             {part}: the relay delivers the copied rows, and never those that you leave in {part}"
        ),
    }
}

/// The remedy for generated columns that are not published.
fn regenerating(table: &QualifiedName, columns: &[String], stored_are_published: bool) -> String {
    let other = "or name another column in the settings of the table";
    if stored_are_published {
        return format!(
            "drop {} of {table} and add it again as a stored generated column, {other}",
            comma_separated(columns)
        );
    }
    let ordinary: Vec<String> = columns
        .iter()
        .map(|c| format!("alter column {} drop expression", quoted_identifier(c)))
        .collect();
    format!(
        "alter table {table} {}, and let the service or a BEFORE INSERT trigger write it; {other}",
        ordinary.join(", ")
    )
}

fn publishing_columns(
    publication: &str,
    table: &QualifiedName,
    needs_generated: bool,
    by_list: bool,
) -> String {
    let set = format!(
        "alter publication {} set ({GENERATED})",
        quoted_identifier(publication)
    );
    match (needs_generated, by_list) {
        (true, false) => set,
        (true, true) => {
            let again = added_again(publication, table);
            format!("in one transaction: {again}; {set}")
        }
        (false, _) => format!("in one transaction: {}", added_again(publication, table)),
    }
}

impl Problem {
    /// The code of the problem. The relay's error and the finding of a check both use this code.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::PublicationMissing { .. } => "publication-missing",
            Self::TableMissing { .. } => "schema-missing",
            Self::ColumnsMissing { .. } | Self::ColumnsGenerated { .. } => "column-missing",
            Self::InsertsNotPublished { .. }
            | Self::NotViaPartitionRoot { .. }
            | Self::TableNotPublished { .. }
            | Self::RowFilter { .. }
            | Self::Inherited { .. }
            | Self::NotStreamed { .. }
            | Self::CapturedTwice { .. }
            | Self::ColumnsNotPublished { .. } => "publication-drift",
        }
    }

    /// The SQL or the change that fixes the problem. SQL has to be run as a role that owns both the publication
    /// and the table.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::PublicationMissing {
                publication,
                tables,
                ..
            } if tables.is_empty() => {
                format!("run `postrider init --apply`, which creates publication {publication}")
            }
            Self::PublicationMissing {
                publication,
                tables,
                needs_generated,
            } => creating(publication, tables, *needs_generated),
            Self::InsertsNotPublished { publication } => {
                format!(
                    "alter publication {} set (publish = 'insert')",
                    quoted_identifier(publication)
                )
            }
            Self::TableMissing { table } if table.schema == "outbox" => format!(
                "run `postrider init --apply`, which creates outbox.events, or correct the setting \
                 that names {table}"
            ),
            Self::TableMissing { table } => format!(
                "create {table} and run `postrider init --apply`, or correct the setting that names it"
            ),
            Self::ColumnsMissing { table, columns } => format!(
                "add {} to {table}, or correct `columns` in the settings of that table (\"\" instead of a name means that \
                 the table has no such column)",
                comma_separated(columns)
            ),
            Self::Inherited { table } => format!(
                "make {table} an ordinary table, or one with declarative partitions (partition by): \
                 PostgreSQL streams those under the name of the root"
            ),
            Self::NotStreamed { table, kind, part } => replacing(table, kind, part),
            Self::CapturedTwice { table, root } => {
                format!(
                    "remove {table} from [[tables]]: its rows are delivered with those of {root}"
                )
            }
            Self::ColumnsGenerated {
                table,
                columns,
                stored_are_published,
            } => regenerating(table, columns, *stored_are_published),
            Self::NotViaPartitionRoot { publication, .. } => format!(
                "alter publication {} set (publish_via_partition_root = true)",
                quoted_identifier(publication)
            ),
            Self::TableNotPublished { publication, table } => {
                format!(
                    "alter publication {} add table {table}",
                    quoted_identifier(publication)
                )
            }
            Self::RowFilter {
                publication, table, ..
            } => format!("in one transaction: {}", added_again(publication, table)),
            Self::ColumnsNotPublished {
                publication,
                table,
                needs_generated,
                by_list,
                ..
            } => publishing_columns(publication, table, *needs_generated, *by_list),
        }
    }
}

fn why_generated(stored_are_published: bool) -> &'static str {
    if stored_are_published {
        "is generated and not stored: such columns are never published"
    } else {
        "is generated: generated columns are not published before PostgreSQL 18"
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PublicationMissing { publication, .. } => {
                write!(f, "publication {publication} does not exist")
            }
            Self::InsertsNotPublished { publication } => {
                write!(f, "publication {publication} does not publish inserts")
            }
            Self::TableMissing { table } => write!(f, "table {table} does not exist"),
            Self::ColumnsMissing { table, columns } => {
                write!(f, "table {table} has no column {}", columns.join(", "))
            }
            Self::Inherited { table } => write!(
                f,
                "rows of table {table} are stored in tables that inherit from it (or it is a TimescaleDB \
                 hypertable): PostgreSQL streams such rows under the names of those tables, so they would \
                 never be delivered"
            ),
            Self::NotStreamed { table, kind, part } if part == table => write!(
                f,
                "{table} is {}: PostgreSQL streams no rows of such a relation",
                with_article(kind)
            ),
            Self::NotStreamed { table, kind, part } => write!(
                f,
                "partition {part} of {table} is {}: PostgreSQL never streams its rows",
                with_article(kind)
            ),
            Self::CapturedTwice { table, root } => write!(
                f,
                "table {table} is a partition of {root}, which is captured too"
            ),
            Self::ColumnsGenerated {
                table,
                columns,
                stored_are_published,
            } => {
                let why = why_generated(*stored_are_published);
                let columns = columns.join(", ");
                write!(f, "column {columns} of table {table} {why}")
            }
            Self::NotViaPartitionRoot { publication, table } => write!(
                f,
                "publication {publication} publishes the partitions of {table} under their own names"
            ),
            Self::TableNotPublished { publication, table } => {
                write!(f, "table {table} is not in publication {publication}")
            }
            Self::RowFilter {
                publication,
                table,
                filter,
            } => write!(
                f,
                "publication {publication} leaves out the rows of {table} that do not satisfy {filter}"
            ),
            Self::ColumnsNotPublished {
                publication,
                table,
                columns,
                ..
            } => write!(
                f,
                "publication {publication} leaves out {} of {table}",
                columns.join(", ")
            ),
        }
    }
}
