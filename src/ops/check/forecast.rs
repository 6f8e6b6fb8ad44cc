//! Predicts what `postrider run` would do: start, wait, recover automatically, or stop. Whether the relay would
//! recover follows from the same verdict as the session's own decision (`recovery::slot_verdict`). The rest follows
//! from the codes of the findings: an error that can go away by itself makes the relay wait, and most other errors
//! stop the relay.

use serde::Serialize;
use slot_manager::{Finding, Severity};

use super::CheckSection;
use crate::error::{Code, Disposition};
use crate::ops::recover::situation::{ReasonEffect, RecoveryReason};
use crate::settings::{OnBadEvent, OnLoss, Settings};

/// What `postrider run` would do now.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Forecast {
    /// Codes of the findings that would stop the relay.
    pub(crate) stops: Vec<&'static str>,
    /// Codes of the findings that would make the relay wait. The relay continues automatically once they are
    /// corrected.
    pub(crate) waits: Vec<&'static str>,
    /// Maximum time in seconds that the relay would wait for PostgreSQL before it exits. `None` if
    /// PostgreSQL answers.
    pub(crate) start_timeout_seconds: Option<f64>,
    /// Why the relay would recover automatically, as `recover --dry-run` and the relay's log name the reason.
    pub(crate) recovers: Vec<&'static str>,
    /// Whether the relay would be a standby, because another session reads from the slot.
    pub(crate) stands_by: bool,
    /// Whether the relay would create the slot.
    pub(crate) creates_slot: bool,
    /// Whether a relay of the slot already uses the HTTP port on this machine, so that another relay would need
    /// another port.
    pub(crate) needs_other_port: bool,
}

/// The consequence of one finding for the relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    None,
    CreatesSlot,
    StandsBy,
    NeedsOtherPort,
    Recovers,
    Waits,
    Stops,
}

impl Forecast {
    /// Computes the forecast. `sections` has all findings of a check. `due` says why the relay would not simply stream
    /// from its slot; `None` if it would, or if this is unknown.
    pub(crate) fn of(
        sections: &[CheckSection],
        due: Option<&RecoveryReason>,
        settings: &Settings,
    ) -> Self {
        let mut forecast = Self::default();
        match due.map(|due| due.effect) {
            Some(ReasonEffect::Recovers) => forecast.recovers.extend(due.map(|due| due.name)),
            Some(ReasonEffect::CreatesSlot) => forecast.creates_slot = true,
            Some(ReasonEffect::Stops) => forecast.stops.extend(due.map(RecoveryReason::code)),
            None => {}
        }
        for finding in sections.iter().flat_map(|section| &section.findings) {
            let codes = match effect(finding, settings) {
                Effect::Recovers if due.is_some() => continue,
                Effect::None => continue,
                Effect::CreatesSlot => {
                    forecast.creates_slot = true;
                    continue;
                }
                Effect::StandsBy => {
                    forecast.stands_by = true;
                    continue;
                }
                Effect::NeedsOtherPort => {
                    forecast.needs_other_port = true;
                    continue;
                }
                Effect::Recovers => &mut forecast.recovers,
                Effect::Waits => &mut forecast.waits,
                Effect::Stops => &mut forecast.stops,
            };
            if finding.code == Code::PostgresUnreachable.name() {
                forecast.start_timeout_seconds = Some(settings.start_timeout.as_secs_f64());
            }
            if !codes.contains(&finding.code) {
                codes.push(finding.code);
            }
        }
        forecast
    }

