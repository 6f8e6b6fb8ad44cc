//! Builds the input of each part of a session, from the settings and the state of the database.

use std::sync::Arc;

use decoder::{Lsn, Oid};
use replication::Source;
use slot_manager::Cluster;
use slot_manager::publication::PublicationState;

use super::SessionRunner;
use super::supervisor::WatchSubject;
use crate::audit::AuditSubject;
use crate::capture::Bounds;
use crate::capture::claim::Captured;
use crate::capture::intake::{Intake, Streamed};
use crate::capture::session_records::SessionRecords;
use crate::delivery::quarantine::Quarantine;
use crate::delivery::topic_maker::TopicMaker;
use crate::delivery::{Attempts, Delivery};
use crate::error::Result;
use crate::metrics::Metrics;
use crate::postgres::Sql;
use crate::recovery::RecoverySubject;
use crate::settings::{OnBadEvent, Settings};
use crate::store::dispatch::quarantined::{self, MAX_BLOCKED};
use crate::store::dispatch::{PredecessorGone, SlotReader};
use crate::store::relay_row::RecordKeeping;

/// Builds the intake of a session with these tables.
pub(super) fn intake(
    settings: &Settings,
    (captured, publication): (&[Captured], &PublicationState),
    known: SessionRecords,
    metrics: &Metrics,
) -> Result<Intake> {
    let tables = settings.tables.iter().zip(captured);
    let streamed = tables
        .zip(&publication.tables)
        .map(|((settings, captured), published)| Streamed {
            columns: published.columns.clone(),
            settings: settings.clone(),
            oid: Oid(captured.shape.oid),
            always_has_inserted_xid: captured.shape.has_inserted_xid
                && captured.record.has_inserted_xid
                && captured.record.added_xids.is_empty(),
        });
    let project = settings.project()?.into();
    Ok(Intake::new(
        streamed.collect(),
        known,
        project,
        metrics.clone(),
    ))
}

/// Returns the fingerprint of the publication for the relay's row. Each capture record contains the fingerprint
/// from the time when the capture of its table began. If one of these differs from the current fingerprint, this
/// function returns the older one. The auditor then finds that the publication has changed, and audits the tables.
/// Otherwise this function returns the current fingerprint.
pub(super) fn as_captured<'a>(captured: &'a [Captured], now: &'a PublicationState) -> &'a str {
    let mut before = captured
        .iter()
        .filter_map(|captured| captured.record.publication.as_deref());
    let changed = before.find(|before| *before != now.fingerprint());
    changed.unwrap_or(now.fingerprint())
}

impl SessionRunner {
    pub(super) fn watch_subject(&self, cluster: &Cluster, source: &Source) -> WatchSubject {
        let settings = &self.settings;
        WatchSubject {
            target: source.target().clone(),
            slot: settings.slot.clone(),
            publication: settings.publication.clone(),
            tables: settings.captured(),
            origin: cluster.origin(),
            lease: source.lease_proof(),
            wal_sender_timeout: settings.wal_sender_timeout,
            instance: self.instance.clone(),
            state: self.state.clone(),
        }
    }

    pub(super) fn audit_subject(
        &self,
        reader: &SlotReader,
        (claimed, bounds): (Vec<u32>, Arc<[Bounds]>),
        records: RecordKeeping,
    ) -> Result<AuditSubject> {
        let settings = &self.settings;
        Ok(AuditSubject {
            target: reader.target().clone(),
            slot: settings.slot.clone(),
            publication: settings.publication.clone(),
            captured: settings.captured(),
            tables: settings.tables.clone().into(),
            claimed,
            project: Arc::from(settings.project()?),
            bounds,
            records,
            instance: self.instance.clone(),
            walsender: reader.walsender(),
            metrics: self.metrics.clone(),
        })
    }

    /// Builds the input of a recovery. This session has read `publication` while no relay held the slot, and before
    /// the session created a new slot.
    pub(super) fn recovery_subject(
        &self,
        reader: &SlotReader,
        publication: &PublicationState,
        (captured, known): (Vec<Captured>, SessionRecords),
        records: RecordKeeping,
    ) -> Result<RecoverySubject> {
        let settings = &self.settings;
        Ok(RecoverySubject {
            target: reader.target().clone(),
            slot: settings.slot.clone(),
            publication: publication.fingerprint().to_owned(),
            tables: settings.tables.clone(),
            project: settings.project()?.to_owned(),
            captured,
            known,
            records,
            instance: self.instance.clone(),
            walsender: reader.walsender(),
            state: self.state.clone(),
            metrics: self.metrics.clone(),
        })
    }

    pub(super) fn delivery(
        &self,
        quarantine: Quarantine,
        reader: SlotReader,
        confirmed: Lsn,
    ) -> Result<Delivery> {
        let seed = u64::from(std::process::id()) << 32 | confirmed.as_u64() & 0xFFFF_FFFF;
        let delivery = Delivery::new(
            &self.settings,
            Attempts::new(self.publisher.clone(), seed),
            TopicMaker::new(self.topics.clone()),
            quarantine,
            self.metrics.clone(),
            self.traces.clone(),
            reader,
        )?;
        Ok(delivery.continuing(self.earlier_failures.clone()))
    }
}

/// Builds the quarantine, with the keys that are blocked from the beginning. If `on_bad_event` is
/// `quarantine_key`, every key with quarantined or released events is blocked. Under the other policies, a
/// key is blocked only if it has no event in quarantine and its first released event is being replayed.
pub(super) async fn quarantine(
    sql: &Sql,
    on_bad_event: OnBadEvent,
    _nobody_adds_rows: &PredecessorGone,
) -> Result<Quarantine> {
    let mut quarantine = Quarantine::new(on_bad_event);
    let keys = quarantined::blocked_keys(sql, MAX_BLOCKED).await?;
    for key in keys {
        if key.is_replayed && !key.is_quarantined {
            // New events must not come between the replayed events.
            quarantine.keys.block_for_release(key.group, key.since);
        } else if on_bad_event == OnBadEvent::QuarantineKey {
            quarantine
                .keys
                .block(key.group, key.since, &key.first.shown());
        }
    }
    if quarantine.keys.count() > 0 {
        tracing::warn!(
            blocked_keys = quarantine.keys.count(),
            hint = "`postrider quarantine list` shows them",
            "events of these keys wait in quarantine"
        );
    }
    Ok(quarantine)
}
