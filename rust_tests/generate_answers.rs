//! Outputs of the engine become collected answers and chunks of streams.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::sync::Arc;

use rollspan_generate::{AnswerFacts, ApiError, Choice, ChunkWriter, GenerateRequest, Reason, Served, collected};
use rollspan_protocol::{
    Admission, EngineCoreOutput, EngineError, FinishReason, Limits, LogprobsLists, PrefillStats, StopReason,
    UtilityFailure,
};
use serde_json::{Value, json};

fn request(fields: &str, sampling: &str) -> GenerateRequest {
    let limits = Limits { max_model_len: 64, vocab_size: 100, max_logprobs: 5, ..Limits::default() };
    let served = Served { model: "toy".into(), limits, eos_token_ids: vec![1] };
    let body = format!(r#"{{"token_ids":[1,2,3],"sampling_params":{{{sampling}}}{fields}}}"#);
    GenerateRequest::parse(body.as_bytes(), None, &served, false).unwrap()
}

fn facts() -> AnswerFacts {
    AnswerFacts { request_id: "e1".into(), model: "toy".into(), created: 1_800_000_000, engine_index: 0 }
}

fn tokens(ids: &[u32]) -> EngineCoreOutput {
    EngineCoreOutput { request_id: "e1-0".into(), new_token_ids: ids.to_vec(), ..EngineCoreOutput::default() }
}

fn admitted(label: &str, commit: u64) -> Admission {
    Admission { weight_version: Arc::from(label), weight_commit: commit }
}

fn last(ids: &[u32]) -> EngineCoreOutput {
    EngineCoreOutput { finish_reason: Some(FinishReason::Length), ..tokens(ids) }
}

fn answer(request: &GenerateRequest, choices: &[Choice]) -> Value {
    serde_json::from_slice(&collected(request, &facts(), choices).unwrap()).unwrap()
}

fn next(writer: &mut ChunkWriter, request: &GenerateRequest, choices: &mut [Choice], index: usize) -> Option<Value> {
    let chunk = writer.chunk(request, &facts(), choices, index).unwrap()?;
    Some(serde_json::from_slice(&chunk).unwrap())
}

#[test]
fn a_collected_answer_has_all_the_fields_of_the_contract() {
    let request = request(r#","return_token_ids":true"#, "");
    let mut choice = Choice::new(0, false);
    let stats = PrefillStats { num_prompt_tokens: 3, num_computed_tokens: 1, num_cached_tokens: 2 };
    let first = EngineCoreOutput { admission: Some(admitted("A", 0)), prefill_stats: Some(stats), ..tokens(&[7]) };
    choice.push(first, Some("A"), Some(0)).unwrap();
    let end = EngineCoreOutput {
        finish_reason: Some(FinishReason::Stop),
        stop_reason: Some(StopReason::Token(9)),
        ..tokens(&[8, 9])
    };
    choice.push(end, Some("B"), Some(1)).unwrap();
    let expected = json!({
        "request_id": "e1", "model": "toy", "created": 1_800_000_000, "output_mode": "tokens",
        "usage": {
            "prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 2}, "completion_tokens_details": null,
        },
        "engine_index": 0, "weight_version": "A", "weight_commit": 0,
        "prompt_token_ids": [1, 2, 3], "prompt_logprobs": null, "kv_transfer_params": null, "ec_transfer_params": null,
        "choices": [{
            "index": 0, "token_ids": [7, 8, 9], "finish_reason": "stop", "stop_reason": 9, "logprobs": null,
            "routed_experts": null,
            "weight_versions": [{"version": "A", "start": 0, "end": 1}, {"version": "B", "start": 1, "end": 3}],
            "weight_commits": [{"commit": 0, "start": 0, "end": 1}, {"commit": 1, "start": 1, "end": 3}],
        }],
    });
    let answered = answer(&request, &[choice]);
    assert_eq!(answered, expected);
    assert_eq!(
        answered.as_object().unwrap().keys().collect::<Vec<_>>(),
        expected.as_object().unwrap().keys().collect::<Vec<_>>()
    );
}

#[test]
fn log_probs_are_objects_with_the_sampled_token_first_and_no_token_twice() {
    let request = request("", r#""logprobs":2"#);
    let mut choice = Choice::new(0, true);
    let lists = LogprobsLists {
        width: 3,
        token_ids: vec![5, 4, 5, 6, 7, 8],
        logprobs: vec![-0.5, -0.25, -0.5, f32::NEG_INFINITY, f32::NAN, -3.0],
        sampled_ranks: vec![2, 9],
        cumulative: None,
    };
    choice.push(EngineCoreOutput { new_logprobs: Some(lists), ..last(&[5, 6]) }, None, None).unwrap();
    let entry = |id: u32, logprob: f64, rank: u32| json!({"token": format!("token_id:{id}"), "token_id": id, "logprob": logprob, "rank": rank});
    let with_top = |mut entry: Value, top: Value| {
        entry["top_logprobs"] = top;
        entry
    };
    let expected = json!({"content": [
        with_top(entry(5, -0.5, 2), json!([entry(5, -0.5, 2), entry(4, -0.25, 1)])),
        with_top(entry(6, -9999.0, 9), json!([entry(6, -9999.0, 9), entry(7, -9999.0, 1), entry(8, -3.0, 2)])),
    ]});
    let answered = answer(&request, &[choice]);
    assert_eq!(answered["choices"][0]["logprobs"], expected);
    assert_eq!(answered["choices"][0]["weight_versions"], Value::Null);
}

#[test]
fn log_probs_zero_name_the_sampled_token_only_whatever_the_engine_sends() {
    let request = request("", r#""logprobs":0"#);
    let mut choice = Choice::new(0, true);
    let lists = LogprobsLists {
        width: 2,
        token_ids: vec![5, 4],
        logprobs: vec![-0.5, -0.25],
        sampled_ranks: vec![2],
        cumulative: None,
    };
    choice.push(EngineCoreOutput { new_logprobs: Some(lists), ..last(&[5]) }, None, None).unwrap();
    let content = &answer(&request, &[choice])["choices"][0]["logprobs"]["content"];
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 1);
}

#[test]
fn missing_or_changing_log_probs_are_a_decode_error_and_end_the_sequence() {
    let mut choice = Choice::new(0, true);
    let error = choice.push(tokens(&[5]), None, None).unwrap_err();
    assert_eq!(error.reason, Reason::DecodeError);
    assert!(choice.finished());
    let rows = |width: usize| LogprobsLists {
        width,
        token_ids: vec![5; width],
        logprobs: vec![0.0; width],
        sampled_ranks: vec![1],
        cumulative: None,
    };
    let mut choice = Choice::new(0, true);
    choice.push(EngineCoreOutput { new_logprobs: Some(rows(1)), ..tokens(&[5]) }, None, None).unwrap();
    let error = choice.push(EngineCoreOutput { new_logprobs: Some(rows(2)), ..tokens(&[5]) }, None, None).unwrap_err();
    assert_eq!(error.reason, Reason::DecodeError);
    assert_eq!(choice.tokens(), 1);
}

#[test]
fn stream_chunks_hold_new_tokens_and_the_last_one_everything() {
    let fields = r#","return_token_ids":true,"stream":true,"stream_options":{"include_usage":true}"#;
    let request = request(fields, "");
    let mut choices = [Choice::new(0, false)];
    let mut writer = ChunkWriter::default();
    assert_eq!(next(&mut writer, &request, &mut choices, 0), None);
    let first = EngineCoreOutput { admission: Some(admitted("A", 0)), ..tokens(&[7]) };
    choices[0].push(first, Some("A"), Some(0)).unwrap();
    let chunk = next(&mut writer, &request, &mut choices, 0).unwrap();
    let expected = json!({
        "request_id": "e1",
        "choices": [{"index": 0, "token_ids": [7], "finish_reason": null}],
        "prompt_token_ids": [1, 2, 3],
    });
    assert_eq!(chunk, expected);
    choices[0].push(tokens(&[8]), Some("A"), Some(0)).unwrap();
    choices[0].push(last(&[9]), Some("B"), Some(1)).unwrap();
    let chunk = next(&mut writer, &request, &mut choices, 0).unwrap();
    let expected = json!({
        "request_id": "e1",
        "choices": [{
            "index": 0, "token_ids": [8, 9], "finish_reason": "length", "stop_reason": null,
            "weight_versions": [{"version": "A", "start": 0, "end": 2}, {"version": "B", "start": 2, "end": 3}],
            "weight_commits": [{"commit": 0, "start": 0, "end": 2}, {"commit": 1, "start": 2, "end": 3}],
        }],
        "model": "toy", "created": 1_800_000_000, "engine_index": 0, "weight_version": "A", "weight_commit": 0,
    });
    assert_eq!(chunk, expected);
    assert_eq!(next(&mut writer, &request, &mut choices, 0), None);
    let usage = writer.usage_chunk(&request, &facts(), &choices).unwrap().unwrap();
    let usage: Value = serde_json::from_slice(&usage).unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 3);
}

#[test]
fn an_aborted_sequence_ends_with_a_chunk_of_its_own_even_without_tokens() {
    let request = request(r#","stream":true"#, "");
    let mut choices = [Choice::new(0, false)];
    let mut writer = ChunkWriter::default();
    choices[0].push(tokens(&[7]), Some("A"), Some(0)).unwrap();
    next(&mut writer, &request, &mut choices, 0).unwrap();
    choices[0].abort();
    choices[0].push(tokens(&[8]), Some("B"), Some(1)).unwrap();
    let chunk = next(&mut writer, &request, &mut choices, 0).unwrap();
    assert_eq!(chunk["choices"][0]["token_ids"], json!([]));
    assert_eq!(chunk["choices"][0]["finish_reason"], "abort");
    assert_eq!(chunk["choices"][0]["weight_versions"], json!([{"version": "A", "start": 0, "end": 1}]));
    assert_eq!(next(&mut writer, &request, &mut choices, 0), None);
}

#[test]
fn chunks_carry_their_own_spans_and_the_usage_so_far_when_asked_to() {
    let options = r#"{"include_usage":true,"continuous_usage_stats":true,"include_weight_versions":true}"#;
    let request = request(&format!(r#","stream":true,"stream_options":{options}"#), "");
    let mut choices = [Choice::new(0, false)];
    let mut writer = ChunkWriter::default();
    choices[0].push(tokens(&[7, 8]), Some("A"), Some(0)).unwrap();
    next(&mut writer, &request, &mut choices, 0).unwrap();
    choices[0].push(tokens(&[9]), Some("A"), Some(0)).unwrap();
    choices[0].push(tokens(&[10]), Some("B"), Some(1)).unwrap();
    let chunk = next(&mut writer, &request, &mut choices, 0).unwrap();
    let spans = json!([{"version": "A", "start": 2, "end": 3}, {"version": "B", "start": 3, "end": 4}]);
    assert_eq!(chunk["choices"][0]["weight_versions"], spans);
    assert_eq!(chunk["usage"]["completion_tokens"], 4);
    assert_eq!(chunk["usage"]["total_tokens"], 7);
}

#[test]
fn the_root_stamp_is_null_where_the_sequences_differ() {
    let request = request("", r#""n":2"#);
    let mut choices = [Choice::new(0, false), Choice::new(1, false)];
    for (index, (label, commit)) in [("A", 0), ("A", 1)].into_iter().enumerate() {
        let output = EngineCoreOutput { admission: Some(admitted(label, commit)), ..last(&[7]) };
        choices[index].push(output, Some(label), Some(commit)).unwrap();
    }
    let answered = answer(&request, &choices);
    assert_eq!((&answered["weight_version"], &answered["weight_commit"]), (&json!("A"), &Value::Null));
    assert_eq!(answered["usage"]["completion_tokens"], 2);
}

#[test]
fn failures_of_the_engine_keep_their_reason() {
    let failure = |code: &str| {
        let error = EngineError { code: code.into(), message: "words".into(), ..EngineError::default() };
        let output = EngineCoreOutput { finish_reason: Some(FinishReason::Error), error: Some(error), ..tokens(&[]) };
        Choice::new(0, false).push(output, None, None).unwrap_err()
    };
    assert_eq!(failure("engine_paused").status(), 503);
    assert_eq!(failure("engine_paused").reason.retry_after(), Some(1));
    assert_eq!(failure("validation_error").reason, Reason::InvalidRequest);
    assert_eq!(failure("nan_logits"), ApiError::new(Reason::NanLogits, "words"));
    assert_eq!(failure("something else").reason, Reason::InternalError);
    let silent = EngineCoreOutput { finish_reason: Some(FinishReason::Error), ..tokens(&[]) };
    assert_eq!(Choice::new(0, false).push(silent, None, None).unwrap_err().reason, Reason::EngineError);
    let utility = UtilityFailure { message: "words".into(), reason: Some("update_active".into()) };
    assert_eq!(ApiError::from(&utility), ApiError::new(Reason::UpdateActive, "words"));
    let utility = UtilityFailure { message: "words".into(), reason: None };
    assert_eq!(ApiError::from(&utility).reason, Reason::InternalError);
}
