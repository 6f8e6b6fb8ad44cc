//! Renders messages as text for snapshots. The text is the same for every server: it omits the server's positions,
//! times and transaction ids, and shows names instead of OIDs for relations and for types that are not built in. It
//! shows the position in an Origin, because `capture.sh` chooses that position.

use std::collections::HashMap;
use std::fmt::Write;

use decoder::{Column, Message, Oid, OldRow, OwnedRelation, Relation, RelationCache, Tuple, Value};

/// Maximum length in bytes of a text that is rendered in full. A longer text is rendered as its start and
/// its length, so that snapshots stay readable.
const LONGEST_TEXT: usize = 60;

/// Renders a stream of messages: one line per message, followed by one line for each column of a relation or
/// each value of a row.
#[derive(Default)]
pub(crate) struct Renderer {
    relations: RelationCache,
    own_types: HashMap<Oid, String>,
    out: String,
}

impl Renderer {
    pub(crate) fn add(&mut self, message: &Message<'_>) {
        match message {
            Message::Begin(_) => self.line("Begin"),
            Message::Commit(_) => self.line("Commit"),
            Message::Origin(origin) => {
                self.line(&format!(
                    "Origin {:?} at {}",
                    origin.name, origin.commit_lsn
                ));
            }
            Message::Relation(relation) => self.relation(relation),
            Message::Type(data_type) => {
                let name = format!("{}.{}", data_type.namespace, data_type.name);
                self.line(&format!("Type {name}"));
                self.own_types.insert(data_type.oid, name);
            }
            Message::Insert(insert) => {
                self.line(&format!("Insert into {}", self.table(insert.relation)));
                self.row("new", insert.relation, insert.tuple);
            }
            Message::Update(update) => {
                self.line(&format!("Update of {}", self.table(update.relation)));
                if let Some(old) = update.old {
                    self.old_row(update.relation, old);
                }
                self.row("new", update.relation, update.new);
            }
            Message::Delete(delete) => {
                self.line(&format!("Delete from {}", self.table(delete.relation)));
                self.old_row(delete.relation, delete.old);
            }
            Message::Truncate(truncate) => {
                let tables: Vec<_> = truncate
                    .relations
                    .iter()
                    .map(|oid| self.table(oid))
                    .collect();
                self.line(&format!(
                    "Truncate of {}, cascade {}, restart identity {}",
                    tables.join(" and "),
                    truncate.cascade,
                    truncate.restart_identity,
                ));
            }
            Message::Logical(message) => self.line(&format!(
                "Message, transactional {}, prefix {:?}, content \"{}\"",
                message.is_transactional,
                message.prefix,
                message.content.escape_ascii(),
            )),
        }
    }

    pub(crate) fn finish(self) -> String {
        self.out
    }

    fn line(&mut self, line: &str) {
        writeln!(self.out, "{line}").expect("writing to a String cannot fail");
    }

    fn relation(&mut self, relation: &Relation<'_>) {
        let change = self.relations.insert(relation);
        self.line(&format!(
            "Relation {}.{}, replica identity {:?}: {change:?}",
            relation.namespace, relation.name, relation.replica_identity,
        ));
        for Column {
            is_key,
            name,
            type_oid,
            type_modifier,
        } in relation.columns
        {
            let key = if is_key { "key, " } else { "" };
            let number = format!("type {type_oid}");
            let data_type = self.own_types.get(&type_oid).unwrap_or(&number);
            let modifier = match type_modifier {
                -1 => String::new(),
                modifier => format!(", modifier {modifier}"),
            };
            self.line(&format!("    {name}: {key}{data_type}{modifier}"));
        }
    }

    fn old_row(&mut self, relation: Oid, old: OldRow<'_>) {
        match old {
            OldRow::Key(tuple) => self.row("old key", relation, tuple),
            OldRow::Full(tuple) => self.row("old row", relation, tuple),
        }
    }

    fn row(&mut self, label: &str, relation: Oid, tuple: Tuple<'_>) {
        let columns = &self.known(relation).columns;
        assert_eq!(tuple.len(), columns.len(), "a row fits its relation");
        let fields: Vec<String> = columns
            .iter()
            .zip(tuple)
            .map(|(column, value)| format!("\n        {} = {}", column.name, render(value)))
            .collect();
        self.line(&format!("    {label}:{}", fields.concat()));
    }

    fn table(&self, oid: Oid) -> String {
        let relation = self.known(oid);
        format!("{}.{}", relation.namespace, relation.name)
    }

    fn known(&self, oid: Oid) -> &OwnedRelation {
        self.relations
            .get(oid)
            .expect("a relation is described before it is used")
    }
}

fn render(value: Value<'_>) -> String {
    match value {
        Value::Null => "NULL".to_owned(),
        Value::UnchangedToast => "(unchanged)".to_owned(),
        Value::Binary(bytes) => {
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("binary {hex}")
        }
        Value::Text(bytes) => {
            let text = std::str::from_utf8(bytes).expect("the databases are in UTF-8");
            match text.get(..LONGEST_TEXT) {
                Some(start) if text.len() > LONGEST_TEXT => {
                    format!("{start:?}... ({} bytes)", text.len())
                }
                _ => format!("{text:?}"),
            }
        }
    }
}
