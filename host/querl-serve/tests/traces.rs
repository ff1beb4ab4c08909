//! Traces of the rewriting service, sent to a fake OTLP collector. A single test, because environment variables belong to the process.
#![allow(clippy::unwrap_used)]

mod support;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value as Any};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use querl_serve::{RewriteOptions, RewriteService, ServerLimits, Traces, Upstream};
use serde_json::json;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use support::{StandInRewriter, answer, http, listen, options, serve_app, tenant};

/// Headers and bodies of requests.
type Received = Arc<Mutex<Vec<(HeaderMap, Bytes)>>>;

/// A service that accepts every request after a delay.
async fn receiver(path: &str, delay: Duration) -> (String, Received) {
    let received = Received::default();
    let accept = async move |State(received): State<Received>, headers: HeaderMap, body: Bytes| {
        tokio::time::sleep(delay).await;
        received.lock().unwrap().push((headers, body));
        axum::Json(json!({"status": 200, "data": {"recall": []}}))
    };
    let app = Router::new().route(path, post(accept)).with_state(received.clone());
    (serve_app(app, ServerLimits::default()).await, received)
}

/// Sets variables of the environment; an empty one counts as unset.
fn set(variables: &[(&str, &str)]) {
    for (name, value) in variables {
        // SAFETY: this program has one test, which reads the environment on the thread that sets it.
        unsafe { std::env::set_var(name, value) };
    }
}

async fn started(change: impl FnOnce(&mut RewriteOptions)) -> (String, Arc<RewriteService>) {
    let mut options = options();
    options.traces = Traces::from_env().unwrap();
    change(&mut options);
    let limits = options.server;
    let service = RewriteService::new(options).unwrap();
    service.set_ready(StandInRewriter::new(vec![tenant("shop", 1, None)]));
    (serve_app(service.router(), limits).await, service)
}

