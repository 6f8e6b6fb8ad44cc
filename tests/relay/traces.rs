//! Tests the spans of events that an OpenTelemetry collector receives over HTTP.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::routing::post;
use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::PubsubMessage;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::trace::v1::{Span, status::StatusCode};
use prost::Message;
use pubsub_emulator::{Action, Fault};
use tokio::net::TcpListener;
use tonic::Code;

use crate::harness::{self, Database, Relay, eventually, insert_orders};
use crate::http::{free_addr, metric};
use crate::mapping::{Subscriber, attributes};

const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// An OpenTelemetry collector that keeps all requests.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

impl Collector {
    /// Starts the collector. Returns its URL, for the setting [`ENDPOINT`].
    async fn start(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/v1/traces", listener.local_addr().unwrap());
        let requests = self.0.clone();
        let take = move |body: Bytes| async move {
            let request = ExportTraceServiceRequest::decode(body).unwrap();
            requests.lock().unwrap().push(request);
            Vec::<u8>::new()
        };
        let app = Router::new().route("/v1/traces", post(take));
        tokio::spawn(async move { axum::serve(listener, app).await });
        url
    }

    fn spans(&self) -> Vec<Span> {
        let requests = self.0.lock().unwrap();
        let scopes = requests
            .iter()
            .flat_map(|request| &request.resource_spans)
            .flat_map(|resource| &resource.scope_spans);
        scopes.flat_map(|scope| scope.spans.clone()).collect()
    }

    async fn wait_for_spans(&self, count: usize) -> Vec<Span> {
        eventually("the spans arrive", || async {
            Some(self.spans()).filter(|spans| spans.len() >= count)
        })
        .await
    }
}

