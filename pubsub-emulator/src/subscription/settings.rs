//! The settings of a subscription: checks them, fills in defaults, applies updates, and refuses
//! features that the emulator lacks.
//!
//! A refusal names the field. The limits and defaults are those of the service:
//! <https://cloud.google.com/pubsub/docs/subscription-properties>.

use std::ops::RangeInclusive;

use prost_types::Duration;
use tonic::Status;

use crate::filter::Filter;
use crate::names::{self, Kind};
use crate::proto::{self, ExpirationPolicy};
use crate::registry::unsupported_field;

/// The allowed ack deadlines of a subscription or a stream.
pub(crate) const ACK_DEADLINE_SECONDS: RangeInclusive<i32> = 10..=600;
/// The deadlines that a client may set for a message that it holds.
const MODIFIED_DEADLINE_SECONDS: RangeInclusive<i32> = 0..=600;
const DEFAULT_ACK_DEADLINE_SECONDS: i32 = 10;
const DAY_SECONDS: i64 = 24 * 60 * 60;
const DEFAULT_RETENTION: Duration = Duration {
    seconds: 7 * DAY_SECONDS,
    nanos: 0,
};
const DEFAULT_EXPIRATION: Duration = Duration {
    seconds: 31 * DAY_SECONDS,
    nanos: 0,
};

/// The fields that an update may name.
pub(crate) const MUTABLE_FIELDS: &[&str] = &[
    "ack_deadline_seconds",
    "labels",
    "message_retention_duration",
    "expiration_policy",
];

/// Checks the settings of a new subscription and fills in the defaults.
pub(super) fn accept(
    mut resource: proto::Subscription,
) -> Result<(proto::Subscription, Option<Filter>), Status> {
    names::check(Kind::Subscription, &resource.name)?;
    names::check(Kind::Topic, &resource.topic)?;
    refuse_features(&resource)?;
    if resource.ack_deadline_seconds == 0 {
        resource.ack_deadline_seconds = DEFAULT_ACK_DEADLINE_SECONDS;
    }
    check_deadline(resource.ack_deadline_seconds, &ACK_DEADLINE_SECONDS)?;
    let filter = Filter::parse(&resource.filter).map_err(|error| {
        Status::invalid_argument(format!("The filter in the request is invalid: {error}."))
    })?;
    resource.push_config = Some(proto::PushConfig::default());
    resource
        .message_retention_duration
        .get_or_insert(DEFAULT_RETENTION);
    let expiration = ExpirationPolicy {
        ttl: Some(DEFAULT_EXPIRATION),
    };
    resource.expiration_policy.get_or_insert(expiration);
    resource.state = proto::subscription::State::Active.into();
    Ok((resource, filter))
}

/// Sets the fields that an update mask names. The caller must have checked the mask.
pub(super) fn update(
    resource: &mut proto::Subscription,
    wanted: &proto::Subscription,
    paths: &[String],
) -> Result<(), Status> {
    for path in paths {
        match path.as_str() {
            "ack_deadline_seconds" => {
                check_deadline(wanted.ack_deadline_seconds, &ACK_DEADLINE_SECONDS)?;
                resource.ack_deadline_seconds = wanted.ack_deadline_seconds;
            }
            "labels" => resource.labels.clone_from(&wanted.labels),
            "message_retention_duration" => {
                resource.message_retention_duration = wanted.message_retention_duration;
            }
            _expiration_policy => resource.expiration_policy = wanted.expiration_policy,
        }
    }
    Ok(())
}

/// Checks a new ack deadline for a message that a client holds.
pub(super) fn check_modified_deadline(seconds: i32) -> Result<(), Status> {
    check_deadline(seconds, &MODIFIED_DEADLINE_SECONDS)
}

fn check_deadline(seconds: i32, bounds: &RangeInclusive<i32>) -> Result<(), Status> {
    let (what, bound, extreme) = if seconds < *bounds.start() {
        ("small", "minimum", bounds.start())
    } else if seconds > *bounds.end() {
        ("large", "maximum", bounds.end())
    } else {
        return Ok(());
    };
    Err(Status::invalid_argument(format!(
        "Invalid ack deadline given: The value for ack_deadline_seconds is too {what}. You passed \
         {seconds} in the request, but the {bound} value is {extreme}."
    )))
}

fn refuse_features(resource: &proto::Subscription) -> Result<(), Status> {
    let pushes = resource
        .push_config
        .as_ref()
        .is_some_and(|push| *push != proto::PushConfig::default());
    let unsupported = [
        (pushes, "push_config"),
        (resource.bigquery_config.is_some(), "bigquery_config"),
        (resource.bigtable_config.is_some(), "bigtable_config"),
        (
            resource.cloud_storage_config.is_some(),
            "cloud_storage_config",
        ),
        (resource.dead_letter_policy.is_some(), "dead_letter_policy"),
        (resource.retry_policy.is_some(), "retry_policy"),
        (resource.retain_acked_messages, "retain_acked_messages"),
        (
            resource.enable_exactly_once_delivery,
            "enable_exactly_once_delivery",
        ),
        (
            !resource.message_transforms.is_empty(),
            "message_transforms",
        ),
    ];
    match unsupported.iter().find(|(used, _)| *used) {
        Some((_, field)) => Err(unsupported_field(field)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn resource() -> proto::Subscription {
        proto::Subscription {
            name: "projects/p/subscriptions/audit".to_owned(),
            topic: "projects/p/topics/orders".to_owned(),
            ..Default::default()
        }
    }

    #[test]
    fn defaults_are_those_of_the_service() {
        let (accepted, filter) = accept(resource()).expect("valid");
        assert_eq!(accepted.ack_deadline_seconds, 10);
        assert_eq!(accepted.message_retention_duration, Some(DEFAULT_RETENTION));
        assert_eq!(filter, None);
    }

    #[test]
    fn ack_deadlines_are_between_ten_seconds_and_ten_minutes() {
        for (seconds, valid) in [
            (9, false),
            (10, true),
            (600, true),
            (601, false),
            (-1, false),
        ] {
            let result = accept(proto::Subscription {
                ack_deadline_seconds: seconds,
                ..resource()
            });
            assert_eq!(result.is_ok(), valid, "{seconds}");
        }
    }

    #[test]
    fn a_bad_filter_is_refused() {
        let filter = "attributes = 1".to_owned();
        let status = accept(proto::Subscription {
            filter,
            ..resource()
        })
        .expect_err("invalid");
        assert_eq!(status.code(), Code::InvalidArgument);
    }

    #[test]
    fn unsupported_features_are_refused_by_name() {
        let wanted = proto::Subscription {
            enable_exactly_once_delivery: true,
            ..resource()
        };
        let status = accept(wanted).expect_err("unsupported");
        assert_eq!(status.code(), Code::Unimplemented);
        assert!(status.message().contains("enable_exactly_once_delivery"));
    }
}
