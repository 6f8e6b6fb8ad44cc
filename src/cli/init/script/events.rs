//! The statements that create `outbox.events`, with the requested payload type and partitions.

const EVENTS: &str = include_str!("../../../../migrations/0001_events.sql");

/// How to create `outbox.events`. These choices do not change a table that already exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cli) struct NewTable {
    pub(in crate::cli) payload: Payload,
    /// `None` if the table is not partitioned.
    pub(in crate::cli) partition: Option<Partition>,
}

/// The type of the payload column of `outbox.events`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(in crate::cli) enum Payload {
    /// For JSON; PostgreSQL validates it
    Jsonb,
    /// For Protobuf, Avro and similar formats; sent byte for byte
    Bytea,
}

/// The partitions of `outbox.events`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(in crate::cli) enum Partition {
    /// One partition a day, by occurred_at in UTC
    Daily,
}

/// Parts of the migration that differ for a partitioned table, each with its replacement: the primary key, and the
/// end of the list of columns.
const DAILY: [(&str, &str); 2] = [
    (
        "    id             uuid        primary key default gen_random_uuid(),\n",
        "    id             uuid        not null default gen_random_uuid(),\n",
    ),
    (
        "default nextval('outbox.events_seq_seq')\n) with (\n",
        "default nextval('outbox.events_seq_seq'),\n    \
             -- The key of a partitioned table contains the column that it is partitioned by.\n    \
             primary key (id, occurred_at)\n\
         ) partition by range (occurred_at);\n\n\
         -- Takes the rows of days that have no partition of their own.\n\
         do $$\nbegin\n    \
             if exists (select from pg_catalog.pg_partitioned_table\n               \
                        where partrelid = 'outbox.events'::regclass) then\n        \
                 create table if not exists outbox.events_default\n            \
                     partition of outbox.events default with (\n",
    ),
];

/// The end of the `create table` statement, with its replacement for a partitioned table. There the storage
/// parameters belong to the default partition, which is created in an anonymous block.
const END: (&str, &str) = (
    "autovacuum_analyze_scale_factor = 0.05\n);\n",
    "autovacuum_analyze_scale_factor = 0.05);\n    end if;\nend\n$$;\n",
);

/// Creates the statement-level trigger `insert_only` on the default partition, because such a trigger
/// on the parent table does not fire for statements on a partition. `outbox.add_day` creates it on each
/// daily partition.
const KEEP_DEFAULT: &str = "
do $$
begin
    if exists (select from pg_catalog.pg_partitioned_table
               where partrelid = 'outbox.events'::regclass) then
        create or replace trigger insert_only
            before update or truncate on outbox.events_default
            for each statement execute function outbox.refuse_change();
    end if;
end
$$;
";

/// Returns the migration that creates the table.
pub(super) fn events(new_table: NewTable) -> String {
    let NewTable { payload, partition } = new_table;
    let mut sql = EVENTS.to_owned();
    if partition == Some(Partition::Daily) {
        for (plain, daily) in DAILY.into_iter().chain([END]) {
            sql = sql.replacen(plain, daily, 1);
        }
        sql += KEEP_DEFAULT;
    }
    match payload {
        Payload::Jsonb => sql,
        // Leave comments unchanged: one of them describes this replacement.
        Payload::Bytea => sql
            .lines()
            .map(|line| {
                if line.starts_with("--") {
                    format!("{line}\n")
                } else {
                    format!("{}\n", line.replace("payload jsonb", "payload bytea"))
                }
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(payload: Payload, partition: Option<Partition>) -> String {
        events(NewTable { payload, partition })
    }

    #[test]
    fn payload_bytea_changes_the_table_and_the_function() {
        let sql = rendered(Payload::Bytea, None);
        let lines = sql.lines().filter(|line| line.trim() == "payload bytea,");
        assert_eq!(lines.count(), 2);
        let mut code = sql.lines().filter(|line| !line.starts_with("--"));
        assert!(!code.any(|line| line.contains("payload jsonb")));
    }

    #[test]
    fn a_daily_table_differs_in_its_key_and_its_partitions_only() {
        assert_eq!(rendered(Payload::Jsonb, None), EVENTS);
        let daily = rendered(Payload::Bytea, Some(Partition::Daily));
        for (plain, _) in DAILY.into_iter().chain([END]) {
            assert_eq!(EVENTS.matches(plain).count(), 1, "{plain}");
            assert!(!daily.contains(plain), "{plain}");
        }
        assert!(daily.contains("    payload bytea,\n"));
    }
}
