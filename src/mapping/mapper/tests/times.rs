//! Tests the time of an event in every envelope.

use super::*;

fn columns(type_oid: Oid) -> [(&'static str, Oid); 9] {
    let mut columns = OUTBOX;
    columns[8].1 = type_oid;
    columns
}

/// The attribute `occurred_at` and CloudEvents' `time`.
fn times(type_oid: Oid, toml: &str, text: &'static str) -> (String, String) {
    let toml = format!("{toml}\nenvelope = 'cloudevents-binary'");
    let row = outbox_row(&[("occurred_at", Value::Text(text.as_bytes()))]);
    let mapped = mapper(&columns(type_oid), &toml).map_row(&row, AT).unwrap();
    let attributes = read(&mapped).attributes;
    (
        attributes["occurred_at"].clone(),
        attributes["ce-time"].clone(),
    )
}

const COMMITTED: &str = "2000-01-01T00:00:01.500000Z";

#[test]
fn a_timestamp_without_time_zone_is_refused_until_the_settings_say_what_it_means() {
    let refused = resolve(&columns(pg_type::TIMESTAMP), "").unwrap_err();
    assert_eq!(refused.code(), "setting-invalid");
    assert!(refused.to_string().contains("\"occurred_at\""), "{refused}");
    assert!(refused.hint().contains("time_zone"), "{}", refused.hint());
    resolve(&columns(pg_type::TIMESTAMP), "columns.occurred_at = ''").unwrap();
}

#[test]
fn a_timestamp_without_time_zone_is_sent_as_time_zone_says() {
    let text = "2026-11-26 12:41:31.728556";
    let of = |zone: &str| times(pg_type::TIMESTAMP, &format!("time_zone = '{zone}'"), text);
    let utc = "2026-11-26T12:41:31.728556Z";
    assert_eq!(of("UTC"), (utc.to_owned(), utc.to_owned()));
    assert_eq!(of("local"), (text.to_owned(), COMMITTED.to_owned()));
}

#[test]
fn a_text_without_an_offset_is_not_a_point_in_time() {
    for (text, occurred_at, time) in [
        ("2026-11-26T12:41:31", "2026-11-26T12:41:31", COMMITTED),
        (
            "2026-11-26T12:41:31+01:00",
            "2026-11-26T11:41:31.000000Z",
            "2026-11-26T11:41:31.000000Z",
        ),
    ] {
        let found = times(pg_type::TEXT, "", text);
        assert_eq!(found, (occurred_at.to_owned(), time.to_owned()));
    }
}

#[test]
fn a_time_outside_the_years_0001_to_9999_is_sent_as_its_text() {
    for text in [
        "infinity",
        "-infinity",
        "294276-12-31 23:59:59.999999+00",
        "4713-01-01 00:00:00+00 BC",
        "10000-01-01 00:00:00+00",
    ] {
        let found = times(pg_type::TIMESTAMPTZ, "", text);
        assert_eq!(found, (text.to_owned(), COMMITTED.to_owned()));
    }
}
