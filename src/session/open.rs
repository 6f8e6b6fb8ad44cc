//! Opens a session: checks everything, and begins to stream.
//!
//! The order of the steps makes this safe. First the cluster must be ours, and the publication right.
//! Then the slot must be free and ours: either the one that we left (`plan`), or a new one
//! (`recovery`), whose stream must wait until older rows are published from the tables. Then the
//! session looks up which events have an outcome. Only then does it read the stream.

use std::sync::Arc;
use std::time::Duration;

use decoder::Lsn;
use replication::{Confirmable, Source, StreamOptions, Watermark};
use slot_manager::{Cluster, cluster, slots};
use tokio::sync::Notify;

use super::pipeline::Pipeline;
use super::plan::{self, FreeSlot, Opening, Plan};
use super::supervisor::{self, Supervisor};
use super::{STATEMENT_TIMEOUT, SessionRunner, parts, standby, stuck};
use crate::audit::{self, Auditor};
use crate::capture::earlier::OutcomeLookup;
use crate::capture::{Bounds, from_table};
use crate::condition::Phase;
use crate::delivery::backlog::Backlog;
use crate::error::{Code, Error, Result};
use crate::postgres::{Sql, Target, connect};
use crate::recovery;
use crate::recovery::slot::{self, RecoverySlot};
use crate::store::dispatch::{RecordedEvents, wait_for_predecessor};
use crate::store::relay_row::{self, Audit, Manner, ServedSlot};

/// Statement timeout of look-ups while the stream waits.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// How long to wait for the reason why a stream ended. The server sends it before it frees the slot.
const LAST_WORD_LIMIT: Duration = Duration::from_secs(1);

/// The tasks that run alongside the pipeline; they end when dropped.
pub(super) type Beside = (Supervisor, Auditor);

impl SessionRunner {
    /// Opens a session.
    pub(super) async fn open(&self) -> Result<(Pipeline, Beside)> {
        let (settings, metrics) = (&self.settings, &self.metrics);
        let (sql, cluster) = primary(settings.database()?).await?;
        plan::refuse_a_copy(&sql, &settings.slot, &cluster, metrics).await?;
        // Look before a slot is created: then any change after that is noticed.
        let first_seen = self.publication.check(&sql).await?;
        let free = self.wait_for_slot(&sql).await?;
        let served = self.served(&cluster);
        let Opening {
            plan,
            repeats,
            captured,
        } = plan::plan(&sql, settings, served, &free, metrics).await?;
        let publication = free.publication;
        wait_for_predecessor(&sql, &settings.slot, settings.publish_timeout).await?;
        let (confirmed, audit, new_slot) = self.carry_out(&sql, plan).await?;
        let mut source = self.open_source(confirmed).await?;
        self.still_the_slot(&sql, &mut source, confirmed).await?;
        // The supervisor proves the lease from here on, however long the rest takes: nobody reads the
        // stream yet.
        let hasten = Arc::new(Notify::new());
        let watched = self.watch_subject(&cluster, &source)?;
        let (supervisor, supervision) = supervisor::start(
            watched,
            publication.clone(),
            metrics.clone(),
            hasten.clone(),
        );
        // Wait again: only now that the slot is ours, nobody else records anything.
        wait_for_predecessor(&sql, &settings.slot, settings.publish_timeout).await?;
        let recorded = RecordedEvents::after(&sql, confirmed, repeats).await?;
        let quarantine = parts::quarantine(&sql, settings.on_bad_event).await?;
        let (_, walsender) = source.lease_proof();
        let manner = Manner {
            dispatch: settings.dispatch,
            publication: parts::as_captured(&captured, &first_seen),
        };
        relay_row::take(&sql, served, confirmed, audit, manner).await?;
        let (rows, from_table) = from_table::channel();
        let (seam, recovered) = if let Some(new) = new_slot {
            let subject =
                self.recovery_subject(walsender, &publication, captured.clone(), repeats)?;
            let (seam, recovered) = recovery::start(&sql, subject, new, rows.another()).await?;
            (Some(seam), Some(recovered))
        } else {
            let server = cluster.major_version();
            tracing::info!(slot = %settings.slot, %confirmed, server, "streaming");
            (None, None)
        };
        // From here on the pipeline uses this session, and it must not wait for long.
        sql.limit_statements(LOOK_UP_TIMEOUT).await?;
        let audit = audit::FirstAudit {
            everything: audit == Audit::Everything,
            after: recovered,
        };
        let bounds: Arc<[Bounds]> = captured.iter().map(Bounds::of).collect();
        let subject = self.audit_subject(walsender, bounds.clone())?;
        let (auditor, broken) = audit::start(subject, audit, hasten, rows);
        let pipeline = Pipeline {
            source,
            intake: parts::intake(settings, &captured, metrics.clone())?,
            watermark: Watermark::new(Confirmable::by_slot(confirmed)),
            delivery: self.delivery(&cluster, quarantine, walsender, confirmed)?,
            earlier: OutcomeLookup::new(recorded, sql, metrics.clone()),
            moved: parts::moved(settings, bounds, repeats, metrics.clone())?,
            supervision,
            from_table,
            seam,
            broken,
            backlog: Backlog::default(),
            metrics: metrics.clone(),
        };
        Ok((pipeline, (supervisor, auditor)))
    }

