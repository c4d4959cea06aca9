//! Requests on the link: delivery, merging while nobody takes, aborts, errors.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rollspan_engine_client::mock::{MockEngine, MockLink, admitted, finished, hello, step, tokens};
use rollspan_engine_client::{
    Connection, Delivery, Delta, EngineClient, Finished, NoObserver, Observer, RequestError, RequestStream, Submission,
    SubmitError,
};
use rollspan_protocol::{
    EngineCoreOutput, EngineCoreRequest, EngineError, FinishReason, LogprobsLists, SchedulerStats, StampSpan,
};
use serde_json::json;

async fn pair_observed(observer: Box<dyn Observer>) -> (EngineClient, MockLink, MockEngine) {
    let engine = MockEngine::bind();
    let path = engine.path();
    let hello = hello();
    let connecting = Connection::open(&path, Duration::from_secs(20));
    let (client, link) = tokio::join!(connecting, engine.accept(&hello));
    (client.unwrap().start(observer), link, engine)
}

async fn pair() -> (EngineClient, MockLink, MockEngine) {
    pair_observed(Box::new(NoObserver)).await
}

fn submission(external_id: &str, choices: usize, delivery: Delivery) -> Submission {
    let requests = (0..choices)
        .map(|choice| EngineCoreRequest {
            request_id: format!("{choice}_{external_id}"),
            ..EngineCoreRequest::default()
        })
        .collect();
    Submission { external_id: external_id.to_owned(), requests, delivery }
}

/// Makes sure that everything the engine sent so far was taken in: its messages come in order.
async fn settle(client: &EngineClient, link: &mut MockLink) {
    let answer = async {
        let call = link.call().await;
        link.answer(call.call_id, Ok(json!(null))).await;
    };
    let (settled, ()) = tokio::join!(client.call("resume_scheduler", vec![]), answer);
    settled.unwrap();
}

async fn rest(stream: &mut RequestStream) -> Vec<Delta> {
    let mut deltas = Vec::new();
    while let Some(delta) = stream.next().await {
        deltas.push(delta.unwrap());
    }
    deltas
}

fn shape(delta: &Delta) -> (usize, &str, Vec<u32>, Option<FinishReason>) {
    let label = delta.weight_version.as_deref().unwrap_or("-");
    (delta.choice, label, delta.output.new_token_ids.clone(), delta.output.finish_reason)
}

#[tokio::test]
async fn outputs_reach_the_stream_of_their_request() {
    let (client, mut link, _engine) = pair().await;
    let mut a = client.submit(submission("a", 1, Delivery::EachStep)).unwrap();
    let mut b = client.submit(submission("b", 1, Delivery::EachStep)).unwrap();
    assert_eq!(link.request().await.request_id, "0_a");
    assert_eq!(link.request().await.request_id, "0_b");
    link.send(&step("v", 1, vec![tokens("0_b", &[7]), tokens("nobody", &[9]), tokens("0_a", &[8])])).await;
    link.send(&step("v", 1, vec![finished("0_a", &[], FinishReason::Stop)])).await;
    link.send(&step("v", 1, vec![finished("0_b", &[6], FinishReason::Length)])).await;
    let a: Vec<u32> = rest(&mut a).await.into_iter().flat_map(|delta| delta.output.new_token_ids).collect();
    let b: Vec<u32> = rest(&mut b).await.into_iter().flat_map(|delta| delta.output.new_token_ids).collect();
    assert_eq!((a, b), (vec![8], vec![7, 6]));
    assert_eq!(client.open_requests(), 0);
}

