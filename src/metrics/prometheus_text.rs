//! Converts OpenMetrics to Prometheus' own text format, for readers that do not ask for OpenMetrics, such
//! as `promtool` and `curl`.
//!
//! For the metrics that we have, the older format differs in two ways: HELP and TYPE name a counter with
//! its suffix `_total`, and there are no lines `UNIT` and `EOF`.

use std::collections::HashSet;

/// Converts OpenMetrics text to Prometheus' text format, version 0.0.4.
pub fn prometheus_text(openmetrics: &str) -> String {
    let counter = |line: &'_ str| {
        let (name, kind) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
        (kind == "counter").then(|| name.to_owned())
    };
    let counters: HashSet<String> = openmetrics.lines().filter_map(counter).collect();
    let mut text = String::with_capacity(openmetrics.len());
    for line in openmetrics.lines() {
        if line == "# EOF" || line.starts_with("# UNIT ") {
            continue;
        }
        match counter_header(line, &counters) {
            Some((kind, name, rest)) => text.extend([kind, name, "_total ", rest]),
            None => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

/// Splits a `# HELP` or `# TYPE` line of a counter into its parts.
fn counter_header<'l>(
    line: &'l str,
    counters: &HashSet<String>,
) -> Option<(&'static str, &'l str, &'l str)> {
    let kinds = ["# HELP ", "# TYPE "];
    kinds.into_iter().find_map(|kind| {
        let (name, rest) = line.strip_prefix(kind)?.split_once(' ')?;
        counters.contains(name).then_some((kind, name, rest))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_get_their_suffix_and_other_lines_stay() {
        let openmetrics = "\
            # HELP a_events Events, all of them.\n# TYPE a_events counter\na_events_total{slot=\"s\"} 3\n\
            # HELP a_lag_seconds Lag.\n# TYPE a_lag_seconds gauge\n# UNIT a_lag_seconds seconds\n\
            a_lag_seconds{slot=\"# TYPE x counter\"} 1.5\n# EOF\n";
        let expected = "\
            # HELP a_events_total Events, all of them.\n# TYPE a_events_total counter\n\
            a_events_total{slot=\"s\"} 3\n\
            # HELP a_lag_seconds Lag.\n# TYPE a_lag_seconds gauge\n\
            a_lag_seconds{slot=\"# TYPE x counter\"} 1.5\n";
        assert_eq!(prometheus_text(openmetrics), expected);
    }
}
