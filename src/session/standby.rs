//! Waits as a standby for a slot that another session holds. The log and the relay's state show the
//! wait. The wait ends within a second after the slot is free, and then this relay takes over.

use std::time::{Duration, Instant};

use slot_manager::publication::PublicationState;
use slot_manager::{Slot, SlotError, SlotName, slots};

use super::STATEMENT_TIMEOUT;
use super::database::OurDatabase;
use super::publication::PublicationCheck;
use crate::condition::RelayState;
use crate::error::Result;

const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Statement timeout of one poll of the slot: a standby must soon notice a dead connection.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// The slot and the publication at a moment when nobody was reading from the slot.
#[derive(Debug)]
pub(super) struct FreeSlot {
    /// `None` if the slot does not exist.
    pub(super) slot: Option<Slot>,
    /// The publication, which has passed its check.
    pub(super) publication: PublicationState,
}

impl FreeSlot {
    /// Waits without end until nobody reads from the slot.
    ///
    /// # Errors
    /// `publication-missing`, `publication-drift`; errors of a statement.
    pub(super) async fn wait(
        OurDatabase { sql, .. }: &OurDatabase,
        name: &SlotName,
        publication: &PublicationCheck,
        state: &RelayState,
    ) -> Result<Self> {
        let began = Instant::now();
        let mut logged: Option<Instant> = None;
        let mut observe = |slot: &Slot| {
            state.standby(slot.holder.as_ref());
            if logged.is_none_or(|at| at.elapsed() >= LOG_INTERVAL)
                && let Some(holder) = &slot.holder
            {
                logged = Some(Instant::now());
                tracing::info!(
                    code = "slot-held",
                    slot = slot.slot_name,
                    "standby for {:.0} s: the slot is held by {holder}",
                    began.elapsed().as_secs_f64()
                );
            }
        };
        sql.limit_statements(QUERY_TIMEOUT).await?;
        let waited = slots::wait_until_free(sql, name, None, &mut observe).await;
        // Reset the timeout even if there is no slot: a recovery then uses this SQL session.
        sql.limit_statements(STATEMENT_TIMEOUT).await?;
        Ok(Self {
            slot: match waited {
                Ok(slot) => Some(slot),
                Err(SlotError::SlotMissing { .. }) => None,
                Err(error) => return Err(error.into()),
            },
            // Check again: waiting for the slot may have taken days.
            publication: publication.check(sql).await?,
        })
    }
}
