//! Creates the table of a history, and replaces it during the history.

use scratch_postgres::ScratchPostgres;

use super::unsendable::Encoding;
use super::{History, IN};
use crate::capture::table::Kind;
use crate::capture::{World, replaced};
use crate::harness;

/// The table, the database and the mode with which a history begins.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setup {
    kind: Kind,
    dispatch: &'static str,
    /// Whether the table has the columns that `init` adds.
    has_columns: bool,
    pub(super) encoding: Option<Encoding>,
}

impl Setup {
    /// Returns the default setup: a table as `init` leaves it, in a database with the encoding UTF-8, and
    /// a record for every event.
    pub(super) fn of(kind: Kind) -> Self {
        Self {
            kind,
            dispatch: "full",
            has_columns: true,
            encoding: None,
        }
    }

    pub(super) fn without_records(self) -> Self {
        Self {
            dispatch: "exceptions",
            ..self
        }
    }

    pub(super) fn without_columns(self) -> Self {
        Self {
            has_columns: false,
            ..self
        }
    }

    pub(super) fn in_encoding(self, encoding: Encoding) -> Self {
        Self {
            encoding: Some(encoding),
            ..self
        }
    }

    /// Creates the server, the slot, and the table with 200 rows from before it was captured.
    pub(super) async fn world(self) -> World {
        let mut builder = ScratchPostgres::builder()
            .setting("wal_level", "logical")
            .setting("max_prepared_transactions", "10");
        if let Some(encoding) = self.encoding {
            builder = builder
                .initdb_arg(&format!("--encoding={}", encoding.name()))
                .initdb_arg("--locale=C");
        }
        let emulator = harness::emulator().await;
        let mut world = World::on(builder.start().unwrap(), self.kind, 200, emulator).await;
        if !self.has_columns {
            let drop = "ALTER TABLE TABLE_NAME DROP COLUMN IF EXISTS inserted_xid, \
                        DROP COLUMN IF EXISTS seq";
            world.execute(drop).await;
            world = world.without_slot().await;
            let created = world.run(&["slot", "create"], &[]);
            assert!(created.status.success(), "{created:?}");
        }
        world
            .more
            .push(("POSTRIDER_DISPATCH", self.dispatch.to_owned()));
        world
    }
}

impl History {
    /// Recreates the table after everything in it has been published. The ids of the new rows start at 1
    /// again.
    pub(super) async fn replace(&mut self) {
        let recreate = match self.world.kind {
            Kind::Numbered => replaced::RECREATE.to_owned(),
            Kind::Timed => format!("DROP TABLE public.timed; {}", Kind::Timed.create()),
            Kind::Events | Kind::Uuid | Kind::Partitioned | Kind::Identity => return,
        };
        self.end_all().await;
        self.settle().await;
        self.wait_until_unsendable_rows_are_set_aside().await;
        self.say("recreate the table");
        self.world.execute(&recreate).await;
        if self.world.kind == Kind::Timed {
            // Without `inserted_xid`, the new rows would get the event ids of earlier rows. So the relay
            // computes the event ids from a name that contains the OID of the new table.
            let oid = "SELECT 'public.timed'::regclass::oid::bigint";
            let oid = self.world.database.number(oid).await;
            self.world.event_id = format!("outbox.event_uuid('public.timed@{oid}', e.id::text)");
        }
        let key = format!("anew{}", self.step);
        self.world.insert(&key, 5).await;
        self.world.execute(IN).await;
    }
}