#[tokio::test]
async fn what_waits_is_merged_by_choice_and_weights() {
    let (client, mut link, _engine) = pair().await;
    let mut stream = client.submit(submission("a", 2, Delivery::EachStep)).unwrap();
    link.request().await;
    link.request().await;
    link.send(&step("v1", 1, vec![admitted("0_a", &[1], "v1", 1), tokens("1_a", &[11])])).await;
    link.send(&step("v1", 1, vec![tokens("0_a", &[2]), tokens("1_a", &[12])])).await;
    link.send(&step("v2", 2, vec![tokens("0_a", &[3])])).await;
    link.send(&step("v2", 2, vec![finished("1_a", &[], FinishReason::Stop)])).await;
    link.send(&step("v2", 2, vec![finished("0_a", &[4, 5], FinishReason::Length)])).await;
    settle(&client, &mut link).await;
    let deltas = rest(&mut stream).await;
    let shapes: Vec<_> = deltas.iter().map(shape).collect();
    let expected = [
        (0, "v1", vec![1, 2], None),
        (0, "v2", vec![3, 4, 5], Some(FinishReason::Length)),
        (1, "v1", vec![11, 12], Some(FinishReason::Stop)),
    ];
    assert_eq!(shapes, expected);
    assert_eq!(deltas[0].output.admission.as_ref().unwrap().weight_commit, 1);
}

#[tokio::test]
async fn log_probs_of_merged_deltas_stay_with_their_tokens() {
    let (client, mut link, _engine) = pair().await;
    let mut stream = client.submit(submission("a", 1, Delivery::WhenFinished)).unwrap();
    link.request().await;
    for token in [3_u32, 4, 5] {
        let logprobs = LogprobsLists {
            width: 2,
            token_ids: vec![token, 9],
            logprobs: vec![-0.5, -2.0],
            sampled_ranks: vec![token],
            cumulative: None,
        };
        let output = EngineCoreOutput { new_logprobs: Some(logprobs), ..tokens("0_a", &[token]) };
        link.send(&step("v", 1, vec![output])).await;
    }
    link.send(&step("v", 1, vec![finished("0_a", &[], FinishReason::Stop)])).await;
    let deltas = rest(&mut stream).await;
    let [delta] = deltas.as_slice() else { panic!("one delta was due, got {deltas:?}") };
    let logprobs = delta.output.new_logprobs.as_ref().unwrap();
    assert_eq!(logprobs.token_ids, [3, 9, 4, 9, 5, 9]);
    assert_eq!(logprobs.sampled_ranks, delta.output.new_token_ids);
}

#[tokio::test]
async fn a_taker_that_wants_the_whole_is_not_woken_before_it_is_there() {
    let (client, mut link, _engine) = pair().await;
    let mut stream = client.submit(submission("a", 1, Delivery::WhenFinished)).unwrap();
    link.request().await;
    link.send(&step("v", 1, vec![tokens("0_a", &[1])])).await;
    settle(&client, &mut link).await;
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(stream.poll_next(&mut context).is_pending());
    link.send(&step("v", 1, vec![finished("0_a", &[2], FinishReason::Stop)])).await;
    assert_eq!(rest(&mut stream).await.len(), 1);
}

#[tokio::test]
async fn spans_of_kv_stay_with_the_token_that_follows_them() {
    let (client, mut link, _engine) = pair().await;
    let mut stream = client.submit(submission("a", 1, Delivery::WhenFinished)).unwrap();
    link.request().await;
    let spans = |end| Some(vec![StampSpan { weight_version: "v".into(), weight_commit: 1, start: 0, end }]);
    let with = |end, token| EngineCoreOutput { kv_spans: spans(end), ..tokens("0_a", &[token]) };
    link.send(&step("v", 1, vec![tokens("0_a", &[])])).await;
    link.send(&step("v", 1, vec![EngineCoreOutput { prompt_spans: spans(2), ..with(2, 1) }])).await;
    link.send(&step("v", 1, vec![tokens("0_a", &[2])])).await;
    link.send(&step("v", 1, vec![with(4, 3)])).await;
    link.send(&step("v", 1, vec![finished("0_a", &[4], FinishReason::Stop)])).await;
    let deltas = rest(&mut stream).await;
    let shapes: Vec<_> =
        deltas.iter().map(|delta| (delta.output.new_token_ids.clone(), delta.output.kv_spans.clone())).collect();
    assert_eq!(shapes, [(vec![1, 2], spans(2)), (vec![3, 4], spans(4))]);
    assert_eq!((&deltas[0].output.prompt_spans, &deltas[1].output.prompt_spans), (&spans(2), &None));
}

