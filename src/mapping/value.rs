//! Reads one value of a row as the text that `SELECT` would print.
//!
//! The relay asks the server for the text format, in which a value is already this text. This module also reads the
//! binary format for the usual types of outbox columns. For any other type, a binary value is an error that names
//! the column, because the relay must not guess its meaning.

use std::borrow::Cow;

use decoder::{Oid, PgTimestamp, Value};

use super::error::EventFault;

/// OIDs of built-in types, from PostgreSQL's `pg_type.dat`. They never change.
pub(super) mod pg_type {
    use decoder::Oid;

    pub(crate) const BOOL: Oid = Oid(16);
    pub(crate) const BYTEA: Oid = Oid(17);
    pub(crate) const NAME: Oid = Oid(19);
    pub(crate) const INT8: Oid = Oid(20);
    pub(crate) const INT2: Oid = Oid(21);
    pub(crate) const INT4: Oid = Oid(23);
    pub(crate) const TEXT: Oid = Oid(25);
    pub(crate) const OID: Oid = Oid(26);
    pub(crate) const JSON: Oid = Oid(114);
    pub(crate) const FLOAT4: Oid = Oid(700);
    pub(crate) const FLOAT8: Oid = Oid(701);
    pub(crate) const MONEY: Oid = Oid(790);
    pub(crate) const INET: Oid = Oid(869);
    pub(crate) const BPCHAR: Oid = Oid(1042);
    pub(crate) const VARCHAR: Oid = Oid(1043);
    pub(crate) const DATE: Oid = Oid(1082);
    pub(crate) const TIME: Oid = Oid(1083);
    pub(crate) const TIMESTAMP: Oid = Oid(1114);
    pub(crate) const TIMESTAMPTZ: Oid = Oid(1184);
    pub(crate) const INTERVAL: Oid = Oid(1186);
    pub(crate) const BIT: Oid = Oid(1560);
    pub(crate) const NUMERIC: Oid = Oid(1700);
    pub(crate) const UUID: Oid = Oid(2950);
    pub(crate) const XID8: Oid = Oid(5069);
    pub(crate) const JSONB: Oid = Oid(3802);
}

/// Version of the binary form of `jsonb`. It is in the byte before the text.
const JSONB_VERSION: u8 = 1;

/// Returns the value as text; `None` if it is null.
pub(super) fn text<'a>(
    value: Value<'a>,
    type_oid: Oid,
    column: &str,
) -> Result<Option<Cow<'a, str>>, EventFault> {
    match value {
        Value::Null => Ok(None),
        Value::UnchangedToast => Err(EventFault::UnchangedToast {
            column: column.to_owned(),
        }),
        Value::Text(bytes) => utf8(bytes, column).map(|text| Some(Cow::Borrowed(text))),
        Value::Binary(bytes) => binary(bytes, type_oid, column).map(Some),
    }
}

/// Returns the text of a value of a character type or of JSON, from its binary form. For these types the
/// binary form contains the text unchanged.
pub(super) fn binary_as_text<'a>(
    bytes: &'a [u8],
    type_oid: Oid,
    column: &str,
) -> Result<&'a [u8], EventFault> {
    match type_oid {
        pg_type::TEXT | pg_type::VARCHAR | pg_type::BPCHAR | pg_type::NAME | pg_type::JSON => {
            Ok(bytes)
        }
        pg_type::JSONB => match bytes.split_first() {
            Some((&JSONB_VERSION, text)) => Ok(text),
            _ => Err(malformed(type_oid, column)),
        },
        _ => Err(EventFault::BinaryTypeUnknown {
            column: column.to_owned(),
            type_oid,
        }),
    }
}

fn binary<'a>(bytes: &'a [u8], type_oid: Oid, column: &str) -> Result<Cow<'a, str>, EventFault> {
    let malformed = |_| malformed(type_oid, column);
    let text = match type_oid {
        pg_type::INT2 => i16::from_be_bytes(bytes.try_into().map_err(malformed)?).to_string(),
        pg_type::INT4 => i32::from_be_bytes(bytes.try_into().map_err(malformed)?).to_string(),
        pg_type::INT8 => i64::from_be_bytes(bytes.try_into().map_err(malformed)?).to_string(),
        pg_type::OID => u32::from_be_bytes(bytes.try_into().map_err(malformed)?).to_string(),
        pg_type::BOOL => match <[u8; 1]>::try_from(bytes).map_err(malformed)? {
            [0] => "f".to_owned(),
            [_] => "t".to_owned(),
        },
        pg_type::UUID => uuid::Uuid::from_bytes(bytes.try_into().map_err(malformed)?).to_string(),
        pg_type::TIMESTAMP | pg_type::TIMESTAMPTZ => timestamp(
            i64::from_be_bytes(bytes.try_into().map_err(malformed)?),
            if type_oid == pg_type::TIMESTAMPTZ {
                "+00"
            } else {
                ""
            },
        ),
        _ => {
            return utf8(binary_as_text(bytes, type_oid, column)?, column).map(Cow::Borrowed);
        }
    };
    Ok(Cow::Owned(text))
}

