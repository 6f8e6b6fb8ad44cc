//! Tests the layers and the checks with settings as a user writes them.

use super::*;
use crate::mapping::TimeZone;

fn load(pairs: &[(&str, &str)]) -> Result<Settings> {
    let env = pairs
        .iter()
        .map(|(k, v)| ((*k).into(), (*v).into()))
        .collect();
    Settings::load(None, &env, &[])
}

#[test]
fn environment_variables_alone_are_enough() {
    let settings = load(&[
        ("DATABASE_URL", "postgres://relay@localhost/shop"),
        ("PUBSUB_EMULATOR_HOST", "127.0.0.1:8085"),
        ("PUBSUB_PROJECT_ID", "demo"),
        ("POSTRIDER_CREATE_TOPICS", "true"),
    ])
    .unwrap();
    assert_eq!(settings.slot.as_str(), "postrider");
    assert_eq!(settings.pubsub, Endpoint::Emulator("127.0.0.1:8085".into()));
    assert!(settings.create_topics);
    assert_eq!(settings.project().unwrap(), "demo");
    assert_eq!(settings.tables.len(), 1);
}

#[test]
fn a_flag_wins_over_the_environment_and_the_file() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut file, b"slot = \"from_file\"\npublication = \"p\"\n").unwrap();
    let env = [("POSTRIDER_SLOT".to_owned(), "from_env".to_owned())].into();
    let flags = [("slot".to_owned(), "from_flag".to_owned())];
    let settings = Settings::load(Some(file.path()), &env, &flags).unwrap();
    assert_eq!(settings.slot.as_str(), "from_flag");
    assert_eq!(settings.publication, "p");
}

#[test]
fn a_publish_timeout_that_could_outlive_the_lease_is_refused() {
    let error = load(&[("POSTRIDER_PUBLISH_TIMEOUT_S", "15")]).unwrap_err();
    assert_eq!(error.code(), Code::SettingInvalid);
    assert!(error.hint_text().contains("quarter"));
}

#[test]
fn a_missing_project_says_which_variable_to_set() {
    let error = load(&[]).unwrap().project().map(str::to_owned).unwrap_err();
    assert_eq!(error.code(), Code::ProjectMissing);
    assert!(error.hint_text().contains("PUBSUB_PROJECT_ID"));
}

#[test]
fn a_project_name_instead_of_its_id_is_refused() {
    for name in ["My Project", "Shop", "a/b"] {
        let error = load(&[("PUBSUB_PROJECT_ID", name)]).unwrap_err();
        assert_eq!(error.code(), Code::SettingInvalid, "{name}");
    }
    assert!(load(&[("PUBSUB_PROJECT_ID", "example.com:shop-1")]).is_ok());
}

#[test]
fn bad_events_are_quarantined_by_key_unless_set_otherwise() {
    assert_eq!(load(&[]).unwrap().on_bad_event, OnBadEvent::QuarantineKey);
    let halt = load(&[("POSTRIDER_ON_BAD_EVENT", "halt")]).unwrap();
    assert_eq!(halt.on_bad_event, OnBadEvent::Halt);
    let error = load(&[("POSTRIDER_ON_BAD_EVENT", "ignore")]).unwrap_err();
    assert_eq!(error.code(), Code::SettingInvalid);
}

#[test]
fn dispatch_is_full_by_default() {
    assert_eq!(load(&[]).unwrap().dispatch, Dispatch::Full);
    let exceptions = load(&[("POSTRIDER_DISPATCH", "exceptions")]).unwrap();
    assert_eq!(exceptions.dispatch, Dispatch::Exceptions);
    let error = load(&[("POSTRIDER_DISPATCH", "off")]).unwrap_err();
    assert_eq!(error.code(), Code::SettingInvalid);
}

#[test]
fn a_dead_letter_topic_gets_the_project_and_is_checked() {
    let topic = |name| {
        let env = [
            ("PUBSUB_PROJECT_ID", "demo"),
            ("POSTRIDER_DEAD_LETTER_TOPIC", name),
        ];
        load(&env)?.dead_letter_topic()
    };
    assert_eq!(
        topic("dead").unwrap().as_deref(),
        Some("projects/demo/topics/dead")
    );
    assert!(topic("").unwrap().is_none());
    let refused = topic("no good").unwrap_err();
    assert_eq!(refused.code(), Code::SettingInvalid);
    assert!(refused.what().contains("POSTRIDER_DEAD_LETTER_TOPIC"));
    let without_project = load(&[("POSTRIDER_DEAD_LETTER_TOPIC", "no good")]);
    assert_eq!(without_project.unwrap_err().code(), Code::SettingInvalid);
}

