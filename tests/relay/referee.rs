//! Runs Google's own Pub/Sub emulator, if its jar is installed, behind a proxy that can cut the
//! relay's connections. A subscriber keeps all messages that it receives.
//!
//! Google's emulator has no journal and can inject no faults, so the tests can only judge the delivered
//! messages.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use fault_proxy::{FaultProxy, Target};
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::publisher_client::PublisherClient;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::schema_service_client::SchemaServiceClient;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::subscriber_client::SubscriberClient;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::{
    AcknowledgeRequest, CreateSchemaRequest, DeleteTopicRequest, Encoding,
    ListSubscriptionsRequest, PubsubMessage, PullRequest, Schema, SchemaSettings, Subscription,
    Topic, UpdateTopicRequest, schema,
};
use tonic::transport::Channel;

use crate::harness::{self, Database, PATIENCE, Relay};
use crate::http::free_addr;

/// The emulator's process. Tests that run at the same time share this process, and it ends with the
/// last of these tests.
#[derive(Debug)]
struct GoogleEmulator {
    child: Child,
    host: String,
}

impl GoogleEmulator {
    fn shared() -> Option<Arc<Self>> {
        static RUNNING: Mutex<Weak<GoogleEmulator>> = Mutex::new(Weak::new());
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(emulator) = running.upgrade() {
            return Some(emulator);
        }
        let emulator = Arc::new(Self::start()?);
        *running = Arc::downgrade(&emulator);
        Some(emulator)
    }

    fn start() -> Option<Self> {
        let files = Command::new("dpkg")
            .args(["-L", "google-cloud-cli-pubsub-emulator"])
            .output();
        let files = String::from_utf8(files.ok()?.stdout).ok()?;
        let jar = files
            .lines()
            .find(|file| file.ends_with("-all.jar"))?
            .to_owned();
        let host = free_addr();
        let (_, port) = host.split_once(':')?;
        let child = Command::new("java")
            .args(["-jar", &jar, "--host=127.0.0.1", &format!("--port={port}")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        Some(Self { child, host })
    }
}

impl Drop for GoogleEmulator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A project on Google's emulator, with the topic `order.events` and an ordered subscription to it.
pub(crate) struct Referee {
    /// The proxy between the relay and the emulator.
    pub(crate) proxy: FaultProxy,
    publisher: PublisherClient<Channel>,
    subscriber: SubscriberClient<Channel>,
    schemas: SchemaServiceClient<Channel>,
    project: String,
    /// The messages received so far, per topic and ordering key, in the order of delivery.
    received: BTreeMap<(String, String), Vec<PubsubMessage>>,
    _emulator: Arc<GoogleEmulator>,
}

impl Referee {
    /// Creates a project on the emulator. Returns `None` if the emulator is not installed.
    pub(crate) async fn start() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let Some(emulator) = GoogleEmulator::shared() else {
            eprintln!("SKIPPED: Google's Pub/Sub emulator (or Java) is not installed");
            return None;
        };
        let channel = harness::channel(&emulator.host).await;
        let proxy = FaultProxy::start(Target::tcp(emulator.host.clone())).await;
        let mut referee = Self {
            proxy: proxy.unwrap(),
            publisher: PublisherClient::new(channel.clone()),
            subscriber: SubscriberClient::new(channel.clone()),
            schemas: SchemaServiceClient::new(channel),
            project: format!("demo-{}", COUNT.fetch_add(1, Ordering::Relaxed)),
            received: BTreeMap::new(),
            _emulator: emulator,
        };
        referee.create_topic("order.events").await;
        referee.subscribe("order.events").await;
        Some(referee)
    }

    /// Starts a relay that publishes through the proxy.
    pub(crate) fn relay(&self, database: &Database, more: &[(&str, &str)]) -> Relay {
        let more = [&[("PUBSUB_PROJECT_ID", self.project.as_str())], more].concat();
        Relay::start_with(database, &self.proxy.addr().to_string(), &more)
    }

    pub(crate) async fn create_topic(&mut self, topic: &str) {
        let topic = Topic {
            name: format!("projects/{}/topics/{topic}", self.project),
            ..Topic::default()
        };
        self.publisher.create_topic(topic).await.unwrap();
    }

    pub(crate) async fn delete_topic(&mut self, topic: &str) {
        let request = DeleteTopicRequest {
            topic: format!("projects/{}/topics/{topic}", self.project),
        };
        self.publisher.delete_topic(request).await.unwrap();
    }

    /// Attaches a schema to the topic `order.events`, so that the topic accepts only payloads like `{"n":
    /// 1}`, or detaches the schema.
    pub(crate) async fn require_a_number(&mut self, required: bool) {
        let schema = format!("projects/{}/schemas/order", self.project);
        if required {
            let definition = r#"{"type": "record", "name": "Order",
                                 "fields": [{"name": "n", "type": "int"}]}"#;
            let request = CreateSchemaRequest {
                parent: format!("projects/{}", self.project),
                schema_id: "order".into(),
                schema: Some(Schema {
                    r#type: schema::Type::Avro.into(),
                    definition: definition.into(),
                    ..Schema::default()
                }),
            };
            self.schemas.create_schema(request).await.unwrap();
        }
        let settings = SchemaSettings {
            schema,
            encoding: Encoding::Json.into(),
            ..SchemaSettings::default()
        };
        let request = UpdateTopicRequest {
            topic: Some(Topic {
                name: format!("projects/{}/topics/order.events", self.project),
                schema_settings: required.then_some(settings),
                ..Topic::default()
            }),
            update_mask: Some(prost_types::FieldMask {
                paths: vec!["schema_settings".into()],
            }),
        };
        self.publisher.update_topic(request).await.unwrap();
    }

