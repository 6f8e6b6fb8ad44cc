//! Waits as a standby for a slot that another session holds. The relay's log and state show the wait, and
//! whether the holder is a relay. The wait ends within a second after the slot is free. Then this relay takes
//! over.

use std::time::{Duration, Instant};

use slot_manager::health::{self, Observation, Thresholds, Viewer};
use slot_manager::publication::PublicationState;
use slot_manager::{DatabaseOrigin, Holder, Slot, SlotError, SlotName, slots};

use super::STATEMENT_TIMEOUT;
use super::database::OurDatabase;
use super::publication::PublicationCheck;
use crate::condition::{self, Phase, RelayState};
use crate::error::{Code, Error, Result};
use crate::metrics::Metrics;

const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// How long the previous session of this relay may hold the slot before the relay reports it. A server
/// process whose connection is closed usually ends sooner.
const OWN_SESSION_LIMIT: Duration = Duration::from_secs(5);

/// Statement timeout of one poll of the slot. Short, because a standby must soon notice a dead
/// connection.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// The slot and the publication at a time when nobody was reading from the slot.
#[derive(Debug)]
pub(super) struct FreeSlot {
    /// `None` if the slot does not exist.
    pub(super) slot: Option<Slot>,
    /// The publication. It was checked after the slot became free.
    pub(super) publication: PublicationState,
}

impl FreeSlot {
    /// Waits until nobody reads from the slot, without a time limit.
    ///
    /// # Errors
    /// The errors of [`PublicationCheck::check`]; `slot-foreign` for a slot that no relay can use; database
    /// errors.
    pub(super) async fn wait(
        OurDatabase { sql, cluster, .. }: &OurDatabase,
        name: &SlotName,
        publication: &PublicationCheck,
        instance: &str,
        views: (&RelayState, &Metrics),
    ) -> Result<Self> {
        let mut wait = Wait {
            began: Instant::now(),
            logged: None,
            origin: cluster.origin(),
            instance,
            views,
        };
        let mut observe = |slot: &Slot| wait.observe(slot);
        sql.limit_statements(QUERY_TIMEOUT).await?;
        let waited = slots::wait_until_free(sql, name, None, &mut observe).await;
        // Reset the timeout even if the wait has failed. If there is no slot, the wait fails, but the next steps still
        // use this SQL session.
        sql.limit_statements(STATEMENT_TIMEOUT).await?;
        views.1.slot_health.set(None);
        views.1.troubles.opening_continues();
        // We are no longer a standby, because the slot is free or does not exist.
        if matches!(
            views.0.phase(),
            Phase::Standby(_) | Phase::HeldByStranger(_)
        ) {
            views.0.set(Phase::Connecting);
        }
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

/// A wait for a held slot, and the views that show it.
struct Wait<'a> {
    began: Instant,
    logged: Option<Instant>,
    origin: DatabaseOrigin,
    /// The name of this relay.
    instance: &'a str,
    views: (&'a RelayState, &'a Metrics),
}

impl Wait<'_> {
    /// Shows who holds the slot.
    fn observe(&mut self, slot: &Slot) {
        let Some(holder) = &slot.holder else {
            return;
        };
        let is_due = self.logged.is_none_or(|at| at.elapsed() >= LOG_INTERVAL);
        if is_due {
            self.logged = Some(Instant::now());
        }
        let waited = self.began.elapsed().as_secs();
        let (state, metrics) = self.views;
        if is_ourselves(holder, self.instance) {
            self.observe_ourselves(&slot.slot_name, holder, is_due);
            return;
        }
        if health::stranger(slot).is_none() {
            metrics.slot_health.set(None);
            state.standby(holder);
            if is_due {
                tracing::info!(
                    code = "slot-held",
                    slot = slot.slot_name,
                    "standby for {waited} s: the slot is held by {holder}"
                );
            }
            return;
        }
        let observation = Observation {
            slot: Some(slot),
            viewer: Viewer::Waiting,
            time_lag: None,
            origin: self.origin,
            recorded: None,
        };
        let hint = health::remedy_for_stranger(holder);
        let what = |shown: &str| format!("{shown} reads the slot, and it is not a relay");
        let error = Error::new(Code::SlotHeld, what(&condition::public(holder))).hint(hint.clone());
        state.held_by_stranger(&error);
        let health = health::judge(&observation, &Thresholds::default());
        metrics.slot_health.set(Some(health));
        if is_due {
            tracing::warn!(
                code = "slot-held",
                slot = slot.slot_name,
                hint,
                "nothing is delivered for {waited} s: {}",
                what(&holder.to_string())
            );
        }
    }

    /// Shows that the previous session of this relay still holds the slot. Shows nothing before
    /// [`OWN_SESSION_LIMIT`]: the connection of that session is already closed, and its server process usually
    /// ends within moments.
    fn observe_ourselves(&self, slot: &str, holder: &Holder, is_due: bool) {
        if self.began.elapsed() < OWN_SESSION_LIMIT {
            return;
        }
        let pid = holder.pid;
        let error = Error::new(
            Code::SlotHeld,
            format!("the previous session of this relay still holds the slot: server process {pid} does not end"),
        )
        .hint(format!(
            "end process {pid} with pg_terminate_backend; if it remains, look at it on the server: it may wait \
             for a disk, or still decode a large transaction"
        ));
        self.views.1.troubles.set_opening(&error, self.began);
        if is_due {
            tracing::warn!(
                code = %error.code(), hint = error.hint_text(), slot,
                "nothing is delivered for {} s: {error}", self.began.elapsed().as_secs()
            );
        }
    }
}

/// Whether a session of the relay `instance` holds the slot. Compares only the part of the name after the host
/// name, because PostgreSQL replaces bytes of the host name that are not ASCII.
fn is_ourselves(holder: &Holder, instance: &str) -> bool {
    let process = |name: &str| name.rsplit('/').next().map(str::to_owned);
    let name = holder.application_name.as_deref();
    name.is_some_and(|name| name.contains('/') && process(name) == process(instance))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_old_session_is_recognised_by_its_process_also_if_the_host_name_is_not_ascii() {
        let ours = "postrider k\u{fc}che/0b84fa19:17";
        for (name, is_ours) in [
            (Some("postrider k\u{fc}che/0b84fa19:17"), true),
            (Some("postrider k??che/0b84fa19:17"), true),
            (Some("postrider k??che/0b84fa20:17"), false),
            (Some("postrider k??che/0b84fa19:18"), false),
            (Some("0b84fa19:17"), false),
            (Some(""), false),
            (None, false),
        ] {
            let holder = Holder {
                pid: 1,
                application_name: name.map(str::to_owned),
                client_addr: None,
                user: None,
                since: None,
                silent: None,
            };
            assert_eq!(is_ourselves(&holder, ours), is_ours, "{name:?}");
        }
    }
}