    /// Returns the forecast as a sentence without a subject, such as "would start".
    pub(crate) fn sentence(&self) -> String {
        if !self.stops.is_empty() {
            return format!(
                "would stop until this is corrected: {}",
                self.stops.join(", ")
            );
        }
        let mut parts = vec![if self.stands_by {
            "would start as a standby".to_owned()
        } else {
            "would start".to_owned()
        }];
        if self.creates_slot {
            parts.push("create the slot".to_owned());
        }
        if !self.recovers.is_empty() {
            parts.push(format!(
                "recover automatically ({})",
                self.recovers.join(", ")
            ));
        }
        if !self.waits.is_empty() {
            let limit = self.start_timeout_seconds;
            let limit = limit.map_or(String::new(), |seconds| format!(" for at most {seconds} s"));
            parts.push(format!(
                "wait{limit} until this is corrected: {}",
                self.waits.join(", ")
            ));
        }
        let port = if self.needs_other_port {
            " (on this machine only with another POSTRIDER_HTTP_ADDR)"
        } else {
            ""
        };
        match parts.pop() {
            Some(last) if parts.is_empty() => last + port,
            Some(last) => format!("{} and {last}{port}", parts.join(", ")),
            None => String::new(),
        }
    }
}

fn effect(finding: &Finding, settings: &Settings) -> Effect {
    let code: Option<Code> = finding.code.parse().ok();
    let is_error = finding.severity == Severity::Error;
    match (finding.severity, code) {
        (Severity::Ok, _) => Effect::None,
        (_, Some(Code::SlotHeld)) => Effect::StandsBy,
        (Severity::Info, Some(Code::SlotMissing)) => Effect::CreatesSlot,
        (Severity::Info, Some(Code::PortInUse)) => Effect::NeedsOtherPort,
        (Severity::Info, _) => Effect::None,
        (_, Some(Code::SlotMissing | Code::SlotLost | Code::SlotRecreated)) => {
            match settings.slot_on_loss {
                OnLoss::Recover => Effect::Recovers,
                OnLoss::Stop => Effect::Stops,
            }
        }
        (Severity::Warning, _) => Effect::None,
        // The relay puts a bad event into quarantine, unless `on_bad_event` tells it to halt.
        (_, Some(Code::EventInvalid | Code::EventTooLarge | Code::EventRefused)) => {
            match settings.on_bad_event {
                OnBadEvent::Halt => Effect::Stops,
                OnBadEvent::QuarantineKey | OnBadEvent::QuarantineEvent => Effect::None,
            }
        }
        (_, Some(code)) => match code.disposition() {
            Disposition::Retry => Effect::Waits,
            Disposition::Stop | Disposition::Bug => Effect::Stops,
        },
        (_, None) if is_error && finding.code == "slot-in-danger" => Effect::None,
        (_, None) => Effect::Stops,
    }
}

#[cfg(test)]
mod tests {
    use decoder::Lsn;
    use slot_manager::{Health, SlotName};

    use super::*;
    use crate::ops::finding::finding;
    use crate::ops::recover;
    use crate::recovery::slot_verdict::RecoveryCause;
    use crate::settings::Start;

    fn settings(set: &[(&str, &str)]) -> Settings {
        let env = [
            ("DATABASE_URL", "postgres://a@b/c"),
            ("PUBSUB_PROJECT_ID", "p"),
        ];
        let given = env.iter().chain(set);
        let given = given.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Settings::load(None, &given.collect(), &[]).unwrap()
    }