    /// Creates a subscription to `topic`, which gets the messages that are published from now on.
    pub(crate) async fn subscribe(&mut self, topic: &str) {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let subscription = Subscription {
            name: format!("projects/{}/subscriptions/s{count}.{topic}", self.project),
            topic: format!("projects/{}/topics/{topic}", self.project),
            enable_message_ordering: true,
            ack_deadline_seconds: 60,
            ..Subscription::default()
        };
        let subscriber = &mut self.subscriber;
        subscriber.create_subscription(subscription).await.unwrap();
    }

    /// Pulls once from each subscription. With `waits`, each pull waits for a message. Returns the
    /// number of received messages.
    async fn pull(&mut self, waits: bool) -> usize {
        let list = ListSubscriptionsRequest {
            project: format!("projects/{}", self.project),
            ..ListSubscriptionsRequest::default()
        };
        let listed = self.subscriber.list_subscriptions(list).await.unwrap();
        let subscriptions = listed.into_inner().subscriptions;
        // Skip a subscription whose topic is deleted: it gets no messages, and a pull from it takes 90
        // seconds.
        let open = |subscription: &Subscription| subscription.topic != "_deleted-topic_";
        let mut count = 0;
        for subscription in subscriptions.into_iter().filter(open) {
            #[expect(deprecated, reason = "an empty answer is asked for on purpose")]
            let request = PullRequest {
                subscription: subscription.name.clone(),
                max_messages: 1_000,
                return_immediately: !waits,
            };
            let answer = self.subscriber.pull(request).await.unwrap().into_inner();
            let received = answer.received_messages;
            if received.is_empty() {
                continue;
            }
            count += received.len();
            let ack = AcknowledgeRequest {
                subscription: subscription.name,
                ack_ids: received.iter().map(|m| m.ack_id.clone()).collect(),
            };
            self.subscriber.acknowledge(ack).await.unwrap();
            for message in received.into_iter().filter_map(|m| m.message) {
                let stream = (subscription.topic.clone(), message.ordering_key.clone());
                self.received.entry(stream).or_default().push(message);
            }
        }
        count
    }

    /// Pulls until every event that is `published` in the database has been received. Then pulls
    /// until three pulls in a row return no message, to receive unexpected messages too.
    pub(crate) async fn receive(&mut self, database: &Database, relay: &Relay) {
        let mut missing: BTreeSet<String> =
            published(database).await.into_values().flatten().collect();
        let deadline = Instant::now() + PATIENCE;
        loop {
            for message in self.received.values().flatten() {
                missing.remove(&message.attributes["event_id"]);
            }
            if missing.is_empty() {
                break;
            }
            let log = relay.log();
            assert!(Instant::now() < deadline, "missing: {missing:?}\n{log}");
            self.pull(true).await;
        }
        let mut empty = 0;
        while empty < 3 {
            let is_empty = self.pull(false).await == 0;
            empty = if is_empty { empty + 1 } else { 0 };
        }
    }

    /// Checks that every published event was delivered, and that the first copies of the events of each
    /// key were delivered in commit order.
    pub(crate) async fn assert_all_came_in_order(&mut self, database: &Database, relay: &Relay) {
        self.receive(database, relay).await;
        self.assert_order(database, relay, true).await;
    }

    /// Like `assert_all_came_in_order`, and also checks that no event was delivered twice.
    pub(crate) async fn assert_all_came_once_in_order(
        &mut self,
        database: &Database,
        relay: &Relay,
    ) {
        self.receive(database, relay).await;
        self.assert_order(database, relay, false).await;
    }

    async fn assert_order(&self, database: &Database, relay: &Relay, repeats: bool) {
        let expected = published(database).await;
        let streams = self.received.iter().map(|(stream, messages)| {
            let mut first = BTreeSet::new();
            let ids = messages.iter().map(|m| m.attributes["event_id"].clone());
            let ids = ids.filter(|id| first.insert(id.clone()) || !repeats);
            (stream.clone(), ids.collect::<Vec<String>>())
        });
        let streams: BTreeMap<(String, String), Vec<String>> = streams.collect();
        let log = relay.log();
        assert_eq!(streams, expected, "\n{log}");
    }

    /// The received messages of the topic `order.events` with the ordering key `key`, in the order of
    /// delivery.
    pub(crate) fn messages(&self, key: &str) -> &[PubsubMessage] {
        let topic = format!("projects/{}/topics/order.events", self.project);
        &self.received[&(topic, key.to_owned())]
    }
}

/// The ids of published events per topic and key, in insertion order. This is commit order, because
/// tests write from one session at a time.
async fn published(database: &Database) -> BTreeMap<(String, String), Vec<String>> {
    let rows = database
        .client
        .query(
            "SELECT d.topic, coalesce(d.ordering_key, ''), e.id::text \
             FROM outbox.events e JOIN outbox.dispatch d ON d.event_id = e.id \
             WHERE d.state = 'published' ORDER BY e.occurred_at, e.version",
            &[],
        )
        .await
        .unwrap();
    let mut published = BTreeMap::new();
    for row in rows {
        let ids: &mut Vec<String> = published.entry((row.get(0), row.get(1))).or_default();
        ids.push(row.get(2));
    }
    published
}
