//! Tests that no command prints control characters that are stored in the database, which could change or
//! forge what a terminal shows.

use scratch_postgres::ScratchPostgres;
use tokio_postgres::NoTls;

use crate::support::Database;

/// Clears the screen, forges a line, and reverses the direction of the text.
const HOSTILE: &str = "x\u{1b}[2J\r\nforged\u{202e}y";

/// The name of a table and of a database. Unlike [`HOSTILE`], the name contains no line break. Only the owner of a
/// table or a database can choose its name, so these tests try no forged line in a name.
const NAME: &str = "x\u{1b}[2J\u{202e}y";

/// The id of an event of outbox.events that is in quarantine.
const BAD: &str = "00000000-0000-4000-8000-000000000002";

/// A database in which every text that a service or another user may choose is [`HOSTILE`]: keys, ids,
/// topics, reasons, and the names of a table, a database and a prepared transaction.
async fn hostile(server: &ScratchPostgres, settings: &std::path::Path) -> Database {
    let database = Database::on(server).await;
    database
        .execute(&format!("create database \"{NAME}\""))
        .await;
    let mut other: tokio_postgres::Config = database.url.parse().unwrap();
    let (other, connection) = other.dbname(NAME).connect(NoTls).await.unwrap();
    tokio::spawn(connection);
    let slot = "select pg_create_logical_replication_slot('of_others', 'pgoutput')";
    crate::support::execute(&other, slot).await;

    let table = format!(
        "create table public.\"{NAME}\" (id text primary key, aggregatetype text not null, \
             aggregateid text, event_type text, payload jsonb)"
    );
    database.execute(&table).await;
    let name = NAME.replace('\u{1b}', "\\u001b");
    let toml = format!(
        "[[tables]]\ntable = 'outbox.events'\n[[tables]]\ntable = \"public.\\\"{name}\\\"\"\n"
    );
    std::fs::write(settings, toml).unwrap();
    let config = settings.to_str().unwrap();
    let init = database.run(&["init", "--apply", "--config", config]).await;
    init.assert_status(0);

    let rows = format!(
        "insert into public.\"{NAME}\" values ('{HOSTILE}', 'order', '{HOSTILE}', 'E', '{{}}'), \
             ('2', '{HOSTILE}', 'k', 'E', '{{}}'); \
         insert into outbox.events (id, aggregatetype, aggregateid, event_type) \
         select ('00000000-0000-4000-8000-00000000000' || n)::uuid, 'order', '{HOSTILE}', '{HOSTILE}' \
         from generate_series(1, 3) n; \
         insert into outbox.dispatch (commit_lsn, committed_at, ordinal, attempts, event_id, state, topic, \
             ordering_key, message_id, error, source_id) values \
         ('0/10', now() - interval '2 days', 1, 1, '00000000-0000-4000-8000-000000000001', 'published', \
          'projects/p/topics/{HOSTILE}', '{HOSTILE}', '{HOSTILE}', null, null), \
         ('0/20', now(), 1, 3, '{BAD}', 'quarantined', 'projects/p/topics/{HOSTILE}', \
          '{HOSTILE}', null, 'event-refused: {HOSTILE}', null), \
         ('0/30', now(), 1, 3, md5('s')::uuid, 'published', 'projects/p/topics/t', '{HOSTILE}', '7', null, \
          'public.t:{HOSTILE}')"
    );
    database.execute(&rows).await;
    let prepared = format!("begin; select pg_current_xact_id(); prepare transaction '{HOSTILE}'");
    database.execute(&prepared).await;
    database
}

#[tokio::test]
async fn no_command_prints_control_characters_from_the_database() {
    let server = ScratchPostgres::builder().setting("max_prepared_transactions", "5");
    let server = server.start().unwrap();
    let settings = tempfile::NamedTempFile::new().unwrap();
    let database = hostile(&server, settings.path()).await;
    let source_id = format!("public.t:{HOSTILE}");
    for arguments in [
        &["audit"][..],
        &["check"],
        &["prune", "--older-than", "1d", "--dry-run"],
        &["recover", "--dry-run"],
        &["replay", "--key", HOSTILE, "--dry-run"],
        &["replay", "--topic", HOSTILE, "--dry-run"],
        &["event", &source_id],
        &["event", BAD],
        &["event", "--key", HOSTILE],
        &["quarantine", "list"],
        &["quarantine", "show", BAD],
        &["quarantine", "release", "--key", HOSTILE],
        &["slot", "list"],
        &["slot", "show"],
        &["status"],
    ] {
        let config = settings.path().to_str().unwrap();
        let all = [arguments, &["--config", config]].concat();
        let pubsub = [
            ("PUBSUB_PROJECT_ID", "p"),
            ("PUBSUB_EMULATOR_HOST", "127.0.0.1:1"),
        ];
        let ran = database.run_with(&all, &pubsub).await;
        let said = format!("{}{}", ran.stdout, ran.stderr);
        let is_raw = |c: char| c.is_control() && c != '\n' || c == '\u{202e}';
        assert!(!said.contains(is_raw), "{arguments:?}: {said:?}");
        let is_forged = |line: &str| line.starts_with("forged");
        assert!(!said.lines().any(is_forged), "{arguments:?}: {said:?}");
        // Two commands print none of these texts: `replay` prints the uuid of an event, and `release`
        // prints only a number of events.
        let hides = ["replay", "release"];
        let shows = !arguments.iter().any(|word| hides.contains(word));
        assert_eq!(said.contains("x\\u{1b}[2J"), shows, "{arguments:?}: {said}");
    }
}
