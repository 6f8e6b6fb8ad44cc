//! Exports a span for each event of a sampled trace, from the commit until Pub/Sub has stored the message
//! or the event is set aside.
//!
//! The producer's trace context is in the attributes of the message, so consumers can continue the producer's
//! trace even if the relay exports no spans. If OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set, the relay adds its
//! own span to that trace. An event gets no span if it has no trace context, or if its trace is not sampled.
//!
//! The OpenTelemetry SDK batches and sends spans on its own thread, from a bounded queue. If the collector is
//! unavailable or too slow, the queue fills up and the SDK drops spans. Delivery never waits for the
//! collector. The metrics count the spans that were started, exported, or failed to export, but not the spans
//! that the SDK dropped from a full queue.
//!
//! Not here: the message attributes (`mapping`), and metrics of latency and lag (`metrics`).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use googleapis_tonic_google_pubsub_v1::google::pubsub::v1::PubsubMessage;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Span, SpanKind, Status, TraceContextExt, Tracer, TracerProvider};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider, SpanData, SpanExporter};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prost::Message;
use publisher::MessageIds;

use crate::build_info;
use crate::error::{Code, Error, Result};
use crate::event::{Event, EventRef};
use crate::metrics::{KindLabel, Metrics};
use crate::throttled_log::ThrottledLog;

/// Maximum time for sending the last spans when the relay stops.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(3);

/// The exporter of spans. It does nothing unless a collector is configured.
#[derive(Debug, Clone, Default)]
pub struct Traces(Option<Arc<Exporting>>);

#[derive(Debug)]
struct Exporting {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    spans: Family<KindLabel, Counter>,
}

/// The topic and ordering key of an event, for the attributes of its span.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Destination<'a> {
    /// Full name of the topic.
    pub(crate) topic: &'a str,
    /// The ordering key; empty if there is none.
    pub(crate) ordering_key: &'a str,
}

impl Traces {
    /// Starts the thread that sends spans to this URL, without connecting yet. Exports nothing if `endpoint`
    /// is `None`.
    ///
    /// # Errors
    /// `setting-invalid` if an environment variable of OpenTelemetry has a value that cannot be used.
    pub fn start(endpoint: Option<&str>, metrics: &Metrics) -> Result<Self> {
        let Some(endpoint) = endpoint else {
            return Ok(Self::default());
        };
        let otlp = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_endpoint(endpoint)
            .build()
            .map_err(|e| {
                Error::new(Code::SettingInvalid, "cannot export spans")
                    .caused_by(e)
                    .hint("correct the environment variables OTEL_EXPORTER_OTLP_*")
            })?;
        let exporter = CountingExporter {
            inner: otlp,
            spans: metrics.trace_spans.clone(),
            log: Mutex::default(),
        };
        let version = KeyValue::new("service.version", build_info::VERSION);
        let mut resource = Resource::builder().with_attribute(version);
        if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
            resource = resource.with_service_name("postrider");
        }
        let provider = SdkTracerProvider::builder()
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::AlwaysOff)))
            .with_resource(resource.build())
            .with_batch_exporter(exporter)
            .build();
        Ok(Self(Some(Arc::new(Exporting {
            tracer: provider.tracer("postrider"),
            provider,
            spans: metrics.trace_spans.clone(),
        }))))
    }

    /// Adds the spans of published events. `at` is the time of Pub/Sub's answer. Like the commit times, `at`
    /// is measured by PostgreSQL's clock.
    pub(crate) fn published(
        &self,
        to: Destination<'_>,
        events: &[Event],
        message_ids: &MessageIds,
        at: SystemTime,
    ) {
        let Some(exporting) = &self.0 else { return };
        for (n, event) in events.iter().enumerate() {
            let message = PubsubMessage::decode(event.message.clone()).unwrap_or_default();
            let message_id = message_ids.get(n).unwrap_or_default().to_owned();
            let Some(mut span) = exporting.span(to, &event.origin, &message) else {
                continue;
            };
            span.set_attribute(KeyValue::new("messaging.message.id", message_id));
            span.end_with_timestamp(at);
        }
    }

    /// Adds the span of an event that goes to quarantine, with the code of its error.
    pub(crate) fn set_aside(
        &self,
        to: Destination<'_>,
        event: &EventRef,
        message: &PubsubMessage,
        code: Code,
        at: SystemTime,
    ) {
        let Some(exporting) = &self.0 else { return };
        if let Some(mut span) = exporting.span(to, event, message) {
            span.set_attribute(KeyValue::new("error.type", code.name()));
            span.set_status(Status::error("the event is in quarantine"));
            span.end_with_timestamp(at);
        }
    }

    /// Sends the remaining spans, for at most three seconds.
    pub async fn finish(self) {
        if let Some(exporting) = self.0 {
            let provider = exporting.provider.clone();
            let ending = move || provider.shutdown_with_timeout(SHUTDOWN_LIMIT);
            if !matches!(tokio::task::spawn_blocking(ending).await, Ok(Ok(()))) {
                let code = Code::TracesNotSent;
                tracing::warn!(%code, hint = code.hint(), "the last spans were not sent");
            }
        }
    }
}

impl Exporting {
    /// Returns a span in the trace of the message, or `None` if the message has no trace, or its trace is
    /// not sampled.
    fn span(
        &self,
        to: Destination<'_>,
        event: &EventRef,
        message: &PubsubMessage,
    ) -> Option<impl Span> {
        let parent = TraceContextPropagator::new()
            .extract_with_context(&Context::new(), &message.attributes);
        if !parent.span().span_context().is_sampled() {
            return None;
        }
        self.spans
            .get_or_create(&KindLabel { kind: "started" })
            .inc();
        let topic = to.topic.rsplit('/').next().unwrap_or(to.topic);
        let started = event.commit_time.to_system_time();
        // The names follow OpenTelemetry's conventions for messaging and Pub/Sub.
        let attributes = [
            KeyValue::new("messaging.system", "gcp_pubsub"),
            KeyValue::new("messaging.operation.type", "send"),
            KeyValue::new("messaging.operation.name", "send"),
            KeyValue::new("messaging.destination.name", topic.to_owned()),
            KeyValue::new(
                "messaging.gcp_pubsub.message.ordering_key",
                to.ordering_key.to_owned(),
            ),
            KeyValue::new("postrider.event_id", event.event_id.shown().to_string()),
            KeyValue::new(
                "postrider.failed_attempts",
                i64::from(event.failed_attempts),
            ),
        ];
        let builder = self
            .tracer
            .span_builder(format!("send {topic}"))
            .with_kind(SpanKind::Producer)
            .with_attributes(attributes)
            .with_start_time(started.unwrap_or_else(SystemTime::now));
        Some(self.tracer.build_with_context(builder, &parent))
    }
}

/// Counts exported and failed spans. Logs at most one failure every ten seconds, because one log line per failed
/// batch would be too many.
#[derive(Debug)]
struct CountingExporter<E> {
    inner: E,
    spans: Family<KindLabel, Counter>,
    log: Mutex<ThrottledLog>,
}

impl<E: SpanExporter> SpanExporter for CountingExporter<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let count = batch.len() as u64;
        let exported = self.inner.export(batch).await;
        let kind = if exported.is_ok() {
            "exported"
        } else {
            "failed"
        };
        self.spans.get_or_create(&KindLabel { kind }).inc_by(count);
        if let Err(error) = &exported {
            let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
            let code = Code::TracesNotSent;
            if let Some(since_last) = log.due(code) {
                tracing::warn!(
                    %code, hint = code.hint(), spans = count, since_last,
                    "cannot send spans: {error}"
                );
            }
        }
        exported
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}
