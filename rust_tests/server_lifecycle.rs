//! Start, death of the engine, and shutdown.

mod server_support;

use std::time::Duration;

use clap::Parser;
use rollspan_engine_client::mock::{MockEngine, admitted, finished, hello, step, tokens};
use rollspan_protocol::{Dead, FinishReason, FrameKind};
use rollspan_server::{Event, Flags, Options, ServeError};
use serde_json::{Value, json};
use server_support::{GENERATE, Server, in_time, settle};
use tokio::net::TcpStream;

fn body(stream: bool) -> Value {
    json!({"token_ids": [5], "sampling_params": {}, "stream": stream})
}

#[tokio::test]
async fn routes_answer_503_until_the_engine_says_hello() {
    let engine = MockEngine::bind();
    let mut server = Server::start(Options::new(engine.path())).await;
    for (method, path) in [("GET", "/health"), ("POST", GENERATE), ("POST", "/pause"), ("GET", "/metrics")] {
        let answer = in_time(server.ask(method, path, &Value::Null)).await;
        assert_eq!(answer.failure(), (503, "engine_starting".to_owned()));
    }
    assert_eq!(in_time(server.ask("GET", "/version", &Value::Null)).await.json()["frontend"], "rust");
    let _link = engine.accept(&hello()).await;
    assert_eq!(server.events.recv().await, Some(Event::Ready));
    assert_eq!(in_time(server.ask("GET", "/health", &Value::Null)).await.json(), json!({"status": "ok"}));
}

#[tokio::test]
async fn an_engine_that_cannot_start_ends_the_server_with_its_words() {
    let engine = MockEngine::bind();
    let server = Server::start(Options::new(engine.path())).await;
    let mut link = engine.accept_silently().await;
    let dead = Dead { reason: "engine_error".to_owned(), message: "no such model".to_owned() };
    link.send_frame(FrameKind::Dead, &dead.encode()).await;
    let ended = in_time(server.serving).await.unwrap();
    let Err(error @ ServeError::Engine(_)) = ended else { panic!("an engine error was due") };
    assert!(error.to_string().contains("no such model"), "{error}");
}

#[tokio::test]
async fn an_engine_that_takes_too_long_ends_the_server() {
    let engine = MockEngine::bind();
    let mut options = Options::new(engine.path());
    options.engine_ready_timeout = Duration::from_millis(10);
    let server = Server::start(options).await;
    assert!(in_time(server.serving).await.unwrap().is_err());
}

#[tokio::test]
async fn the_death_of_the_engine_is_an_error_for_every_open_request() {
    let (server, mut link, _engine) = Server::ready().await;
    let collected = server.generate(&body(false)).await;
    link.request().await;
    let unborn = server.generate(&body(true)).await;
    link.request().await;
    let mut streamed = server.generate(&body(true)).await;
    let id = link.request().await.request_id;
    link.send(&step("v", 1, vec![tokens(&id, &[1])])).await;
    let paused = server.send("POST", "/pause?mode=wait", b"").await;
    link.call().await;
    settle(&server, &mut link).await;
    drop(link);
    let dead = (503, "engine_dead".to_owned());
    assert_eq!(in_time(collected.answer()).await.failure(), dead);
    assert_eq!(in_time(paused.answer()).await.failure(), dead);
    let (status, head) = in_time(streamed.head()).await;
    let events = in_time(streamed.rest(status, head)).await.events();
    assert_eq!(events.last().unwrap()["error"]["reason"], "engine_dead");
    assert_eq!(in_time(unborn.answer()).await.failure(), dead);
    for (method, path) in [("GET", "/health"), ("POST", GENERATE), ("POST", "/resume")] {
        assert_eq!(in_time(server.ask(method, path, &body(false))).await.failure(), dead);
    }
    assert_eq!(in_time(server.ask("GET", "/v1/models", &Value::Null)).await.status, 200);
}

#[tokio::test]
async fn a_stopped_server_lets_its_requests_finish() {
    let (server, mut link, _engine) = Server::ready().await;
    let asked = server.generate(&body(false)).await;
    let id = link.request().await.request_id;
    server.stop.send(()).unwrap();
    in_time(async { while TcpStream::connect(server.address).await.is_ok() {} }).await;
    link.send(&step("v", 1, vec![finished(&id, &[1, 2], FinishReason::Stop)])).await;
    assert_eq!(in_time(asked.answer()).await.json()["choices"][0]["token_ids"], json!([1, 2]));
    in_time(server.serving).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_stopped_server_aborts_requests_that_take_too_long() {
    let (server, mut link, _engine) =
        Server::with_engine(|options| options.shutdown_timeout = Duration::from_millis(50), &hello()).await;
    let asked = server.generate(&body(true)).await;
    let id = link.request().await.request_id;
    link.send(&step("v", 1, vec![admitted(&id, &[1], "v", 1)])).await;
    settle(&server, &mut link).await;
    server.stop.send(()).unwrap();
    let events = in_time(asked.answer()).await.events();
    let last = events.last().unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "abort");
    assert_eq!(last["choices"][0]["weight_versions"], json!([{"version": "v", "start": 0, "end": 1}]));
    in_time(server.serving).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_server_stops_while_its_engine_starts() {
    let engine = MockEngine::bind();
    let server = Server::start(Options::new(engine.path())).await;
    server.stop.send(()).unwrap();
    in_time(server.serving).await.unwrap().unwrap();
}

#[test]
fn the_flags_have_their_defaults() {
    let flags = Flags::try_parse_from(["rollspan-http", "--engine", "e.sock"]).unwrap();
    assert_eq!(flags.options(), Options::new("e.sock"));
    assert_eq!((flags.host.as_str(), flags.port), ("127.0.0.1", 8000));
    assert!(flags.check().is_ok());
}

#[test]
fn flags_out_of_range_are_refused() {
    for flags in [
        vec![],
        vec!["--engine", "e", "--port", "65536"],
        vec!["--engine", "e", "--max-queued-requests", "0"],
        vec!["--engine", "e", "--max-body-bytes", "-1"],
        vec!["--engine", "e", "--shutdown-timeout", "nan"],
        vec!["--engine", "e", "--engine-ready-timeout", "-1"],
        vec!["--engine", "e", "--log-level", "loud"],
        vec!["--engine", "e", "--unknown"],
    ] {
        let arguments = std::iter::once("rollspan-http").chain(flags.iter().copied());
        assert!(Flags::try_parse_from(arguments).is_err(), "{flags:?}");
    }
}

#[test]
fn an_address_that_others_can_reach_needs_a_word() {
    for (host, insecure, allowed) in [
        ("127.0.0.2", false, true),
        ("::1", false, true),
        ("localhost", false, true),
        ("0.0.0.0", false, false),
        ("::", false, false),
        ("example.org", false, false),
        ("0.0.0.0", true, true),
    ] {
        let mut arguments = vec!["rollspan-http", "--engine", "e", "--host", host];
        arguments.extend(insecure.then_some("--insecure"));
        assert_eq!(Flags::try_parse_from(arguments).unwrap().check().is_ok(), allowed, "{host}");
    }
}
