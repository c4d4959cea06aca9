//! What answers hold when it was asked for: log-probs of the prompt, KV versions, and routed experts.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "support/vectors.rs"]
#[expect(dead_code, reason = "no messages here")]
mod vectors;

use rollspan_generate::{AnswerFacts, Choice, ChunkWriter, GenerateRequest, Reason, Served, collected};
use rollspan_protocol::{
    EngineCoreOutput, EngineError, FinishReason, Limits, LogprobsLists, Provenance, RoutedExperts, StampSpan,
    StopReason,
};
use serde_json::{Value, json};
use vectors::{load, text};

fn request(token_ids: &[u32], sampling: &str) -> GenerateRequest {
    let limits = Limits { max_model_len: 64, vocab_size: 100, max_logprobs: 5, ..Limits::default() };
    let served = Served { model: "toy".into(), limits, eos_token_ids: vec![1] };
    let body = format!(r#"{{"token_ids":{token_ids:?},"sampling_params":{{{sampling}}}}}"#);
    GenerateRequest::parse(body.as_bytes(), None, &served, false).unwrap()
}

fn facts() -> AnswerFacts {
    AnswerFacts { request_id: "e1".into(), model: "toy".into(), created: 1, engine_index: 0 }
}

fn answer(request: &GenerateRequest, choices: &[Choice]) -> Value {
    serde_json::from_slice(&collected(request, &facts(), choices).unwrap()).unwrap()
}

fn chunk(writer: &mut ChunkWriter, request: &GenerateRequest, choices: &mut [Choice], index: usize) -> Value {
    serde_json::from_slice(&writer.chunk(request, &facts(), choices, index).unwrap().unwrap()).unwrap()
}

fn output(ids: &[u32]) -> EngineCoreOutput {
    EngineCoreOutput { new_token_ids: ids.to_vec(), ..EngineCoreOutput::default() }
}

fn last(ids: &[u32]) -> EngineCoreOutput {
    EngineCoreOutput { finish_reason: Some(FinishReason::Length), ..output(ids) }
}

/// Of a prompt `[.., 5, 6]`: the second row's token is among the most probable ones again.
fn prompt() -> LogprobsLists {
    LogprobsLists {
        width: 3,
        token_ids: vec![5, 4, 7, 6, 8, 6],
        logprobs: vec![-2.5, -0.25, -0.5, -1.0, -0.5, -1.0],
        sampled_ranks: vec![9, 2],
        cumulative: None,
    }
}

fn with_prompt(output: EngineCoreOutput) -> EngineCoreOutput {
    EngineCoreOutput { new_prompt_logprobs: Some(Box::new(prompt())), ..output }
}

fn expected_prompt() -> Value {
    let entry = |id: u32, logprob: f64, rank: u32| json!({"logprob": logprob, "rank": rank, "decoded_token": format!("token_id:{id}")});
    json!([
        null,
        {"5": entry(5, -2.5, 9), "4": entry(4, -0.25, 1), "7": entry(7, -0.5, 2)},
        {"6": entry(6, -1.0, 2), "8": entry(8, -0.5, 1)},
    ])
}

#[test]
fn log_probs_of_the_prompt_are_objects_by_token_with_its_own_first() {
    let request = request(&[3, 5, 6], r#""prompt_logprobs":2"#);
    let mut choices = request.choices();
    choices[0].push(with_prompt(last(&[7])), None, None).unwrap();
    let answered = answer(&request, &choices);
    assert_eq!(answered["prompt_logprobs"], expected_prompt());
    let keys: Vec<_> = answered["prompt_logprobs"][1].as_object().unwrap().keys().cloned().collect();
    assert_eq!(keys, ["5", "4", "7"]);
}

#[test]
fn fewer_candidates_are_shown_than_the_engine_sends_when_fewer_were_asked_for() {
    let request = request(&[3, 5, 6], r#""prompt_logprobs":0"#);
    let mut choices = request.choices();
    choices[0].push(with_prompt(last(&[7])), None, None).unwrap();
    let rows = answer(&request, &choices)["prompt_logprobs"].as_array().unwrap().clone();
    assert_eq!(rows.iter().map(|row| row.as_object().map_or(0, serde_json::Map::len)).collect::<Vec<_>>(), [0, 1, 1]);
}

#[test]
fn a_prompt_of_one_token_has_one_null_and_an_abort_before_the_prompt_none() {
    let one = request(&[3], r#""prompt_logprobs":2"#);
    let mut choices = one.choices();
    choices[0].push(last(&[7]), None, None).unwrap();
    assert_eq!(answer(&one, &choices)["prompt_logprobs"], json!([null]));
    let request = request(&[3, 5, 6], r#""prompt_logprobs":2"#);
    let mut choices = request.choices();
    choices[0].abort();
    assert_eq!(answer(&request, &choices)["prompt_logprobs"], Value::Null);
}

#[test]
fn tokens_before_the_log_probs_of_the_prompt_are_a_decode_error_and_so_are_too_few_rows() {
    let request = request(&[3, 5, 6, 7], r#""prompt_logprobs":2"#);
    assert_eq!(request.choices()[0].push(output(&[7]), None, None).unwrap_err().reason, Reason::DecodeError);
    let error = request.choices()[0].push(with_prompt(output(&[7])), None, None).unwrap_err();
    assert_eq!(error.message, "the engine sent 3 tokens of the prompt with 2 log-probs");
}

#[test]
fn the_first_of_several_sequences_asks_for_the_prompt_and_its_first_chunk_has_it() {
    let request = request(&[3, 5, 6], r#""prompt_logprobs":2,"n":2"#);
    let asked: Vec<_> = request
        .engine_requests("e", 1, 0.0, None)
        .into_iter()
        .map(|child| child.sampling_params.unwrap().prompt_logprobs)
        .collect();
    assert_eq!(asked, [Some(2), None]);
    let mut choices = request.choices();
    let mut writer = ChunkWriter::default();
    choices[1].push(output(&[8]), None, None).unwrap();
    assert_eq!(chunk(&mut writer, &request, &mut choices, 1).get("prompt_logprobs"), None);
    choices[0].push(with_prompt(output(&[7])), None, None).unwrap();
    assert_eq!(chunk(&mut writer, &request, &mut choices, 0)["prompt_logprobs"], expected_prompt());
    choices[0].push(last(&[7]), None, None).unwrap();
    assert_eq!(chunk(&mut writer, &request, &mut choices, 0).get("prompt_logprobs"), None);
}

#[test]
fn routed_experts_are_the_npy_files_of_the_vectors_at_the_end_only() {
    for case in load("npy.json")["cases"].as_array().unwrap() {
        let shape: [usize; 3] = serde_json::from_value(case["shape"].clone()).unwrap();
        let ids = (0..shape.iter().product::<usize>()).map(|id| u8::try_from(id % 251).unwrap());
        let data = match text(&case["dtype"]) {
            "|u1" => ids.collect(),
            "<i2" => ids.flat_map(|id| i16::from(id).to_le_bytes()).collect(),
            _ => ids.flat_map(|id| i32::from(id).to_le_bytes()).collect::<Vec<u8>>(),
        };
        let experts = RoutedExperts::new(text(&case["dtype"]), shape, data).map(Box::new);
        let request = request(&[3], r#""routed_experts":true"#);
        let end = EngineCoreOutput { routed_experts: experts, ..last(&[8]) };
        let (mut whole, mut streamed) = (request.choices(), request.choices());
        whole[0].push(end.clone(), None, None).unwrap();
        assert_eq!(answer(&request, &whole)["choices"][0]["routed_experts"], case["base64"]);
        let mut writer = ChunkWriter::default();
        streamed[0].push(output(&[7]), None, None).unwrap();
        let first = chunk(&mut writer, &request, &mut streamed, 0);
        assert_eq!(first["choices"][0].get("routed_experts"), None);
        streamed[0].push(end, None, None).unwrap();
        assert_eq!(chunk(&mut writer, &request, &mut streamed, 0)["choices"][0]["routed_experts"], case["base64"]);
    }
    assert!(RoutedExperts::new("|u1", [usize::MAX, 2, 2], Vec::new()).is_none());
    assert!(RoutedExperts::new("<i8", [1, 1, 1], vec![0; 8]).is_none());
}

#[test]
fn a_refusal_that_only_the_engine_can_find_names_its_field() {
    let error = EngineError {
        code: "validation_error".into(),
        message: "sampling_params.bad_words needs a tokenizer.json".into(),
        param: Some("sampling_params.bad_words".into()),
        reason: Some("unsupported_field".into()),
        ..EngineError::default()
    };
    let end = EngineCoreOutput { finish_reason: Some(FinishReason::Error), error: Some(error), ..output(&[]) };
    let refused = Choice::new(0, false).push(end, None, None).unwrap_err();
    assert_eq!((refused.status(), refused.reason), (400, Reason::UnsupportedField));
    assert_eq!(refused.body()["error"]["param"], "sampling_params.bad_words");
}

fn span(label: &str, commit: u64, start: u32, end: u32) -> StampSpan {
    StampSpan { weight_version: label.into(), weight_commit: commit, start, end }
}

#[test]
fn the_weights_that_scored_the_prompt_are_beside_its_log_probs() {
    let request = request(&[3, 5, 6], r#""prompt_logprobs":2"#);
    let expected = json!([{"version": "A", "commit": 1, "start": 1, "end": 2}, {"version": "B", "commit": 2, "start": 2, "end": 3}]);
    let spans = || Some(vec![span("A", 1, 1, 2), span("B", 2, 2, 3)]);
    let (mut whole, mut streamed) = (request.choices(), request.choices());
    whole[0].push(EngineCoreOutput { prompt_spans: spans(), ..with_prompt(last(&[7])) }, None, None).unwrap();
    assert_eq!(answer(&request, &whole)["prompt_weight_commits"], expected);
    let mut writer = ChunkWriter::default();
    streamed[0].push(EngineCoreOutput { prompt_spans: spans(), ..with_prompt(output(&[7])) }, None, None).unwrap();
    assert_eq!(chunk(&mut writer, &request, &mut streamed, 0)["prompt_weight_commits"], expected);
    streamed[0].push(last(&[7]), None, None).unwrap();
    assert_eq!(chunk(&mut writer, &request, &mut streamed, 0).get("prompt_weight_commits"), None);
    let mut silent = request.choices();
    silent[0].push(with_prompt(last(&[7])), None, None).unwrap();
    assert_eq!(answer(&request, &silent).get("prompt_weight_commits"), Some(&Value::Null));
}

#[test]
fn a_prompt_whose_log_probs_nobody_asked_for_has_no_weights_either() {
    let plain = request(&[3, 5], "");
    let mut choices = plain.choices();
    choices[0].push(last(&[7]), None, None).unwrap();
    assert_eq!(answer(&plain, &choices).get("prompt_weight_commits"), None);
    let one = request(&[3], r#""prompt_logprobs":2"#);
    let mut choices = one.choices();
    choices[0].push(last(&[7]), None, None).unwrap();
    assert_eq!(answer(&one, &choices)["prompt_weight_commits"], json!([]));
}

#[test]
fn kv_versions_come_at_the_end_when_they_were_asked_for() {
    let plain = request(&[3, 5], "");
    let asking = GenerateRequest {
        provenance: Provenance { return_kv_versions: true, ..Provenance::default() },
        ..plain.clone()
    };
    let first = |token| EngineCoreOutput { kv_spans: Some(vec![span("A", 1, 0, 2)]), ..output(&[token]) };
    let expected = json!([
        {"start": 0, "end": 1, "kv": [{"version": "A", "commit": 1, "start": 0, "end": 2}]},
        {
            "start": 1,
            "end": 3,
            "kv": [
                {"version": "A", "commit": 1, "start": 0, "end": 2},
                {"version": "B", "commit": 2, "start": 2, "end": 4},
            ],
        },
    ]);
    for request in [&asking, &plain] {
        let (mut whole, mut streamed) = (request.choices(), request.choices());
        let mut writer = ChunkWriter::default();
        for choices in [&mut whole, &mut streamed] {
            choices[0].push(first(7), Some("A"), Some(1)).unwrap();
        }
        assert_eq!(chunk(&mut writer, request, &mut streamed, 0)["choices"][0].get("kv_versions"), None);
        for choices in [&mut whole, &mut streamed] {
            choices[0].push(last(&[8, 9]), Some("B"), Some(2)).unwrap();
        }
        let wanted = request.provenance.return_kv_versions.then_some(&expected);
        assert_eq!(answer(request, &whole)["choices"][0].get("kv_versions"), wanted);
        assert_eq!(chunk(&mut writer, request, &mut streamed, 0)["choices"][0].get("kv_versions"), wanted);
    }
    let mut silent = asking.choices();
    silent[0].push(last(&[7]), Some("A"), Some(1)).unwrap();
    assert_eq!(answer(&asking, &silent)["choices"][0].get("kv_versions"), Some(&Value::Null));
    let mut aborted = asking.choices();
    aborted[0].abort();
    assert_eq!(answer(&asking, &aborted)["choices"][0]["kv_versions"], json!([]));
}

#[test]
fn kv_spans_that_do_not_fit_their_token_are_a_decode_error() {
    let provenance = Provenance { return_kv_versions: true, ..Provenance::default() };
    let request = GenerateRequest { provenance, ..request(&[3, 5], "") };
    let mut choices = request.choices();
    let wrong = EngineCoreOutput { kv_spans: Some(vec![span("A", 1, 0, 3)]), ..output(&[7]) };
    let error = choices[0].push(wrong, Some("A"), Some(1)).unwrap_err();
    let message = "the engine sent KV spans cover 3 positions, but 2 come before the token";
    assert_eq!((error.reason, error.message.as_str()), (Reason::DecodeError, message));
    assert_eq!((choices[0].tokens(), choices[0].finished()), (0, true));
}

#[test]
fn weights_that_are_too_old_are_a_conflict_and_a_lag_an_abort_that_says_why() {
    let error =
        EngineError { code: "stale_weights".into(), message: "commit 3 is in force".into(), ..EngineError::default() };
    let end = EngineCoreOutput { finish_reason: Some(FinishReason::Error), error: Some(error), ..output(&[]) };
    let refused = Choice::new(0, false).push(end, None, None).unwrap_err();
    assert_eq!((refused.status(), refused.reason), (409, Reason::StaleWeights));
    let request = request(&[3], "");
    let mut choices = request.choices();
    let end = EngineCoreOutput {
        finish_reason: Some(FinishReason::Abort),
        stop_reason: Some(StopReason::Text("stale_weights".into())),
        ..output(&[7])
    };
    choices[0].push(end, Some("A"), Some(1)).unwrap();
    let choice = &answer(&request, &choices)["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("abort"), &json!("stale_weights")));
    assert_eq!(choice["weight_commits"], json!([{"commit": 1, "start": 0, "end": 1}]));
}
