use proptest::prelude::*;
use prost::Message;

use super::*;
use crate::proto::PubsubMessage;

fn matches(filter: &str, attributes: &[(&str, &str)]) -> bool {
    let filter = Filter::parse(filter)
        .expect("valid filter")
        .expect("not empty");
    let message = PubsubMessage {
        attributes: attributes
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect(),
        ..Default::default()
    };
    let encoded = message.encode_to_vec();
    filter.matches(MessageView::parse(&encoded).expect("valid message"))
}

#[test]
fn a_key_is_found_regardless_of_its_value() {
    assert!(matches("attributes:region", &[("region", "")]));
    assert!(!matches("attributes:region", &[("Region", "eu")]));
    assert!(matches(
        "attributes:\"iana.org/language_tag\"",
        &[("iana.org/language_tag", "en")]
    ));
}

#[test]
fn values_are_compared_exactly() {
    assert!(matches("attributes.region = \"eu\"", &[("region", "eu")]));
    assert!(!matches("attributes.region=\"eu\"", &[("region", "EU")]));
    assert!(!matches("attributes.region = \"eu\"", &[]));
    assert!(matches(
        "attributes.x-y = \"say \\\"hi\\\"\"",
        &[("x-y", "say \"hi\"")]
    ));
}

#[test]
fn unequal_is_the_opposite_of_equal_even_for_absent_keys() {
    assert!(matches("attributes.region != \"eu\"", &[("region", "us")]));
    assert!(matches("attributes.region != \"eu\"", &[]));
    assert!(!matches("attributes.region != \"eu\"", &[("region", "eu")]));
}

#[test]
fn a_prefix_is_compared_with_the_value() {
    assert!(matches(
        "hasPrefix(attributes.region, \"eu\")",
        &[("region", "europe")]
    ));
    assert!(!matches(
        "hasPrefix(attributes.region, \"eu\")",
        &[("region", "us")]
    ));
    assert!(!matches("hasPrefix(attributes.region, \"eu\")", &[]));
}

#[test]
fn operators_combine_conditions() {
    let both = "attributes:a AND attributes:b";
    assert!(matches(both, &[("a", ""), ("b", "")]));
    assert!(!matches(both, &[("a", "")]));
    let either = "attributes:a OR attributes:b OR attributes:c";
    assert!(matches(either, &[("c", "")]));
    assert!(!matches(either, &[("d", "")]));
    for not in ["NOT attributes:a", "-attributes:a", "NOT (attributes:a)"] {
        assert!(matches(not, &[]), "{not}");
        assert!(!matches(not, &[("a", "")]), "{not}");
    }
    let nested = "attributes:a AND (attributes.b = \"1\" OR NOT attributes:c)";
    assert!(matches(nested, &[("a", ""), ("b", "1"), ("c", "")]));
    assert!(!matches(nested, &[("a", ""), ("b", "2"), ("c", "")]));
    assert!(matches(nested, &[("a", "")]));
}

#[test]
fn an_empty_filter_is_no_filter() {
    assert_eq!(Filter::parse(""), Ok(None));
    assert_eq!(Filter::parse("  "), Ok(None));
}

#[test]
fn bad_filters_are_refused_with_the_expected_token() {
    let mixed = "attributes:a AND attributes:b OR attributes:c";
    assert_eq!(Filter::parse(mixed), Err(FilterError::MixedOperators));
    assert_eq!(
        Filter::parse("attributes.a = \"x"),
        Err(FilterError::OpenString)
    );
    assert_eq!(
        Filter::parse(&"a".repeat(257)),
        Err(FilterError::TooLong { bytes: 257 })
    );
    for (filter, message) in [
        (
            "attributes.a = x",
            "expected a string in quotation marks, found x",
        ),
        (
            "attributes",
            "expected : or . after attributes, found the end",
        ),
        (
            "data = \"x\"",
            "expected attributes, hasPrefix, NOT or (, found data",
        ),
        (
            "attributes:a and attributes:b",
            "expected AND, OR or the end, found and",
        ),
        ("(attributes:a", "expected ), found the end"),
        (
            "attributes.a > \"1\"",
            "expected a key, a string in quotation marks or an operator, found >",
        ),
        ("attributes.a ! \"1\"", "expected = after !, found  "),
        (
            "hasPrefix(attributes:a, \"x\")",
            "expected . after attributes, found :",
        ),
    ] {
        let error = Filter::parse(filter).expect_err(filter);
        assert_eq!(error.to_string(), message, "{filter}");
    }
}

/// Generates a filter together with its text, which has parentheses around every part.
fn filter_text() -> impl Strategy<Value = (String, Filter)> {
    let key = "[a-c]";
    let value = "[x-z\"\\\\]{0,2}";
    let leaf = prop_oneof![
        key.prop_map(|key| (format!("attributes:{key}"), Filter::Has { key })),
        (key, value).prop_map(|(key, value)| {
            (
                format!("attributes.{key} = {value:?}"),
                Filter::Equals { key, value },
            )
        }),
        (key, value).prop_map(|(key, prefix)| {
            let text = format!("hasPrefix(attributes.{key}, {prefix:?})");
            (text, Filter::HasPrefix { key, prefix })
        }),
    ];
    leaf.prop_recursive(3, 8, 3, |inner| {
        let join = |parts: &[(String, Filter)], operator: &str| {
            let texts: Vec<_> = parts.iter().map(|(text, _)| format!("({text})")).collect();
            (
                texts.join(operator),
                parts.iter().map(|(_, filter)| filter.clone()).collect(),
            )
        };
        prop_oneof![
            inner.clone().prop_map(|(text, filter)| {
                (format!("NOT ({text})"), Filter::Not(Box::new(filter)))
            }),
            proptest::collection::vec(inner.clone(), 2..4).prop_map(move |parts| {
                let (text, parts) = join(&parts, " AND ");
                (text, Filter::All(parts))
            }),
            proptest::collection::vec(inner, 2..4).prop_map(move |parts| {
                let (text, parts) = join(&parts, " OR ");
                (text, Filter::Any(parts))
            }),
        ]
    })
}

proptest! {
    #[test]
    fn a_written_filter_is_read_back((text, filter) in filter_text()) {
        prop_assume!(text.len() <= MAX_FILTER_BYTES);
        prop_assert_eq!(Filter::parse(&text), Ok(Some(filter)));
    }

    #[test]
    fn any_text_is_parsed_or_refused_without_a_panic(text in ".{0,80}") {
        let _ = Filter::parse(&text);
    }

    #[test]
    fn any_tokens_are_parsed_or_refused_without_a_panic(
        tokens in proptest::collection::vec(
            prop_oneof![
                Just("attributes"), Just(":"), Just("."), Just("a"), Just("\"x\""), Just("="),
                Just("!="), Just("("), Just(")"), Just("AND"), Just("OR"), Just("NOT"),
                Just("hasPrefix"), Just(","), Just("-"),
            ],
            0..30,
        )
    ) {
        let _ = Filter::parse(&tokens.join(" "));
    }
}
