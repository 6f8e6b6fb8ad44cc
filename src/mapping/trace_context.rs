//! Reads the trace context from the column `tracingspancontext` of Debezium's outbox tables.
//!
//! Debezium's library writes the column with Java's `Properties.store`: one `name=value` per line, with a
//! backslash before a special character, and comment lines. The mapping uses only two of the names,
//! `traceparent` and `tracestate`.
//!
//! Sources: the documentation of `java.util.Properties`; W3C Trace Context, section 3.

use std::borrow::Cow;

/// Returns the value of the property `name`, without escapes.
pub(super) fn value<'t>(text: &'t str, name: &str) -> Option<Cow<'t, str>> {
    text.lines().find_map(|line| {
        let rest = line.trim_start().strip_prefix(name)?.trim_start();
        let value = rest.strip_prefix(['=', ':'])?.trim();
        Some(if value.contains('\\') {
            Cow::Owned(value.replace('\\', ""))
        } else {
            Cow::Borrowed(value)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "#Fri Nov 27 12:00:00 UTC 2026\ntraceparent=00-0af7-b7ad-01\r\n  tracestate : a\\=1,b\\:c\\=2\n";

    #[test]
    fn a_trace_context_is_read_as_java_writes_it() {
        assert_eq!(
            value(TEXT, "traceparent").as_deref(),
            Some("00-0af7-b7ad-01")
        );
        assert_eq!(value(TEXT, "tracestate").as_deref(), Some("a=1,b:c=2"));
    }

    #[test]
    fn a_trace_context_is_not_found_in_comments_other_names_or_other_texts() {
        for text in [
            "",
            r"uber-trace-id=1\:2\:0\:1",
            "#traceparent=00-a",
            "traceparent2=00-a",
            "traceparent",
            "{\"traceparent\": \"00-a\"}",
        ] {
            assert_eq!(value(text, "traceparent"), None, "{text}");
        }
    }
}
