//! Tests the migrations and the script, rendered for different settings.

use super::*;

const NEW_TABLE: NewTable = NewTable {
    payload: Payload::Jsonb,
    partition: None,
};

fn settings(pairs: &[(&str, &str)]) -> Settings {
    let env = pairs
        .iter()
        .map(|(k, v)| ((*k).into(), (*v).into()))
        .collect();
    Settings::load(None, &env, &[]).unwrap()
}

#[test]
fn the_default_settings_render_the_files_unchanged() {
    let rendered = migrations(&settings(&[]), NEW_TABLE);
    let texts: Vec<&str> = rendered.iter().map(|m| m.sql.as_str()).collect();
    assert_eq!(
        texts,
        [
            include_str!("../../../../migrations/0001_events.sql"),
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
            SINCE_LSN,
            DAYS,
            TABLE_OIDS,
            EARLIER_MESSAGES,
            RECOVERY_PROGRESS,
            UNCAPTURED,
            SETTLED
        ]
    );
    let versions: Vec<i32> = rendered.iter().map(|m| m.version).collect();
    assert_eq!(
        versions,
        [
            1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24
        ]
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
fn the_relay_may_drop_days_only_if_it_prunes_the_partitioned_table() {
    fn grants_drop(pairs: &[(&str, &str)]) -> bool {
        days(&settings(pairs)).contains("outbox.drop_day(oid, date) to postrider_relay")
    }
    assert!(!grants_drop(&[]));
    let prunes = ("POSTRIDER_PRUNE_AFTER", "30d");
    assert!(grants_drop(&[prunes]));
    assert!(!grants_drop(&[prunes, ("POSTRIDER_TABLE", "sales.outbox")]));
}

#[test]
fn the_first_days_are_added_after_the_migrations() {
    let daily = NewTable {
        partition: Some(Partition::Daily),
        ..NEW_TABLE
    };
    let sql = script(&settings(&[]), daily, None, true, true);
    let added = sql.find("select m.day, outbox.add_day(m.day)").unwrap();
    assert!(sql.rfind("commit;").unwrap() < added);
    assert!(added < sql.find("slot_name =>").unwrap());
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
fn the_capture_record_has_the_identity_that_a_relay_would_give_the_table() {
    let settings = settings(&[("POSTRIDER_TABLE", "sales.\"a:b@c\"")]);
    let sql = script(&settings, NEW_TABLE, None, true, false);
    assert!(
        sql.contains("select 'sales.a%3Ab%40c', 'sales', 'a:b@c', c.oid"),
        "{sql}"
    );
}

#[test]
fn the_slot_comes_after_the_publication_and_can_be_left_out() {
    let settings = settings(&[("POSTRIDER_SLOT", "mine")]);
    let sql = script(&settings, NEW_TABLE, Some("shop relay"), true, true);
    let slot = sql.find("slot_name => 'mine'").unwrap();
    assert!(sql.find("create publication").unwrap() < slot);
    assert!(sql.rfind("commit;").unwrap() < slot);
    assert!(sql.contains("grant postrider_relay to \"shop relay\";"));
    let without = script(&settings, NEW_TABLE, None, false, false);
    assert!(!without.contains("pg_create_logical_replication_slot"));
}
