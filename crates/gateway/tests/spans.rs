//! Calls as OpenTelemetry spans. The one test of this program, because the tracer is global.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use engine::EngineError;
use gateway::Config;
use ledger::Options;
use opentelemetry::{Value, global, trace::Status};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use support::client::Client;
use support::{World, ask, config, path};

fn attribute(span: &SpanData, name: &str) -> Option<Value> {
    let found = span.attributes.iter().find(|one| one.key.as_str() == name);
    found.map(|one| one.value.clone())
}

#[tokio::test]
async fn a_call_is_a_span_with_numbers_and_without_text() {
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder()
        .with_simple_exporter(exporter.clone())
        .build();
    global::set_tracer_provider(provider.clone());

    let off = World::new().await;
    let mut client = Client::tcp(off.address()).await;
    client.post(&path(&off.open("off")), &[], &ask("x")).await;
    off.quiet("off").await;
    assert!(
        exporter.get_finished_spans().unwrap().is_empty(),
        "off by default"
    );

    let config = Config {
        spans: true,
        ..config()
    };
    let world = World::with(config, Options::default()).await;
    let path = path(&world.open("r"));
    let mut client = Client::tcp(world.address()).await;
    client.post(&path, &[], &ask("a secret plan")).await;
    world
        .engine
        .fail_next(EngineError::Gone("no power".to_owned()));
    client.post(&path, &[], &ask("another plan")).await;
    let calls = world.quiet("r").await;
    let spans = exporter.get_finished_spans().unwrap();
    assert_eq!(spans.len(), 2);
    let (answered, failed) = (&spans[0], &spans[1]);
    assert_eq!(answered.name, "chat m");
    assert!(answered.end_time >= answered.start_time);
    let number = |name: &str| match attribute(answered, name) {
        Some(Value::I64(number)) => number as usize,
        other => panic!("{name}: {other:?}"),
    };
    assert_eq!(
        number("gen_ai.usage.input_tokens"),
        calls[0].prompt_ids.len()
    );
    let generated = calls[0].generation.as_ref().unwrap().token_ids.len();
    assert_eq!(number("gen_ai.usage.output_tokens"), generated);
    assert_eq!(
        attribute(answered, "gen_ai.operation.name"),
        Some("chat".into())
    );
    assert_eq!(
        attribute(answered, "gen_ai.conversation.id"),
        Some("r".into())
    );
    assert_eq!(
        attribute(failed, "error.type"),
        Some("engine_failed".into())
    );
    assert!(matches!(failed.status, Status::Error { .. }));
    let shown = format!("{spans:?}");
    assert!(!shown.contains("plan"), "{shown}");
    provider.shutdown().unwrap();
}
