//! What each part of a session receives: some settings, and some of the state that was found.

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
use crate::capture::moved::MovedRows;
use crate::delivery::Delivery;
use crate::delivery::quarantine::Quarantine;
use crate::delivery::topic_maker::TopicMaker;
use crate::error::Result;
use crate::metrics::Metrics;
use crate::postgres::Sql;
use crate::recovery::RecoverySubject;
use crate::settings::{OnBadEvent, Settings};
use crate::store::dispatch::SlotReader;
use crate::store::dispatch::quarantined::{self, MAX_BLOCKED};

pub(super) fn intake(
    settings: &Settings,
    captured: &[Captured],
    metrics: Metrics,
) -> Result<Intake> {
    let project = Arc::from(settings.project()?);
    Ok(Intake::new(streamed(settings, captured), project, metrics))
}

pub(super) fn moved(
    settings: &Settings,
    bounds: Arc<[Bounds]>,
    repeats: bool,
    metrics: Metrics,
) -> Result<MovedRows> {
    let target = settings.database()?.clone();
    Ok(MovedRows::new(target, bounds, repeats, metrics))
}

/// The captured tables, with the properties that the stream needs.
fn streamed(settings: &Settings, captured: &[Captured]) -> Vec<Streamed> {
    let tables = settings.tables.iter().zip(captured);
    tables
        .map(|(settings, captured)| Streamed {
            settings: settings.clone(),
            oid: Oid(captured.shape.oid),
            identity: captured.identity(),
            always_has_inserted_xid: captured.record.has_inserted_xid
                && captured.record.added_xids.is_empty(),
        })
        .collect()
}

/// Fingerprint of the publication when capturing began. It matters only at the first session, which
/// compares the tables if the publication has changed since.
pub(super) fn as_captured<'a>(captured: &'a [Captured], now: &'a PublicationState) -> &'a str {
    let mut before = captured
        .iter()
        .filter_map(|captured| captured.record.publication.as_deref());
    let changed = before.find(|before| *before != now.fingerprint());
    changed.unwrap_or(now.fingerprint())
}

impl SessionRunner {
    /// What the supervisor receives.
    pub(super) fn watch_subject(&self, cluster: &Cluster, source: &Source) -> Result<WatchSubject> {
        let settings = &self.settings;
        Ok(WatchSubject {
            target: settings.database()?.clone(),
            slot: settings.slot.clone(),
            publication: settings.publication.clone(),
            tables: settings.captured(),
            origin: cluster.origin(),
            lease: source.lease_proof(),
            wal_sender_timeout: settings.wal_sender_timeout,
            instance: self.instance.clone(),
            state: self.state.clone(),
        })
    }

    /// What the auditor receives.
    pub(super) fn audit_subject(
        &self,
        walsender: i32,
        bounds: Arc<[Bounds]>,
    ) -> Result<AuditSubject> {
        let settings = &self.settings;
        Ok(AuditSubject {
            target: settings.database()?.clone(),
            slot: settings.slot.clone(),
            publication: settings.publication.clone(),
            captured: settings.captured(),
            tables: settings.tables.clone().into(),
            project: Arc::from(settings.project()?),
            bounds,
            dispatch: settings.dispatch,
            instance: self.instance.clone(),
            walsender,
            metrics: self.metrics.clone(),
        })
    }

    /// What a recovery receives. `publication` is the publication from before the slot was created.
    pub(super) fn recovery_subject(
        &self,
        walsender: i32,
        publication: &PublicationState,
        captured: Vec<Captured>,
        repeats: bool,
    ) -> Result<RecoverySubject> {
        let settings = &self.settings;
        Ok(RecoverySubject {
            target: settings.database()?.clone(),
            slot: settings.slot.clone(),
            publication: publication.fingerprint().to_owned(),
            tables: settings.tables.clone(),
            project: settings.project()?.to_owned(),
            captured,
            repeats,
            dispatch: settings.dispatch,
            instance: self.instance.clone(),
            walsender,
            state: self.state.clone(),
            metrics: self.metrics.clone(),
        })
    }

    pub(super) fn delivery(
        &self,
        cluster: &Cluster,
        quarantine: Quarantine,
        walsender: i32,
        confirmed: Lsn,
    ) -> Result<Delivery> {
        let reader = SlotReader {
            instance: self.instance.clone(),
            walsender,
            system_identifier: cluster.system_identifier,
            timeline: cluster.timeline,
        };
        Delivery::new(
            &self.settings,
            self.publisher.clone(),
            TopicMaker::new(self.topics.clone()),
            quarantine,
            self.metrics.clone(),
            reader,
            u64::from(std::process::id()) << 32 | confirmed.as_u64() & 0xFFFF_FFFF,
        )
    }
}

/// The quarantine, with the keys that earlier sessions have blocked.
pub(super) async fn quarantine(sql: &Sql, on_bad_event: OnBadEvent) -> Result<Quarantine> {
    let mut quarantine = Quarantine::new(on_bad_event);
    let keys = quarantined::blocked_keys(sql, MAX_BLOCKED).await?;
    for key in keys {
        if key.is_replayed && !key.is_quarantined {
            // New events must not come between the replayed ones.
            quarantine.block_for_release(key.group, key.since);
        } else if on_bad_event == OnBadEvent::QuarantineKey {
            quarantine.block(key.group, key.since, &key.first.shown());
        }
    }
    if quarantine.blocked() > 0 {
        tracing::warn!(
            blocked_keys = quarantine.blocked(),
            hint = "`postrider quarantine list` shows them",
            "events of these keys wait in quarantine"
        );
    }
    Ok(quarantine)
}
