//! Tests of columns of many types: in the stream, in rows read from the tables, in audits, and in the
//! output of commands.

mod domains;
mod generated;
mod identity;
mod keys;
mod released;
mod times;

use std::process::Output;

use pubsub_emulator::RunningEmulator;
use tempfile::NamedTempFile;

use crate::harness::{self, Database, Relay, eventually, postrider};
use crate::mapping::settings;

/// A database whose publication contains only the tables of a test, and the relay's settings for these
/// tables.
struct World {
    database: Database,
    emulator: RunningEmulator,
    host: String,
    settings: NamedTempFile,
}

impl World {
    /// Runs the SQL `tables`, which creates tables. The publication then contains the tables `captured`
    /// instead of `outbox.events`. `toml` is the text of the settings file.
    async fn start(tables: &str, captured: &[&str], toml: &str) -> Self {
        let database = Database::start().await;
        database.execute(tables).await;
        let list = captured.join(", ");
        let publish = format!("ALTER PUBLICATION postrider SET TABLE {list}");
        database.execute(&publish).await;
        let emulator = harness::emulator().await;
        for topic in ["domains", "generated", "numbers", "times", "types"] {
            let topic = format!("projects/demo/topics/{topic}");
            emulator.create_topic(&topic).await.unwrap();
        }
        Self {
            host: emulator.addr().to_string(),
            database,
            emulator,
            settings: settings(toml),
        }
    }

    fn config(&self) -> &str {
        self.settings.path().to_str().unwrap()
    }

    fn run(&self) -> Relay {
        let more = [("POSTRIDER_CONFIG", self.config())];
        Relay::start_with(&self.database, &self.host, &more)
    }

    /// Runs `postrider` with these arguments. Returns stdout followed by stderr, and the exit status.
    fn command(&self, arguments: &[&str]) -> (String, Option<i32>) {
        let environment = [
            ("DATABASE_URL", self.database.url.as_str()),
            ("PUBSUB_EMULATOR_HOST", &self.host),
            ("PUBSUB_PROJECT_ID", "demo"),
            ("POSTRIDER_SLOT", self.database.slot()),
            ("POSTRIDER_CONFIG", self.config()),
        ];
        let mut command = postrider(arguments, &environment);
        let Output {
            status,
            stdout,
            stderr,
        } = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (text(stdout) + &text(stderr), status.code())
    }

    /// Checks that `check` and `run` refuse the settings with `message`, and that the error of `run` is
    /// `code`.
    async fn is_refused(&self, code: &str, message: &str) {
        let (found, status) = self.command(&["check"]);
        assert_eq!(status, Some(2), "{found}");
        assert!(found.contains(message), "{message}\n{found}");
        let relay = self.run();
        relay.wait_for_error(code).await;
        let log = relay.log();
        assert!(log.contains(message), "{message}\n{log}");
        assert!(!relay.wait().await.success());
        assert!(!log.contains("streaming"), "at the start: {log}");
    }

    async fn wait_until_recorded(&self, events: i64) {
        eventually("every event is recorded", || async {
            let recorded = "SELECT count(*) FROM outbox.dispatch WHERE state = 'published'";
            (self.database.number(recorded).await == events).then_some(())
        })
        .await;
    }

    /// Stops the relay and drops the slot, so that the next relay publishes later rows from the tables.
    async fn lose_the_slot(&self, relay: Relay) {
        self.database.wait_until_confirmed().await;
        relay.stop().await;
        self.database.drop_slot().await;
    }
}
