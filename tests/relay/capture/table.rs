//! The kinds of outbox tables that services have.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `outbox.events`, as `init` creates it.
    Events,
    /// Ids are numbers from a sequence. They start at 1 again when the table is recreated.
    Numbered,
    /// Like `Numbered`, but with a column `occurred_at`, by which the relay can recognise the rows of a copied table.
    /// The relay needs this column only if there is no `inserted_xid`. So most tests drop the column `inserted_xid`,
    /// which `init` adds.
    Timed,
    /// Ids are random UUIDs. The service's table has no column that counts the rows.
    Uuid,
    /// Partitioned by date. Ids are random UUIDs.
    Partitioned,
    /// Partitioned by number. The table's identity column numbers the rows.
    Identity,
}

/// The columns that services write, after the id.
const COLUMNS: &str = "aggregatetype text, aggregateid text, event_type text, payload jsonb";

impl Kind {
    pub(super) fn table(self) -> &'static str {
        match self {
            Self::Events => "outbox.events",
            Self::Numbered => "public.numbered",
            Self::Timed => "public.timed",
            Self::Uuid => "public.plain",
            Self::Partitioned => "public.parts",
            Self::Identity => "public.ident",
        }
    }

    /// SQL with which a service creates the table. Empty for `outbox.events`, which `init` creates.
    pub(super) fn create(self) -> String {
        match self {
            Self::Events => String::new(),
            Self::Numbered => {
                format!("CREATE TABLE public.numbered (id bigserial PRIMARY KEY, {COLUMNS});")
            }
            Self::Timed => format!(
                "CREATE TABLE public.timed (id bigserial PRIMARY KEY, {COLUMNS}, \
                 occurred_at timestamptz NOT NULL DEFAULT clock_timestamp());"
            ),
            Self::Uuid => format!(
                "CREATE TABLE public.plain (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), {COLUMNS});"
            ),
            Self::Identity => format!(
                "CREATE TABLE public.ident (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, {COLUMNS}) \
                     PARTITION BY RANGE (id); \
                 CREATE TABLE public.ident_1 PARTITION OF public.ident FOR VALUES FROM (0) TO (200); \
                 CREATE TABLE public.ident_2 PARTITION OF public.ident FOR VALUES FROM (200) TO (9999);"
            ),
            Self::Partitioned => {
                let partitions = (0..4).map(|n| {
                    format!(
                        "CREATE TABLE public.parts_{n} PARTITION OF public.parts \
                         FOR VALUES FROM ('{}-01-01') TO ('{}-01-01');",
                        2020 + n,
                        2021 + n
                    )
                });
                format!(
                    "CREATE TABLE public.parts (id uuid DEFAULT gen_random_uuid(), {COLUMNS}, \
                     day date NOT NULL) PARTITION BY RANGE (day);{}",
                    partitions.collect::<String>()
                )
            }
        }
    }

    /// The text of the settings file of a relay that captures only `table`.
    pub(super) fn settings(self, table: &str) -> String {
        format!("[[tables]]\ntable = \"{table}\"\n")
    }

    /// SQL for the event id of a row. The query must give the table the alias `e`.
    pub(super) fn event_id(self) -> &'static str {
        match self {
            Self::Numbered => "outbox.event_uuid('public.numbered', e.id::text, e.inserted_xid)",
            Self::Timed => "outbox.event_uuid('public.timed', e.id::text)",
            Self::Identity => "outbox.event_uuid('public.ident', e.id::text, e.inserted_xid)",
            Self::Events | Self::Uuid | Self::Partitioned => "e.id",
        }
    }

    fn is_partitioned(self) -> bool {
        self == Self::Partitioned
    }

    /// SQL that inserts a row with the number `n`, an SQL expression. With a FROM clause appended,
    /// it inserts one row for each row of that clause.
    fn values(self, table: &str, key: &str, event_type: &str, n: &str) -> String {
        let (column, value) = if self.is_partitioned() {
            (", day", format!(", date '2020-01-01' + ({n}) % 4 * 366"))
        } else {
            ("", String::new())
        };
        format!(
            "INSERT INTO {table} (aggregatetype, aggregateid, event_type, payload{column}) \
             SELECT 'order', {key}, '{event_type}', jsonb_build_object('n', {n}){value}"
        )
    }

    /// SQL that inserts `rows` old rows in one transaction. Tests run it before capturing begins.
    pub(super) fn insert_old(self, table: &str, rows: u32) -> String {
        let insert = self.values(table, "'old-' || n % 5", "Old", "n");
        format!("{insert} FROM generate_series(1, {rows}) n")
    }

    /// SQL that inserts `rows` new rows with the numbers from `first` on, one transaction per row.
    pub(super) fn insert(self, table: &str, prefix: &str, first: u32, rows: u32) -> String {
        let insert = self.values(table, &format!("'{prefix}-' || i % 5"), "New", "i");
        format!(
            "DO $$ BEGIN FOR i IN {first}..{last} LOOP {insert}; COMMIT; END LOOP; END $$",
            last = first + rows - 1
        )
    }

    /// Like `insert`, but all rows in one transaction.
    pub(super) fn insert_at_once(self, table: &str, prefix: &str, first: u32, rows: u32) -> String {
        let insert = self.values(table, &format!("'{prefix}-' || i % 5"), "New", "i");
        format!(
            "{insert} FROM generate_series({first}, {}) i",
            first + rows - 1
        )
    }

    /// SQL that inserts one new row with the number `n`.
    pub(super) fn row(self, table: &str, key: &str, n: u32) -> String {
        self.values(table, &format!("'{key}'"), "New", &n.to_string())
    }
}
