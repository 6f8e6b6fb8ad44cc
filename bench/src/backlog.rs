//! The outbox rows that a measurement drains.

/// Rows of an outbox, written before any program reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Backlog {
    pub(crate) events: u64,
    /// Rows per transaction. `None` puts all rows into one transaction.
    pub(crate) rows_per_transaction: Option<u64>,
    /// How many distinct ordering keys there are. `None` gives each row its own key.
    pub(crate) keys: Option<u64>,
    /// The text in each payload.
    pub(crate) text: Text,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Text {
    /// 100 bytes of the same letter. With ids and attributes, the message has about 350 bytes.
    Short,
    /// A text of this many bytes that PostgreSQL cannot compress.
    Noise(u64),
}

impl Backlog {
    /// Returns a backlog of `events` rows with short payloads. The number is rounded down to whole
    /// transactions, but there is at least one transaction.
    pub(crate) fn new(events: u64, rows_per_transaction: Option<u64>, keys: Option<u64>) -> Self {
        let rows = rows_per_transaction.unwrap_or(1);
        Self {
            events: (events / rows).max(1) * rows,
            rows_per_transaction,
            keys,
            text: Text::Short,
        }
    }

    pub(crate) fn with_noise(self, bytes: u64) -> Self {
        let text = Text::Noise(bytes);
        Self { text, ..self }
    }

    pub(crate) fn text_bytes(&self) -> u64 {
        match self.text {
            Text::Short => 100,
            Text::Noise(bytes) => bytes,
        }
    }

    pub(crate) fn describe(&self) -> String {
        let rows = match self.rows_per_transaction {
            None => "one transaction".to_owned(),
            Some(1) => "1 row per transaction".to_owned(),
            Some(rows) => format!("{rows} rows per transaction"),
        };
        let keys = match self.keys {
            None => "every row its own key".to_owned(),
            Some(keys) => format!("{keys} keys"),
        };
        let bytes = self.text_bytes();
        format!("{} events of {bytes} bytes, {rows}, {keys}", self.events)
    }

    /// The statements that write the rows. Send each statement in a message of its own: PostgreSQL runs the
    /// statements of one message in one transaction, and there a `DO` block cannot commit.
    pub(crate) fn statements(&self) -> Vec<String> {
        let key = match self.keys {
            Some(keys) => format!("'k-' || (i % {keys})"),
            None => "'k-' || i".to_owned(),
        };
        let (prepare, text) = match self.text {
            Text::Short => (None, "repeat('x', 100)".to_owned()),
            Text::Noise(bytes) => (
                Some(format!(
                    "CREATE TABLE noise AS SELECT string_agg(md5(n::text), '') AS text \
                     FROM generate_series(0, {bytes} / 32) n"
                )),
                // The digest at the start makes the text of each row different.
                format!("left(md5(i::text) || (SELECT text FROM noise), {bytes})"),
            ),
        };
        let insert = |series: &str| {
            format!(
                "INSERT INTO outbox.events (aggregatetype, aggregateid, event_type, version, payload) \
                 SELECT 'order', {key}, 'OrderPlaced', i, \
                        jsonb_build_object('order', i, 'note', {text}) \
                 FROM generate_series({series}) i"
            )
        };
        let write = match self.rows_per_transaction {
            None => insert(&format!("1, {}", self.events)),
            Some(rows) => format!(
                "DO $$ BEGIN FOR t IN 0..{} LOOP {}; COMMIT; END LOOP; END $$",
                self.events / rows - 1,
                insert(&format!(
                    "t::bigint * {rows} + 1, t::bigint * {rows} + {rows}"
                )),
            ),
        };
        prepare.into_iter().chain([write]).collect()
    }
}
