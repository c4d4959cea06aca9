//! Generate over HTTP: answers, streams, refusals, and clients that go away.
#![expect(clippy::unwrap_used, reason = "tests")]

mod server_support;

use rollspan_engine_client::mock::{admitted, finished, hello, step, tokens};
use rollspan_protocol::{EngineCoreOutput, EngineError, EngineHello, FinishReason, Limits};
use serde_json::{Value, json};
use server_support::{GENERATE, Server, in_time, settle};

fn body() -> Value {
    json!({"token_ids": [5, 6], "sampling_params": {}})
}

fn with(fields: &Value) -> Value {
    let mut body = body();
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_collected_answer_has_the_tokens_and_their_spans() {
    let (server, mut link, _engine) = Server::ready().await;
    let asked = server.generate(&with(&json!({"request_id": "r", "extra": 1}))).await;
    let id = link.request().await.request_id;
    link.send(&step("v1", 1, vec![admitted(&id, &[7], "v1", 1)])).await;
    link.send(&step("v2", 2, vec![finished(&id, &[8, 9], FinishReason::Length)])).await;
    let answer = in_time(asked.answer()).await;
    assert_eq!(answer.header("x-request-id"), Some("r"));
    assert_eq!(answer.header("x-ignored-fields"), Some("extra"));
    let answer = answer.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["token_ids"], json!([7, 8, 9]));
    let spans = json!([{"version": "v1", "start": 0, "end": 1}, {"version": "v2", "start": 1, "end": 3}]);
    assert_eq!(choice["weight_versions"], spans);
    assert_eq!((&answer["weight_version"], &answer["weight_commit"]), (&json!("v1"), &json!(1)));
}

#[tokio::test]
async fn a_stream_is_sent_while_it_is_made_and_ends_with_done() {
    let (server, mut link, _engine) = Server::ready().await;
    let mut asked = server.generate(&with(&json!({"stream": true}))).await;
    let id = link.request().await.request_id;
    link.send(&step("v1", 1, vec![tokens(&id, &[7])])).await;
    let (status, head) = in_time(asked.head()).await;
    assert_eq!(status, 200);
    assert!(head.contains("content-type: text/event-stream"), "{head}");
    let piece = in_time(asked.piece()).await.unwrap();
    assert!(piece.ends_with(b"\n\n"));
    link.send(&step("v1", 1, vec![finished(&id, &[], FinishReason::Stop)])).await;
    let rest = in_time(asked.rest(status, head)).await.events();
    assert_eq!(rest.len(), 1);
    assert_eq!(rest[0]["choices"][0]["finish_reason"], "stop");
    assert_eq!(rest[0]["choices"][0]["weight_versions"], json!([{"version": "v1", "start": 0, "end": 1}]));
}

#[tokio::test]
async fn every_choice_of_a_stream_ends_with_a_chunk_of_its_own() {
    let (server, mut link, _engine) = Server::ready().await;
    let asked = server.generate(&with(&json!({"stream": true, "sampling_params": {"n": 3}}))).await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(link.request().await.request_id);
    }
    link.send(&step("v", 1, ids.iter().map(|id| tokens(id, &[1])).collect())).await;
    link.send(&step("v", 1, ids.iter().map(|id| finished(id, &[2], FinishReason::Length)).collect())).await;
    let events = in_time(asked.answer()).await.events();
    let ended = events.iter().filter(|event| !event["choices"][0]["finish_reason"].is_null());
    let mut ended: Vec<_> = ended.map(|event| event["choices"][0]["index"].as_u64().unwrap()).collect();
    ended.sort_unstable();
    assert_eq!(ended, [0, 1, 2]);
}

#[tokio::test]
async fn a_refusal_before_the_first_token_of_a_stream_has_its_real_status() {
    let (server, mut link, _engine) = Server::ready().await;
    let asked = server.generate(&with(&json!({"stream": true, "request_id": "r"}))).await;
    let id = link.request().await.request_id;
    let error = EngineError {
        code: "engine_paused".to_owned(),
        message: "paused".to_owned(),
        retryable: true,
        ..EngineError::default()
    };
    let refused = EngineCoreOutput { error: Some(error), ..finished(&id, &[], FinishReason::Error) };
    link.send(&step("v", 1, vec![refused])).await;
    let answer = in_time(asked.answer()).await;
    assert_eq!(answer.failure(), (503, "engine_paused".to_owned()));
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(answer.header("x-request-id"), Some("r"));
}