#[test]
fn settings_that_no_table_can_fit_are_refused_with_their_place() {
    for (section, what) in [
        (
            "columns = { aggregatetype = '' }",
            "`topic` needs the column that `columns.aggregatetype` switches off",
        ),
        ("columns = { id = '' }", "`columns.id` is empty"),
        ("columns = { payload = '' }", "`columns.payload` is empty"),
        (
            "columns = { aggregateid = '' }",
            "`ordering` needs the column that `columns.aggregateid`",
        ),
        (
            "columns = { event_type = '' }\nenvelope = 'cloudevents-binary'",
            "`envelope` needs the column that `columns.event_type`",
        ),
        (
            "columns = { aggregatetype = '' }\ntopic = 'all-events'\ntopic_rules = { order = 'orders' }",
            "`topic_rules` needs the column that `columns.aggregatetype`",
        ),
        ("topic = 'x y'", "`topic` gives the topic"),
        ("topic = 'a/{aggregatetype}'", "`topic` gives the topic"),
        (
            "topic_rules = { order = 'no good' }",
            "`topic_rules` gives the topic",
        ),
        (
            "attributes = ['event_type']",
            "`attributes` lists \"event_type\"",
        ),
        ("attributes = ['a', 'a']", "`attributes` lists \"a\""),
        ("attributes = ['google']", "`attributes` lists \"google\""),
    ] {
        let file = format!("[[tables]]\ntable = 'public.t'\n{section}\n");
        let refused = load_file(&file, &[]).unwrap_err();
        assert_eq!(refused.code(), Code::SettingInvalid, "{section}: {refused}");
        assert!(refused.what().contains(what), "{section}: {refused}");
        assert!(refused.what().contains(":2:9: "), "{section}: {refused}");
    }
    for fits in [
        "columns = { aggregatetype = '', topic = 'topic' }",
        "columns = { aggregateid = '' }\nordering = 'none'",
        "columns = { id = 'seq' }\nattributes = ['tenant']",
        "topic = '{topic}-{tenant}'",
        "columns = { id = 'n', occurred_at = 'n' }",
        "attributes = ['source_id']",
    ] {
        let file = format!("[[tables]]\ntable = 'public.t'\n{fits}\n");
        load_file(&file, &[]).unwrap_or_else(|error| panic!("{fits}: {error}"));
    }
    let refused = load(&[("POSTRIDER_TOPIC", "x y")]).unwrap_err();
    assert_eq!(refused.code(), Code::SettingInvalid);
}

#[test]
fn a_wrong_endpoint_is_named() {
    let error = load(&[("POSTRIDER_PUBSUB_ENDPOINT", "pubsub")]).unwrap_err();
    assert_eq!(error.code(), Code::PubsubEndpoint);
    let error = load(&[("PUBSUB_EMULATOR_HOST", "localhost")]).unwrap_err();
    assert_eq!(error.code(), Code::SettingInvalid);
}

fn load_file(toml: &str, env: &[(&str, &str)]) -> Result<Settings> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut file, toml.as_bytes()).unwrap();
    let env = env
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect();
    Settings::load(Some(file.path()), &env, &[])
}

#[test]
fn a_table_in_two_sections_is_refused() {
    let twice = "[[tables]]\ntable = 'a.b'\n[[tables]]\ntable = '\"a\".\"b\"'\ntopic = 'other'\n";
    let error = load_file(twice, &[]).unwrap_err();
    assert_eq!(error.code(), Code::SettingInvalid);
    assert!(error.what().contains("a.b twice"), "{error}");
    load_file(
        "[[tables]]\ntable = 'a.b'\n[[tables]]\ntable = 'a.\"B\"'\n",
        &[],
    )
    .unwrap();
}

