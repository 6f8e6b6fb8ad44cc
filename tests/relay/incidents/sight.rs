//! The views of an operator at one moment, and the expected content of each.

use std::fmt;

use serde_json::Value;

/// The content of `status`, `slot show`, `/status`, `/readyz`, the page, the metrics and the
/// relay's log at one moment.
pub(super) struct Sight {
    pub(super) status: CommandView,
    pub(super) slot: CommandView,
    /// The body of `/status`. `None` if the port does not answer.
    pub(super) port: Option<Value>,
    /// The status code and the body of `/readyz`. `None` if the port does not answer.
    pub(super) ready: Option<(u16, String)>,
    pub(super) metrics: Option<String>,
    /// The state that the page shows.
    pub(super) page: Option<Value>,
    pub(super) log: String,
}

/// The output of a command, as text and as JSON.
pub(super) struct CommandView {
    pub(super) exit: Option<i32>,
    /// Standard output followed by standard error.
    pub(super) screen: String,
    pub(super) json: Value,
}

/// The expected content of all views. `None` in `code` or `quarantined`, and an empty list, mean that
/// any content is allowed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expected {
    /// The state and the exit code of `postrider status`.
    pub(super) status: (&'static str, i32),
    /// The state and the exit code of `postrider slot show`.
    pub(super) slot: (&'static str, i32),
    /// The state at `/status`, at `/readyz`, on the page and in the metric `postrider_condition`.
    /// `None`: the port must not answer.
    pub(super) port: Option<&'static str>,
    /// The status code of `/readyz`. `None`: the port must not answer.
    pub(super) ready: Option<u16>,
    /// The error code that the relay's log and the screens of `postrider status` and `postrider slot show` must
    /// contain. If the port must answer, `/status` and `/readyz` must contain the code too.
    pub(super) code: Option<&'static str>,
    /// Further texts that `postrider status` must print, for example the number of waiting events or
    /// the remedy.
    pub(super) says: &'static [&'static str],
    /// Texts that the relay's log must contain.
    pub(super) log: &'static [&'static str],
    /// The number of events in quarantine that `/status` shows.
    pub(super) quarantined: Option<u64>,
}

impl Expected {
    /// The relay streams, and no event waits.
    pub(super) const HEALTHY: Self = Self {
        status: ("streaming", 0),
        slot: ("streaming", 0),
        port: Some("streaming"),
        ready: Some(200),
        code: None,
        says: &["no event is waiting", "quarantine   empty"],
        log: &[],
        quarantined: Some(0),
    };

    /// No relay runs.
    pub(super) const DOWN: Self = Self {
        status: ("down", 1),
        slot: ("down", 1),
        port: None,
        ready: None,
        code: None,
        says: &["nothing is delivered", "start the relay"],
        log: &[],
        quarantined: None,
    };

    /// The relay runs, but PostgreSQL holds it up.
    pub(super) const BLOCKED_ON_DATABASE: Self = Self {
        status: ("blocked-on-database", 1),
        slot: ("blocked-on-database", 1),
        port: Some("blocked-on-database"),
        ready: Some(503),
        code: None,
        says: &["BLOCKED ON DATABASE for "],
        log: &[],
        quarantined: None,
    };

    /// The relay runs, but cannot continue until an operator acts.
    pub(super) const fn broken(code: &'static str) -> Self {
        Self {
            status: ("broken", 2),
            slot: ("broken", 2),
            port: Some("broken"),
            ready: Some(503),
            code: Some(code),
            says: &["BROKEN for "],
            log: &[],
            quarantined: None,
        }
    }

    pub(super) const fn says(self, says: &'static [&'static str]) -> Self {
        Self { says, ..self }
    }

    pub(super) const fn quarantined(self, events: u64) -> Self {
        Self {
            quarantined: Some(events),
            ..self
        }
    }

    pub(super) const fn log(self, log: &'static [&'static str]) -> Self {
        Self { log, ..self }
    }
}

