//! `postrider init`: the database objects, as SQL to read or applied.

mod apply;
mod script;
mod slot;

use std::process::ExitCode;
use std::time::Duration;

use slot_manager::{Finding, Severity, cluster, publication};

pub(super) use script::Payload;

use super::findings::Findings;
use super::output;
use crate::error::{Code, Error, Result};
use crate::postgres::{Sql, connect};
use crate::settings::Settings;

/// Long enough for a wait on another session's lock, short enough to be told of it.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// The arguments of `postrider init`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Run the statements instead of printing them
    #[arg(long)]
    apply: bool,
    /// Type of the payload column of outbox.events, when the table is made
    #[arg(long, value_enum, value_name = "TYPE")]
    payload: Option<Payload>,
    /// Grant postrider_relay to this role, and say what else it needs
    #[arg(long, value_name = "ROLE")]
    relay_user: Option<String>,
    /// Leave the replication slot out; rows committed before it exists are not streamed
    #[arg(long)]
    no_slot: bool,
    /// Leave captured tables without the columns inserted_xid and seq; see
    /// docs/explanation/recovery.md for what that costs
    #[arg(long)]
    no_columns: bool,
    /// Print what was done as JSON: {findings: [...], worst}
    #[arg(long, requires = "apply")]
    json: bool,
}

pub(super) fn run(settings: &Settings, args: &Args) -> Result<ExitCode> {
    let payload = args.payload.unwrap_or(Payload::Jsonb);
    if !args.apply {
        let user = args.relay_user.as_deref();
        output::write(&script::script(
            settings,
            payload,
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
                "Ready. `postrider slot create` starts the count of what is delivered.\n"
            }
            Severity::Ok | Severity::Info => {
                "Ready. Next: `postrider check`, then `postrider run`.\n"
            }
            Severity::Warning | Severity::Error => {
                "Not ready yet: do what stands behind the arrows above.\n"
            }
        });
    }
    Ok(findings.exit_code())
}

async fn apply(settings: &Settings, args: &Args) -> Result<Findings> {
    let target = settings.database()?;
    let mut sql = connect(target, "postrider init", STATEMENT_TIMEOUT).await?;
    if let Some(user) = &args.relay_user {
        apply::relay_user_exists(&sql, user).await?;
    }
    let mut done = schema(&mut sql, settings, args.payload.unwrap_or(Payload::Jsonb)).await?;
    if !args.no_columns {
        done.findings.extend(apply::columns(&sql, settings).await?);
    }
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

/// What [`schema`] did.
#[derive(Debug)]
pub(super) struct Schema {
    /// One for each migration, and for the publication.
    pub(super) findings: Vec<Finding>,
    /// Whether the publication was missing before.
    pub(super) new_publication: bool,
}

/// Brings schema, publication and roles up to date, without the slot.
///
/// # Errors
/// `postgres-version`, `privilege-missing`, `schema-missing` when a captured table is not there.
pub(super) async fn schema(sql: &mut Sql, settings: &Settings, payload: Payload) -> Result<Schema> {
    let major = cluster::inspect(sql).await?.major_version();
    if major < 14 {
        return Err(Error::new(
            Code::PostgresVersion,
            format!("the server is PostgreSQL {major}"),
        ));
    }
    let captured = settings.captured();
    let before = publication::inspect(sql, &settings.publication, &captured).await?;
    let mut findings = apply::migrations(sql, settings, payload).await?;
    findings.extend(apply::publication(sql, settings).await?);
    Ok(Schema {
        findings,
        new_publication: before.publication.is_none(),
    })
}
