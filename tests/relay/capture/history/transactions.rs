//! Steps of a history with transactions of many kinds: rolled back, with savepoints, prepared, slow, or empty.

use super::History;
use crate::capture::wraparound;
use crate::harness;

impl History {
    pub(super) async fn insert_and_roll_back(&mut self) {
        self.say("insert and roll back");
        let sql = format!("BEGIN; {}; ROLLBACK", self.world.row_sql("o-1"));
        self.world.execute(&sql).await;
    }

    pub(super) async fn insert_with_savepoints(&mut self) {
        self.say("insert with savepoints");
        let mut sql = String::from("BEGIN;");
        for _ in 0..3 {
            let end = ["RELEASE s", "ROLLBACK TO s", "RELEASE s"][self.random.below(3) as usize];
            sql += &format!(
                "SAVEPOINT s; {}; {end};",
                self.world.row_sql(&format!("{}-2", self.keys))
            );
        }
        self.world.execute(&(sql + "COMMIT")).await;
    }

    pub(super) async fn prepare(&mut self) {
        self.say("prepare");
        let name = format!("p{}", self.step);
        let row = self.world.row_sql(&name);
        let sql = format!("BEGIN; {row}; PREPARE TRANSACTION '{name}'");
        self.world.execute(&sql).await;
        self.prepared.push(name);
    }

    pub(super) async fn end_prepared(&mut self) {
        let Some(name) = self.prepared.pop() else {
            return;
        };
        let end = ["COMMIT", "ROLLBACK"][self.random.below(2) as usize];
        self.say(&format!("{end} PREPARED {name}"));
        self.world
            .execute(&format!("{end} PREPARED '{name}'"))
            .await;
    }

    pub(super) async fn begin_slow(&mut self) {
        if self.slow.is_some() {
            return;
        }
        self.say("begin a slow transaction");
        let client = harness::connect(&self.world.database.url).await;
        let row = self.world.row_sql(&format!("slow-{}", self.step));
        client
            .batch_execute(&format!("BEGIN; {row}"))
            .await
            .unwrap();
        self.slow = Some(client);
    }

    pub(super) async fn end_slow(&mut self) {
        let Some(client) = self.slow.take() else {
            return;
        };
        let end = ["COMMIT", "ROLLBACK"][self.random.below(2) as usize];
        self.say(&format!("{end} the slow transaction"));
        client.batch_execute(end).await.unwrap();
    }

    /// In some histories, the transaction ids wrap around in one of these steps.
    pub(super) async fn use_up_transaction_ids(&mut self) {
        let ids = 1 + self.random.below(200);
        self.say(&format!("use up {ids} transaction ids"));
        wraparound::use_up(&self.world, ids).await;
    }

    /// Ends all open transactions, which hold locks on the table.
    pub(super) async fn end_all(&mut self) {
        self.end_slow().await;
        while !self.prepared.is_empty() {
            self.end_prepared().await;
        }
    }
}