/// Formats a timestamp as PostgreSQL prints it with `DateStyle = ISO` and `TimeZone = UTC`.
fn timestamp(micros: i64, zone: &str) -> String {
    match micros {
        i64::MAX => "infinity".to_owned(),
        i64::MIN => "-infinity".to_owned(),
        _ => {
            let rfc3339 = PgTimestamp::from_micros(micros)
                .to_string()
                .replace('T', " ");
            let without_zone = rfc3339.trim_end_matches('Z');
            format!(
                "{}{zone}",
                without_zone.trim_end_matches('0').trim_end_matches('.')
            )
        }
    }
}

fn utf8<'a>(bytes: &'a [u8], column: &str) -> Result<&'a str, EventFault> {
    std::str::from_utf8(bytes).map_err(|_| EventFault::NotUtf8 {
        column: column.to_owned(),
    })
}

fn malformed(type_oid: Oid, column: &str) -> EventFault {
    EventFault::BinaryMalformed {
        column: column.to_owned(),
        type_oid,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn binary_text(bytes: &[u8], type_oid: Oid) -> String {
        text(Value::Binary(bytes), type_oid, "c")
            .unwrap()
            .unwrap()
            .into_owned()
    }

    #[test]
    fn binary_values_are_read_as_select_prints_them() {
        assert_eq!(binary_text(&(-7_i16).to_be_bytes(), pg_type::INT2), "-7");
        assert_eq!(binary_text(&7_i32.to_be_bytes(), pg_type::INT4), "7");
        assert_eq!(
            binary_text(&i64::MIN.to_be_bytes(), pg_type::INT8),
            i64::MIN.to_string()
        );
        assert_eq!(
            binary_text(&u32::MAX.to_be_bytes(), pg_type::OID),
            "4294967295"
        );
        assert_eq!(binary_text(&[1], pg_type::BOOL), "t");
        assert_eq!(binary_text(b"abc", pg_type::VARCHAR), "abc");
        assert_eq!(binary_text(b"\x01[1]", pg_type::JSONB), "[1]");
        assert_eq!(
            binary_text(&[0xAB; 16], pg_type::UUID),
            "abababab-abab-abab-abab-abababababab"
        );
    }

    #[test]
    fn binary_timestamps_are_read_as_select_prints_them() {
        let time = |micros: i64, type_oid| binary_text(&micros.to_be_bytes(), type_oid);
        assert_eq!(time(0, pg_type::TIMESTAMPTZ), "2000-01-01 00:00:00+00");
        assert_eq!(time(10, pg_type::TIMESTAMP), "2000-01-01 00:00:00.00001");
        assert_eq!(
            time(100_000, pg_type::TIMESTAMPTZ),
            "2000-01-01 00:00:00.1+00"
        );
        assert_eq!(time(i64::MAX, pg_type::TIMESTAMPTZ), "infinity");
        assert_eq!(time(i64::MIN, pg_type::TIMESTAMP), "-infinity");
    }

    #[test]
    fn a_binary_value_of_an_unknown_type_or_length_is_an_error_that_names_the_column() {
        let unknown = text(Value::Binary(b"x"), Oid(600), "spot").unwrap_err();
        assert!(
            matches!(&unknown, EventFault::BinaryTypeUnknown { column, type_oid: Oid(600) }
            if column == "spot")
        );
        for type_oid in [
            pg_type::INT2,
            pg_type::INT8,
            pg_type::UUID,
            pg_type::TIMESTAMPTZ,
        ] {
            let short = text(Value::Binary(b"xyz"), type_oid, "c").unwrap_err();
            assert!(
                matches!(short, EventFault::BinaryMalformed { .. }),
                "{short:?}"
            );
        }
    }

    #[test]
    fn text_that_is_not_utf_8_is_an_error() {
        let refused = text(Value::Text(b"\xFF"), pg_type::TEXT, "c").unwrap_err();
        assert!(matches!(refused, EventFault::NotUtf8 { .. }));
    }
}
