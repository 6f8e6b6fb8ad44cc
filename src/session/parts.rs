//! Builds the parts of a session from the settings and from the state that was found.

use std::sync::Arc;

use decoder::{Lsn, Oid};
use slot_manager::Cluster;
use slot_manager::publication::PublicationState;
use tokio::sync::{Notify, watch};

use super::Relay;
use super::supervisor::{self, Supervision, Supervisor, WatchSubject};
use crate::audit;
use crate::capture::Bounds;
use crate::capture::claim::Captured;
use crate::capture::intake::{Intake, Streamed};
use crate::capture::moved::MovedRows;
use crate::delivery::Delivery;
use crate::delivery::quarantine::Quarantine;
use crate::delivery::topic_maker::TopicMaker;
use crate::error::Result;
use crate::postgres::Sql;
use crate::settings::{OnBadEvent, Settings};
use crate::source::Source;
use crate::store::dispatch::SlotReader;
use crate::store::dispatch::quarantined::{self, MAX_BLOCKED};

pub(super) fn intake(relay: &Relay, captured: &[Captured]) -> Result<Intake> {
    let settings = &relay.settings;
    let project = Arc::from(settings.project()?);
    let tables = streamed(settings, captured);
    Ok(Intake::new(tables, project, relay.metrics.clone()))
}

pub(super) fn moved(relay: &Relay, bounds: Arc<[Bounds]>, repeats: bool) -> Result<MovedRows> {
    let target = relay.settings.database()?.clone();
    let metrics = relay.metrics.clone();
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

pub(super) fn supervise(
    relay: &Relay,
    publication: PublicationState,
    cluster: &Cluster,
    source: &Source,
    hasten: Arc<Notify>,
) -> Result<(Supervisor, watch::Receiver<Supervision>)> {
    let settings = &relay.settings;
    let subject = WatchSubject {
        target: settings.database()?.clone(),
        slot: settings.slot.clone(),
        publication: settings.publication.clone(),
        tables: relay.captured.clone(),
        origin: cluster.origin(),
        lease: source.lease_proof(),
        wal_sender_timeout: settings.wal_sender_timeout,
    };
    let metrics = relay.metrics.clone();
    Ok(supervisor::start(subject, publication, metrics, hasten))
}

pub(super) fn audited(
    relay: &Relay,
    walsender: i32,
    bounds: Arc<[Bounds]>,
) -> Result<audit::AuditSubject> {
    let settings = &relay.settings;
    Ok(audit::AuditSubject {
        target: settings.database()?.clone(),
        slot: settings.slot.clone(),
        publication: settings.publication.clone(),
        captured: relay.captured.clone(),
        tables: settings.tables.clone().into(),
        project: Arc::from(settings.project()?),
        bounds,
        dispatch: settings.dispatch,
        instance: relay.instance.clone(),
        walsender,
        metrics: relay.metrics.clone(),
    })
}

pub(super) fn delivery(
    relay: &Relay,
    cluster: &Cluster,
    quarantine: Quarantine,
    walsender: i32,
    confirmed: Lsn,
) -> Result<Delivery> {
    let settings = &relay.settings;
    let reader = SlotReader {
        instance: relay.instance.clone(),
        walsender,
        system_identifier: cluster.system_identifier,
        timeline: cluster.timeline,
    };
    Delivery::new(
        settings,
        relay.publisher.clone(),
        TopicMaker::new(relay.topics.clone()),
        quarantine,
        relay.metrics.clone(),
        reader,
        u64::from(std::process::id()) << 32 | confirmed.as_u64() & 0xFFFF_FFFF,
    )
}

/// The quarantine, with the keys that earlier sessions have blocked.
pub(super) async fn quarantine(relay: &Relay, sql: &Sql) -> Result<Quarantine> {
    let mut quarantine = Quarantine::new(relay.settings.on_bad_event);
    // Read the blocked keys even if the policy does not use them: a relay that may not read the
    // quarantine then fails here, at the start.
    let keys = quarantined::blocked_keys(sql, MAX_BLOCKED).await?;
    if relay.settings.on_bad_event == OnBadEvent::QuarantineKey {
        for key in &keys {
            quarantine.block(key.group.clone(), key.since, &key.first.shown());
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
