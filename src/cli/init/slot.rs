//! Creates the slot at the end of `postrider init --apply`. The relay delivers the rows that are
//! committed after that.

use std::time::Duration;

use slot_manager::health::{self, Observation, Thresholds, Viewer};
use slot_manager::slots::{self, CreateOptions};
use slot_manager::{Cluster, Finding, Severity, Slot, SlotError, cluster};

use crate::cli::capture;
use crate::cli::findings::{finding, finding_with_remedy};
use crate::error::Result;
use crate::ops::slot::before_publication;
use crate::postgres::Sql;
use crate::settings::Settings;
use crate::store::capture_record;
use crate::store::relay_row::shown::served_before;

/// How long the creation of the slot may wait for running transactions to end.
const CREATE_TIMEOUT: Duration = Duration::from_secs(30);

/// Creates the slot unless it exists. Does not recreate a slot that a relay has lost, because the relay recreates
/// it. `new_publication` says whether this run created the publication. If so, the capture begins now even if the
/// slot is older, because the slot cannot stream rows from before the publication.
pub(super) async fn ensure(
    sql: &Sql,
    settings: &Settings,
    cluster: &Cluster,
    new_publication: bool,
) -> Result<Finding> {
    let name = &settings.slot;
    if let Some(slot) = slots::find(sql, name).await? {
        slot.require_ours()?;
        // An earlier run may have created the slot and ended before it wrote the capture records, so write them
        // now.
        let since_lsn = if new_publication {
            Some(cluster::written_wal_end(sql).await?)
        } else {
            slot.confirmed_flush_lsn
        };
        capture::from_now_on(sql, settings, "postrider init", since_lsn).await?;
        let records = capture_record::read(&**sql).await?;
        let older = before_publication(&slot, &records);
        return Ok(older.unwrap_or_else(|| existing(&slot, cluster)));
    }
    if let Some(confirmed) = served_before(sql, name).await? {
        return Ok(finding_with_remedy(
            Severity::Warning,
            "slot-missing",
            format!("slot {name} was confirmed up to {confirmed} and is gone: it is not recreated"),
            "start the relay: it recreates the slot and publishes the unrecorded rows from the tables \
             (`postrider recover --dry-run` lists them)",
        ));
    }
    let options = CreateOptions {
        failover: settings.slot_failover,
    };
    capture::refuse_others(sql, settings).await?;
    match slots::create(sql, name, options, CREATE_TIMEOUT).await {
        Ok(at) => {
            capture::from_now_on(sql, settings, "postrider init", Some(at)).await?;
            Ok(finding(
                Severity::Ok,
                "slot",
                format!(
                    "slot {name} created at {at}: every row committed from now on is delivered"
                ),
            ))
        }
        Err(SlotError::WalLevel { wal_level }) => Ok(finding_with_remedy(
            Severity::Warning,
            "wal-level",
            format!("slot {name} was not created: wal_level is {wal_level}"),
            "alter system set wal_level = 'logical', restart the server (Amazon RDS: \
             rds.logical_replication = 1; Cloud SQL: flag cloudsql.logical_decoding = on), then \
             run this again",
        )),
        Err(SlotError::NoReplicationRight { .. }) => Ok(finding_with_remedy(
            Severity::Warning,
            "replication-right",
            format!("slot {name} was not created: this role may not replicate"),
            "run `postrider slot create` as the relay's role; rows committed before that are not \
             streamed",
        )),
        Err(error) => Err(error.into()),
    }
}

fn existing(slot: &Slot, cluster: &Cluster) -> Finding {
    let name = &slot.slot_name;
    let observation = Observation {
        slot: Some(slot),
        viewer: Viewer::Outside,
        time_lag: None,
        origin: cluster.origin(),
        recorded: None,
    };
    let health = health::judge(&observation, &Thresholds::default());
    let what = format!("slot {name} already exists");
    match health.severity() {
        Severity::Error => finding_with_remedy(
            Severity::Error,
            "slot-lost",
            format!("{what}, but {}", health.name()),
            health.remedy().unwrap_or_default(),
        ),
        Severity::Ok | Severity::Info | Severity::Warning => finding(Severity::Ok, "slot", what),
    }
}
