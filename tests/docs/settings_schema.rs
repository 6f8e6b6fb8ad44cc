//! Generates the JSON Schema of the settings file from the table of settings, and checks that the schema
//! accepts and refuses the same files as the relay.
//!
//! The schema cannot express a few rules: limits on bytes, relations between two settings, and that a
//! number must not be written as `5.0`.

mod evaluate;

use postrider::environment::Environment;
use postrider::settings::{
    COLUMN_KEYS, KEYS, SettingKind, Settings, TABLE_KEYS, TableKey, TableKeyKind,
};
use serde_json::{Map, Value, json};

use evaluate::is_valid;

/// A bare or quoted SQL identifier.
const IDENTIFIER: &str = "(?:(?:[A-Za-z_]|[^\\x00-\\x7f])(?:[A-Za-z0-9_$]|[^\\x00-\\x7f]){0,62}\
    |\"(?:[^\"]|\"\"){1,63}\")";
const PROJECT: &str = "[a-z0-9.:-]{1,128}";
const TOPIC_ID: &str = "[A-Za-z][A-Za-z0-9_.~+%-]{2,254}";
const OCTET: &str = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";
const PORT: &str =
    "0*(?:[0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])";

/// The rules for the text of a setting, at the top of the file or in `[[tables]]`. The patterns use only
/// syntax that all dialects of regular expressions share, because each editor has its own dialect.
fn text_rules(name: &str) -> Value {
    let pattern = match name {
        "slot" => "[a-z0-9_]{1,63}".to_owned(),
        "table" => format!("{IDENTIFIER}\\.{IDENTIFIER}"),
        "topic" => {
            let full = format!("(?:projects/{PROJECT}/topics/)?");
            let (column, text) = ("\\{[^{}]+\\}", "(?:[^{}/]|\\{[^{}]+\\})*");
            return json!({
                "type": "string",
                "pattern": format!("^(?:{full}(?:{TOPIC_ID}|{text}{column}{text}))$"),
                "not": {"pattern": format!("^{full}goog[^{{}}]*$")},
            });
        }
        "ordering" => "key|none|bucketed\\(\\+?0*(?:[1-9][0-9]{0,3}|10000)\\)".to_owned(),
        "project" => format!("(?:{PROJECT})?"),
        "pubsub_endpoint" => "[Hh][Tt][Tt][Pp][Ss]?://[^@/?#\\s][^@\\s]*".to_owned(),
        "pubsub_emulator_host" => {
            format!("(?:(?:http://)*[^@/?#\\s]+:{PORT}(?:[/?#][^@\\s]*)?)?")
        }
        "prune_after" => "off|\\s*[0-9]+\\s*(?:ms|s|sec|m|min|h|d|w)\\s*".to_owned(),
        "http_addr" => format!(
            "off|{OCTET}(?:\\.{OCTET}){{3}}:{PORT}|\\[[0-9A-Fa-f:.]{{2,45}}(?:%[0-9]+)?\\]:{PORT}"
        ),
        "http_token" => "(?:[\\s\\S]{16,})?".to_owned(),
        "dead_letter_topic" => return topic_rules("?"),
        _ => return json!({"type": "string"}),
    };
    json!({"type": "string", "pattern": format!("^(?:{pattern})$")})
}

/// The rules for the name of a topic. `repeat` is `?` if the name may be empty.
fn topic_rules(repeat: &str) -> Value {
    json!({
        "type": "string",
        "pattern": format!("^(?:(?:projects/{PROJECT}/topics/)?{TOPIC_ID}){repeat}$"),
        "not": {"pattern": "^(?:projects/[^/]*/topics/)?goog"},
    })
}

/// The JSON Schema of the setting `name`. With `may_be_empty`, a setting that allows only some words also
/// allows an empty text, which means "not set".
fn value_schema(name: &str, kind: SettingKind, may_be_empty: bool) -> Value {
    match kind {
        SettingKind::Text(_) => text_rules(name),
        SettingKind::Choice(words) => {
            let empty = may_be_empty.then_some("");
            let words: Vec<&str> = words.iter().copied().chain(empty).collect();
            json!({"enum": words})
        }
        SettingKind::Number(min, max) => json!({"type": "integer", "minimum": min, "maximum": max}),
        SettingKind::Switch => json!({"type": "boolean"}),
    }
}

/// The JSON Schema of an object with these properties and no others.
fn object(properties: Map<String, Value>) -> Value {
    json!({"type": "object", "properties": properties, "additionalProperties": false})
}

