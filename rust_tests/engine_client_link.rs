//! The link itself: hellos, death, undecodable messages, utility calls.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::path::Path;
use std::time::Duration;

use rollspan_engine_client::mock::{self, MockEngine, MockLink, hello, step, tokens};
use rollspan_engine_client::{
    CallError, ConnectError, Connection, Delivery, EngineClient, NoObserver, RequestError, RequestStream, Submission,
    SubmitError,
};
use rollspan_protocol::{
    Body, Dead, EngineCoreRequest, EngineHello, FrameKind, SchedulerStats, UtilityFailure, UtilityOutput,
};
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(20);

async fn connect(path: &Path) -> Result<EngineClient, ConnectError> {
    Ok(Connection::open(path, PATIENCE).await?.start(Box::new(NoObserver)))
}

async fn pair() -> (EngineClient, MockLink, MockEngine) {
    let engine = MockEngine::bind();
    let path = engine.path();
    let hello = hello();
    let (client, link) = tokio::join!(connect(&path), engine.accept(&hello));
    (client.unwrap(), link, engine)
}

fn submission(external_id: &str) -> Submission {
    let request = EngineCoreRequest { request_id: format!("{external_id}-1"), ..EngineCoreRequest::default() };
    Submission { external_id: external_id.to_owned(), requests: vec![request], delivery: Delivery::EachStep }
}

async fn error_of(stream: &mut RequestStream) -> RequestError {
    stream.next().await.expect("an error is due").expect_err("an error is due")
}

#[tokio::test]
async fn the_engines_hello_is_there_once_connected() {
    let (client, _link, _engine) = pair().await;
    assert_eq!(*client.hello(), hello());
    assert_eq!(&*client.status().weight_version, "default");
    assert!(client.death().is_none());
}

#[tokio::test]
async fn a_socket_that_appears_later_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let path = mock::socket_path(directory.path());
    let connecting = tokio::spawn(async move { connect(&path).await });
    tokio::task::yield_now().await;
    let engine = MockEngine::bind_in(directory);
    let _link = engine.accept(&hello()).await;
    assert!(connecting.await.unwrap().is_ok());
}

#[tokio::test]
async fn an_engine_that_never_comes_is_a_timeout() {
    let directory = tempfile::tempdir().unwrap();
    let path = mock::socket_path(directory.path());
    let connected = Connection::open(&path, Duration::from_millis(1)).await;
    assert!(matches!(connected, Err(ConnectError::Timeout(_))));
}

#[tokio::test]
async fn an_engine_of_another_major_version_is_refused() {
    let engine = MockEngine::bind();
    let path = engine.path();
    let foreign = EngineHello { version: [2, 0], ..hello() };
    let (client, _link) = tokio::join!(connect(&path), engine.accept(&foreign));
    assert!(matches!(client, Err(ConnectError::Refused(_))));
}

#[tokio::test]
async fn an_engine_that_cannot_start_says_why() {
    let engine = MockEngine::bind();
    let path = engine.path();
    let dying = async {
        let mut link = engine.accept_silently().await;
        let dead = Dead { reason: "engine_error".to_owned(), message: "no such model".to_owned() };
        link.send_frame(FrameKind::Dead, &dead.encode()).await;
    };
    let (client, ()) = tokio::join!(connect(&path), dying);
    let Err(ConnectError::Dead(death)) = client else { panic!("a death was due") };
    assert!(death.message.contains("no such model"), "{death}");
}

#[tokio::test]
async fn an_engine_that_closes_before_its_hello_is_dead() {
    let engine = MockEngine::bind();
    let path = engine.path();
    let (client, ()) = tokio::join!(connect(&path), async { drop(engine.accept_silently().await) });
    assert!(matches!(client, Err(ConnectError::Dead(_))));
}

#[tokio::test]
async fn the_death_of_the_engine_ends_every_request_and_call() {
    let (client, mut link, _engine) = pair().await;
    let mut first = client.submit(submission("a")).unwrap();
    let mut second = client.submit(submission("b")).unwrap();
    let dying = async {
        link.request().await;
        link.request().await;
        link.call().await;
        drop(link);
    };
    let (called, ()) = tokio::join!(client.call("pause_generation", vec![json!("wait"), json!(true)]), dying);
    assert!(matches!(called, Err(CallError::Dead(_))));
    for stream in [&mut first, &mut second] {
        let RequestError::Dead(death) = error_of(stream).await else { panic!("a death was due") };
        assert_eq!(death.reason, "engine_dead");
        assert!(stream.next().await.is_none());
    }
    assert_eq!(client.died().await.reason, "engine_dead");
    assert_eq!(client.open_requests(), 0);
}

#[tokio::test]
async fn a_dead_engine_takes_neither_requests_nor_calls() {
    let (client, link, _engine) = pair().await;
    drop(link);
    client.died().await;
    assert!(matches!(client.submit(submission("a")), Err(SubmitError::Dead(_))));
    assert!(matches!(client.call("get_weight_version", vec![]).await, Err(CallError::Dead(_))));
}

#[tokio::test]
async fn last_words_reach_the_open_requests() {
    let (client, mut link, _engine) = pair().await;
    let mut stream = client.submit(submission("a")).unwrap();
    let dead = Dead { reason: "engine_error".to_owned(), message: "out of memory".to_owned() };
    link.send_frame(FrameKind::Dead, &dead.encode()).await;
    assert!(error_of(&mut stream).await.to_string().contains("out of memory"));
}

#[tokio::test]
async fn an_undecodable_message_ends_all_requests_and_closes_the_link() {
    let (client, mut link, _engine) = pair().await;
    let mut stream = client.submit(submission("a")).unwrap();
    link.request().await;
    link.send_frame(FrameKind::Outputs, b"\xc1").await;
    let RequestError::Dead(death) = error_of(&mut stream).await else { panic!("a death was due") };
    assert_eq!(death.reason, "decode_error");
    assert!(link.message().await.is_none(), "the link is closed");
}

