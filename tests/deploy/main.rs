//! Checks that the files of `deploy/` fit the program: every variable, command, flag, port, probe
//! path, exit code, setting and metric that they name must exist. These tests need no other
//! program. `cargo xtask deploy` checks the files with external tools.

mod alerts;
mod files;
mod kubernetes;

use std::collections::{BTreeMap, BTreeSet};

use postrider::cli::command;
use postrider::environment::Environment;
use postrider::error::{Code, Disposition};
use postrider::settings::{KEYS, Settings};
use regex_lite::Regex;
use serde_json::Value;

use files::{all, containers, documents, each_object, read, root, with_extension};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Variables that begin with `POSTRIDER_` but are not settings. The command line, the build and
/// deploy/compose.yaml read them.
const NO_SETTINGS: [&str; 4] = [
    "POSTRIDER_CONFIG",
    "POSTRIDER_COMMIT",
    "POSTRIDER_COMMIT_DATE",
    "POSTRIDER_IMAGE",
];

/// Other variables of a container that the relay reads (see docs/reference/settings.md).
const OTHER_VARIABLES: [&str; 2] = ["RUST_LOG", "GOOGLE_APPLICATION_CREDENTIALS"];

fn texts() -> Vec<(String, String)> {
    let pages = ["docs/how-to/deploy.md", "docs/how-to/alerts.md"];
    let pages = pages.iter().map(|page| root().join(page));
    let named = all().into_iter().chain(pages).map(|path| {
        let name = path.strip_prefix(root()).expect("below the root");
        (name.display().to_string(), read(&path))
    });
    named.collect()
}

fn default_of(setting: &str) -> &'static str {
    let key = KEYS.iter().find(|key| key.name == setting);
    key.expect("the setting exists").default
}

fn is_read_by_the_relay(variable: &str) -> bool {
    KEYS.iter()
        .any(|key| key.variable() == variable || key.aliases.contains(&variable))
        || NO_SETTINGS.contains(&variable)
        || OTHER_VARIABLES.contains(&variable)
        || variable.starts_with("PG")
}

#[test]
fn every_yaml_toml_and_json_file_can_be_parsed() {
    assert!(documents().len() > 25, "documents are missing");
    for path in with_extension(&["json"]) {
        let parsed = serde_json::from_str::<Value>(&read(&path));
        parsed.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    }
    let manifest: toml::Table = read("Cargo.toml").parse().expect("Cargo.toml");
    let package = &manifest["package"]["metadata"]["deb"];
    let assets = package["assets"].as_array().expect("assets");
    for asset in assets {
        let file = asset[0].as_str().expect("a path");
        let is_built = file.starts_with("target/");
        assert!(is_built || root().join(file).exists(), "no {file}");
    }
    let units = package["systemd-units"]["unit-scripts"].as_str();
    assert!(
        root()
            .join(units.expect("a folder"))
            .join("postrider.service")
            .exists()
    );
}

#[test]
fn every_variable_is_one_that_the_relay_reads() {
    let variable = Regex::new(r"\bPOSTRIDER_[A-Z][A-Z0-9_]*").expect("a pattern");
    let mut seen = BTreeSet::new();
    for (name, text) in texts() {
        for found in variable.find_iter(&text) {
            // A match ends with `_` if a placeholder follows in the text. Compare the name without the
            // `_`.
            let found = found.as_str().trim_end_matches('_');
            assert!(is_read_by_the_relay(found), "{name} names {found}");
            seen.insert(found.to_owned());
        }
    }
    assert!(seen.len() > 6, "only {seen:?} were recognised");
    for (path, document) in documents() {
        for map in document["configMapGenerator"]
            .as_array()
            .into_iter()
            .flatten()
        {
            for literal in map["literals"].as_array().into_iter().flatten() {
                let literal = literal.as_str().expect("a text");
                let name = literal.split('=').next().unwrap_or_default();
                assert!(is_read_by_the_relay(name), "{} sets {name}", path.display());
            }
        }
    }
    for (path, container) in containers() {
        for entry in container["env"].as_array().into_iter().flatten() {
            let name = entry["name"].as_str().expect("a name");
            assert!(is_read_by_the_relay(name), "{} sets {name}", path.display());
        }
    }
}