    fn forecast(findings: &[(&'static str, Severity)], set: &[(&str, &str)]) -> String {
        let settings = settings(set);
        let findings = findings
            .iter()
            .map(|(code, severity)| finding(*severity, code, "it is so"));
        let section = CheckSection {
            heading: "PostgreSQL".to_owned(),
            findings: findings.collect(),
        };
        Forecast::of(&[section], None, &settings).sentence()
    }

    #[test]
    fn the_code_of_a_finding_decides_what_the_relay_would_do() {
        use Severity::{Error, Info, Warning};
        let stop = [("POSTRIDER_SLOT_ON_LOSS", "stop")];
        let halt = [("POSTRIDER_ON_BAD_EVENT", "halt")];
        for (code, severity, set, expected) in [
            ("wal-level", Severity::Ok, &[][..], "would start"),
            ("slot-missing", Info, &[], "would start and create the slot"),
            ("slot-held", Info, &[], "would start as a standby"),
            ("slot-unread", Warning, &[], "would start"),
            (
                "port-in-use",
                Info,
                &[],
                "would start (on this machine only with another POSTRIDER_HTTP_ADDR)",
            ),
            (
                "port-in-use",
                Error,
                &[],
                "would stop until this is corrected: port-in-use",
            ),
            ("topic-missing", Warning, &[], "would start"),
            (
                "topic-missing",
                Error,
                &[],
                "would start and wait until this is corrected: topic-missing",
            ),
            (
                "postgres-unreachable",
                Error,
                &[],
                "would start and wait for at most 10 s until this is corrected: postgres-unreachable",
            ),
            (
                "slot-lost",
                Error,
                &[],
                "would start and recover automatically (slot-lost)",
            ),
            (
                "slot-lost",
                Error,
                &stop,
                "would stop until this is corrected: slot-lost",
            ),
            ("event-invalid", Error, &[], "would start"),
            (
                "event-invalid",
                Error,
                &halt,
                "would stop until this is corrected: event-invalid",
            ),
            ("slot-in-danger", Error, &[], "would start"),
            (
                "pooler-in-between",
                Error,
                &[],
                "would stop until this is corrected: pooler-in-between",
            ),
            (
                "privilege-missing",
                Error,
                &[],
                "would stop until this is corrected: privilege-missing",
            ),
        ] {
            assert_eq!(forecast(&[(code, severity)], set), expected, "{code}");
        }
    }

    #[test]
    fn a_finding_that_stops_the_relay_comes_before_all_others() {
        let findings = [
            ("topic-missing", Severity::Error),
            ("topic-missing", Severity::Error),
            ("slot-lost", Severity::Error),
        ];
        assert_eq!(
            forecast(&findings, &[]),
            "would start, recover automatically (slot-lost) and wait until this is corrected: topic-missing"
        );
        let stops = [&findings[..], &[("wal-level", Severity::Error)]].concat();
        assert_eq!(
            forecast(&stops, &[]),
            "would stop until this is corrected: wal-level"
        );
    }

    /// Compares the forecast with the decision of a session (`session::plan`) for every reason to recover.
    #[test]
    fn the_forecast_names_the_reason_for_which_a_session_would_recover_or_stop() {
        let slot: SlotName = "postrider".parse().unwrap();
        let (recorded, found) = (Lsn::new(1), Lsn::new(2));
        for cause in [
            RecoveryCause::Unfinished("requested".to_owned()),
            RecoveryCause::FirstStart(Start::All),
            RecoveryCause::TableAdded,
            RecoveryCause::OtherTable,
            RecoveryCause::SlotMissing,
            RecoveryCause::SlotLost(Health::Lost),
            RecoveryCause::SlotRecreated { recorded, found },
            RecoveryCause::WalMissing {
                recorded: found,
                server: recorded,
            },
            RecoveryCause::PublicationChanged,
            RecoveryCause::SlotUnproven { recorded, found },
        ] {
            for on_loss in [OnLoss::Recover, OnLoss::Stop] {
                let stop = cause.stops(&slot).filter(|_| on_loss == OnLoss::Stop);
                let due = RecoveryReason::of(&cause, &slot, on_loss);
                let mut settings = settings(&[]);
                settings.slot_on_loss = on_loss;
                let section = CheckSection {
                    heading: "PostgreSQL".to_owned(),
                    findings: recover::finding(&due, &settings).into_iter().collect(),
                };
                let forecast = Forecast::of(&[section], Some(&due), &settings);
                let (recovers, stops) = match stop {
                    Some(error) => (vec![], vec![error.code().name()]),
                    None => (vec![cause.name()], vec![]),
                };
                assert_eq!(forecast.recovers, recovers, "{cause:?} {on_loss:?}");
                assert_eq!(forecast.stops, stops, "{cause:?} {on_loss:?}");
            }
        }
        let first = RecoveryCause::FirstStart(Start::New);
        let first = RecoveryReason::of(&first, &slot, OnLoss::Stop);
        let forecast = Forecast::of(&[], Some(&first), &settings(&[]));
        assert_eq!(forecast.sentence(), "would start and create the slot");
    }
}
