//! Defines the types of settings that choose one of a few options.

/// A setting that chooses one of a few options. In the settings, a word stands for each option.
pub(super) trait ByWord: Copy + 'static {
    /// Each word with its option, in the order of the words in [`super::KEYS`].
    const WORDS: &'static [(&'static str, Self)];
}

/// What to do with an event that can never be published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnBadEvent {
    /// Quarantine the event and the later events of its ordering key, to keep the order.
    QuarantineKey,
    /// Quarantine only the event; later events are published.
    QuarantineEvent,
    /// The relay stops.
    Halt,
}

impl ByWord for OnBadEvent {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("quarantine_key", OnBadEvent::QuarantineKey),
        ("quarantine_event", OnBadEvent::QuarantineEvent),
        ("halt", OnBadEvent::Halt),
    ];
}

/// What the first start on a database delivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Only rows that are committed once the slot is ready.
    New,
    /// Also the unrecorded rows that are already in the tables.
    All,
}

impl ByWord for Start {
    const WORDS: &'static [(&'static str, Self)] = &[("new", Start::New), ("all", Start::All)];
}

/// What to do when the slot is missing, lost or recreated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnLoss {
    /// Create a new slot, and publish the unrecorded rows from the tables.
    Recover,
    /// Exit with an error that gives the reason.
    Stop,
}

impl ByWord for OnLoss {
    const WORDS: &'static [(&'static str, Self)] =
        &[("recover", OnLoss::Recover), ("stop", OnLoss::Stop)];
}

/// Which events get a row in `outbox.dispatch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dispatch {
    /// All events.
    Full,
    /// Only quarantined events. After a crash, all events after the confirmed position are published
    /// again.
    Exceptions,
}

impl Dispatch {
    /// The name in the settings and in `outbox.relay`.
    pub fn name(self) -> &'static str {
        match self {
            Dispatch::Full => "full",
            Dispatch::Exceptions => "exceptions",
        }
    }

    /// The option with this name.
    pub fn named(name: &str) -> Option<Self> {
        by_word(name)
    }
}

impl ByWord for Dispatch {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("full", Dispatch::Full),
        ("exceptions", Dispatch::Exceptions),
    ];
}

/// The format of the relay's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// One line of text for each log line.
    Text,
    /// One JSON object for each log line.
    Json,
    /// JSON with the names of fields and severities that Google Cloud Logging recognises.
    CloudLogging,
}

impl ByWord for LogFormat {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("text", LogFormat::Text),
        ("json", LogFormat::Json),
        ("cloud_logging", LogFormat::CloudLogging),
    ];
}

impl LogFormat {
    /// The format with this name in the settings.
    pub fn named(name: &str) -> Option<Self> {
        by_word(name)
    }
}

pub(super) fn by_word<T: ByWord>(word: &str) -> Option<T> {
    let found = T::WORDS.iter().find(|(known, _)| *known == word);
    found.map(|(_, option)| *option)
}

#[cfg(test)]
mod tests {
    use super::super::{KEYS, SettingKind};
    use super::*;

    fn assert_same<T: ByWord>(name: &str) {
        let key = KEYS.iter().find(|key| key.name == name).unwrap();
        let words: Vec<&str> = T::WORDS.iter().map(|(word, _)| *word).collect();
        assert_eq!(key.kind, SettingKind::Choice(&words.leak()[..]), "{name}");
    }

    #[test]
    fn the_table_of_settings_lists_the_words_of_each_choice() {
        assert_same::<OnBadEvent>("on_bad_event");
        assert_same::<Start>("start");
        assert_same::<OnLoss>("slot_on_loss");
        assert_same::<Dispatch>("dispatch");
        assert_same::<LogFormat>("log_format");
    }
}