#[test]
fn settings_of_a_single_table_are_refused_together_with_tables() {
    let tables = "[[tables]]\ntable = 'a.b'\n";
    for (name, value) in [
        ("table", "a.b"),
        ("topic", "shop"),
        ("ordering", "none"),
        ("envelope", "protobuf"),
        ("time_zone", "UTC"),
    ] {
        let in_file = load_file(&format!("{name} = '{value}'\n{tables}"), &[]);
        let variable = format!("POSTRIDER_{}", name.to_uppercase());
        let in_environment = load_file(tables, &[(&variable, value)]);
        for refused in [in_file.unwrap_err(), in_environment.unwrap_err()] {
            assert_eq!(refused.code(), Code::SettingInvalid, "{name}");
            assert!(refused.what().contains(name), "{refused}");
        }
        load_file(&format!("{name} = '{value}'"), &[]).unwrap();
    }
    load_file(tables, &[]).unwrap();
}

#[test]
fn time_zone_accepts_only_utc_and_local_or_nothing() {
    let of = |settings: Settings| settings.tables[0].time_zone;
    assert_eq!(of(load(&[]).unwrap()), None);
    let utc = load(&[("POSTRIDER_TIME_ZONE", "UTC")]).unwrap();
    assert_eq!(of(utc), Some(TimeZone::Utc));
    let local = load(&[("POSTRIDER_TIME_ZONE", "local")]).unwrap();
    assert_eq!(of(local), Some(TimeZone::Local));
    for empty in ["time_zone = ''", "[[tables]]\ntime_zone = ''"] {
        assert_eq!(of(load_file(empty, &[]).unwrap()), None, "{empty}");
    }
    assert!(load_file("start = ''", &[]).is_err(), "it has a default");
    let error = load(&[("POSTRIDER_TIME_ZONE", "Europe/Berlin")]).unwrap_err();
    assert_eq!(error.code(), Code::SettingInvalid);
}

/// Returns the error for a file, without the file's name, and the error's hint.
fn refused(toml: &str) -> (String, String) {
    let error = load_file(toml, &[]).unwrap_err();
    let (_, place) = error.what().split_once(':').unwrap();
    (place.to_owned(), error.hint_text().to_owned())
}

#[test]
fn an_error_about_a_misspelt_name_in_the_file_shows_line_and_suggestion() {
    for (toml, what, hint) in [
        (
            "slot = 'a'\n  slott = 'b'\n",
            "2:3: unknown setting `slott`",
            "did you mean `slot`?",
        ),
        (
            "[[tables]]\ntable = 'a.b'\n\n[[tables]]\ntabel = 'a.c'\n",
            "5:1: unknown setting `tabel` in [[tables]]",
            "did you mean `table`?",
        ),
        (
            "[[tables]]\ncolumns = { vesrion = 'v' }\n",
            "2:13: unknown setting `vesrion` in `columns` of [[tables]]",
            "did you mean `version`?",
        ),
        (
            "columns = {}\n",
            "1:1: unknown setting `columns`",
            "write `columns` in a [[tables]] section",
        ),
    ] {
        let (place, hinted) = refused(toml);
        assert_eq!((place.as_str(), hinted.as_str()), (what, hint));
    }
    let (_, hint) = refused("[[tables]]\nhello = 1\n");
    assert!(hint.contains("topic_rules"), "{hint}");
}

#[test]
fn an_error_about_a_wrong_value_in_the_file_shows_line_and_column() {
    for (toml, what) in [
        (
            "slot = 'a'\nslot_failover = 'hunter2'\n",
            "2:17: setting `slot_failover` must be",
        ),
        ("slot = 'Hunter2'\n", "1:8: setting `slot` is not valid"),
        ("project = 'a b'\n", "1:11: setting `project` is not valid"),
        (
            "slot = 'ä' # ü\nstart = 'hunter2'\n",
            "2:9: setting `start` must be `new` or `all`",
        ),
        ("slot = hunter2\n", "1:8: "),
        ("tables = []\n", "1:10: `tables` is empty"),
        (
            "tables = [1]\n",
            "1:11: a table of `tables` must be a section",
        ),
        (
            "[[tables]]\nenvelope = 'xml'\n",
            "2:12: setting `envelope` in [[tables]]: \"xml\" is not an envelope",
        ),
        (
            "[[tables]]\n[tables.columns]\nid = 7\n",
            "3:6: setting `columns.id` in [[tables]]: invalid type",
        ),
        (
            "[[tables]]\ntable = 'a.b'\n[[tables]]\ntable = 'a.b'\n",
            "4:9: [[tables]] names table a.b twice",
        ),
        (
            "slot = 'a'\ntopic = 'b'\n[[tables]]\ntable = 'a.b'\n",
            "2:9: setting `topic` has no effect together with [[tables]]",
        ),
    ] {
        let (place, _) = refused(toml);
        assert!(place.starts_with(what), "{toml}: {place}");
        assert!(!place.contains("unter2"), "{place}");
    }
}

