//! Generates the gRPC server traits of `google.pubsub.v1` and `google.iam.v1` from the lists below.
//!
//! The published crate `googleapis-tonic-google-pubsub-v1` contains the message types and clients, but no
//! server traits. Because the methods are listed here by hand, the build needs neither `protoc` nor a copy
//! of the proto files. `Publish`, `Pull` and `StreamingPull` use the types of `src/wire.rs`, which leave
//! messages encoded.

use tonic_build::manual::{Builder, Method, Service};

/// One unary method: Rust name, name on the wire, request type, response type.
type Unary = (&'static str, &'static str, &'static str, &'static str);

const PUBLISHER: &[Unary] = &[
    (
        "create_topic",
        "CreateTopic",
        "proto::Topic",
        "proto::Topic",
    ),
    (
        "update_topic",
        "UpdateTopic",
        "proto::UpdateTopicRequest",
        "proto::Topic",
    ),
    (
        "publish",
        "Publish",
        "wire::PublishRequest",
        "proto::PublishResponse",
    ),
    (
        "get_topic",
        "GetTopic",
        "proto::GetTopicRequest",
        "proto::Topic",
    ),
    (
        "list_topics",
        "ListTopics",
        "proto::ListTopicsRequest",
        "proto::ListTopicsResponse",
    ),
    (
        "list_topic_subscriptions",
        "ListTopicSubscriptions",
        "proto::ListTopicSubscriptionsRequest",
        "proto::ListTopicSubscriptionsResponse",
    ),
    (
        "delete_topic",
        "DeleteTopic",
        "proto::DeleteTopicRequest",
        "wire::Empty",
    ),
    (
        "detach_subscription",
        "DetachSubscription",
        "proto::DetachSubscriptionRequest",
        "proto::DetachSubscriptionResponse",
    ),
];

const SUBSCRIBER: &[Unary] = &[
    (
        "create_subscription",
        "CreateSubscription",
        "proto::Subscription",
        "proto::Subscription",
    ),
    (
        "get_subscription",
        "GetSubscription",
        "proto::GetSubscriptionRequest",
        "proto::Subscription",
    ),
    (
        "update_subscription",
        "UpdateSubscription",
        "proto::UpdateSubscriptionRequest",
        "proto::Subscription",
    ),
    (
        "list_subscriptions",
        "ListSubscriptions",
        "proto::ListSubscriptionsRequest",
        "proto::ListSubscriptionsResponse",
    ),
    (
        "delete_subscription",
        "DeleteSubscription",
        "proto::DeleteSubscriptionRequest",
        "wire::Empty",
    ),
    (
        "modify_ack_deadline",
        "ModifyAckDeadline",
        "proto::ModifyAckDeadlineRequest",
        "wire::Empty",
    ),
    (
        "acknowledge",
        "Acknowledge",
        "proto::AcknowledgeRequest",
        "wire::Empty",
    ),
    ("pull", "Pull", "proto::PullRequest", "wire::PullResponse"),
    (
        "modify_push_config",
        "ModifyPushConfig",
        "proto::ModifyPushConfigRequest",
        "wire::Empty",
    ),
    ("seek", "Seek", "proto::SeekRequest", "proto::SeekResponse"),
];

const IAM_POLICY: &[Unary] = &[(
    "test_iam_permissions",
    "TestIamPermissions",
    "wire::TestIamPermissionsRequest",
    "wire::TestIamPermissionsResponse",
)];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let publisher = service("google.pubsub.v1", "Publisher", PUBLISHER).build();
    let iam_policy = service("google.iam.v1", "IAMPolicy", IAM_POLICY).build();
    let streaming_pull = Method::builder()
        .name("streaming_pull")
        .route_name("StreamingPull")
        .input_type("crate::proto::StreamingPullRequest")
        .output_type("crate::wire::StreamingPullResponse")
        .codec_path("tonic_prost::ProstCodec")
        .client_streaming()
        .server_streaming()
        .build();
    let subscriber = service("google.pubsub.v1", "Subscriber", SUBSCRIBER)
        .method(streaming_pull)
        .build();
    Builder::new()
        .build_client(false)
        .compile(&[publisher, subscriber, iam_policy]);
}

fn service(package: &str, name: &str, methods: &[Unary]) -> tonic_build::manual::ServiceBuilder {
    let described = Service::builder().package(package).name(name);
    methods
        .iter()
        .fold(described, |service, (rust_name, route, input, output)| {
            service.method(
                Method::builder()
                    .name(*rust_name)
                    .route_name(*route)
                    .input_type(format!("crate::{input}"))
                    .output_type(format!("crate::{output}"))
                    .codec_path("tonic_prost::ProstCodec")
                    .build(),
            )
        })
}