#[tokio::test]
async fn a_failure_in_the_middle_of_a_stream_ends_every_choice_and_comes_last() {
    let (server, mut link, _engine) = Server::ready().await;
    let asked = server.generate(&with(&json!({"stream": true, "sampling_params": {"n": 2}}))).await;
    let id = link.request().await.request_id;
    let sibling = link.request().await.request_id;
    link.send(&step("v", 1, vec![tokens(&id, &[1])])).await;
    let error = EngineError { code: "nan_logits".to_owned(), message: "NaN".to_owned(), ..EngineError::default() };
    let failed = EngineCoreOutput { error: Some(error), ..finished(&id, &[], FinishReason::Error) };
    link.send(&step("v", 1, vec![failed])).await;
    assert_eq!(in_time(link.aborted()).await, [sibling]);
    let events = in_time(asked.answer()).await.events();
    let [.., first, second, error] = events.as_slice() else { panic!("three events were due, got {events:?}") };
    for (index, chunk) in [first, second].into_iter().enumerate() {
        let choice = &chunk["choices"][0];
        assert_eq!((&choice["index"], &choice["finish_reason"]), (&json!(index), &json!("error")));
    }
    assert_eq!(first["choices"][0]["weight_versions"], json!([{"version": "v", "start": 0, "end": 1}]));
    assert_eq!(second["choices"][0]["weight_versions"], json!([]));
    assert_eq!(error["error"]["reason"], "nan_logits");
}

#[tokio::test]
async fn a_client_that_goes_away_aborts_its_request() {
    let (server, mut link, _engine) = Server::ready().await;
    for stream in [false, true] {
        let mut asked = server.generate(&with(&json!({"stream": stream, "sampling_params": {"n": 2}}))).await;
        let mut ids = vec![link.request().await.request_id, link.request().await.request_id];
        link.send(&step("v", 1, vec![tokens(&ids[0], &[1])])).await;
        if stream {
            in_time(asked.head()).await;
        }
        drop(asked);
        let mut aborted = in_time(link.aborted()).await;
        aborted.sort_unstable();
        ids.sort_unstable();
        assert_eq!(aborted, ids);
    }
}

#[tokio::test]
async fn a_client_that_goes_away_before_the_first_token_of_its_stream_aborts_it_too() {
    let (server, mut link, _engine) = Server::ready().await;
    let asked = server.generate(&with(&json!({"stream": true}))).await;
    let id = link.request().await.request_id;
    drop(asked);
    assert_eq!(in_time(link.aborted()).await, [id]);
}

#[tokio::test]
async fn an_open_id_is_a_conflict_until_its_request_ends() {
    let (server, mut link, _engine) = Server::ready().await;
    let body = with(&json!({"request_id": "same"}));
    let asked = server.generate(&body).await;
    let id = link.request().await.request_id;
    let answer = in_time(server.ask("POST", GENERATE, &body)).await;
    assert_eq!(answer.failure(), (409, "duplicate_request_id".to_owned()));
    link.send(&step("v", 1, vec![finished(&id, &[1], FinishReason::Stop)])).await;
    assert_eq!(in_time(asked.answer()).await.status, 200);
    let asked = server.generate(&body).await;
    let id = link.request().await.request_id;
    link.send(&step("v", 1, vec![finished(&id, &[1], FinishReason::Stop)])).await;
    assert_eq!(in_time(asked.answer()).await.status, 200);
}

#[tokio::test]
async fn more_open_requests_than_allowed_are_refused() {
    let (server, mut link, _engine) = Server::with_engine(|options| options.max_queued_requests = 1, &hello()).await;
    let asked = server.generate(&body()).await;
    let id = link.request().await.request_id;
    let answer = in_time(server.ask("POST", GENERATE, &body())).await;
    assert_eq!(answer.failure(), (429, "queue_full".to_owned()));
    link.send(&step("v", 1, vec![finished(&id, &[1], FinishReason::Stop)])).await;
    assert_eq!(in_time(asked.answer()).await.status, 200);
    let asked = server.generate(&body()).await;
    let id = link.request().await.request_id;
    link.send(&step("v", 1, vec![finished(&id, &[1], FinishReason::Stop)])).await;
    assert_eq!(in_time(asked.answer()).await.status, 200);
}

