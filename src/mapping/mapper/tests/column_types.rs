//! Tests columns with domains, and with types that cannot be sorted.

use super::*;
use crate::mapping::column_types::ColumnType;

/// The columns of `outbox.events`, each with a domain over its type.
fn domains() -> (Vec<(&'static str, Oid)>, ColumnTypes) {
    let mut types = ColumnTypes::default();
    let mut columns = OUTBOX.to_vec();
    for (n, (_, type_oid)) in columns.iter_mut().enumerate() {
        let domain = Oid(20_000 + n as u32);
        let known = ColumnType {
            base: *type_oid,
            name: format!("domain_{n}").into(),
            has_order: true,
            is_dropped: false,
        };
        types.learn(domain, known);
        *type_oid = domain;
    }
    (columns, types)
}

fn resolved(columns: &[(&str, Oid)], types: &ColumnTypes, toml: &str) -> Result<Mapper, MapError> {
    let identity = TableIdentity::new("outbox.events");
    Mapper::resolve(&relation(columns), types, &settings(toml), &identity, "p")
}

#[test]
fn a_domain_behaves_like_its_base_type() {
    let (columns, types) = domains();
    for envelope in [
        "raw",
        "cloudevents-binary",
        "cloudevents-structured",
        "protobuf",
    ] {
        let toml = format!("envelope = '{envelope}'");
        let plain = mapper(&OUTBOX, &toml)
            .map_row(&outbox_row(&[]), AT)
            .unwrap();
        let mut mapper = resolved(&columns, &types, &toml).unwrap();
        assert_eq!(
            mapper.map_row(&outbox_row(&[]), AT).unwrap(),
            plain,
            "{envelope}"
        );
        let known = mapper.table_columns();
        assert!(known.id_is_uuid);
        assert_eq!(known.time_kind, TimeKind::Instant);
    }
}

#[test]
fn bytea_behind_a_domain_is_sent_as_bytes() {
    let (columns, mut types) = domains();
    let known = ColumnType {
        base: pg_type::BYTEA,
        name: "body".into(),
        has_order: true,
        is_dropped: false,
    };
    types.learn(columns[6].1, known);
    let row = outbox_row(&[("payload", Value::Text(b"\\x00ff"))]);
    let mapped = resolved(&columns, &types, "").unwrap().map_row(&row, AT);
    assert_eq!(read(&mapped.unwrap()).data, &b"\x00\xff"[..]);
}

#[test]
fn columns_other_than_payload_and_headers_may_have_any_type() {
    let strange = Oid(600);
    let mut types = ColumnTypes::default();
    let known = ColumnType {
        base: strange,
        name: "point".into(),
        has_order: false,
        is_dropped: false,
    };
    types.learn(strange, known);
    let mut columns = OUTBOX;
    for column in [0, 1, 2, 3, 4, 5, 8] {
        columns[column].1 = strange;
    }
    let mapper = resolved(&columns, &types, "").unwrap();
    let known = mapper.table_columns();
    assert!(!known.id_has_order);
    assert_eq!(known.time_kind, TimeKind::Unknown);
}
