//! Previews a recovery, requests one, and lets a relay continue on another server.
//!
//! The relay does the recovery itself, because it holds the slot and knows which events are in flight.
//! The command only marks the slot for recovery in `outbox.relay` and ends the relay's session. The
//! relay finds the mark when it opens the next session.
//!
//! - [`situation`] finds out whether a relay would recover, and why.
//! - [`preview`] lists the rows that a recovery would publish.
//! - [`request`] checks whether the request is allowed. Then it writes the mark, or lets the relay keep its slot.
//! - `adoption` decides whether the relay can keep its slot on another server.
//! - `transactions` refuses a server whose transaction ids are too low.
//!
//! Not here: the recovery itself (`recovery`), and the questions and texts for the operator (`cli`).

mod adoption;
pub(crate) mod preview;
pub(crate) mod request;
pub(crate) mod situation;
mod transactions;

use slot_manager::{Finding, Severity};

use super::finding::finding_with_remedy;
use crate::postgres::Sql;
use crate::settings::{OnLoss, Settings};
use situation::{ReasonEffect, RecoveryReason, Situation};

/// Returns why the next session of a relay would not simply stream. Returns `None` if a query fails, because another
/// finding then says why.
pub(crate) async fn due(sql: &Sql, settings: &Settings) -> Option<RecoveryReason> {
    Situation::read(sql, settings).await.ok()?.why
}

/// Returns the finding of `postrider check` about a recovery that is due. A slot that is missing, lost or recreated is a
/// warning or an error. Returns `None` if other findings report the reason.
pub(crate) fn finding(due: &RecoveryReason, settings: &Settings) -> Option<Finding> {
    let Some(error) = &due.stops else {
        let finding = finding_with_remedy(
            Severity::Info,
            "recovery-due",
            format!("a recovery is due ({}): {}", due.name, due.what),
            "`postrider run` publishes every row without a known outcome from the tables; `postrider recover \
             --dry-run` lists these rows",
        );
        return (due.effect == ReasonEffect::Recovers).then_some(finding);
    };
    let (severity, remedy) = match settings.slot_on_loss {
        OnLoss::Recover => (
            Severity::Warning,
            "`postrider run` creates a new slot and publishes every row without a record from the \
             tables; `postrider recover --dry-run` lists these rows. If this server is a copy of \
             another one, run no relay here",
        ),
        OnLoss::Stop => (
            Severity::Error,
            "`postrider recover --dry-run` lists the undelivered rows, and `postrider recover --yes` \
             requests their delivery. If this server is a copy of another one, run no relay here",
        ),
    };
    let code = error.code().name();
    Some(finding_with_remedy(severity, code, error.what(), remedy))
}
