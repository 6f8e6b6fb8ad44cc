//! Ends the session when an audit finds that the session cannot continue.

use std::time::Duration;

use super::{AuditState, AuditSubject, SOON, former, statements};
use crate::capture::claim::{self, Captured};
use crate::capture::detached::DetachedTable;
use crate::error::{Code, Error, Result};
use crate::postgres::Sql;
use crate::recovery::slot_verdict::RecoveryCause;
use crate::store::relay_row::RecordKeeping;
use crate::store::relay_row::audits;

impl AuditState {
    /// Called after a change of the publication or of a captured table. Ends the session in two cases:
    ///
    /// - Published events may lack a record.
    /// - A configured name belongs to another table than when the session began.
    ///
    /// Returns whether the session ends.
    pub(super) async fn ends_after_change(
        &self,
        sql: &Sql,
        records: RecordKeeping,
    ) -> Result<bool> {
        if records.may_lack_records() {
            self.end_session(sql).await?;
            return Ok(true);
        }
        let AuditSubject {
            tables, claimed, ..
        } = &self.subject;
        match claim::refuse_replaced(sql, tables, claimed).await {
            Err(error) if error.code() == Code::SlotBusy => {
                // If the session has ended already, nobody receives this error.
                let _ = self.broken.try_send(error);
                Ok(true)
            }
            found => found.map(|()| false),
        }
    }

    /// Whether only a recovery can find all missing rows. This is the case if published events may lack a record, and
    /// one of these conditions holds:
    ///
    /// - The rows of a former partition have just become readable.
    /// - A partition was attached whose rows the stream may have missed.
    pub(super) async fn needs_recovery(
        &self,
        sql: &Sql,
        captured: &[Captured],
        detached: &[DetachedTable],
        records: RecordKeeping,
    ) -> Result<bool> {
        Ok(records.may_lack_records()
            && (former::any_became_readable(captured, detached)
                || statements::any_overlooked(sql, &self.subject.tables, captured, records)
                    .await?))
    }

    /// Ends the session, and marks a recovery for the next one.
    pub(super) async fn end_session(&self, sql: &Sql) -> Result<Duration> {
        let AuditSubject { slot, instance, .. } = &self.subject;
        audits::mark_broken(
            sql,
            slot,
            instance,
            RecoveryCause::PublicationChanged.name(),
        )
        .await?;
        let what = "the publication or a captured table was altered or recreated: publishing all \
                    rows without a known outcome from the tables";
        // If the session has ended already, nobody receives this error.
        let _ = self.broken.try_send(Error::new(Code::PublicationGap, what));
        Ok(SOON)
    }
}