#[tokio::test]
async fn a_dropped_stream_aborts_what_is_still_running() {
    let (client, mut link, _engine) = pair().await;
    let stream = client.submit(submission("a", 3, Delivery::WhenFinished)).unwrap();
    for _ in 0..3 {
        link.request().await;
    }
    link.send(&step("v", 1, vec![finished("1_a", &[1], FinishReason::Stop)])).await;
    settle(&client, &mut link).await;
    drop(stream);
    assert_eq!(link.aborted().await, ["0_a", "2_a"]);
    assert_eq!(client.open_requests(), 0);
}

#[tokio::test]
async fn a_stream_dropped_after_its_end_aborts_nothing() {
    let (client, mut link, _engine) = pair().await;
    let mut stream = client.submit(submission("a", 1, Delivery::EachStep)).unwrap();
    link.request().await;
    link.send(&step("v", 1, vec![finished("0_a", &[1], FinishReason::Stop)])).await;
    rest(&mut stream).await;
    drop(stream);
    settle(&client, &mut link).await;
}

#[tokio::test]
async fn an_aborted_request_gets_what_was_there_and_nothing_later() {
    let (client, mut link, _engine) = pair().await;
    let mut stream = client.submit(submission("a", 2, Delivery::WhenFinished)).unwrap();
    let other = client.submit(submission("b", 1, Delivery::WhenFinished)).unwrap();
    for _ in 0..3 {
        link.request().await;
    }
    link.send(&step("v1", 1, vec![tokens("0_a", &[1])])).await;
    settle(&client, &mut link).await;
    assert_eq!(client.abort(&["a".to_owned(), "unknown".to_owned(), "a".to_owned()]), 1);
    assert_eq!(link.aborted().await, ["0_a", "1_a"]);
    link.send(&step("v2", 2, vec![tokens("0_a", &[2])])).await;
    settle(&client, &mut link).await;
    let deltas = rest(&mut stream).await;
    let shapes: Vec<_> = deltas.iter().map(shape).collect();
    let abort = Some(FinishReason::Abort);
    assert_eq!(shapes, [(0, "v1", vec![1], abort), (1, "-", vec![], abort)]);
    assert_eq!(client.open_requests(), 1);
    assert_eq!(client.abort_all(), 1);
    drop(other);
}

#[tokio::test]
async fn an_open_external_id_is_taken_until_its_request_ends() {
    let (client, mut link, _engine) = pair().await;
    let mut stream = client.submit(submission("a", 1, Delivery::EachStep)).unwrap();
    let refused = client.submit(submission("a", 1, Delivery::EachStep)).err();
    assert_eq!(refused, Some(SubmitError::Duplicate("a".to_owned())));
    link.request().await;
    link.send(&step("v", 1, vec![finished("0_a", &[1], FinishReason::Stop)])).await;
    rest(&mut stream).await;
    assert!(client.submit(submission("a", 1, Delivery::EachStep)).is_ok());
}