/// The JSON Schema of a `[[tables]]` section or, if `is_columns` is true, of the table `columns` inside a
/// section.
fn table_schema(keys: &[TableKey], is_columns: bool) -> Value {
    let properties = keys.iter().map(|key| {
        let mut schema = match key.kind {
            // Every event needs these columns, so their names must not be empty.
            TableKeyKind::Plain(_) if is_columns && ["id", "payload"].contains(&key.name) => {
                json!({"type": "string", "pattern": "^[\\s\\S]+$"})
            }
            TableKeyKind::Plain(_) if is_columns => json!({"type": "string"}),
            TableKeyKind::Plain(kind) => value_schema(key.name, kind, key.name == "time_zone"),
            TableKeyKind::List => {
                let name = json!({"type": "string", "not": {"pattern": "^goog"}});
                json!({"type": "array", "items": name})
            }
            TableKeyKind::Texts => {
                json!({"type": "object", "additionalProperties": topic_rules("")})
            }
            TableKeyKind::Columns => table_schema(COLUMN_KEYS, true),
        };
        schema["description"] = json!(format!("{}.", key.reason));
        (key.name.to_owned(), schema)
    });
    object(properties.collect())
}

/// The JSON Schema of the settings file. Editors use it to check and complete the file.
pub(crate) fn settings_schema() -> String {
    let mut properties: Map<String, Value> = Map::new();
    for key in KEYS {
        let mut schema = value_schema(key.name, key.kind, key.default.is_empty());
        schema["description"] = json!(format!("{}.", key.reason));
        match (key.kind, key.default) {
            (_, "") => {}
            (SettingKind::Text(_) | SettingKind::Choice(_), default) => {
                schema["default"] = json!(default);
            }
            (SettingKind::Number(..) | SettingKind::Switch, default) => {
                schema["default"] = serde_json::from_str(default).expect("a number or a switch");
            }
        }
        properties.insert(key.name.to_owned(), schema);
    }
    let sections = json!({
        "type": "array",
        "minItems": 1,
        "items": table_schema(TABLE_KEYS, false),
        "description": "The outbox tables, a section [[tables]] each.",
    });
    properties.insert("tables".to_owned(), sections);
    let mut schema = object(properties);
    schema["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    schema["title"] = json!("The settings file of Postrider");
    // The settings for a single table have no effect together with [[tables]], so the schema
    // forbids this combination.
    let of_one_table: Vec<Value> = TABLE_KEYS
        .iter()
        .filter(|key| KEYS.iter().any(|single| single.name == key.name))
        .map(|key| json!({"required": [key.name]}))
        .collect();
    schema["dependentSchemas"] = json!({"tables": {"not": {"anyOf": of_one_table}}});
    let text = serde_json::to_string_pretty(&schema).expect("JSON can be written");
    text + "\n"
}

/// Files that the relay accepts.
const GOOD: &[&str] = &[
    "",
    "slot = 'a_1'",
    "table = 'outbox.events'",
    "table = '\"My Schema\".\"Ev\"\"ents\"'",
    "table = 'größe.ereignisse'",
    "topic = '{aggregatetype}.events'",
    "topic = 'projects/p/topics/all'",
    "topic = 'projects/p/topics/{aggregatetype}-{event_type}'",
    "topic = '{aggregatetype}'",
    "ordering = 'bucketed(10000)'",
    "ordering = 'bucketed(007)'",
    "project = 'example.com:shop'",
    "project = ''",
    "time_zone = ''",
    "envelope = 'protobuf'",
    "pubsub_endpoint = 'https://europe-west1-pubsub.googleapis.com'",
    "pubsub_emulator_host = 'localhost:8085'",
    "pubsub_emulator_host = 'http://[::1]:8085/'",
    "pubsub_emulator_host = ''",
    "prune_after = 'off'",
    "prune_after = '30 d'",
    "http_addr = 'off'",
    "http_addr = '0.0.0.0:65535'",
    "http_addr = '[::1]:9464'",
    "http_token = ''",
    "http_token = '0123456789abcdef'",
    "dead_letter_topic = ''",
    "dead_letter_topic = 'dead.letters'",
    "dead_letter_topic = 'projects/p/topics/dead'",
    "in_flight_mib = 4096",
    "shutdown_timeout_s = 0",
    "create_topics = true",
    "[[tables]]\ntable = 'a.b'\n[[tables]]\ntable = 'a.c'",
    "[[tables]]\ntime_zone = ''\nattributes = ['a']\nsource = 'x'\ncolumns = { topic = 't', seq = '' }",
    "[[tables]]\ntopic_rules = { order = 'orders' }\nordering = 'none'\nenvelope = 'raw'",
];

/// Files that the relay refuses.
const BAD: &[&str] = &[
    "slto = 'a'",
    "slot = ''",
    "slot = 'Upper'",
    "slot = 'a-b'",
    "slot = 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'",
    "slot = 7",
    "table = 'events'",
    "table = 'a.b.c'",
    "table = 'a b.c'",
    "table = '1a.b'",
    "table = 'a.'",
    "table = '\"a.b'",
    "topic = ''",
    "topic = '{a'",
    "topic = 'a}'",
    "topic = '{}'",
    "topic = '{{a}}'",
    "topic = 'x y'",
    "topic = 'googly'",
    "topic = 'a/{aggregatetype}'",
    "topic = 'projects/{aggregatetype}/topics/abc'",
    "ordering = ''",
    "ordering = 'Key'",
    "ordering = 'bucketed(0)'",
    "ordering = 'bucketed(10001)'",
    "ordering = 'bucketed()'",
    "project = 'My Project'",
    "project = 'Shop'",
    "time_zone = 'CET'",
    "envelope = ''",
    "envelope = 'xml'",
    "start = 'All'",
    "pubsub_endpoint = ''",
    "pubsub_endpoint = 'pubsub.googleapis.com'",
    "pubsub_endpoint = 'ftp://a'",
    "pubsub_endpoint = 'https://u@a'",
    "pubsub_emulator_host = 'localhost'",
    "pubsub_emulator_host = 'u@localhost:1'",
    "pubsub_emulator_host = 'localhost:65536'",
    "prune_after = ''",
    "prune_after = '30'",
    "prune_after = '30y'",
    "prune_after = '-1d'",
    "http_addr = ''",
    "http_addr = ':9464'",
    "http_addr = 'localhost:9464'",
    "http_addr = '256.0.0.1:1'",
    "http_addr = '1.2.3.4:65536'",
    "http_addr = '1.2.3.4'",
    "http_token = '0123456789abcde'",
    "dead_letter_topic = 'ab'",
    "dead_letter_topic = '1abc'",
    "dead_letter_topic = 'goog-dead'",
    "dead_letter_topic = 'projects/p/topics/google'",
    "dead_letter_topic = 'projects/P/topics/dead'",
    "dead_letter_topic = 'a/b'",
    "in_flight_mib = 0",
    "in_flight_mib = 4097",
    "in_flight_mib = '24'",
    "in_flight_mib = -1",
    "publish_timeout_s = 61",
    "create_topics = 'true'",
    "tables = []",
    "tables = 'a.b'",
    "tables = ['a.b']",
    "slot = ['a']",
    "topic = 'a'\n[[tables]]\ntable = 'a.b'",
    "[[tables]]\ntabel = 'a.b'",
    "[[tables]]\ntable = 'b'",
    "[[tables]]\ntable = 7",
    "[[tables]]\ntopic = '{a'",
    "[[tables]]\nordering = 'bucketed(0)'",
    "[[tables]]\nenvelope = 'other'",
    "[[tables]]\ntime_zone = 'CET'",
    "[[tables]]\nattributes = 'a'",
    "[[tables]]\nattributes = [1]",
    "[[tables]]\ncolumns = { nosuch = 'a' }",
    "[[tables]]\ncolumns = { id = 1 }",
    "[[tables]]\ncolumns = 'id'",
    "[[tables]]\ntopic_rules = { order = 1 }",
    "[[tables]]\ntopic_rules = { order = '' }",
    "[[tables]]\ntopic_rules = { order = 'x y' }",
    "[[tables]]\nattributes = ['google']",
    "[[tables]]\ncolumns = { id = '' }",
    "[[tables]]\ncolumns = { payload = '' }",
    "[[tables]]\nslot = 'a'",
];

/// Whether the relay accepts a file with this text.
fn is_accepted(text: &str) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("relay.toml");
    std::fs::write(&file, text).unwrap();
    let project = ("POSTRIDER_PROJECT".to_owned(), "shop".to_owned());
    let has_project = text.contains("project =");
    let environment: Environment = Some(project).filter(|_| !has_project).into_iter().collect();
    let settings = Settings::load(Some(&file), &environment, &[]);
    settings.is_ok_and(|settings| has_project || settings.dead_letter_topic().is_ok())
}

#[test]
fn the_schema_accepts_and_refuses_the_same_files_as_the_relay() {
    let schema: Value = serde_json::from_str(&settings_schema()).unwrap();
    for (files, wanted) in [(GOOD, true), (BAD, false)] {
        for text in files {
            assert_eq!(is_accepted(text), wanted, "the relay, {text}");
            let file: toml::Value = toml::from_str(text).unwrap();
            let file = serde_json::to_value(file).unwrap();
            assert_eq!(is_valid(&schema, &file), wanted, "the schema, {text}");
        }
    }
}

#[test]
fn every_setting_has_a_bad_value_that_the_schema_refuses() {
    // These settings accept any text, so they have no bad value.
    let any_text = ["database_url", "password_command", "publication"];
    for key in KEYS.iter().filter(|key| !any_text.contains(&key.name)) {
        let begins = format!("{} = ", key.name);
        let is_tested = BAD.iter().any(|text| text.starts_with(&begins));
        let has_words = !matches!(key.kind, SettingKind::Text(_));
        assert!(is_tested || has_words, "{}", key.name);
    }
}
