//! `postrider init`: prints the SQL of the database objects, or applies it.

mod apply;
mod script;
mod slot;

use std::process::ExitCode;
use std::time::Duration;

use slot_manager::{Finding, Severity, cluster, publication};

use script::Partition;
pub(super) use script::{NewTable, Payload};

use super::findings::Findings;
use super::output;
use crate::error::{Code, Error, Result};
use crate::postgres::{Sql, connect};
use crate::settings::Settings;

/// Statement timeout: long enough to wait until another session releases its lock, and short enough that an
/// operator does not give up before the error appears.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// The arguments of `postrider init`.
#[derive(Debug, clap::Args)]
pub(super) struct InitArgs {
    /// Run the statements instead of printing them
    #[arg(long)]
    apply: bool,
    /// Type of the payload column of outbox.events, used when the table is created
    #[arg(long, value_enum, value_name = "TYPE")]
    payload: Option<Payload>,
    /// Partition outbox.events by day, used when the table is created; `prune` then drops whole days
    #[arg(long, value_enum, value_name = "PERIOD")]
    partition: Option<Partition>,
    /// Grant postrider_relay to this role, and report which rights it still needs
    #[arg(long, value_name = "ROLE")]
    relay_user: Option<String>,
    /// Do not create the replication slot; rows committed before it exists are not streamed
    #[arg(long)]
    no_slot: bool,
    /// Do not add the columns inserted_xid and seq to captured tables;
    /// docs/explanation/recovery.md describes the cost
    #[arg(long)]
    no_columns: bool,
    /// Print the results as JSON: {findings: [...], worst}
    #[arg(long, requires = "apply")]
    json: bool,
}

impl InitArgs {
    fn new_table(&self) -> NewTable {
        NewTable {
            payload: self.payload.unwrap_or(Payload::Jsonb),
            partition: self.partition,
        }
    }
}

pub(super) fn run(settings: &Settings, args: &InitArgs) -> Result<ExitCode> {
    if !args.apply {
        let user = args.relay_user.as_deref();
        output::write(&script::script(
            settings,
            args.new_table(),
            user,
            !args.no_slot,
            !args.no_columns,
        ));
        return Ok(ExitCode::SUCCESS);
    }
    let findings = super::block_on(apply(settings, args))?;
    if args.json {
        findings.print_json();
    } else {
        findings.print();
        output::write(match findings.worst() {
            Severity::Ok | Severity::Info if args.no_slot => {
                "Ready. Next: `postrider slot create`; rows committed after it are delivered.\n"
            }
            Severity::Ok | Severity::Info => {
                "Ready. Next: `postrider check`, then `postrider run`.\n"
            }
            Severity::Warning | Severity::Error => {
                "Not ready yet: follow the steps marked -> above.\n"
            }
        });
    }
    Ok(findings.exit_code())
}

async fn apply(settings: &Settings, args: &InitArgs) -> Result<Findings> {
    let target = settings.database()?;
    let mut sql = connect(target, "postrider init", STATEMENT_TIMEOUT).await?;
    sql.wait_without_limit();
    sql.batch_execute(script::TABLESPACE).await?;
    if let Some(user) = &args.relay_user {
        apply::relay_user_exists(&sql, user).await?;
    }
    let mut done = schema(&mut sql, settings, args.new_table()).await?;
    if !args.no_columns {
        done.findings.extend(apply::columns(&sql, settings).await?);
    }
    // Add the days after the columns, so that each new partition has the index on `seq` from the start.
    done.findings
        .extend(apply::days(&sql, args.partition).await?);
    if let Some(wanted) = args.payload {
        done.findings
            .extend(apply::payload_type(&sql, wanted).await?);
    }
    done.findings
        .extend(apply::roles(&sql, args.relay_user.as_deref()).await?);
    if !args.no_slot {
        let cluster = cluster::inspect(&sql).await?;
        let slot = slot::ensure(&sql, settings, &cluster, done.new_publication).await?;
        done.findings.push(slot);
    }
    let mut findings = Findings::default();
    findings.section(format!("PostgreSQL {target}"), done.findings);
    Ok(findings)
}

/// The result of [`schema`].
#[derive(Debug)]
pub(super) struct Schema {
    /// The findings of the migrations and of the publication.
    pub(super) findings: Vec<Finding>,
    /// Whether this run created the publication.
    pub(super) new_publication: bool,
}

/// Brings the schema, the publication and the roles up to date. Does not create the slot.
///
/// # Errors
/// `postgres-version`; `privilege-missing`; `schema-missing` when a captured table does not exist;
/// `publication-drift` when a captured table cannot be in any publication.
pub(super) async fn schema(
    sql: &mut Sql,
    settings: &Settings,
    new_table: NewTable,
) -> Result<Schema> {
    let major = cluster::inspect(sql).await?.major_version();
    if major < 14 {
        return Err(Error::new(
            Code::PostgresVersion,
            format!("the server is PostgreSQL {major}"),
        ));
    }
    let captured = settings.captured();
    let before = publication::inspect(sql, &settings.publication, &captured).await?;
    if let Some(unfit) = before.unfit().first() {
        return Err(unfit.into());
    }
    let mut findings = apply::migrations(sql, settings, new_table).await?;
    findings.extend(apply::publication(sql, settings).await?);
    Ok(Schema {
        findings,
        new_publication: before.publication.is_none(),
    })
}