#[tokio::test]
async fn an_undecodable_message_is_laid_at_the_requests_that_it_names() {
    let (client, mut link, _engine) = pair().await;
    let mut named = client.submit(submission("a")).unwrap();
    let mut other = client.submit(submission("b")).unwrap();
    let payload = step("v", 1, vec![tokens("a-1", &[5])]).encode();
    // The finish reason, behind eleven bytes of envelope, id, tokens and nils, becomes 9.
    let position = payload.windows(4).position(|bytes| bytes == [0x91, 0x05, 0xc0, 0xc0]).unwrap() + 5;
    let mut payload = payload;
    payload[position] = 9;
    link.send_frame(FrameKind::Outputs, &payload).await;
    let RequestError::Dead(death) = error_of(&mut named).await else { panic!("a death was due") };
    assert_eq!(death.reason, "decode_error");
    let RequestError::Dead(death) = error_of(&mut other).await else { panic!("a death was due") };
    assert_eq!(death.reason, "engine_dead");
}

#[tokio::test]
async fn a_frame_over_the_limit_ends_the_link() {
    let (client, mut link, _engine) = pair().await;
    link.send_bytes(&[0xff, 0xff, 0xff, 0xff, 0x21]).await;
    assert_eq!(client.died().await.reason, "decode_error");
}

#[tokio::test]
async fn a_frontends_own_frame_kind_from_the_engine_ends_the_link() {
    let (client, mut link, _engine) = pair().await;
    link.send_frame(FrameKind::Abort, b"\x90").await;
    assert_eq!(client.died().await.reason, "decode_error");
}

#[tokio::test]
async fn a_message_may_come_in_pieces_and_many_at_once() {
    let (client, mut link, _engine) = pair().await;
    let mut stream = client.submit(submission("a")).unwrap();
    let frame = |token| {
        let payload = step("v", 1, vec![tokens("a-1", &[token])]).encode();
        rollspan_protocol::encode_frame(FrameKind::Outputs, &payload, rollspan_protocol::MAX_FRAME_BYTES).unwrap()
    };
    let (one, two) = (frame(1), frame(2));
    link.send_bytes(&one[..7]).await;
    link.send_bytes(&[&one[7..], &two[..]].concat()).await;
    let mut seen = Vec::new();
    while seen.len() < 2 {
        seen.extend(stream.next().await.unwrap().unwrap().output.new_token_ids);
    }
    assert_eq!(seen, [1, 2]);
}

#[tokio::test]
async fn calls_may_be_answered_in_any_order() {
    let (client, mut link, _engine) = pair().await;
    let engine = async {
        let waits = link.call().await;
        let quick = link.call().await;
        assert_eq!((waits.method.as_str(), waits.args), ("pause_generation", vec![json!("wait"), json!(true)]));
        link.answer(quick.call_id, Ok(json!("step-1"))).await;
        link.answer(waits.call_id, Ok(json!(null))).await;
    };
    let (paused, label, ()) = tokio::join!(
        client.call("pause_generation", vec![json!("wait"), json!(true)]),
        client.call("get_weight_version", vec![]),
        engine,
    );
    assert_eq!(paused.unwrap(), json!(null));
    assert_eq!(label.unwrap(), json!("step-1"));
}

#[tokio::test]
async fn a_failed_call_carries_the_engines_reason() {
    let (client, mut link, _engine) = pair().await;
    let failure = UtilityFailure { message: "already active".to_owned(), reason: Some("update_active".to_owned()) };
    let engine = async {
        let call = link.call().await;
        link.answer(call.call_id, Err(failure.clone())).await;
    };
    let (failed, ()) = tokio::join!(client.call("start_weight_update", vec![]), engine);
    assert_eq!(failed, Err(CallError::Failed(failure)));
}

#[tokio::test]
async fn an_answer_to_no_call_is_ignored() {
    let (client, mut link, _engine) = pair().await;
    let stray = UtilityOutput { call_id: u64::MAX, outcome: Ok(json!(1)) };
    link.send(&mock::envelope(Body::Utility(stray))).await;
    let engine = async {
        let call = link.call().await;
        link.answer(call.call_id, Ok(json!(2))).await;
    };
    let (answered, ()) = tokio::join!(client.call("get_weight_commit", vec![]), engine);
    assert_eq!(answered.unwrap(), json!(2));
}

#[tokio::test]
async fn scheduler_stats_become_the_status() {
    let (client, mut link, _engine) = pair().await;
    let counts = SchedulerStats {
        num_running_reqs: 3,
        num_waiting_reqs: 4,
        kv_cache_usage: 0.5,
        step_counter: 9,
        paused: Some(true),
        weight_state: Some("updating".into()),
        ..SchedulerStats::default()
    };
    link.send(&mock::stats("step-7", 7, counts)).await;
    // Of a step that was launched before that commit.
    link.send(&mock::step("step-6", 6, vec![mock::tokens("unknown", &[1])])).await;
    let engine = async {
        let call = link.call().await;
        link.answer(call.call_id, Ok(json!(null))).await;
    };
    // The answer to a later call shows that the message before it was taken in.
    let (answered, ()) = tokio::join!(client.call("resume_scheduler", vec![]), engine);
    answered.unwrap();
    let status = client.status();
    assert_eq!((status.running, status.waiting, status.weight_commit), (3, 4, 7));
    assert_eq!((&*status.weight_version, status.paused), ("step-7", true));
    assert_eq!(&*status.weight_state, "updating");
}