/// The spans of all requests, once there are `n_spans`, and the name of their service.
async fn spans(received: &Received, n_spans: usize) -> (Vec<Span>, String) {
    for _ in 0..500 {
        let requests: Vec<_> = {
            let received = received.lock().unwrap();
            received.iter().map(|(_, body)| ExportTraceServiceRequest::decode(body.clone()).unwrap()).collect()
        };
        let resources: Vec<_> = requests.into_iter().flat_map(|request| request.resource_spans).collect();
        let of_scopes = resources.iter().flat_map(|resource| &resource.scope_spans);
        let spans: Vec<Span> = of_scopes.flat_map(|scope| scope.spans.clone()).collect();
        if spans.len() >= n_spans {
            assert_eq!(spans.len(), n_spans, "{spans:#?}");
            let service = text(&resources[0].resource.as_ref().unwrap().attributes, "service.name");
            return (spans, service);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("fewer than {n_spans} spans were sent");
}

fn text(attributes: &[KeyValue], key: &str) -> String {
    let found = attributes.iter().find(|attribute| attribute.key == key);
    match found.and_then(|attribute| attribute.value.clone()?.value) {
        Some(Any::StringValue(text)) => text,
        Some(Any::IntValue(number)) => number.to_string(),
        Some(Any::BoolValue(flag)) => flag.to_string(),
        other => panic!("{key} is {other:?}"),
    }
}

fn named<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no span {name} in {spans:#?}"))
}

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_continue_the_trace_of_the_client_to_the_upstream_service_and_a_lost_collector_delays_nothing() {
    set(&[("NO_PROXY", "127.0.0.1"), ("no_proxy", "127.0.0.1"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "")]);
    assert!(Traces::from_env().unwrap().is_none(), "nothing is sent where no collector is configured");
    let (collector, received) = receiver("/v1/traces", Duration::ZERO).await;
    set(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &collector), ("OTEL_SDK_DISABLED", "true")]);
    assert!(Traces::from_env().unwrap().is_none());
    set(&[("OTEL_SDK_DISABLED", ""), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]);
    assert_eq!(Traces::from_env().err().unwrap(), "OTEL_EXPORTER_OTLP_PROTOCOL is `grpc`; expected http/protobuf");
    set(&[("OTEL_EXPORTER_OTLP_PROTOCOL", ""), ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "collector:4318")]);
    let refused = Traces::from_env().err().unwrap();
    assert!(refused.starts_with("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is `collector:4318`; expected http"), "{refused}");

    set(&[
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", ""),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc,x-team=search"),
        ("OTEL_BSP_SCHEDULE_DELAY", "50"),
    ]);
    let (upstream, forwarded) = receiver("/api/chat/general_rag", Duration::ZERO).await;
    let with_upstream = |options: &mut RewriteOptions| {
        options.upstream = Some(Upstream::new(&upstream, Duration::from_secs(5)).unwrap());
    };
    let (url, _service) = started(with_upstream).await;
    let client = http();
    let rag =
        client.post(format!("{url}/api/chat/general_rag")).header("traceparent", format!("00-{TRACE}-{PARENT}-01"));
    let rag = rag.header("tracestate", "vendor=7").json(&json!({"query": "鱼油的秘密", "tenant_id": "shop"}));
    assert_eq!(rag.send().await.unwrap().status(), 200);
    client.get(format!("{url}/health")).send().await.unwrap();

    let (found, service) = spans(&received, 5).await;
    assert_eq!(service, "querl");
    let request = named(&found, "POST /api/chat/general_rag");
    assert_eq!((hex(&request.trace_id), hex(&request.parent_span_id)), (TRACE.to_owned(), PARENT.to_owned()));
    assert_eq!(text(&request.attributes, "http.response.status_code"), "200");
    assert_eq!(text(&request.attributes, "querl.tenant"), "shop");
    for name in ["queue", "prefill", "decode", "upstream"] {
        let span = named(&found, name);
        assert_eq!((&span.trace_id, &span.parent_span_id), (&request.trace_id, &request.span_id), "{name}");
        assert!(span.end_time_unix_nano <= request.end_time_unix_nano, "{name}");
    }
    let length = |name: &str| named(&found, name).end_time_unix_nano - named(&found, name).start_time_unix_nano;
    assert_eq!(["queue", "prefill", "decode"].map(length), [1_000_000, 2_000_000, 3_000_000]);
    assert_eq!(named(&found, "queue").end_time_unix_nano, named(&found, "prefill").start_time_unix_nano);
    assert_eq!(text(&named(&found, "prefill").attributes, "querl.prompt_tokens"), "20");
    let (headers, body) = received.lock().unwrap()[0].clone();
    assert_eq!(
        (&headers["authorization"], &headers["x-team"]),
        (&"Basic abc".parse().unwrap(), &"search".parse().unwrap())
    );
    assert!(!String::from_utf8_lossy(&body).contains("鱼油"), "spans have no texts");
    let (headers, _) = forwarded.lock().unwrap()[0].clone();
    let expected = format!("00-{TRACE}-{}-01", hex(&named(&found, "upstream").span_id));
    assert_eq!(
        (headers["traceparent"].to_str().unwrap(), headers["tracestate"].to_str().unwrap()),
        (&*expected, "vendor=7")
    );

    // A batch has spans for each query; a fallback has none, but its reason.
    received.lock().unwrap().clear();
    let batch = json!({"queries": [{"query": "a"}, {"query": "unreadable"}, {"query": "b"}]});
    let (_, response) = answer(client.post(format!("{url}/v1/rewrite")).json(&batch)).await;
    let (found, _) = spans(&received, 7).await;
    let request = named(&found, "POST /v1/rewrite");
    assert!(request.parent_span_id.is_empty() && hex(&request.trace_id) != TRACE);
    assert_eq!(text(&request.attributes, "querl.fallback"), "no_rewrite");
    let mut ids: Vec<_> = found.iter().filter(|span| span.name == "decode").collect();
    ids.sort_by_key(|span| text(&span.attributes, "querl.request_id"));
    let ids: Vec<String> = ids.iter().map(|span| text(&span.attributes, "querl.request_id")).collect();
    assert_eq!(json!(ids), json!([response["results"][0]["id"], response["results"][2]["id"]]));

    // A client that disables tracing gets no trace, and the upstream service is not asked for one.
    received.lock().unwrap().clear();
    let rag =
        client.post(format!("{url}/api/chat/general_rag")).header("traceparent", format!("00-{TRACE}-{PARENT}-00"));
    rag.json(&json!({"query": "a", "tenant_id": "shop"})).send().await.unwrap();
    let (headers, _) = forwarded.lock().unwrap().pop().unwrap();
    assert!(headers["traceparent"].to_str().unwrap().ends_with("-00"), "{headers:?}");

    // A collector that accepts no connection, and one that never responds.
    let (listener, lost) = listen().await;
    drop(listener);
    let (stuck, _) = receiver("/v1/traces", Duration::from_secs(60)).await;
    for collector in [lost, stuck] {
        set(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &collector), ("OTEL_BSP_MAX_QUEUE_SIZE", "4")]);
        let (url, service) = started(|_| ()).await;
        for _ in 0..50 {
            let asked = Instant::now();
            let response = client.post(format!("{url}/v1/rewrite")).json(&json!({"query": "a"})).send().await.unwrap();
            assert_eq!(response.status(), 200);
            assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
        }
        drop(service);
    }
    assert!(received.lock().unwrap().is_empty(), "nothing was sent for the client without a trace");
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
