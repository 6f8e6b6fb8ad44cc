//! Checks Kubernetes, Helm and the container image: ports, probe paths, memory, values, images.

use std::collections::BTreeSet;

use postrider::settings::KEYS;
use regex_lite::Regex;
use serde_json::Value;

use super::files::{all, containers, documents, each_object, read, root, yaml};
use super::{VERSION, default_of, texts};

fn port() -> &'static str {
    default_of("http_addr").rsplit_once(':').expect("a port").1
}

/// The paths that the relay's HTTP server offers.
fn paths() -> BTreeSet<String> {
    let source = read("src/http/mod.rs");
    let route = Regex::new(r#"\.route\("(/[a-z]+)""#).expect("a pattern");
    let found: BTreeSet<_> = route
        .captures_iter(&source)
        .map(|found| found[1].to_owned())
        .collect();
    assert!(found.len() >= 4, "only {found:?} were recognised");
    found
}

#[test]
fn every_probe_and_scrape_asks_a_path_that_the_relay_serves() {
    let asked = Regex::new(r"\bpath: (/[a-z]+), port: (http|[0-9]+)\b|^ +path: (/[a-z]+)$")
        .expect("a pattern");
    let (served, mut asks) = (paths(), 0);
    for (name, text) in texts() {
        for line in text.lines() {
            if let Some(found) = asked.captures(line) {
                let path = found.get(1).or(found.get(3)).expect("a group").as_str();
                assert!(served.contains(path), "{name}: {path}");
                if let Some(asked) = found.get(2) {
                    assert!(["http", port()].contains(&asked.as_str()), "{name}: {line}");
                }
                asks += 1;
            }
        }
    }
    assert!(asks >= 9, "only {asks} were recognised");
}

#[test]
fn every_file_opens_the_port_that_the_relay_listens_on() {
    let opened = Regex::new(r"name: http, (?:containerPort|port): ([0-9]+)|:([0-9]+):9464|0\.0\.0\.0:(94[0-9]+)|EXPOSE (9[0-9]+)")
        .expect("a pattern");
    let mut ports = 0;
    for (name, text) in texts() {
        for found in opened.captures_iter(&text) {
            let opened = found.iter().skip(1).flatten().next().expect("a group");
            assert_eq!(opened.as_str(), port(), "{name}");
            ports += 1;
        }
    }
    assert!(ports >= 8, "only {ports} were recognised");
}

#[test]
fn every_memory_limit_is_above_the_need_of_the_relay() {
    let in_flight: u64 = default_of("in_flight_mib").parse().expect("a number");
    let mut limits = 0;
    for (path, container) in containers() {
        let limit = &container["resources"]["limits"]["memory"];
        if let Some(limit) = limit.as_str() {
            let mib: u64 = limit
                .strip_suffix("Mi")
                .expect("MiB")
                .parse()
                .expect("a number");
            assert!(mib >= in_flight + 40, "{}: {limit}", path.display());
            limits += 1;
        }
    }
    assert!(limits >= 2, "only {limits} were recognised");
}

#[test]
fn every_file_and_folder_of_a_kustomization_exists() {
    let mut named = 0;
    for (path, document) in documents() {
        if path.ends_with("kustomization.yaml") {
            for key in ["resources", "components"] {
                for entry in document[key].as_array().into_iter().flatten() {
                    let entry = entry.as_str().expect("a path");
                    let folder = path.parent().expect("a folder");
                    assert!(
                        folder.join(entry).exists(),
                        "{} names {entry}",
                        path.display()
                    );
                    named += 1;
                }
            }
        }
    }
    assert!(named >= 10, "only {named} were recognised");
}

#[test]
fn no_image_names_a_registry() {
    let mut images = 0;
    for (path, document) in documents() {
        each_object(&document, &mut |object| {
            for key in ["image", "newName", "repository"] {
                if let Some(image) = object.get(key).and_then(Value::as_str) {
                    let host = image.split_once('/').map_or("", |(host, _)| host);
                    assert!(!host.contains('.'), "{} names {image}", path.display());
                    images += 1;
                }
            }
        });
    }
    assert!(images >= 8, "only {images} were recognised");
}

/// The value at a path with dots, such as `image.tag`.
fn at<'a>(mut value: &'a Value, path: &str) -> Option<&'a Value> {
    for part in path.split('.') {
        value = value.get(part)?;
    }
    Some(value)
}

#[test]
fn every_value_of_the_helm_chart_is_described_and_used() {
    let chart = root().join("deploy/helm/postrider");
    let values = yaml(&chart, &read(chart.join("values.yaml"))).remove(0);
    let schema: Value =
        serde_json::from_str(&read(chart.join("values.schema.json"))).expect("JSON");
    let templates = all()
        .into_iter()
        .filter(|path| path.starts_with(chart.join("templates")));
    let templates: String = templates.map(read).collect();
    let used = Regex::new(r"\.Values\.([A-Za-z.]+)").expect("a pattern");
    let mut seen = BTreeSet::new();
    for found in used.captures_iter(&templates) {
        assert!(
            at(&values, &found[1]).is_some(),
            "values.yaml has no {}",
            &found[1]
        );
        let in_schema = found[1].replace('.', ".properties.");
        assert!(
            at(&schema["properties"], &in_schema).is_some(),
            "no schema of {}",
            &found[1]
        );
        seen.insert(found[1].split('.').next().unwrap_or_default().to_owned());
    }
    for name in values.as_object().expect("an object").keys() {
        assert!(seen.contains(name), "no template uses {name}");
    }
    // values.yaml sets no relay settings. It only suggests some of them in comments, so read the
    // comments.
    let suggested = Regex::new(r"(?m)^#  ([a-z_]+): ").expect("a pattern");
    let text = read(chart.join("values.yaml"));
    let suggested: Vec<&str> = suggested
        .captures_iter(&text)
        .map(|found| found.get(1).expect("a name").as_str())
        .collect();
    assert!(suggested.contains(&"project"), "{suggested:?}");
    for name in suggested {
        assert!(KEYS.iter().any(|key| key.name == name), "no setting {name}");
    }
    let opened = templates.matches("{{").count();
    assert_eq!(
        opened,
        templates.matches("}}").count(),
        "a template is not closed"
    );
    assert!(read(chart.join("Chart.yaml")).contains(&format!("appVersion: {VERSION}\n")));
}

#[test]
fn the_chart_and_the_kustomization_agree() {
    // Both files describe the same pod. This test fails if one of them lacks a line that protects the
    // pod.
    let base = read("deploy/kubernetes/base/deployment.yaml");
    let chart = read("deploy/helm/postrider/templates/deployment.yaml");
    for line in [
        "rollingUpdate: {maxSurge: 0, maxUnavailable: 1}",
        "enableServiceLinks: false",
        "runAsNonRoot: true",
        "runAsUser: 10001",
        "seccompProfile: {type: RuntimeDefault}",
        "allowPrivilegeEscalation: false",
        "readOnlyRootFilesystem: true",
        "capabilities: {drop: [\"ALL\"]}",
        "automountServiceAccountToken: false",
        "httpGet: {path: /livez, port: http}",
        "httpGet: {path: /readyz, port: http}",
    ] {
        assert!(base.contains(line), "the base lacks {line}");
        assert!(chart.contains(line), "the chart lacks {line}");
    }
    assert!(read("deploy/Dockerfile").contains("USER 10001:10001"));
}
