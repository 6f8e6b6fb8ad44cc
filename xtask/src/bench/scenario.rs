//! The backlogs that are drained.

/// A backlog.
#[derive(Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// Rows per transaction; `None` puts all into one.
    pub(crate) rows_per_transaction: Option<u64>,
    /// Distinct ordering keys; `None` gives each row its own.
    pub(crate) keys: Option<u64>,
}

pub(crate) fn all() -> Vec<Scenario> {
    vec![
        Scenario {
            name: "1-row-1000-keys",
            rows_per_transaction: Some(1),
            keys: Some(1_000),
        },
        Scenario {
            name: "100-row-1000-keys",
            rows_per_transaction: Some(100),
            keys: Some(1_000),
        },
        Scenario {
            name: "one-transaction",
            rows_per_transaction: None,
            keys: Some(1_000),
        },
        Scenario {
            name: "1-row-every-key",
            rows_per_transaction: Some(1),
            keys: None,
        },
    ]
}

impl Scenario {
    /// SQL that writes `events` rows.
    pub(crate) fn sql(&self, events: u64) -> String {
        let key = match self.keys {
            Some(keys) => format!("'k-' || (i % {keys})"),
            None => "'k-' || i".to_owned(),
        };
        let insert = |series: &str| {
            format!(
                "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
                 SELECT 'order', {key}, 'OrderPlaced', i, \
                        jsonb_build_object('order', i, 'note', repeat('x', 100)) \
                 FROM generate_series({series}) i"
            )
        };
        match self.rows_per_transaction {
            None => insert(&format!("1, {events}")),
            Some(rows) => format!(
                "DO $$ BEGIN FOR t IN 0..{} LOOP {}; COMMIT; END LOOP; END $$",
                events / rows - 1,
                insert(&format!(
                    "t::bigint * {rows} + 1, t::bigint * {rows} + {rows}"
                )),
            ),
        }
    }
}