    async fn wait_for_slot(&self, sql: &Sql) -> Result<FreeSlot> {
        Ok(FreeSlot {
            slot: standby::free_slot(sql, &self.settings.slot, &self.state).await?,
            // Check again: waiting for the slot may have taken days.
            publication: self.publication.check(sql).await?,
        })
    }

    fn served<'a>(&'a self, cluster: &'a Cluster) -> ServedSlot<'a> {
        ServedSlot {
            slot: &self.settings.slot,
            cluster,
            instance: &self.instance,
        }
    }

    /// Carries out the plan. Returns where the session begins, what to audit, and the slot of the
    /// recovery if there is one.
    async fn carry_out(&self, sql: &Sql, plan: Plan) -> Result<(Lsn, Audit, Option<RecoverySlot>)> {
        let (settings, metrics) = (&self.settings, &self.metrics);
        match plan {
            Plan::Stream { confirmed, audit } => Ok((confirmed, audit, None)),
            Plan::Continue {
                confirmed,
                audit,
                unfinished,
            } => {
                self.state.set(Phase::Recovering);
                let kept = slot::kept(&settings.slot, unfinished, metrics);
                Ok((confirmed, audit, Some(kept)))
            }
            Plan::Recover(loss) => {
                // Creating the slot may take minutes.
                self.state.set(Phase::Recovering);
                let new = slot::create(sql, settings, &self.instance, &loss, metrics).await?;
                Ok((new.consistent_point(), Audit::Continue, Some(new)))
            }
        }
    }

    /// Opens the stream on the slot, which was free a moment ago.
    async fn open_source(&self, confirmed: Lsn) -> Result<Source> {
        let settings = &self.settings;
        let options = StreamOptions {
            target: settings.database()?.clone(),
            slot: settings.slot.to_string(),
            publication: settings.publication.clone(),
            application_name: self.instance.clone(),
            wal_sender_timeout: settings.wal_sender_timeout,
            confirmed: Confirmable::by_slot(confirmed),
        };
        let last_status = self.metrics.last_status.clone();
        let opened = Source::open(options, move || last_status.now()).await;
        opened
            .map_err(Error::from)
            .map_err(|error| match error.code() {
                // It existed a moment ago: the next session looks again.
                Code::SlotMissing | Code::SlotLost => changed().caused_by(error),
                _ => error,
            })
    }

    /// Makes sure that we stream from the slot that we examined: until the stream has begun, another
    /// relay may replace it by a new one of the same name.
    async fn still_the_slot(&self, sql: &Sql, source: &mut Source, confirmed: Lsn) -> Result<()> {
        let (_, walsender) = source.lease_proof();
        let found = slots::confirmed_by_reader(sql, &self.settings.slot, walsender).await?;
        if found == Some(confirmed) {
            return Ok(());
        }
        // Or the stream has ended already: then its error says more.
        let ended = source.end_within(LAST_WORD_LIMIT).await;
        Err(match ended.map(Error::from) {
            Some(ended) if stuck::is_of_this_place(&ended) => self.stuck(confirmed, ended).await,
            Some(ended) => ended,
            None => changed(),
        })
    }
}

/// Opens a session, and checks that the server can be streamed from.
async fn primary(target: &Target) -> Result<(Sql, Cluster)> {
    let sql = connect(target, "postrider", STATEMENT_TIMEOUT).await?;
    let cluster = cluster::inspect(&sql).await?;
    if cluster.major_version() < 14 {
        return Err(Error::new(
            Code::PostgresVersion,
            format!("the server is PostgreSQL {}", cluster.major_version()),
        ));
    }
    if cluster.in_recovery {
        return Err(Error::new(Code::PostgresStandby, "the server is a standby"));
    }
    Ok((sql, cluster))
}

fn changed() -> Error {
    let what = "the slot has changed while it was being opened";
    Error::new(Code::SlotBusy, what).hint("no action needed: the relay looks at the slot again")
}
