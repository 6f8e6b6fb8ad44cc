//! The migrations and the script, rendered for different settings.

use super::*;

fn settings(pairs: &[(&str, &str)]) -> Settings {
    let env = pairs
        .iter()
        .map(|(k, v)| ((*k).into(), (*v).into()))
        .collect();
    Settings::load(None, &env, &[]).unwrap()
}

#[test]
fn the_default_settings_render_the_files_unchanged() {
    let rendered = migrations(&settings(&[]), Payload::Jsonb);
    let texts: Vec<&str> = rendered.iter().map(|m| m.sql.as_str()).collect();
    assert_eq!(
        texts,
        [
            EVENTS,
            DISPATCH,
            PUBLICATION,
            ROLES,
            QUARANTINE,
            RECOVERY,
            AUDIT,
            EXCEPTIONS,
            ONE_RELAY,
            CAPTURE,
            CAPTURE_HISTORY,
            DATABASE,
            UNFINISHED,
            CONDITION,
            REPLAY,
            PRUNING,
            SINCE_LSN
        ]
    );
    let versions: Vec<i32> = rendered.iter().map(|m| m.version).collect();
    assert_eq!(
        versions,
        [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    );
}

#[test]
fn payload_bytea_changes_the_table_and_the_function() {
    let sql = events(Payload::Bytea);
    assert_eq!(
        sql.lines()
            .filter(|line| line.trim() == "payload bytea,")
            .count(),
        2
    );
    assert!(
        !sql.lines()
            .any(|line| !line.starts_with("--") && line.contains("payload jsonb"))
    );
}

#[test]
fn the_names_in_the_settings_are_quoted_where_sql_needs_it() {
    let settings = settings(&[
        ("POSTRIDER_PUBLICATION", "Shop's \"events\""),
        ("POSTRIDER_TABLE", "sales.\"Outbox\""),
    ]);
    let sql = publication(&settings);
    assert!(
        sql.contains("create publication \"Shop's \"\"events\"\"\" for table sales.\"Outbox\"")
    );
    assert!(sql.contains("where pubname = 'Shop''s \"events\"'"));
    assert!(sql.contains("schemaname = 'sales' and tablename = 'Outbox'"));
    assert!(grants(&settings).contains("grant select on sales.\"Outbox\" to postrider_relay;"));
}

#[test]
fn the_relay_may_delete_only_if_it_prunes() {
    let grants_delete = |settings| roles(&settings).contains("grant delete on");
    assert!(!grants_delete(settings(&[])));
    let prunes = settings(&[
        ("POSTRIDER_PRUNE_AFTER", "30d"),
        ("POSTRIDER_TABLE", "sales.\"Outbox\""),
    ]);
    let grant = "grant delete on sales.\"Outbox\", outbox.dispatch to postrider_relay;";
    assert!(roles(&prunes).contains(grant));
}

#[test]
fn a_quoted_name_cannot_end_its_do_block() {
    let settings = settings(&[
        ("POSTRIDER_PUBLICATION", "a$$b"),
        ("POSTRIDER_TABLE", "sales.\"$block_1$\""),
    ]);
    assert!(publication(&settings).ends_with("end\n$block_2$;\n"));
    assert!(grants(&settings).ends_with("end\n$$;\n"));
}

#[test]
fn the_slot_comes_after_the_publication_and_can_be_left_out() {
    let settings = settings(&[("POSTRIDER_SLOT", "mine")]);
    let sql = script(&settings, Payload::Jsonb, Some("shop relay"), true, true);
    let slot = sql.find("slot_name => 'mine'").unwrap();
    assert!(sql.find("create publication").unwrap() < slot);
    assert!(sql.rfind("commit;").unwrap() < slot);
    assert!(sql.contains("grant postrider_relay to \"shop relay\";"));
    let without = script(&settings, Payload::Jsonb, None, false, false);
    assert!(!without.contains("pg_create_logical_replication_slot"));
}
