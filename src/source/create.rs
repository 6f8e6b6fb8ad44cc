//! Makes a slot and exports the snapshot that fits it: what is visible in the snapshot was
//! committed before the slot's consistent point, and all the rest is streamed.
//!
//! Only a replication connection can do this. The snapshot can be imported by other sessions as
//! long as that connection stands and does nothing else. Source: manual, "Streaming Replication
//! Protocol", CREATE_REPLICATION_SLOT.

use std::time::Duration;

use bytes::BytesMut;
use decoder::Lsn;
use fallible_iterator::FallibleIterator;
use postgres_protocol::message::backend::{DataRowBody, Message};
use postgres_protocol::message::frontend;
use slot_manager::SlotName;
use tokio::io::AsyncWriteExt;

use super::handshake::{self, Connection, Login, code_and_message, lost, protocol, unexpected};
use crate::error::{Code, Error, Result};
use crate::postgres::{Target, wire};

const COMMAND: &str = "CREATE_REPLICATION_SLOT";

/// Limit of connecting, of logging in, and of a cancelled command's end.
const STEP_LIMIT: Duration = Duration::from_secs(20);

/// What slot to make.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CreateSlot<'a> {
    pub(crate) target: &'a Target,
    pub(crate) slot: &'a SlotName,
    /// Keep it up to date on standbys (PostgreSQL 17 and newer).
    pub(crate) failover: bool,
    pub(crate) application_name: &'a str,
    pub(crate) wal_sender_timeout: Duration,
    /// How long to wait for transactions that run.
    pub(crate) limit: Duration,
}

/// A new slot, and its snapshot for as long as this lives.
pub(crate) struct CreatedSlot {
    /// Every transaction that commits from here on is streamed.
    pub(crate) consistent_point: Lsn,
    /// For SET TRANSACTION SNAPSHOT.
    pub(crate) snapshot: String,
    connection: Connection,
}

impl CreatedSlot {
    /// Gives the snapshot up, and waits until the walsender has ended: sessions that have imported
    /// the snapshot keep it, and there may be no other walsender for the stream.
    pub(crate) async fn close(self) {
        self.connection.close().await;
    }
}

/// Makes the slot; `None` when transactions that ran held it up for too long.
///
/// # Errors
/// `slot-busy` when the name is taken just now, `wal-level`, `replication-right`,
/// `replication-slots-used-up` when no slot is left, those of the connection.
pub(crate) async fn create_slot(wanted: CreateSlot<'_>) -> Result<Option<CreatedSlot>> {
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
            // Either it is cancelled, and the server has removed the slot, or it came at the last
            // moment.
            match in_time(answer(&mut connection, wanted.slot, &mut row)).await {
                Ok(()) => {}
                Err(error)
                    if matches!(
                        error.code(),
                        Code::PostgresTimeout | Code::PostgresConnectionLost
                    ) =>
                {
                    return Ok(None);
                }
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

async fn connect(wanted: CreateSlot<'_>) -> Result<Connection> {
    let wire = wire::open(
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

/// The form with parentheses exists from PostgreSQL 15 on, the option FAILOVER from 17 on.
fn statement(wanted: CreateSlot<'_>) -> String {
    let options = match wanted.failover {
        true => "(SNAPSHOT 'export', FAILOVER)",
        false => "EXPORT_SNAPSHOT",
    };
    format!("{COMMAND} \"{}\" LOGICAL pgoutput {options}", wanted.slot)
}

/// Reads to the end of the command; dropping the future loses nothing.
async fn answer(
    connection: &mut Connection,
    slot: &SlotName,
    row: &mut Option<(Lsn, String)>,
) -> Result<()> {
    loop {
        match connection.message().await? {
            Message::DataRow(body) => *row = Some(slot_row(&body)?),
            Message::ErrorResponse(body) => {
                let (sqlstate, message) = code_and_message(body.fields());
                return Err(refused(slot, &sqlstate, &message));
            }
            Message::NoticeResponse(body) => handshake::log_notice(body.fields()),
            Message::RowDescription(_)
            | Message::CommandComplete(_)
            | Message::ParameterStatus(_) => {}
            Message::ReadyForQuery(_) => return Ok(()),
            _ => return Err(unexpected(COMMAND)),
        }
    }
}

/// Columns: slot_name, consistent_point, snapshot_name, output_plugin.
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

fn refused(slot: &SlotName, sqlstate: &str, message: &str) -> Error {
    let what = format!("cannot create slot \"{slot}\"");
    let error = Error::from_sqlstate(sqlstate, message, &what);
    match sqlstate {
        "42501" => Error::new(Code::ReplicationRight, error.what().to_owned()),
        // Another relay is at it: at the next look it holds the slot.
        "42710" => Error::new(Code::SlotBusy, error.what().to_owned())
            .hint("no action needed: another relay makes the slot just now"),
        // Before 16: a standby does not decode.
        "0A000" => Error::new(Code::PostgresStandby, error.what().to_owned()),
        "55000" => Error::new(Code::WalLevel, error.what().to_owned()),
        "42601" => Error::new(Code::PostgresVersion, error.what().to_owned())
            .hint("slot_failover needs PostgreSQL 17 or newer: set it to false"),
        _ => error,
    }
}

/// Asks the server to give up what it does for `connection`.
async fn cancel(connection: &Connection, wanted: CreateSlot<'_>) -> Result<()> {
    let Some((process, secret)) = connection.cancel_key else {
        return Ok(());
    };
    let mut stream = wire::open(wanted.target, handshake::liveness(STEP_LIMIT))
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
            Err(Error::new(
                Code::PostgresUnreachable,
                "the session that makes the slot gets no answer",
            ))
        })
}
