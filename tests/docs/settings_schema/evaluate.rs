//! Evaluates the part of JSON Schema that the schema of the settings uses.

use regex_lite::Regex;
use serde_json::Value;

/// Whether the value is valid. Panics if the schema has a keyword that is not known here.
pub(super) fn is_valid(schema: &Value, value: &Value) -> bool {
    let keywords = schema.as_object().expect("a schema is an object");
    keywords
        .iter()
        .all(|(keyword, rule)| holds(keyword, rule, schema, value))
}

fn holds(keyword: &str, rule: &Value, schema: &Value, value: &Value) -> bool {
    match keyword {
        "$schema" | "title" | "description" | "default" => true,
        "type" => has_type(rule.as_str().unwrap(), value),
        "enum" => rule.as_array().unwrap().contains(value),
        "minimum" => value.as_f64().is_none_or(|n| n >= rule.as_f64().unwrap()),
        "maximum" => value.as_f64().is_none_or(|n| n <= rule.as_f64().unwrap()),
        "pattern" => {
            let pattern = Regex::new(rule.as_str().unwrap()).unwrap();
            value.as_str().is_none_or(|text| pattern.is_match(text))
        }
        "minItems" => value
            .as_array()
            .is_none_or(|list| list.len() as u64 >= rule.as_u64().unwrap()),
        "items" => value
            .as_array()
            .is_none_or(|list| list.iter().all(|item| is_valid(rule, item))),
        "properties" => rule.as_object().unwrap().iter().all(|(name, rule)| {
            let property = value.get(name);
            property.is_none_or(|property| is_valid(rule, property))
        }),
        "additionalProperties" => value.as_object().is_none_or(|object| {
            let known = |name: &String| schema["properties"].get(name).is_some();
            let mut others = object.iter().filter(|(name, _)| !known(name));
            match rule {
                Value::Bool(is_allowed) => *is_allowed || others.next().is_none(),
                rule => others.all(|(_, value)| is_valid(rule, value)),
            }
        }),
        "required" => rule
            .as_array()
            .unwrap()
            .iter()
            .all(|name| value.get(name.as_str().unwrap()).is_some()),
        "dependentSchemas" => rule
            .as_object()
            .unwrap()
            .iter()
            .all(|(name, rule)| value.get(name).is_none() || is_valid(rule, value)),
        "not" => !is_valid(rule, value),
        "anyOf" => rule
            .as_array()
            .unwrap()
            .iter()
            .any(|rule| is_valid(rule, value)),
        unknown => panic!("{unknown}: not known here"),
    }
}

fn has_type(name: &str, value: &Value) -> bool {
    match name {
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        unknown => panic!("{unknown}: not known here"),
    }
}
