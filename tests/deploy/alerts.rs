//! Checks that every alert has a section in the runbook and a test. `tests/docs/main.rs` checks
//! that the metrics in the rules exist.

use std::collections::BTreeSet;

use serde_json::Value;

use super::files::{read, yaml};

fn rules() -> Vec<Value> {
    let path = std::path::Path::new("deploy/prometheus-alerts.yml");
    let file = yaml(path, &read(path)).remove(0);
    let groups = file["groups"].as_array().expect("groups").clone();
    let rules = groups
        .iter()
        .filter_map(|group| group["rules"].as_array().cloned());
    rules.flatten().collect()
}

#[test]
fn every_alert_links_to_its_section_and_every_section_has_an_alert() {
    let page = read("docs/how-to/alerts.md");
    let sections: BTreeSet<_> = page
        .lines()
        .filter_map(|line| line.strip_prefix("## "))
        .collect();
    let rules = rules();
    let names: BTreeSet<_> = rules
        .iter()
        .filter_map(|rule| rule["alert"].as_str())
        .collect();
    assert_eq!(names, sections);
    for rule in &rules {
        let name = rule["alert"].as_str().expect("a name");
        let runbook = format!(
            "https://REPOSITORY/docs/how-to/alerts.md#{}",
            name.to_lowercase()
        );
        assert_eq!(rule["annotations"]["runbook_url"], runbook.as_str());
        for annotation in ["summary", "action"] {
            assert!(
                rule["annotations"][annotation].is_string(),
                "{name}: {annotation}"
            );
        }
        let severity = rule["labels"]["severity"].as_str().unwrap_or_default();
        assert!(
            ["critical", "warning", "info"].contains(&severity),
            "{name}"
        );
    }
}

#[test]
fn every_alert_has_a_test_in_which_it_fires() {
    let path = std::path::Path::new("deploy/prometheus-alerts-test.yml");
    let file = yaml(path, &read(path)).remove(0);
    let tests = file["tests"].as_array().expect("tests").iter();
    let cases = tests.filter_map(|test| test["alert_rule_test"].as_array());
    let fires = |case: &&Value| {
        case["exp_alerts"]
            .as_array()
            .is_some_and(|found| !found.is_empty())
    };
    let fired: BTreeSet<_> = cases
        .flatten()
        .filter(fires)
        .filter_map(|case| case["alertname"].as_str())
        .collect();
    let rules = rules();
    let names: BTreeSet<_> = rules
        .iter()
        .filter_map(|rule| rule["alert"].as_str())
        .collect();
    assert_eq!(fired, names);
}
