//! Creates a slot and exports the snapshot that matches it. The snapshot shows everything that was
//! committed before the slot's consistent point. The slot streams everything that is committed
//! later.
//!
//! Only a replication connection can export this snapshot. Other sessions can import the snapshot as
//! long as the replication connection stays open and runs no other command. Source: manual, "Streaming
//! Replication Protocol", CREATE_REPLICATION_SLOT.

use std::time::Duration;

use bytes::BytesMut;
use decoder::Lsn;
use fallible_iterator::FallibleIterator;
use postgres_protocol::message::backend::{DataRowBody, Message};
use postgres_protocol::message::frontend;
use tokio::io::AsyncWriteExt;

use super::handshake::{self, Login, ReplicationConnection};
use super::quoted;
use super::walsender_error::{
    code_and_message, log_notice, lost, protocol, unexpected, with_sqlstate,
};
use crate::connection::{self, Target};
use crate::error::{ErrorKind, ReplicationError, Result};

const COMMAND: &str = "CREATE_REPLICATION_SLOT";

/// Maximum duration of each step: connecting and logging in, sending a cancel request, and waiting
/// for the cancelled command to end.
const STEP_LIMIT: Duration = Duration::from_secs(20);

/// The slot to create.
#[derive(Debug, Clone, Copy)]
pub struct CreateSlot<'a> {
    /// The server, and how to log in.
    pub target: &'a Target,
    /// The name of the slot.
    pub slot: &'a str,
    /// Whether standby servers keep a copy of the slot in sync (PostgreSQL 17 and newer).
    pub failover: bool,
    /// The name of the session in `pg_stat_replication`.
    pub application_name: &'a str,
    /// `wal_sender_timeout` of the session.
    pub wal_sender_timeout: Duration,
    /// How long to wait for running transactions. PostgreSQL creates a slot only after they have ended.
    pub limit: Duration,
}

/// A new slot and its exported snapshot. Other sessions can import the snapshot until this value is
/// closed or dropped.
pub struct CreatedSlot {
    /// The slot's consistent point: every transaction that commits after this point is streamed.
    pub consistent_point: Lsn,
    /// The snapshot's name, for SET TRANSACTION SNAPSHOT.
    pub snapshot: String,
    connection: ReplicationConnection,
}

impl CreatedSlot {
    /// Ends the connection and waits until its walsender has exited, because the server might have no second
    /// free walsender for the stream. Sessions that have already imported the snapshot keep it.
    pub async fn close(self) {
        self.connection.close().await;
    }
}