#[tokio::test]
async fn an_aborted_request_answers_with_what_it_has() {
    let (server, mut link, _engine) = Server::ready().await;
    let asked = server.generate(&with(&json!({"request_id": "r"}))).await;
    let id = link.request().await.request_id;
    link.send(&step("v1", 1, vec![admitted(&id, &[7], "v1", 1)])).await;
    settle(&server, &mut link).await;
    let aborted = in_time(server.ask("POST", "/abort_requests", &json!({"request_ids": ["r", "other"]}))).await;
    assert_eq!(aborted.json(), json!({"status": "aborted", "aborted": 1}));
    assert_eq!(link.aborted().await, [id]);
    let answer = in_time(asked.answer()).await.json();
    let choice = &answer["choices"][0];
    assert_eq!((&choice["token_ids"], &choice["finish_reason"]), (&json!([7]), &json!("abort")));
    assert_eq!(choice["weight_versions"], json!([{"version": "v1", "start": 0, "end": 1}]));
    assert_eq!(answer["weight_version"], "v1");
}

#[tokio::test]
async fn a_slow_reader_holds_nobody_up_and_misses_nothing() {
    const STEPS: usize = 60_000;
    let limits = Limits { max_model_len: 1 << 20, ..hello().limits };
    let roomy = EngineHello { limits, ..hello() };
    let (server, mut link, _engine) = Server::with_engine(|_| {}, &roomy).await;
    let asked = server.generate(&with(&json!({"stream": true}))).await;
    let id = link.request().await.request_id;
    for step_number in 0..STEPS {
        let token = u32::try_from(step_number % 100).unwrap();
        // Nobody reads the answer, and the engine can write all the same.
        in_time(link.send(&step("v", 1, vec![tokens(&id, &[token])]))).await;
    }
    link.send(&step("v", 1, vec![finished(&id, &[], FinishReason::Length)])).await;
    settle(&server, &mut link).await;
    let events = in_time(asked.answer()).await.events();
    let seen: Vec<_> = events.iter().flat_map(|event| event["choices"][0]["token_ids"].as_array().unwrap()).collect();
    assert_eq!(seen.len(), STEPS);
    assert!(seen.iter().enumerate().all(|(index, token)| token.as_u64() == Some(index as u64 % 100)));
    assert!(events.len() < STEPS / 2, "{} chunks", events.len());
}

#[tokio::test]
async fn a_client_in_the_middle_of_a_body_over_the_limit_reads_its_413() {
    let (server, _link, _engine) = Server::with_engine(|options| options.max_body_bytes = 1000, &hello()).await;
    let body = vec![b' '; 8 * 1024 * 1024];
    let answer = in_time(async { server.send("POST", GENERATE, &body).await.answer().await }).await;
    assert_eq!(answer.failure(), (413, "body_too_large".to_owned()));
}

#[tokio::test]
async fn a_large_prompt_and_a_large_answer_take_the_same_way() {
    let limits = Limits { max_model_len: 1 << 20, ..hello().limits };
    let roomy = EngineHello { limits, ..hello() };
    let (server, mut link, _engine) = Server::with_engine(|_| {}, &roomy).await;
    let prompt: Vec<u32> = (0..300_000).map(|index| index % 100).collect();
    let asked = server.generate(&json!({"token_ids": prompt, "sampling_params": {}})).await;
    let request = in_time(link.request()).await;
    assert_eq!(request.prompt_token_ids.as_deref(), Some(prompt.as_slice()));
    link.send(&step("v", 1, vec![finished(&request.request_id, &prompt, FinishReason::Length)])).await;
    let answer = in_time(asked.answer()).await.json();
    assert_eq!(answer["choices"][0]["token_ids"].as_array().unwrap().len(), prompt.len());
}
