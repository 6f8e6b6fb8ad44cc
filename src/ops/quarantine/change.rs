//! Releases and discards events in quarantine.

use super::select::{self, QuarantineSelection};
use crate::error::Result;
use crate::postgres::Sql;
use crate::settings::{OnBadEvent, Settings};
use crate::store::dispatch::quarantine_commands::{self, EventRow};

/// The result of releasing one event.
pub(crate) struct ReleasedEvent {
    pub(crate) events: u64,
    /// Why the whole key was released; `None` if only the event was released.
    pub(crate) whole_key: Option<WholeKeyReason>,
}

/// Why the release of one event releases its whole key.
pub(crate) enum WholeKeyReason {
    /// No earlier event of the key is in quarantine, and `behind` events wait for this one.
    IsFirst { key: String, behind: u64 },
    /// `before` events of the key are in quarantine ahead of the event. If it were released alone, it
    /// would overtake them.
    IsBehind { key: String, before: u64 },
}

/// Releases one event, or its whole key if that is necessary to keep the order.
///
/// # Errors
/// The errors of [`select::in_quarantine`]; database errors.
pub(crate) async fn release_event(
    sql: &Sql,
    settings: &Settings,
    id: &str,
) -> Result<ReleasedEvent> {
    let event = select::in_quarantine(sql, settings, id).await?;
    let (before, behind) = quarantine_commands::neighbours(sql, &event).await?;
    let blocks = settings.on_bad_event == OnBadEvent::QuarantineKey;
    let key = || event.key.clone();
    let whole_key = match (before, behind) {
        (0, 0) => None,
        (0, behind) => blocks.then(|| WholeKeyReason::IsFirst { key: key(), behind }),
        (before, _) => Some(WholeKeyReason::IsBehind { key: key(), before }),
    };
    let events = match &whole_key {
        None => quarantine_commands::release_event(sql, &event).await?,
        Some(_) => quarantine_commands::release_key(sql, &event).await?,
    };
    Ok(ReleasedEvent { events, whole_key })
}

/// Releases the selected events. Returns their number.
///
/// # Errors
/// `not-in-quarantine` if there is no such event; database errors.
pub(crate) async fn release(sql: &Sql, selection: QuarantineSelection<'_>) -> Result<u64> {
    match quarantine_commands::release(sql, &selection.filter()).await? {
        0 => Err(selection.nothing()),
        released => Ok(released),
    }
}

/// Returns how many events are in quarantine.
///
/// # Errors
/// Database errors.
pub(crate) async fn count_left(sql: &Sql) -> Result<u64> {
    let all = QuarantineSelection {
        key: None,
        topic: None,
    };
    quarantine_commands::count(sql, &all.filter()).await
}

/// Events to discard.
pub(crate) enum DiscardRequest<'a> {
    Event(EventRow),
    Selection(QuarantineSelection<'a>),
}

impl DiscardRequest<'_> {
    /// Creates a request for the event with this id.
    ///
    /// # Errors
    /// The errors of [`select::in_quarantine`].
    pub(crate) async fn event(sql: &Sql, settings: &Settings, id: &str) -> Result<Self> {
        Ok(Self::Event(select::in_quarantine(sql, settings, id).await?))
    }

    /// Returns how many events the request would discard.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn count(&self, sql: &Sql) -> Result<u64> {
        match self {
            Self::Event(_) => Ok(1),
            Self::Selection(selection) => {
                quarantine_commands::count(sql, &selection.filter()).await
            }
        }
    }

    /// Discards the events. Returns their number.
    ///
    /// # Errors
    /// `not-in-quarantine` if there is no such event; database errors.
    pub(crate) async fn carry_out(&self, sql: &Sql) -> Result<u64> {
        let (discarded, selection) = match self {
            Self::Event(event) => {
                let all = QuarantineSelection {
                    key: None,
                    topic: None,
                };
                (quarantine_commands::discard_event(sql, event).await?, all)
            }
            Self::Selection(selection) => {
                let filter = selection.filter();
                (
                    quarantine_commands::discard(sql, &filter).await?,
                    *selection,
                )
            }
        };
        if discarded == 0 {
            return Err(selection.nothing());
        }
        Ok(discarded)
    }
}