#[tokio::test]
async fn a_failed_choice_fails_the_request_and_aborts_its_siblings() {
    let (client, mut link, _engine) = pair().await;
    let mut stream = client.submit(submission("a", 2, Delivery::EachStep)).unwrap();
    link.request().await;
    link.request().await;
    let error = EngineError {
        code: "engine_paused".to_owned(),
        message: "paused".to_owned(),
        retryable: true,
        ..EngineError::default()
    };
    let failed = EngineCoreOutput { error: Some(error.clone()), ..finished("1_a", &[], FinishReason::Error) };
    link.send(&step("v", 1, vec![tokens("0_a", &[5]), failed])).await;
    assert_eq!(link.aborted().await, ["0_a"]);
    assert_eq!(stream.next().await.unwrap().unwrap().output.new_token_ids, [5]);
    assert_eq!(stream.next().await, Some(Err(RequestError::Engine(error))));
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn an_error_without_words_is_an_engine_error() {
    let (client, mut link, _engine) = pair().await;
    let mut stream = client.submit(submission("a", 1, Delivery::WhenFinished)).unwrap();
    link.request().await;
    link.send(&step("v", 1, vec![finished("0_a", &[], FinishReason::Error)])).await;
    let Some(Err(RequestError::Engine(error))) = stream.next().await else { panic!("an error was due") };
    assert_eq!(error.code, "engine_error");
}

#[tokio::test]
async fn a_thousand_choices_are_aborted_in_one_go() {
    let (client, mut link, _engine) = pair().await;
    let stream = client.submit(submission("a", 1024, Delivery::WhenFinished)).unwrap();
    for _ in 0..1024 {
        link.request().await;
    }
    drop(stream);
    assert_eq!(link.aborted().await.len(), 1024);
}

/// Writes down what it observes.
#[derive(Default, Clone)]
struct Notes(Arc<Mutex<Vec<String>>>);

impl Notes {
    fn add(&self, note: String) {
        self.0.lock().unwrap().push(note);
    }
}

impl Observer for Notes {
    fn first_tokens(&self, count: usize, prompt_tokens: usize, _: Duration) {
        self.add(format!("first {count} behind {prompt_tokens}"));
    }
    fn more_tokens(&self, count: usize, _: Duration) {
        self.add(format!("more {count}"));
    }
    fn finished(&self, finished: Finished) {
        self.add(format!("finished {} {:?}", finished.reason.as_str(), finished.commits));
    }
    fn weight_commit(&self, commit: u64) {
        self.add(format!("commit {commit}"));
    }
    fn scheduler_stats(&self, stats: &SchedulerStats) {
        self.add(format!("stats {}", stats.num_running_reqs));
    }
    fn decode_error(&self, reason: &'static str) {
        self.add(format!("decode error {reason}"));
    }
    fn skipped_fields(&self, count: u64) {
        self.add(format!("skipped {count}"));
    }
}

#[tokio::test]
async fn the_observer_hears_of_tokens_finishes_and_updates_in_between() {
    let notes = Notes::default();
    let (client, mut link, _engine) = pair_observed(Box::new(notes.clone())).await;
    let mut submission = submission("a", 1, Delivery::EachStep);
    submission.requests[0].prompt_token_ids = Some([1, 2, 3].into());
    let mut stream = client.submit(submission).unwrap();
    link.request().await;
    link.send(&step("v1", 1, vec![tokens("0_a", &[5])])).await;
    link.send(&step("v2", 2, vec![tokens("0_a", &[6, 7])])).await;
    link.send(&step("v2", 2, vec![finished("0_a", &[], FinishReason::Stop)])).await;
    rest(&mut stream).await;
    let heard = notes.0.lock().unwrap().clone();
    let expected = [
        "commit 0",
        "commit 1",
        "first 1 behind 3",
        "commit 2",
        "more 2",
        "commit 2",
        "finished stop [(Some(1), 1), (Some(2), 2)]",
    ];
    assert_eq!(heard, expected);
}

#[tokio::test]
async fn elements_that_this_version_does_not_know_are_counted() {
    let notes = Notes::default();
    let (client, mut link, _engine) = pair_observed(Box::new(notes.clone())).await;
    let mut payload = step("v", 1, vec![tokens("x", &[1])]).encode();
    assert_eq!(payload[0], 0x9a, "an array of ten");
    payload[0] = 0x9c;
    payload.extend_from_slice(&[0xc3, 0x07]);
    link.send_frame(rollspan_protocol::FrameKind::Outputs, &payload).await;
    settle(&client, &mut link).await;
    assert_eq!(*notes.0.lock().unwrap(), ["commit 0", "skipped 2", "commit 1"]);
}