/// Creates the slot. Returns `None` if the running transactions do not end within the limit.
///
/// # Errors
/// `SlotRefused` (42710 if a slot of this name exists or is being created, 53400 if no slot is left);
/// connection errors.
pub async fn create_slot(wanted: CreateSlot<'_>) -> Result<Option<CreatedSlot>> {
    let mut connection = in_time(connect(wanted)).await?;
    let mut message = BytesMut::new();
    frontend::query(&statement(wanted), &mut message).map_err(protocol)?;
    connection.send(&message).await?;
    let mut row = None;
    let answered = answer(&mut connection, wanted.slot, &mut row);
    match tokio::time::timeout(wanted.limit, answered).await {
        Ok(answered) => answered?,
        Err(_) => {
            in_time(cancel(&connection, wanted)).await?;
            // Normally the server removes the unfinished slot and answers that it cancelled the command. If
            // the cancel request arrived too late, the server answers with the finished slot.
            match in_time(answer(&mut connection, wanted.slot, &mut row)).await {
                Ok(()) => {}
                Err(error) if is_cancelled(error.kind()) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }
    let (consistent_point, snapshot) = row.ok_or_else(|| unexpected(COMMAND))?;
    Ok(Some(CreatedSlot {
        consistent_point,
        snapshot,
        connection,
    }))
}

async fn connect(wanted: CreateSlot<'_>) -> Result<ReplicationConnection> {
    let wire = connection::open(
        wanted.target,
        handshake::liveness(wanted.wal_sender_timeout / 2),
    )
    .await?;
    let login = Login {
        target: wanted.target,
        application_name: wanted.application_name,
        wal_sender_timeout: wanted.wal_sender_timeout,
    };
    handshake::log_in(wire, login).await
}

/// Builds the command. EXPORT_SNAPSHOT works with every version. Options in parentheses need PostgreSQL 15,
/// and FAILOVER needs PostgreSQL 17.
fn statement(wanted: CreateSlot<'_>) -> String {
    let options = if wanted.failover {
        "(SNAPSHOT 'export', FAILOVER)"
    } else {
        "EXPORT_SNAPSHOT"
    };
    format!(
        "{COMMAND} {} LOGICAL pgoutput {options}",
        quoted(wanted.slot)
    )
}

/// Reads the server's messages until the command ends. Dropping the future loses no data, so the caller can
/// call this function again after a timeout.
async fn answer(
    connection: &mut ReplicationConnection,
    slot: &str,
    row: &mut Option<(Lsn, String)>,
) -> Result<()> {
    loop {
        match connection.message().await? {
            Message::DataRow(body) => *row = Some(slot_row(&body)?),
            Message::ErrorResponse(body) => {
                let (sqlstate, message) = code_and_message(body.fields());
                return Err(refused(slot, &sqlstate, &message));
            }
            Message::NoticeResponse(body) => log_notice(body.fields()),
            Message::RowDescription(_)
            | Message::CommandComplete(_)
            | Message::ParameterStatus(_) => {}
            Message::ReadyForQuery(_) => return Ok(()),
            _ => return Err(unexpected(COMMAND)),
        }
    }
}

/// Reads a row with the columns slot_name, consistent_point, snapshot_name, output_plugin.
fn slot_row(body: &DataRowBody) -> Result<(Lsn, String)> {
    let ranges: Vec<_> = body.ranges().collect().map_err(protocol)?;
    let column = |n: usize| {
        let range = ranges.get(n).cloned().flatten();
        range.and_then(|range| std::str::from_utf8(&body.buffer()[range]).ok())
    };
    let point = column(1).and_then(|text| text.parse().ok());
    point
        .zip(column(2).map(str::to_owned))
        .ok_or_else(|| unexpected(COMMAND))
}

fn refused(slot: &str, sqlstate: &str, message: &str) -> ReplicationError {
    let what = format!("cannot create slot \"{slot}\"");
    let kind = ErrorKind::SlotRefused {
        sqlstate: sqlstate.to_owned(),
    };
    ReplicationError::new(kind, with_sqlstate(&what, message, sqlstate))
}

/// Whether an error of this kind can end a command that we asked to cancel: the server cancelled the command,
/// ended its session, or ran out of disk or memory. Source: PostgreSQL's Appendix A.
fn is_cancelled(kind: &ErrorKind) -> bool {
    const TIMEOUTS: [&str; 5] = ["57014", "55P03", "25P03", "25P04", "72000"];
    const CLASSES: [&str; 5] = ["57P", "08", "53", "40", "58"];
    // These are not cancellations: the server is starting up, or has no free connection or slot.
    const OTHERS: [&str; 3] = ["57P03", "53300", "53400"];
    match kind {
        ErrorKind::ConnectionLost => true,
        ErrorKind::SlotRefused { sqlstate } => {
            let sqlstate = sqlstate.as_str();
            TIMEOUTS.contains(&sqlstate)
                || CLASSES.iter().any(|class| sqlstate.starts_with(class))
                    && !OTHERS.contains(&sqlstate)
        }
        _ => false,
    }
}

/// Asks the server to cancel the command that is running on `connection`.
async fn cancel(connection: &ReplicationConnection, wanted: CreateSlot<'_>) -> Result<()> {
    let Some((process, secret)) = connection.cancel_key else {
        return Ok(());
    };
    let mut stream = connection::open(wanted.target, handshake::liveness(STEP_LIMIT))
        .await?
        .stream;
    let mut message = BytesMut::new();
    frontend::cancel_request(process, secret, &mut message);
    let sent = async {
        stream.write_all(&message).await?;
        stream.flush().await?;
        stream.shutdown().await
    };
    sent.await
        .map_err(|e| lost("cancelling failed").caused_by(e))
}

async fn in_time<T>(step: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(STEP_LIMIT, step)
        .await
        .unwrap_or_else(|_| {
            Err(ReplicationError::new(
                ErrorKind::Unreachable,
                "no answer from the server while the slot was being created",
            ))
        })
}
