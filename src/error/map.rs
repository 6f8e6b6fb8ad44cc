//! Converts errors of the mapping into errors for the operator.

use super::{Code, Error};
use crate::mapping::MapError;

impl From<MapError> for Error {
    fn from(error: MapError) -> Self {
        let code = error.code().parse();
        let code: Code = code.expect("invariant: the mapping's codes are in the table of codes");
        let hint = error.hint();
        Error::new(code, error.to_string()).hint(hint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{CommittedAt, EventId, OrderingKey};
    use crate::mapping::{EventError, EventFault, FaultyRow, SettingFault};

    #[test]
    fn an_error_of_the_mapping_keeps_its_code() {
        let event = |fault| {
            let event_id = EventId {
                uuid: [0; 16],
                source_id: None,
            };
            MapError::Event(Box::new(EventError {
                table: "outbox.events".into(),
                event_id: None,
                at: CommittedAt::default(),
                fault,
                known: FaultyRow {
                    event_id,
                    topic: None,
                    ordering_key: OrderingKey::UNORDERED,
                },
            }))
        };
        let column = || "payload".to_owned();
        let setting = SettingFault::TimeZoneMissing { column: column() };
        for error in [
            event(EventFault::ValueTooLarge { column: column() }),
            event(EventFault::NotUtf8 { column: column() }),
            MapError::Setting {
                table: "t".to_owned(),
                fault: setting,
            },
            MapError::ColumnMissing {
                table: "t".to_owned(),
                column: column(),
                setting: "columns.payload".to_owned(),
                present: Vec::new(),
            },
        ] {
            let code = error.code();
            assert_eq!(Error::from(error).code().name(), code);
        }
    }
}
