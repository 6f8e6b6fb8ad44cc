//! Writes Postrider's own log to standard error, as text or JSON; `RUST_LOG` sets the level.

mod burst;
mod cloud_logging;

use std::io::IsTerminal;
use std::str::FromStr;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use super::paint;
use crate::error::{Code, Error, Result};
use crate::settings::LogFormat;
use burst::BurstLimit;
use cloud_logging::CloudLogging;

/// Log filter when `RUST_LOG` is not set: info from Postrider, warnings from other crates.
const DEFAULT_FILTER: &str = "warn,postrider=info";

/// Installs the logger.
///
/// # Errors
/// `setting-invalid` if `RUST_LOG` cannot be parsed.
pub(super) fn start(format: LogFormat) -> Result<()> {
    let filter = match std::env::var("RUST_LOG") {
        Ok(text) if !text.is_empty() => filter(&text)?,
        Ok(_) | Err(_) => EnvFilter::new(DEFAULT_FILTER),
    };
    install(format, filter);
    Ok(())
}

/// Installs the logger with the default filter, if there is no logger yet. So even an error that comes before
/// [`start`] has succeeded, such as an invalid `RUST_LOG`, is logged.
pub(super) fn start_by_default(format: LogFormat) {
    install(format, EnvFilter::new(DEFAULT_FILTER));
}

/// Installs the logger. Does nothing if a logger is installed already, as in a test.
fn install(format: LogFormat, filter: EnvFilter) {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // Drop a line that cannot be written, because the relay must deliver events even if the disk of the log is
        // full. By default, tracing-subscriber reports the failed write on standard error, and panics if it cannot
        // write the report either.
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    let limit = BurstLimit::default();
    let _ = match format {
        LogFormat::Json => {
            let json = builder.json().flatten_event(true);
            json.finish().with(limit).try_init()
        }
        LogFormat::CloudLogging => {
            let cloud_logging = builder.event_format(CloudLogging);
            cloud_logging.finish().with(limit).try_init()
        }
        LogFormat::Text => {
            let has_colours = std::io::stderr().is_terminal() && paint::is_wanted();
            let text = builder.with_target(false).with_ansi(has_colours);
            text.finish().with(limit).try_init()
        }
    };
}

/// Parses `RUST_LOG`. Refuses a bare word that is neither a level nor one of our crates, because
/// `EnvFilter` would treat a misspelt level as the name of a crate, and silence all other crates.
fn filter(text: &str) -> Result<EnvFilter> {
    let invalid = |what: String| {
        Error::new(Code::SettingInvalid, what).hint(
            "set RUST_LOG to error, warn, info, debug, trace or off, or to directives such as \
             warn,postrider=debug",
        )
    };
    let is_bare = |word: &&str| {
        word.chars()
            .all(|c| c.is_alphanumeric() || c == '_' || c == '-')
    };
    let words = text
        .split(',')
        .map(str::trim)
        .filter(|word| !word.is_empty());
    // A filter without directives would silence the log.
    if words.clone().next().is_none() {
        return Err(invalid("RUST_LOG has no level".to_owned()));
    }
    let unknown = words
        .filter(is_bare)
        .find(|word| LevelFilter::from_str(word).is_err() && !word.starts_with("postrider"));
    if let Some(word) = unknown {
        return Err(invalid(format!("RUST_LOG: `{word}` is not a level")));
    }
    EnvFilter::try_new(text).map_err(|e| invalid("RUST_LOG cannot be read".to_owned()).caused_by(e))
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use super::*;

    /// The lines that a test has logged. Clones share them.
    #[derive(Debug, Clone, Default)]
    pub(super) struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Lines {
        pub(super) fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_misspelt_level_is_refused_instead_of_silencing_the_log() {
        for fine in [
            "debug",
            "INFO",
            "off",
            "warn,postrider=debug",
            "postrider",
            "h2=trace,info",
        ] {
            assert!(filter(fine).is_ok(), "{fine}");
        }
        for wrong in ["nosuch", "inof", "postrider=nosuch", "warn,debgu"] {
            let error = filter(wrong).unwrap_err();
            assert_eq!(error.code(), Code::SettingInvalid, "{wrong}");
            assert!(error.hint_text().contains("debug"), "{wrong}");
        }
    }
}
