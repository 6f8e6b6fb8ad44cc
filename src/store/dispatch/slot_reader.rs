//! Proves that our walsender has the slot. The dispatch writer needs this proof before it writes. The session needs the
//! proof before it waits for the last writes of the previous relay (`predecessor`). Until our walsender has the slot, a
//! third relay could take the slot and begin to write.

use decoder::Lsn;
use slot_manager::{SystemIdentifier, cluster, slots};

use crate::error::{Code, Error, Result};
use crate::postgres::{Sql, Target};
use crate::store::relay_row::ServedSlot;

/// Our walsender, which reads the slot, and its server.
#[derive(Debug, Clone)]
pub(crate) struct SlotReader {
    /// The server that the session is connected to. The dispatch writer connects to it too.
    pub(super) target: Target,
    /// The name of this relay in `outbox.relay`.
    pub(super) instance: String,
    /// The pid of our walsender, or 0 if the pid is unknown.
    pub(super) walsender: i32,
    pub(super) system_identifier: SystemIdentifier,
    pub(super) timeline: u32,
}

impl SlotReader {
    /// Checks that our walsender reads the slot, and that the slot's confirmed position is still `confirmed`, the
    /// position before our stream began. Returns `None` if either check fails. A different position can mean that
    /// another relay has replaced the slot by a new slot of the same name.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn of(
        sql: &Sql,
        served: ServedSlot<'_>,
        walsender: i32,
        confirmed: Lsn,
    ) -> Result<Option<Self>> {
        let found = slots::confirmed_by_reader(sql, served.slot, walsender).await?;
        Ok((found == Some(confirmed)).then(|| Self {
            target: sql.target().clone(),
            instance: served.instance.to_owned(),
            walsender,
            system_identifier: served.cluster.system_identifier,
            timeline: served.cluster.timeline,
        }))
    }

    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    /// The pid of our walsender, or 0 if the pid is unknown.
    pub(crate) fn walsender(&self) -> i32 {
        self.walsender
    }

    /// Checks that the writer is connected to the server on which the session began.
    ///
    /// A promoted standby server may lack the latest records of its primary, so the next session repeats the events of
    /// these records. If the writer recorded later events of the same keys on the promoted server, the next session
    /// would not repeat these later events. Consumers would then get earlier events of a key after the later ones.
    ///
    /// # Errors
    /// `postgres-stopping` if this is not the session's server; database errors.
    pub(super) async fn is_still_served_by(&self, sql: &Sql) -> Result<()> {
        let cluster = cluster::inspect(sql).await?;
        if cluster.system_identifier == self.system_identifier && cluster.timeline == self.timeline
        {
            return Ok(());
        }
        let what = "another PostgreSQL server answers than the one on which the session began";
        Err(Error::new(Code::PostgresStopping, what)
            .hint("no action needed: the relay opens a new session on the server that answers now"))
    }
}
