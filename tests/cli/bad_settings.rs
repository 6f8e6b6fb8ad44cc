//! Tests that the error about a wrong setting names the place where the setting comes from. If no setting is wrong,
//! the error names the actual cause, such as the limit on open files.

use tokio::process::Command;

use crate::bad_input::{FAST, run, run_without_database};
use crate::support::{Database, PATIENCE, assert_contains, postrider};

/// No machine has this address, because it is reserved for documentation (RFC 5737).
#[tokio::test]
async fn an_address_that_this_machine_does_not_have_is_refused_with_that_reason() {
    let database = Database::initialised().await;
    let ran = run(&database, &[("POSTRIDER_HTTP_ADDR", "192.0.2.1:9464")]).await;
    ran.assert_error("port-in-use", 2);
    assert_contains(
        &ran.stderr,
        "no network interface of this machine has that address",
    );
}

#[tokio::test]
async fn too_few_file_descriptors_name_the_limit() {
    let database = Database::initialised().await;
    let binary = env!("CARGO_BIN_EXE_postrider");
    for (arguments, limits) in [("run", &[7, 9, 14, 20, 30][..]), ("status", &[7, 9, 14])] {
        for limit in limits {
            let script = format!("ulimit -n {limit}; exec {binary} {arguments}");
            let mut command = Command::new("/bin/sh");
            command.args(["-c", &script]).env_clear();
            command.envs(database.env()).envs(FAST);
            command.env("PUBSUB_PROJECT_ID", "demo").kill_on_drop(true);
            let output = tokio::time::timeout(PATIENCE, command.output()).await;
            let output = output.unwrap().unwrap();
            let shown = [output.stdout, output.stderr].concat();
            let shown = String::from_utf8(shown).unwrap();
            assert_contains(&shown, "error[open-files-limit]");
            assert_contains(&shown, "LimitNOFILE=1024");
        }
    }
}

#[tokio::test]
async fn a_database_url_from_a_flag_or_a_file_is_named_as_such() {
    let ran = postrider(&["status", "--database-url", "shop"], &[]).await;
    ran.assert_error("database-url-invalid", 2);
    assert_contains(
        &ran.stderr,
        "--database-url is neither a URL that starts with postgres://",
    );
    assert_contains(&ran.stderr, "host=HOST port=5432 user=USER dbname=DATABASE");
    assert!(!ran.stderr.contains("DATABASE_URL"), "{ran}");
    let mut file = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut file, b"database_url = 'shop'\n").unwrap();
    let path = file.path().to_str().unwrap();
    let ran = run_without_database(&[("POSTRIDER_CONFIG", path)]).await;
    assert_contains(&ran.stderr, &format!("{path}:1:16 is neither a URL"));
    let ran = run_without_database(&[("DATABASE_URL", "shop")]).await;
    assert_contains(&ran.stderr, "DATABASE_URL is neither a URL");
}

#[tokio::test]
async fn a_log_filter_without_a_level_is_refused() {
    for filter in [",,,", " , ", " "] {
        let ran = run_without_database(&[("RUST_LOG", filter)]).await;
        ran.assert_error("setting-invalid", 2);
        assert_contains(&ran.stderr, "RUST_LOG has no level");
    }
}

#[tokio::test]
async fn settings_that_no_table_can_fit_are_refused_without_a_connection() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let settings = "[[tables]]\ntable = 'public.t'\ncolumns = { aggregatetype = '' }\n";
    std::io::Write::write_all(&mut file, settings.as_bytes()).unwrap();
    let path = file.path().to_str().unwrap();
    for command in [&["check", "--offline"][..], &["run"], &["init"]] {
        let ran = postrider(command, &[("POSTRIDER_CONFIG", path)]).await;
        ran.assert_error("setting-invalid", 2);
        assert_contains(
            &ran.stderr,
            "`topic` needs the column that `columns.aggregatetype` switches off",
        );
        assert_contains(&ran.stderr, &format!("{path}:2:9"));
        assert_contains(&ran.stderr, "set `columns.topic` to that column");
    }
}

#[tokio::test]
async fn check_says_what_is_wrong_with_a_file_of_credentials() {
    for (content, wrong) in [
        ("{\"type\": \"service_account\"}", "missing field"),
        ("{\"type\": \"weird\"}", "its type weird is not supported"),
        ("{\"type", "EOF while parsing"),
    ] {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, content.as_bytes()).unwrap();
        let env = [
            (
                "GOOGLE_APPLICATION_CREDENTIALS",
                file.path().to_str().unwrap(),
            ),
            ("PUBSUB_PROJECT_ID", "demo"),
            ("POSTRIDER_PUBSUB_ENDPOINT", "https://localhost:1"),
        ];
        let ran = postrider(&["check", "--json"], &env).await;
        let found = ran.finding("credentials-missing");
        let what = found["what"].as_str().unwrap();
        let expected = format!("the file with the Google credentials cannot be used: {wrong}");
        assert_contains(what, &expected);
    }
}
