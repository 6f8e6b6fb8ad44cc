//! Converts errors of the mapping into the operator's errors.

use super::{Code, Error};
use crate::map::{EventFault, Limit, MapError};

impl From<MapError> for Error {
    fn from(error: MapError) -> Self {
        let code = match &error {
            MapError::ColumnMissing { .. } => Code::ColumnMissing,
            MapError::Setting { .. } => Code::SettingInvalid,
            MapError::Event(event) => match &event.fault {
                EventFault::OverLimit {
                    limit: Limit::Request,
                    ..
                } => Code::EventTooLarge,
                _ => Code::EventInvalid,
            },
        };
        let hint = error.hint();
        Error::new(code, error.to_string()).hint(hint)
    }
}
