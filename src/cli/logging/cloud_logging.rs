//! Formats log lines for Google Cloud Logging, which recognises fields for severity, time, message and
//! source location. Other fields go to `jsonPayload`.
//!
//! <https://cloud.google.com/logging/docs/structured-logging#special-payload-fields>

use std::fmt;

use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// A formatter that writes each log event as one line of JSON for Cloud Logging.
pub(super) struct CloudLogging;

impl<S, N> FormatEvent<S, N> for CloudLogging
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        writeln!(writer, "{}", Value::Object(entry(event, time)))
    }
}

fn entry(event: &Event<'_>, time: String) -> Map<String, Value> {
    let mut fields = EntryFields::default();
    event.record(&mut fields);
    let mut entry = fields.0;
    let metadata = event.metadata();
    // Some log events of libraries have no message. Use the name of the event instead, which contains its place in
    // the code.
    entry
        .entry("message")
        .or_insert_with(|| metadata.name().into());
    // Insert the special fields last, so that no field of an event replaces a special field.
    entry.insert("severity".into(), severity(*metadata.level()).into());
    entry.insert("time".into(), time.into());
    entry.insert("target".into(), metadata.target().into());
    if let (Some(file), Some(line)) = (metadata.file(), metadata.line()) {
        // Cloud Logging wants the line number as a string.
        let place = json!({"file": file, "line": line.to_string()});
        entry.insert("logging.googleapis.com/sourceLocation".into(), place);
    }
    entry
}

fn severity(level: Level) -> &'static str {
    match level {
        Level::ERROR => "ERROR",
        Level::WARN => "WARNING",
        Level::INFO => "INFO",
        Level::DEBUG | Level::TRACE => "DEBUG",
    }
}

/// The fields of a log event as JSON. The message is the field `message`.
#[derive(Debug, Default)]
struct EntryFields(Map<String, Value>);

impl EntryFields {
    fn add(&mut self, field: &Field, value: Value) {
        self.0.insert(field.name().to_owned(), value);
    }
}

impl Visit for EntryFields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format!("{value:?}").into());
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Lines;
    use super::*;

    #[test]
    fn an_event_has_the_field_names_of_cloud_logging() {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .event_format(CloudLogging)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(slot = %"shop", waiting = 3, severity = "forged", "a \"topic\"\nfails");
        });
        let text = lines.text();
        assert_eq!(text.matches('\n').count(), 1, "{text}");
        let entry: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(entry["severity"], "WARNING");
        assert_eq!(entry["message"], "a \"topic\"\nfails");
        assert_eq!(
            (&entry["slot"], &entry["waiting"]),
            (&json!("shop"), &json!(3))
        );
        let place = &entry["logging.googleapis.com/sourceLocation"];
        assert!(
            place["file"]
                .as_str()
                .unwrap()
                .ends_with("cloud_logging.rs")
        );
        assert!(place["line"].as_str().unwrap().parse::<u32>().is_ok());
        // RFC 3339 in UTC.
        let time = entry["time"].as_str().unwrap();
        assert!(
            time.len() > 19 && time.ends_with('Z') && &time[10..11] == "T",
            "{time}"
        );
    }
}