impl Sight {
    /// Lists all differences between the views and their expected content.
    pub(super) fn faults(&self, expected: &Expected) -> Vec<String> {
        let mut faults = Vec::new();
        let mut is = |view: &str, found: String, wanted: String| {
            if found != wanted {
                faults.push(format!("{view} is {found}, not {wanted}"));
            }
        };
        let (state, exit) = expected.status;
        is("status", text(&self.status.json["state"]), state.into());
        is(
            "exit code of status",
            shown(self.status.exit),
            shown(Some(exit)),
        );
        let (state, exit) = expected.slot;
        is("slot show", text(&self.slot.json["state"]), state.into());
        is(
            "exit code of slot show",
            shown(self.slot.exit),
            shown(Some(exit)),
        );
        let port = self.port.as_ref().map(|port| text(&port["state"]));
        is("/status", shown(port), shown(expected.port));
        let page = self.page.as_ref().map(|page| text(&page["state"]));
        is("the page", shown(page), shown(expected.port));
        let word = |(_, body): &(u16, String)| {
            body.trim_end()
                .split(':')
                .next()
                .unwrap_or_default()
                .to_owned()
        };
        is(
            "the state in /readyz",
            shown(self.ready.as_ref().map(word)),
            shown(expected.port),
        );
        is("the metric", shown(self.metric()), shown(expected.port));
        let ready = self.ready.as_ref().map(|(code, _)| *code);
        is("/readyz", shown(ready), shown(expected.ready));
        if let (Some(events), Some(port)) = (expected.quarantined, &self.port) {
            let found = port["events_in_quarantine"].as_u64();
            is(
                "the quarantine at /status",
                shown(found),
                shown(Some(events)),
            );
        }
        if let Some(port) = &self.port {
            let severity = |view: &Value| text(&view["severity"]);
            let page = shown(self.page.as_ref().map(severity));
            is("the severity on the page", page, severity(port));
            for (name, member) in [
                ("failing_topics", "failing_topics"),
                ("events_in_quarantine", "events_in_quarantine"),
                ("blocked_keys", "blocked_keys"),
                ("events_published_total", "events_published"),
            ] {
                let metric = self.value_of(name);
                is(name, shown(metric), shown(port[member].as_f64()));
            }
        }
        faults.extend(self.missing(expected));
        if self.contradicts_itself() {
            faults.push("status says that events wait, and that none does".to_owned());
        }
        if expected.status.0 != Expected::HEALTHY.status.0 {
            faults.extend(self.claims_of_health());
        }
        faults
    }

    /// The state that the metrics show.
    fn metric(&self) -> Option<String> {
        let mut lines = self.metrics.as_ref()?.lines();
        let line = lines.find(|line| {
            let value = line
                .rsplit(' ')
                .next()
                .and_then(|value| value.parse::<f64>().ok());
            line.starts_with("postrider_condition{") && value == Some(1.0)
        })?;
        Some(line.split("kind=\"").nth(1)?.split('"').next()?.to_owned())
    }

    /// The value of a metric that has no label except `slot`. `None` if the metric is absent.
    fn value_of(&self, name: &str) -> Option<f64> {
        let name = format!("postrider_{name}{{");
        let mut lines = self.metrics.as_ref()?.lines();
        let line = lines.find(|line| line.starts_with(&name))?;
        line.rsplit(' ').next()?.parse().ok()
    }

    /// Lists the expected texts that are missing in a view.
    fn missing(&self, expected: &Expected) -> Vec<String> {
        let ready = self.ready.as_ref().map_or("", |(_, body)| body);
        let port = self.port.as_ref().map(ToString::to_string);
        let port = port.unwrap_or_default();
        let mut wanted: Vec<(&str, &str, &str)> = Vec::new();
        if let Some(code) = expected.code {
            wanted.push(("the log", &self.log, code));
            wanted.push(("the screen of status", &self.status.screen, code));
            wanted.push(("the screen of slot show", &self.slot.screen, code));
            if expected.port.is_some() {
                wanted.push(("/status", &port, code));
                wanted.push(("/readyz", ready, code));
            }
        }
        let screen = self.status.screen.as_str();
        wanted.extend(
            expected
                .says
                .iter()
                .map(|part| ("the screen of status", screen, *part)),
        );
        wanted.extend(
            expected
                .log
                .iter()
                .map(|part| ("the log", self.log.as_str(), *part)),
        );
        let missing = wanted.iter().filter(|(_, text, part)| !text.contains(part));
        missing
            .map(|(view, _, part)| format!("{view} does not say {part:?}"))
            .collect()
    }

    /// Whether `status` says that no event waits, although it lists a topic for which events wait.
    fn contradicts_itself(&self) -> bool {
        let topics = &self.status.json["condition"]["topics"];
        let mut topics = topics.as_array().into_iter().flatten();
        self.status.screen.contains("no event is waiting")
            && topics.any(|topic| topic["waiting_events"].as_u64() > Some(0))
    }

    /// Lists the views that claim that events are delivered, although an incident holds them up.
    fn claims_of_health(&self) -> Vec<String> {
        let ready = self.ready.as_ref().map_or("", |(_, body)| body);
        let claims = [
            ("status", self.status.screen.contains("STREAMING")),
            (
                "status",
                self.status.screen.contains("as they are committed"),
            ),
            ("slot show", self.slot.screen.contains("STREAMING")),
            ("slot show", self.slot.screen.contains("up to date")),
            ("/readyz", ready.contains("streaming")),
        ];
        let claims = claims.into_iter().filter(|(_, claims)| *claims);
        claims
            .map(|(view, _)| format!("{view} says that all is well"))
            .collect()
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or("unknown").to_owned()
}

fn shown<T: ToString>(value: Option<T>) -> String {
    value.map_or("nothing".to_owned(), |value| value.to_string())
}

impl fmt::Display for Sight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { status, slot, .. } = self;
        writeln!(f, "--- status, exit {:?}\n{}", status.exit, status.screen)?;
        writeln!(f, "--- slot show, exit {:?}\n{}", slot.exit, slot.screen)?;
        writeln!(
            f,
            "--- /status\n{:?}",
            self.port.as_ref().map(ToString::to_string)
        )?;
        writeln!(f, "--- /readyz\n{:?}", self.ready)?;
        writeln!(f, "--- metric\n{:?}", self.metric())?;
        writeln!(f, "--- log\n{}", self.log)
    }
}