#[test]
fn a_choice_is_read_by_its_word() {
    let json = load(&[("POSTRIDER_LOG_FORMAT", "cloud_logging")]).unwrap();
    assert_eq!(json.log_format, LogFormat::CloudLogging);
    let all = load(&[
        ("POSTRIDER_START", "all"),
        ("POSTRIDER_SLOT_ON_LOSS", "stop"),
    ])
    .unwrap();
    assert_eq!((all.start, all.slot_on_loss), (Start::All, OnLoss::Stop));
}

/// Connection strings that somebody may put into a wrong setting.
const CONNECTION_STRINGS: [&str; 7] = [
    "postgres://relay:hunter2@db:5432/shop?sslmode=require",
    "postgresql://relay:hun/ter2@db/shop",
    "postgres://db/shop?user=relay&password=hunter2",
    "host=db user=relay password=hunter2 dbname=shop",
    "dbname=shop password = hunter2",
    "jdbc:postgresql://db/shop?user=relay&password=hunter2",
    "relay:hunter2@db/shop",
];

/// Checks that loading failed with an error that does not show the password. `place` names the setting. Settings
/// that accept any text may also load without an error.
fn assert_hidden(loaded: Result<Settings>, place: &str) {
    let Err(error) = loaded else {
        let may_be_any_text = ["password_command", "http_token"];
        let place = place.to_lowercase();
        let is_accepted = may_be_any_text.iter().any(|name| place.contains(name));
        assert!(is_accepted, "{place} is accepted");
        return;
    };
    let shown = format!("{error} {error:?} {}", crate::error::Report(&error));
    assert!(!shown.contains("ter2"), "{place}: {shown}");
}

#[test]
fn a_connection_string_in_a_wrong_setting_is_refused_and_not_shown() {
    for value in CONNECTION_STRINGS {
        for key in KEYS.iter().filter(|key| key.name != "database_url") {
            let variable = key.variable();
            assert_hidden(load(&[(&variable, value)]), &variable);
            let flags = [(key.name.to_owned(), value.to_owned())];
            assert_hidden(Settings::load(None, &Environment::new(), &flags), key.name);
            let in_file = load_file(&format!("{} = {value:?}\n", key.name), &[]);
            assert_hidden(in_file, key.name);
        }
        for section in TABLE_KEYS
            .iter()
            .map(|key| format!("{} = {value:?}", key.name))
            .chain([
                format!("table = [{value:?}]"),
                format!("attributes = ['a', {value:?}]"),
                format!("topic_rules = {{ order = {value:?} }}"),
                format!("columns = {{ id = {value:?} }}"),
                format!("columns = {{ {value:?} = 'id' }}"),
                format!("{value:?} = 1"),
            ])
        {
            assert_hidden(
                load_file(&format!("[[tables]]\n{section}\n"), &[]),
                &section,
            );
        }
        for line in [
            format!("{value:?} = 1"),
            value.to_owned(),
            format!("tables = {value:?}"),
            format!("tables = [{value:?}]"),
            format!("slot = {value}"),
        ] {
            assert_hidden(load_file(&format!("{line}\n"), &[]), &line);
        }
    }
}

#[test]
fn a_refused_connection_string_names_the_setting_and_what_to_do() {
    let error = load(&[("POSTRIDER_SLOT", CONNECTION_STRINGS[0])]).unwrap_err();
    assert_eq!(error.code(), Code::SettingInvalid);
    assert_eq!(
        error.what(),
        "POSTRIDER_SLOT: setting `slot` looks like a connection string with a password"
    );
    assert!(error.hint_text().contains("DATABASE_URL"));
}
