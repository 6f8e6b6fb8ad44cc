//! Requests a recovery of the relay, or adopts another server or slot for the relay.

use slot_manager::{SlotName, slots};
use tokio_postgres::error::SqlState;

use super::adoption;
use super::situation::Situation;
use super::transactions;
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::capture_record as captures;
use crate::store::relay_row;

/// A request that passed the checks, before the operator confirms it.
pub(crate) struct RecoveryRequest<'a> {
    situation: &'a Situation,
    settings: &'a Settings,
    /// The reason to record for the recovery: `adopted` or `requested`.
    reason: &'static str,
}

/// The changes that a request has made.
pub(crate) struct RequestedRecovery {
    /// The recorded reason; `None` if the relay continues with the slot as it is.
    pub(crate) marked: Option<&'static str>,
    pub(crate) relay: RelayReaction,
    /// Number of records that the request moved to positions that no new event can have. Otherwise the relay would
    /// mistake new events for recorded ones.
    pub(crate) records_moved: u64,
}

/// When the relay acts on the requested recovery.
pub(crate) enum RelayReaction {
    /// At its next start, because no relay runs now.
    Starts,
    /// Now, because this request has ended the relay's session, and the relay opens the next session.
    BeginsAnew,
    /// Only after somebody restarts the relay. The role of this command has no right to end the relay's session.
    MustBeRestarted,
}

impl RelayReaction {
    /// Returns a stable name in kebab case, for programs.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            RelayReaction::Starts => "starts",
            RelayReaction::BeginsAnew => "begins-anew",
            RelayReaction::MustBeRestarted => "must-be-restarted",
        }
    }
}

impl<'a> RecoveryRequest<'a> {
    /// Checks whether the request is allowed. Changes nothing. `adopt` says that the operator wants this
    /// server to replace the relay's previous server, or this slot to replace another slot.
    ///
    /// # Errors
    /// `foreign-cluster` or `table-captured` when an adoption is needed but not wanted, or not possible;
    /// `setting-invalid` when an adoption is wanted but not needed; `slot-held` when a relay still reads the
    /// slot that owns the tables; database errors.
    pub(crate) async fn prepare(
        sql: &Sql,
        situation: &'a Situation,
        settings: &'a Settings,
        adopt: bool,
    ) -> Result<Self> {
        let reason = reason(situation, adopt)?;
        if let Some(owner) = &situation.owner {
            adoption::refuse_a_live_owner(sql, owner).await?;
        }
        if situation.may_have_higher_ids() {
            transactions::refuse_lower(sql, settings).await?;
        }
        Ok(Self {
            situation,
            settings,
            reason,
        })
    }

    /// Carries the request out. If this is an adoption, takes over the tables and records. Marks the slot for
    /// recovery, unless the relay can keep the slot. Then ends the relay's session.
    ///
    /// # Errors
    /// Database errors. The last statement ends the relay's session. If only this statement fails, the
    /// request is already stored. After any other error nothing has changed.
    pub(crate) async fn carry_out(self, sql: &mut Sql) -> Result<RequestedRecovery> {
        let Self {
            situation,
            settings,
            reason,
        } = self;
        let name = &settings.slot;
        let kept_from = adoption::kept_from(situation, settings).await?;
        let transaction = sql.client_mut().transaction().await?;
        if situation.needs_adoption() {
            captures::take_over(&transaction, name, &situation.identities).await?;
        }
        let records_moved = if situation.is_foreign() {
            captures::adopt(&transaction, situation.is_of_a_later_state()).await?;
            relay_row::move_records(&transaction).await?
        } else {
            0
        };
        let cluster = &situation.cluster;
        match kept_from {
            Some(confirmed) => {
                let publication = &situation.publication;
                relay_row::keep_slot(&transaction, name, cluster, confirmed, publication).await?;
            }
            None => relay_row::mark::request_recovery(&transaction, name, cluster, reason).await?,
        }
        transaction.commit().await?;
        Ok(RequestedRecovery {
            marked: kept_from.is_none().then_some(reason),
            relay: wake(sql, name).await?,
            records_moved,
        })
    }
}

/// Returns the reason to record for the recovery: `adopted` or `requested`. It is an error if an
/// adoption is needed but `--adopt` is missing, or if `--adopt` is given without need.
fn reason(situation: &Situation, adopt: bool) -> Result<&'static str> {
    match (situation.needs_adoption(), adopt) {
        (true, true) => Ok("adopted"),
        (false, false) => Ok("requested"),
        (true, false) => {
            let (what, code) = match &situation.why {
                Some(why) => (
                    why.what.clone(),
                    why.name.parse().unwrap_or(Code::ForeignCluster),
                ),
                None => (String::new(), Code::ForeignCluster),
            };
            Err(Error::new(code, what).hint(
                "if no other relay publishes these tables and events should be published from here: \
                 `postrider recover --adopt`",
            ))
        }
        (false, true) => Err(Error::new(
            Code::SettingInvalid,
            "--adopt is not needed: the tables and the slot already belong to this relay",
        )
        .hint("leave --adopt out")),
    }
}

/// Ends the session that holds the slot, so that the relay's next session finds the mark.
async fn wake(sql: &Sql, slot: &SlotName) -> Result<RelayReaction> {
    match slots::end_reader(sql, slot).await {
        Ok(false) => Ok(RelayReaction::Starts),
        Ok(true) => Ok(RelayReaction::BeginsAnew),
        Err(error) if error.sqlstate() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
            Ok(RelayReaction::MustBeRestarted)
        }
        Err(error) => Err(error.into()),
    }
}
