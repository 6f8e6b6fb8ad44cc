//! Creates the table of a history, and replaces it during the history.

use scratch_postgres::ScratchPostgres;

use super::random::Random;
use super::unsendable::Encoding;
use super::{History, IN};
use crate::capture::table::Kind;
use crate::capture::wraparound::near_the_wraparound;
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
    /// Whether the transaction ids wrap around during the history.
    pub(super) is_across_the_wraparound: bool,
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
            is_across_the_wraparound: false,
        }
    }

    /// Chooses at random one of the setups that the histories with fixed seeds use.
    pub(super) fn random(random: &mut Random) -> Self {
        let kinds = [
            Kind::Events,
            Kind::Numbered,
            Kind::Partitioned,
            Kind::Timed,
            Kind::Uuid,
        ];
        let kind = kinds[random.below(5) as usize];
        let setup = match kind {
            Kind::Timed | Kind::Uuid => return Self::of(kind).without_columns(),
            _ => Self::of(kind),
        };
        let setup = match random.below(3) {
            0 => setup.without_records(),
            _ => setup,
        };
        match (kind, random.below(5)) {
            (Kind::Events | Kind::Numbered, 0) => setup.in_encoding(Encoding::Win1252),
            (Kind::Numbered, 1) => setup.in_encoding(Encoding::SqlAscii),
            (_, 2) => setup.across_the_wraparound(),
            _ => setup,
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

    pub(super) fn across_the_wraparound(self) -> Self {
        Self {
            is_across_the_wraparound: true,
            ..self
        }
    }

    async fn server(self) -> Option<ScratchPostgres> {
        if self.is_across_the_wraparound {
            return near_the_wraparound().await;
        }
        let mut builder = ScratchPostgres::builder()
            .setting("wal_level", "logical")
            .setting("max_prepared_transactions", "10");
        if let Some(encoding) = self.encoding {
            builder = builder
                .initdb_arg(&format!("--encoding={}", encoding.name()))
                .initdb_arg("--locale=C");
        }
        Some(builder.start().unwrap())
    }

    /// Creates the server, the slot, and the table with 200 rows from before it was captured. Returns `None` if this
    /// PostgreSQL cannot be brought near the wraparound.
    pub(super) async fn world(self) -> Option<World> {
        let emulator = harness::emulator().await;
        let mut world = World::on(self.server().await?, self.kind, 200, emulator).await;
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
        Some(world)
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