fn text(attributes: &[KeyValue], key: &str) -> String {
    let found = attributes.iter().find(|attribute| attribute.key == key);
    let value = found.and_then(|found| found.value.clone()?.value);
    match value {
        Some(any_value::Value::StringValue(text)) => text,
        other => panic!("{key}: {other:?}"),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Inserts an event that belongs to the trace [`TRACE`]. `flags` is `01` if the trace is sampled.
async fn insert_traced(database: &Database, id: &str, key: &str, flags: &str) {
    let sql = format!(
        "insert into outbox.events (id, aggregatetype, aggregateid, event_type, payload, headers)
         values ('{id}', 'order', '{key}', 'Placed', '{{}}',
             '{{\"traceparent\": \"00-{TRACE}-{PARENT}-{flags}\", \"tracestate\": \"a=1\"}}')"
    );
    database.execute(&sql).await;
}

/// Inserts events with a `traceparent` that the W3C specification does not allow.
async fn insert_with_a_wrong_context(database: &Database) {
    let nothing = "0".repeat(32);
    for wrong in [
        format!("00-{nothing}-{PARENT}-01"),
        format!("00-{TRACE}-0000000000000000-01"),
        format!("ff-{TRACE}-{PARENT}-01"),
        format!("00-{TRACE}-{PARENT}"),
        "01".to_owned(),
        String::new(),
    ] {
        let sql = format!(
            "insert into outbox.events (aggregatetype, aggregateid, event_type, payload, headers)
             values ('order', 'good', 'Placed', '{{}}', '{{\"traceparent\": \"{wrong}\"}}')"
        );
        database.execute(&sql).await;
    }
}

/// Inserts an event whose trace context is in the column of Debezium, as Debezium writes it.
async fn insert_traced_for_debezium(database: &Database, id: &str) {
    let sql = format!(
        "insert into outbox.events (id, aggregatetype, aggregateid, event_type, payload, tracingspancontext)
         values ('{id}', 'order', 'good', 'Placed', '{{}}',
             E'#Wed Nov 25 10:00:00 UTC 2026\ntraceparent=00-{TRACE}-{PARENT}-01\ntracestate=a\\\\=1\n')"
    );
    database.execute(&sql).await;
}

/// Checks that the message of the event belongs to the trace [`TRACE`].
fn assert_message_is_traced(messages: &[PubsubMessage], id: &str) {
    let is_wanted = |message: &&PubsubMessage| attributes(message)["event_id"] == id;
    let attributes = attributes(messages.iter().find(is_wanted).unwrap());
    let parent = format!("00-{TRACE}-{PARENT}-01");
    assert_eq!(attributes["traceparent"], parent);
    assert_eq!(attributes["tracestate"], "a=1");
    assert!(!attributes.contains_key("tracingspancontext"));
}

const SAMPLED: &str = "5a246b35-2bea-4931-9cfc-3e071ccb09c0";
const NOT_SAMPLED: &str = "5a246b35-2bea-4931-9cfc-3e071ccb09c1";
const REFUSED: &str = "5a246b35-2bea-4931-9cfc-3e071ccb09c2";
const OF_DEBEZIUM: &str = "5a246b35-2bea-4931-9cfc-3e071ccb09c3";

#[tokio::test(flavor = "multi_thread")]
async fn each_event_of_a_sampled_trace_gets_one_span_and_others_get_none() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let collector = Collector::default();
    let url = collector.start().await;
    let settings = [
        (ENDPOINT, url.as_str()),
        ("OTEL_BSP_SCHEDULE_DELAY", "100"),
        (
            "OTEL_RESOURCE_ATTRIBUTES",
            "deployment.environment.name=test",
        ),
    ];
    let refusal = Fault::new(Action::Fail(Code::InvalidArgument)).on_ordering_key("bad");
    emulator.faults().inject(refusal);
    let mut orders = Subscriber::new(&emulator, "order.events").await;
    let column = "alter table outbox.events add column tracingspancontext text";
    database.execute(column).await;
    let relay = Relay::start_with(&database, &emulator.addr().to_string(), &settings);
    insert_orders(&database, 20, 3).await;
    insert_traced(&database, NOT_SAMPLED, "good", "00").await;
    insert_with_a_wrong_context(&database).await;
    insert_traced(&database, SAMPLED, "good", "01").await;
    insert_traced_for_debezium(&database, OF_DEBEZIUM).await;
    insert_traced(&database, REFUSED, "bad", "01").await;

    let spans = collector.wait_for_spans(3).await;
    let of_event = |id: &str| {
        let mut found = spans
            .iter()
            .filter(|span| text(&span.attributes, "postrider.event_id") == id);
        (found.next().unwrap(), found.count())
    };
    // Twenty orders, one event that is not sampled, six with a wrong context, and two with a good one.
    let messages = orders.take(29).await;
    for id in [SAMPLED, OF_DEBEZIUM] {
        let (span, more) = of_event(id);
        assert_eq!(more, 0, "{spans:?}");
        assert_eq!(hex(&span.trace_id), TRACE);
        assert_eq!(hex(&span.parent_span_id), PARENT);
        assert_eq!(span.trace_state, "a=1");
        assert_message_is_traced(&messages, id);
    }
    let (span, _) = of_event(SAMPLED);
    assert_eq!(span.name, "send order.events");
    let topic = text(&span.attributes, "messaging.destination.name");
    assert_eq!(topic, "order.events");
    let key = "messaging.gcp_pubsub.message.ordering_key";
    assert_eq!(text(&span.attributes, key), "good");
    assert!(
        span.start_time_unix_nano < span.end_time_unix_nano,
        "{span:?}"
    );
    database.wait_until_recorded().await;
    let recorded = format!("select message_id from outbox.dispatch where event_id = '{SAMPLED}'");
    let message_id = text(&span.attributes, "messaging.message.id");
    assert_eq!(message_id, database.text(&recorded).await);

    let (span, _) = of_event(REFUSED);
    assert_eq!(text(&span.attributes, "error.type"), "event-refused");
    let code = span.status.as_ref().map(|status| status.code);
    assert_eq!(code, Some(StatusCode::Error as i32));

    let resource = collector.0.lock().unwrap()[0].resource_spans[0]
        .resource
        .clone();
    let resource = resource.unwrap().attributes;
    assert_eq!(text(&resource, "service.name"), "postrider");
    assert_eq!(text(&resource, "deployment.environment.name"), "test");
    relay.stop().await;
    assert_eq!(collector.spans().len(), 3, "no span of other events");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_is_away_costs_spans_and_nothing_else() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let (away, addr) = (free_addr(), free_addr());
    let settings = [
        (ENDPOINT, &*format!("http://user:hunter2@{away}/v1/traces")),
        ("OTEL_BSP_SCHEDULE_DELAY", "50"),
        ("POSTRIDER_HTTP_ADDR", &addr),
    ];
    let relay = Relay::start_with(&database, &emulator.addr().to_string(), &settings);
    for (id, count) in [(SAMPLED, 1.0), (REFUSED, 2.0)] {
        insert_traced(&database, id, "k", "01").await;
        eventually("the span fails", || async {
            let failed = metric(&addr, "postrider_trace_spans_total \"failed\"").await;
            failed.filter(|failed| *failed == count)
        })
        .await;
    }
    database.wait_until_recorded().await;
    let log = relay.log();
    assert_eq!(log.matches("cannot send spans").count(), 1, "{log}");
    assert!(log.contains("traces-not-sent"), "{log}");
    assert!(!log.contains("hunter2"), "{log}");
    relay.stop().await;
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_never_answers_delays_the_end_by_seconds_and_delivery_not_at_all() {
    let database = Database::start().await;
    let emulator = harness::emulator().await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1/traces", silent.local_addr().unwrap());
    let settings = [(ENDPOINT, url.as_str()), ("OTEL_BSP_SCHEDULE_DELAY", "50")];
    let relay = Relay::start_with(&database, &emulator.addr().to_string(), &settings);
    insert_traced(&database, SAMPLED, "k", "01").await;
    let _connection = silent.accept().await.unwrap();
    insert_orders(&database, 3_000, 7).await;
    insert_traced(&database, REFUSED, "k", "01").await;
    database.wait_until_recorded().await;
    let began = Instant::now();
    relay.stop().await;
    assert!(began.elapsed() < Duration::from_secs(6), "{began:?}");
    let report = harness::check(&database, &emulator).await;
    assert!(report.is_clean(), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_is_no_url_is_refused_at_the_start() {
    let database = Database::start().await;
    for wrong in ["collector:4318", "grpc://localhost:4317", "/v1/traces"] {
        let settings = [(ENDPOINT, wrong)];
        let relay = Relay::start_with(&database, "127.0.0.1:1", &settings);
        relay.wait_for_error("setting-invalid").await;
        let log = relay.log();
        assert!(log.contains("http://localhost:4318/v1/traces"), "{log}");
    }
}