/// Loads the settings that a file gives to the relay. Adds a database URL, which most files take
/// from a secret.
fn accept(name: &str, variables: BTreeMap<String, String>) -> Settings {
    let database = "postgres://relay:secret@db.example:5432/shop?sslmode=disable".to_owned();
    let mut environment = Environment::from_iter([("DATABASE_URL".to_owned(), database)]);
    // Leave out `PGSSLROOTCERT`, because it names a file that exists only in the container.
    let variables = variables
        .into_iter()
        .filter(|(name, _)| name != "PGSSLROOTCERT");
    environment.extend(variables);
    Settings::load(None, &environment, &[]).unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[test]
fn the_relay_accepts_the_values_of_every_file() {
    let mut shutdowns = BTreeMap::new();
    for (path, container) in containers() {
        let entries = container["env"].as_array().into_iter().flatten();
        let literal = |entry: &Value| {
            let (name, value) = (entry["name"].as_str()?, entry["value"].as_str()?);
            Some((name.to_owned(), value.to_owned()))
        };
        let settings = accept(
            &path.display().to_string(),
            entries.filter_map(literal).collect(),
        );
        shutdowns.insert(path, settings.shutdown_timeout.as_secs());
    }
    let cloud_run = root().join("deploy/cloud-run.yaml");
    assert!(shutdowns[&cloud_run] < 10, "Cloud Run waits ten seconds");

    let lines = read("deploy/postrider.env.example");
    let lines = lines.lines().filter(|line| !line.starts_with('#'));
    let variables = lines.filter_map(|line| line.split_once('='));
    let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
    accept("postrider.env.example", variables.collect());

    let compose = documents()
        .into_iter()
        .find(|(path, _)| path.ends_with("docker-compose.yml"));
    let (_, compose) = compose.expect("docker-compose.yml");
    for service in ["init", "relay"] {
        let variables = compose["services"][service]["environment"].as_object();
        let variables = variables.expect("variables").iter();
        let plain = |(name, value): (&String, &Value)| {
            let value = value.as_str().expect("a text").to_owned();
            (!value.contains('$')).then(|| (name.clone(), value))
        };
        accept(service, variables.filter_map(plain).collect());
    }
}

#[test]
fn every_wait_for_a_shutdown_is_longer_than_the_relay_takes() {
    let takes: u64 = default_of("shutdown_timeout_s").parse().expect("a number");
    let wait = Regex::new(
        r"(?:terminationGracePeriodSeconds:|stop_grace_period:|TimeoutStopSec=) *([0-9]+)",
    )
    .expect("a pattern");
    let mut waits = 0;
    for (name, text) in texts() {
        for found in wait.captures_iter(&text) {
            let seconds: u64 = found[1].parse().expect("a number");
            assert!(seconds >= takes + 5, "{name} waits {seconds} s");
            waits += 1;
        }
    }
    assert!(waits >= 5, "only {waits} were recognised");
}

/// Checks that the program would accept a call such as `postrider init --apply`.
fn check_call(name: &str, words: &[String]) {
    let mut command = command();
    let mut words = words.iter().peekable();
    while let Some(word) = words.next_if(|word| !word.starts_with('-')) {
        if !command.has_subcommands() {
            break; // an argument, such as the code of `explain`
        }
        let found = command.find_subcommand(word).cloned();
        command = found.unwrap_or_else(|| panic!("{name} calls `postrider {word}`"));
    }
    for word in words.filter(|word| word.starts_with("--")) {
        let flag = word
            .trim_start_matches('-')
            .split('=')
            .next()
            .unwrap_or_default();
        let mut flags = command.get_arguments();
        let is_flag = flags.any(|arg| arg.get_long() == Some(flag));
        assert!(is_flag || flag == "config", "{name} calls it with {word}");
    }
}

#[test]
fn every_command_and_flag_exists() {
    // Matches `postrider check` in a text, and ` -- postrider check` and `/usr/bin/postrider run`
    // in a script.
    let call =
        Regex::new(r"(?:`|-- |/usr/bin/)postrider ([a-z][a-zA-Z0-9 =_-]*)").expect("a pattern");
    let mut calls = 0;
    for (name, text) in texts() {
        for found in call.captures_iter(&text) {
            let words: Vec<_> = found[1].split(' ').map(str::to_owned).collect();
            check_call(&name, &words);
            calls += 1;
        }
    }
    assert!(calls > 20, "only {calls} were recognised");
    for (path, document) in documents() {
        each_object(&document, &mut |object| {
            let is_relay = object.get("name").is_some_and(|name| name == "postrider")
                || object
                    .get("image")
                    .is_some_and(|image| image == "postrider");
            for key in ["args", "command"] {
                let words = object.get(key).and_then(Value::as_array);
                if let (true, Some(words)) = (is_relay, words) {
                    let words = words.iter().filter_map(Value::as_str).map(str::to_owned);
                    check_call(&path.display().to_string(), &words.collect::<Vec<_>>());
                }
            }
        });
    }
}

#[test]
fn systemd_restarts_the_relay_after_every_exit_whose_cause_can_pass() {
    // These errors stop the relay, but they can disappear without a change of the settings: another
    // process frees the port, an operator restores the database, or a migration adds the column. So the
    // unit must start the relay again.
    let passing = [
        Code::PortInUse,
        Code::DatabaseUrlInvalid,
        Code::ColumnMissing,
    ];
    let unit = read("deploy/postrider.service");
    let setting = |name: &str| {
        let mut lines = unit.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
    };
    assert_eq!(setting("Restart"), Some("always"));
    assert_eq!(setting("StartLimitIntervalSec"), Some("0"));
    assert_eq!(setting("ExecStart"), Some("/usr/bin/postrider run"));
    let can_pass =
        |code: &&Code| code.disposition() == Disposition::Retry || passing.contains(*code);
    let restarted = Code::ALL.iter().filter(can_pass);
    let restarted: BTreeSet<u8> = restarted.map(|code| code.exit_status()).collect();
    assert_eq!(restarted, BTreeSet::from([2, 3, 4, 5]));
    // Each of these exit codes can have a temporary cause, so the unit restarts the relay after all
    // of them.
    assert_eq!(setting("RestartPreventExitStatus"), None);
}

#[test]
fn the_exit_codes_of_the_page_and_of_the_unit_are_those_of_the_errors() {
    // `row` matches a row of the table in exit-codes.md, and `line` matches a comment line of
    // postrider.service. Each has an exit status and its error codes.
    let row = Regex::new(r"(?m)^\| ([1-5]) \| [^|]* \| (`[^|]*) \|").expect("a pattern");
    let line = Regex::new(r"(?m)^#   ([1-5]): .*\(([a-z, -]+)\)$").expect("a pattern");
    let used: BTreeSet<u8> = Code::ALL.iter().map(|code| code.exit_status()).collect();
    for (name, pattern) in [
        ("docs/reference/exit-codes.md", row),
        ("deploy/postrider.service", line),
    ] {
        let text = read(name);
        let mut listed = BTreeSet::new();
        for found in pattern.captures_iter(&text) {
            let status: u8 = found[1].parse().expect("a number");
            for code in found[2].split(", ").map(|code| code.trim_matches('`')) {
                let code: Code = code.parse().unwrap_or_else(|e| panic!("{name}: {e}"));
                assert_eq!(code.exit_status(), status, "{name}: {code}");
            }
            listed.insert(status);
        }
        assert_eq!(listed, used, "{name}");
    }
}

#[test]
fn the_version_is_the_same_everywhere() {
    let mentions = Regex::new(
        r"postrider:([0-9][0-9.]*)|newName: REGISTRY/postrider, newTag: ([0-9.]+)|postrider_([0-9.]+)-1|(?m:^(?:version|appVersion): (.*)$)",
    )
    .expect("a pattern");
    let mut seen = 0;
    for (name, text) in texts() {
        for found in mentions.captures_iter(&text) {
            let version = found.iter().skip(1).flatten().next().expect("a group");
            assert_eq!(version.as_str(), VERSION, "{name}");
            seen += 1;
        }
    }
    assert!(seen >= 6, "only {seen} were recognised");
    let toolchain: toml::Table = read("rust-toolchain.toml").parse().expect("TOML");
    let compiler = toolchain["toolchain"]["channel"]
        .as_str()
        .expect("a version");
    let dockerfile = read("deploy/Dockerfile");
    assert!(dockerfile.contains(&format!("rust:{compiler}-")));
    assert!(dockerfile.contains(&format!("RUSTUP_TOOLCHAIN={compiler}")));
}

#[test]
fn every_action_of_a_workflow_is_pinned_to_a_commit() {
    let pinned = Regex::new(r"^[a-z-]+/[a-z-]+@[0-9a-f]{40} # v[0-9.]+$").expect("a pattern");
    let mut actions = 0;
    for (name, text) in texts() {
        for line in text.lines() {
            let step = line.trim_start().trim_start_matches("- ");
            if let Some(action) = step.strip_prefix("uses: ") {
                assert!(pinned.is_match(action), "{name}: {action}");
                actions += 1;
            }
        }
    }
    assert!(actions >= 10, "only {actions} were recognised");
}
