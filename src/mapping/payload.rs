//! Reads the payload column: the bytes to send, and the kind of content.
//!
//! The payload is sent exactly as PostgreSQL prints it, with two exceptions: the hexadecimal text form of
//! `bytea` is decoded (`data`), and the version byte of binary `jsonb` is removed.

use decoder::{Oid, Value};

use super::data::{Bytea, MessageData};
use super::error::EventFault;
use super::value::{self, pg_type};

/// The kind of content in the payload, which follows from the type of its column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ContentKind {
    /// `json` or `jsonb`.
    Json,
    /// `bytea`.
    Binary,
    /// Any other type, in its text form.
    Text,
}

impl ContentKind {
    pub(super) fn of(type_oid: Oid) -> Self {
        match type_oid {
            pg_type::JSON | pg_type::JSONB => Self::Json,
            pg_type::BYTEA => Self::Binary,
            _ => Self::Text,
        }
    }

    /// The media type, for rows without a header `content-type`.
    pub(super) fn media_type(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::Binary => "application/octet-stream",
            Self::Text => "text/plain; charset=utf-8",
        }
    }
}

/// The payload of one row; `None` when it is null.
pub(super) fn read<'a>(
    value: Value<'a>,
    type_oid: Oid,
    column: &str,
) -> Result<Option<MessageData<'a>>, EventFault> {
    let kind = ContentKind::of(type_oid);
    let body = match value {
        Value::Null => return Ok(None),
        Value::UnchangedToast => {
            return Err(EventFault::UnchangedToast {
                column: column.to_owned(),
            });
        }
        Value::Text(text) if kind == ContentKind::Binary => {
            let malformed = || EventFault::ByteaMalformed {
                column: column.to_owned(),
            };
            MessageData::Bytea(Bytea::parse(text).ok_or_else(malformed)?)
        }
        Value::Text(bytes) => MessageData::Plain(bytes),
        Value::Binary(bytes) => MessageData::Plain(match type_oid {
            pg_type::BYTEA => bytes,
            _ => value::binary_as_text(bytes, type_oid, column)?,
        }),
    };
    Ok(Some(body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(value: Value<'_>, type_oid: Oid) -> Result<Option<Vec<u8>>, EventFault> {
        let body = read(value, type_oid, "payload")?;
        Ok(body.map(|body| {
            let mut out = Vec::new();
            body.write(&mut out);
            assert_eq!(out.len(), body.len());
            out
        }))
    }

    #[test]
    fn text_and_json_are_sent_unchanged() {
        for type_oid in [pg_type::JSON, pg_type::JSONB, pg_type::TEXT, Oid(99_999)] {
            let read = bytes(Value::Text(b"{\"a\" :1}"), type_oid).unwrap();
            assert_eq!(read.as_deref(), Some(&b"{\"a\" :1}"[..]));
        }
    }

    #[test]
    fn binary_jsonb_loses_its_version_byte_and_only_that() {
        let read = bytes(Value::Binary(b"\x01{}"), pg_type::JSONB).unwrap();
        assert_eq!(read.as_deref(), Some(&b"{}"[..]));
        let newer = bytes(Value::Binary(b"\x02{}"), pg_type::JSONB).unwrap_err();
        assert!(
            matches!(newer, EventFault::BinaryMalformed { .. }),
            "{newer:?}"
        );
        let json = bytes(Value::Binary(b"\x01{}"), pg_type::JSON).unwrap();
        assert_eq!(json.as_deref(), Some(&b"\x01{}"[..]));
    }

    #[test]
    fn binary_bytea_is_the_payload_itself() {
        let read = bytes(Value::Binary(b"\\x00\xFF"), pg_type::BYTEA).unwrap();
        assert_eq!(read.as_deref(), Some(&b"\\x00\xFF"[..]));
    }

    #[test]
    fn bytea_that_is_not_in_hex_form_is_refused() {
        for text in [
            &b""[..],
            b"\\",
            b"\\x0",
            b"\\x0g",
            b"\\x\x80\x80",
            b"hello",
            b"\\001",
        ] {
            let refused = bytes(Value::Text(text), pg_type::BYTEA).unwrap_err();
            assert!(
                matches!(refused, EventFault::ByteaMalformed { .. }),
                "{refused:?}"
            );
        }
    }

    #[test]
    fn null_is_no_payload_and_unchanged_toast_is_an_error() {
        assert_eq!(read(Value::Null, pg_type::JSONB, "p").unwrap(), None);
        let toast = read(Value::UnchangedToast, pg_type::JSONB, "p").unwrap_err();
        assert!(matches!(toast, EventFault::UnchangedToast { .. }));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_back_from_their_hex_form(
            payload in proptest::collection::vec(any::<u8>(), 0..200), upper: bool,
        ) {
            let hex: String = payload
                .iter()
                .map(|b| if upper { format!("{b:02X}") } else { format!("{b:02x}") })
                .collect();
            let read = bytes(Value::Text(format!("\\x{hex}").as_bytes()), pg_type::BYTEA).unwrap();
            prop_assert_eq!(read, Some(payload));
        }
    }
}
