//! A slot on one screen: health and what to do first, then the details.

use std::io::IsTerminal;

use slot_manager::{Health, Severity, Slot, WalStatus};

use super::look::{Look, Rates};
use crate::cli::figures;
use crate::cli::paint::Paint;
use crate::printable::printable;
use crate::settings::Dispatch;

/// Width of the labels.
const LABEL: usize = 10;

pub(super) fn text(look: &Look, paint: Paint) -> String {
    let Look {
        name,
        cluster,
        health,
        ..
    } = look;
    let mut text = format!(
        "slot {name}, database {}, PostgreSQL {}\n\n",
        cluster.database,
        cluster.major_version()
    );
    let mut line = |label: &str, value: &str| text += &format!("{label:LABEL$}  {value}\n");
    let word = paint.severity(health.severity(), &health.name().to_uppercase());
    line("health", &format!("{word}: {}", meaning(health)));
    if let Some(remedy) = health.remedy() {
        line("do", &remedy);
    }
    let relay = look.relay.as_ref();
    if let Some(why) = relay.and_then(|relay| relay.recovering.as_deref()) {
        let text = format!("due or running ({why}): rows from the tables are published first");
        line("recovery", &text);
    }
    if relay.is_some_and(|relay| relay.dispatch == Dispatch::Exceptions.name()) {
        line("records", "quarantined events only (dispatch = exceptions)");
    }
    if let Some(slot) = &look.slot {
        line("lag", &lag(look, slot));
        if let Some(figures) = look.rates {
            line("rates", &rates(figures));
        }
        line("position", &position(look, slot));
        line("reader", &reader(look, slot));
        line("WAL kept", &kept(look, slot));
        for (i, holder) in look.holders.iter().enumerate() {
            line(
                if i == 0 { "held by" } else { "" },
                &printable(&holder.to_string()),
            );
            line(
                "",
                &paint.faint(&format!("-> {}", printable(&holder.remedy()))),
            );
        }
        if look.holders.is_empty() {
            line("held by", "nothing but this slot's own position");
        }
    }
    text
}

/// The text, preceded by an escape code that clears the screen if standard output is a terminal.
pub(super) fn replacing(text: &str) -> String {
    if std::io::stdout().is_terminal() {
        format!("\x1b[H\x1b[2J{text}")
    } else {
        format!("{text}\n")
    }
}

/// The health in words.
fn meaning(health: &Health) -> String {
    let severe = |severity| match severity {
        Severity::Error => "critically far behind",
        Severity::Ok | Severity::Info | Severity::Warning => "behind",
    };
    match health {
        Health::Active => "a relay reads it, and is up to date".to_owned(),
        Health::StandbyHeld { .. } => "another relay reads it".to_owned(),
        Health::Lagging(lag) => format!("a relay reads it, but is {}", severe(lag.severity)),
        Health::Inactive(lag) if lag.severity == Severity::Ok => {
            "nobody reads it: nothing is delivered, WAL piles up".to_owned()
        }
        Health::Inactive(lag) => format!(
            "nobody reads it, and it is {}: nothing is delivered, WAL piles up",
            severe(lag.severity)
        ),
        Health::Reserved(_) | Health::Extended(_) => {
            "PostgreSQL still has all WAL for it, but not for long at the current rate".to_owned()
        }
        Health::Unreserved(_) => {
            "the next checkpoint may remove WAL that the slot needs".to_owned()
        }
        Health::Lost => {
            "PostgreSQL removed WAL that the slot needs: it can never be read again".to_owned()
        }
        Health::Invalidated { .. } => {
            "PostgreSQL invalidated it: it can never be read again".to_owned()
        }
        Health::Missing => "no slot with this name exists: nothing is delivered".to_owned(),
        Health::Recreated { recorded, found } => {
            format!(
                "its position is {found}, but the relay had confirmed {recorded}: events are left out"
            )
        }
        Health::ForeignCluster { expected, found } => {
            format!("the relay's records come from cluster {expected}, but this is cluster {found}")
        }
    }
}

fn lag(look: &Look, slot: &Slot) -> String {
    let bytes = slot.lag_bytes.map_or("unknown".to_owned(), figures::bytes);
    let mut text = format!("{bytes} of WAL not confirmed");
    match (look.pending.map(|pending| pending.events), look.lag_time()) {
        (Some(0), _) => text += ", no event is waiting",
        (Some(events), Some(oldest)) => {
            let events = figures::count(events, "event");
            text += &format!(
                "; {events} not recorded yet, the oldest {} old",
                figures::time(oldest)
            );
        }
        (Some(events), None) => {
            text += &format!("; {} not recorded yet", figures::count(events, "event"))
        }
        (None, _) => text += "; age unknown (see the relay's /metrics)",
    }
    text
}

fn rates(rates: Rates) -> String {
    format!(
        "{}/s written, {}/s confirmed",
        figures::bytes(rates.written_bytes_per_second),
        figures::bytes(rates.confirmed_bytes_per_second)
    )
}

fn position(look: &Look, slot: &Slot) -> String {
    let lsn = |lsn: Option<decoder::Lsn>| lsn.map_or("unknown".to_owned(), |lsn| lsn.to_string());
    format!(
        "confirmed {}, server {}, timeline {}",
        lsn(slot.confirmed_flush_lsn),
        lsn(slot.server_lsn),
        look.cluster.timeline
    )
}

fn reader(look: &Look, slot: &Slot) -> String {
    if let Some(holder) = &slot.holder {
        return holder.to_string();
    }
    let mut text = match &slot.inactive_since {
        Some(since) => format!("none since {since}"),
        None => "none".to_owned(),
    };
    match &look.relay {
        Some(relay) => text += &format!("; last {} (started {})", relay.instance, relay.since),
        None => text += "; no relay has served it yet",
    }
    text
}

fn kept(look: &Look, slot: &Slot) -> String {
    let kept = slot
        .retained_bytes
        .map_or("unknown".to_owned(), figures::bytes);
    let status = match slot.wal_status {
        Some(WalStatus::Reserved) | None => "",
        Some(WalStatus::Extended) => " (more than max_wal_size)",
        Some(WalStatus::Unreserved) => " (no longer protected)",
        Some(WalStatus::Lost) => " (lost)",
    };
    let room = match (slot.safe_wal_size, look.time_to_loss) {
        (None, _) if slot.wal_status == Some(WalStatus::Lost) => String::new(),
        (None, _) => "; no limit (max_slot_wal_keep_size): watch the disk".to_owned(),
        (Some(left), time) => {
            let time = time.map(|time| format!(", in about {}", figures::time(time)));
            let left = figures::bytes(u64::try_from(left).unwrap_or(0));
            format!("; lost after {left} more{}", time.unwrap_or_default())
        }
    };
    format!("{kept}{status}{room}")
}
