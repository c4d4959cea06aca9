//! What the vectors cannot say: paths of errors, recovery of request ids, round trips of every message.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::sync::Arc;

use rollspan_protocol::{
    Admission, Batch, Body, ClientHello, Dead, DecodeErrorKind, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest,
    EngineError, EngineHello, FinishReason, FrameError, FrameHeader, FrameKind, Limits, LogprobsLists, MAX_FRAME_BYTES,
    ModelFacts, PrefillStats, PrefixCacheStats, Provenance, RoutedExperts, SamplingParams, SchedulerStats, StampSpan,
    StopReason, StructuredOutputs, UtilityFailure, UtilityOutput, UtilityRequest, VERSION, WeightUpdateSeconds,
    WeightUpdates, decode_abort, decode_outputs, encode_abort, encode_frame, recover_request_ids,
};
use serde_json::json;

fn envelope(body: Body) -> EngineCoreOutputs {
    EngineCoreOutputs {
        engine_index: 2,
        timestamp: 1.5,
        weight_version: Some("v7".into()),
        weight_commit: Some(3),
        body,
    }
}

fn batch(outputs: Vec<EngineCoreOutput>) -> EngineCoreOutputs {
    envelope(Body::Batch(Batch { outputs, ..Batch::default() }))
}

fn output(request_id: &str) -> EngineCoreOutput {
    EngineCoreOutput { request_id: request_id.to_owned(), new_token_ids: vec![42], ..EngineCoreOutput::default() }
}

fn logprobs() -> LogprobsLists {
    LogprobsLists {
        width: 2,
        token_ids: vec![42, 7],
        logprobs: vec![-0.5, f32::NEG_INFINITY],
        sampled_ranks: vec![1],
        cumulative: Some(vec![0, 1]),
    }
}

#[test]
fn every_family_of_outputs_survives_a_round_trip() {
    let full = EngineCoreOutput {
        new_logprobs: Some(logprobs()),
        finish_reason: Some(FinishReason::Stop),
        stop_reason: Some(StopReason::Text("stale_weights".into())),
        prefill_stats: Some(PrefillStats { num_prompt_tokens: 3, num_computed_tokens: 2, num_cached_tokens: 1 }),
        num_nans_in_logits: 4,
        error: Some(EngineError {
            code: "nan_logits".into(),
            message: "NaN".into(),
            retryable: true,
            param: Some("p".into()),
            reason: Some("invalid_request".into()),
        }),
        new_prompt_logprobs: Some(Box::new(LogprobsLists { cumulative: None, ..logprobs() })),
        routed_experts: RoutedExperts::new("<i2", [1, 2, 1], vec![0, 1, 2, 3]).map(Box::new),
        admission: Some(Admission { weight_version: "v6".into(), weight_commit: u64::MAX }),
        ..output("r1")
    };
    let stats = SchedulerStats {
        num_running_reqs: 1,
        kv_cache_usage: 0.5,
        prefix_cache_stats: Some(PrefixCacheStats { queries: 4, hits: 2, ..PrefixCacheStats::default() }),
        paused: Some(true),
        weight_state: Some("updating".into()),
        weight_updates: Some(WeightUpdates { success: 3, failure: 1 }),
        weight_update_seconds: Some(WeightUpdateSeconds { receive: 1.5, stall: Some(0.25), ..Default::default() }),
        ..SchedulerStats::default()
    };
    let whole = Batch {
        outputs: vec![full, output("r2")],
        scheduler_stats: Some(stats),
        finished_requests: Some(vec!["r1".into()]),
    };
    let failure = UtilityFailure { message: "boom".into(), reason: Some("update_active".into()) };
    for body in [
        Body::Batch(whole),
        Body::Utility(UtilityOutput { call_id: u64::MAX, outcome: Ok(json!({"a": [1, -1, 0.5, null, true, "x"]})) }),
        Body::Utility(UtilityOutput { call_id: 7, outcome: Err(failure) }),
        Body::WaveComplete(3),
        Body::StartWave(4),
    ] {
        let message = envelope(body);
        let decoded = decode_outputs(&[&message.encode()]).unwrap();
        assert_eq!(decoded.value, message);
        assert_eq!(decoded.skipped_fields, 0);
    }
}

#[test]
fn requests_calls_and_hellos_survive_a_round_trip() {
    let request = EngineCoreRequest {
        request_id: "0_e1-0a0b0c0d".into(),
        prompt_token_ids: Some(Arc::from([1, 2, u32::MAX])),
        sampling_params: Some(SamplingParams {
            temperature: 0.7,
            top_p: 0.9,
            top_k: -1,
            seed: Some(i64::MAX),
            max_tokens: 1,
            min_tokens: 1,
            stop_token_ids: vec![7],
            ignore_eos: true,
            logprobs: Some(0),
            output_kind: 2,
            eos_token_id: Some(1),
            all_stop_token_ids: vec![1, 7],
            min_p: 0.25,
            presence_penalty: -0.5,
            frequency_penalty: 0.5,
            repetition_penalty: 1.5,
            prompt_logprobs: Some(-1),
            logit_bias: vec![(7, -100.0), (u32::MAX, 0.5)],
            allowed_token_ids: Some(vec![1, 2]),
            bad_words: vec!["größe".into()],
            bad_words_token_ids: vec![vec![1, 2], vec![3]],
            structured_outputs: Some(StructuredOutputs { regex: Some("a+".into()), ..StructuredOutputs::default() }),
            skip_reading_prefix_cache: Some(false),
            routed_experts: Some(true),
            routed_experts_prompt_start: 3,
            n: 1,
        }),
        arrival_time: 1.25,
        cache_salt: Some("salt".into()),
        priority: -3,
        external_req_id: Some("e1".into()),
        session_id: Some("s".into()),
        ..EngineCoreRequest::default()
    };
    assert_eq!(EngineCoreRequest::decode(&request.encode()).unwrap().value, request);
    let call = UtilityRequest { client_index: 1, call_id: 2, method: "m".into(), args: vec![json!({"path": "/w"})] };
    assert_eq!(UtilityRequest::decode(&call.encode()).unwrap().value, call);
    assert_eq!(decode_abort(&encode_abort(&["a", "b"])).unwrap(), ["a", "b"]);
    let hello = ClientHello::new("test", 1024);
    assert_eq!(ClientHello::decode(&hello.encode()).unwrap().value, hello);
    let dead = Dead { reason: "engine_error".into(), message: "out of memory".into() };
    assert_eq!(Dead::decode(&dead.encode()).unwrap().value, dead);
    let hello = EngineHello {
        version: VERSION,
        rollspan_version: "0.1.0".into(),
        engine_index: 1,
        pid: 2,
        limits: Limits { max_model_len: 512, vocab_size: 64, ..Limits::default() },
        model: ModelFacts { name: "m".into(), eos_token_ids: vec![1], ..ModelFacts::default() },
        weight_version: "default".into(),
        weight_commit: 0,
        paused: true,
        weight_state: "updating".into(),
    };
    assert_eq!(EngineHello::decode(&hello.encode()).unwrap().value, hello);
}

#[test]
fn token_ids_over_31_bits_survive_in_log_probs() {
    let lists = LogprobsLists { token_ids: vec![u32::MAX, 7], cumulative: None, ..logprobs() };
    let message = batch(vec![EngineCoreOutput { new_logprobs: Some(lists), ..output("r1") }]);
    assert_eq!(decode_outputs(&[&message.encode()]).unwrap().value, message);
}

#[test]
fn an_error_says_where_it_is_and_what_was_allowed() {
    // [0, [["r1", [42]], ["r2", [42, -1]]]]
    let payload = b"\x92\x00\x92\x92\xa2r1\x91\x2a\x92\xa2r2\x92\x2a\xff";
    let error = decode_outputs(&[payload]).unwrap_err();
    assert_eq!(error.path(), "EngineCoreOutputs.outputs[1].new_token_ids[1]");
    assert_eq!(*error.kind(), DecodeErrorKind::OutOfRange("an unsigned 32-bit integer"));
    let expected = "EngineCoreOutputs.outputs[1].new_token_ids[1]: is outside the range of an unsigned 32-bit integer";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn ids_are_recovered_from_a_message_that_is_refused() {
    let mut payload = batch(vec![output("r1"), output("r2"), output("r3")]).encode();
    payload.push(0xc0);
    assert!(decode_outputs(&[&payload]).is_err());
    assert_eq!(recover_request_ids(&[&payload]), ["r1", "r2", "r3"]);
    let second = payload.windows(3).position(|bytes| bytes == b"\xa2r2").unwrap();
    assert_eq!(recover_request_ids(&[&payload[..second + 2]]), ["r1"]);
    assert!(recover_request_ids(&[b"\xc1"]).is_empty());
    assert!(recover_request_ids(&[]).is_empty());
}

#[test]
fn what_is_passed_on_keeps_its_bytes_and_is_checked() {
    // [0, [["r1", [42], nil, nil, {"k": value}]]], and once more behind the known elements of the output.
    let within = |value: &[u8]| [b"\x92\x00\x91\x95\xa2r1\x91\x2a\xc0\xc0\x81\xa1k", value].concat();
    let behind = |value: &[u8]| {
        let nils = [0xc0; 11];
        [b"\x92\x00\x91\xdc\x00\x17\xa2r1\x91\x2a", &nils[..], b"\x00", &[0xc0; 8], value].concat()
    };
    // Not the shortest form of 1, a 32-bit float, bytes that are not UTF-8, an array of numbers.
    for value in [&b"\xcd\x00\x01"[..], b"\xca\x3f\x80\x00\x00", b"\xc4\x02\xff\xfe", b"\xd7\x0312345678"] {
        let decoded = decode_outputs(&[&within(value)]).unwrap().value;
        let Body::Batch(batch) = &decoded.body else { panic!("a batch") };
        let (name, raw) = &batch.outputs[0].other[0];
        assert_eq!((*name, raw.as_bytes()), ("pooling_output", &[b"\x81\xa1k", value].concat()[..]));
        assert_eq!(decode_outputs(&[&decoded.encode()]).unwrap().value, decoded);
        assert_eq!(decode_outputs(&[&behind(value)]).unwrap().skipped_fields, 1);
    }
    for (value, reason) in [(&b"\xa2\xff\xfe"[..], "malformed"), (b"\xd7\x0112345678", "bad_extension")] {
        assert_eq!(decode_outputs(&[&within(value)]).unwrap_err().reason(), reason);
        assert_eq!(decode_outputs(&[&behind(value)]).unwrap_err().reason(), reason);
    }
}

#[test]
fn a_message_without_frames_is_malformed() {
    assert_eq!(decode_outputs(&[]).unwrap_err().reason(), "malformed");
}

#[test]
fn a_frame_over_the_limit_is_refused_on_both_sides_before_it_is_allocated() {
    let header = FrameHeader::parse([0xff, 0xff, 0xff, 0xff, 0x21], MAX_FRAME_BYTES);
    assert_eq!(header, Err(FrameError::TooLarge { length: 0xffff_ffff, limit: MAX_FRAME_BYTES }));
    assert_eq!(header.unwrap_err().reason(), "frame_too_large");
    let frame = encode_frame(FrameKind::Outputs, &[0; 8], 8);
    assert_eq!(frame, Err(FrameError::TooLarge { length: 9, limit: 8 }));
    assert_eq!(encode_frame(FrameKind::Outputs, &[0; 8], 9).unwrap().len(), 13);
}

#[test]
fn elements_of_ours_are_written_only_where_they_say_something() {
    let plain = EngineCoreRequest { request_id: "r1".into(), ..EngineCoreRequest::default() };
    let bound = Provenance { max_weight_lag: Some(0), ..Provenance::default() };
    let bounded = EngineCoreRequest { provenance: bound, ..plain.clone() };
    // An array of 16 bits of length.
    assert_eq!(plain.encode()[..3], [0xdc, 0, 22]);
    assert_eq!(bounded.encode()[..3], [0xdc, 0, 23]);
    assert_eq!(EngineCoreRequest::decode(&bounded.encode()).unwrap().value, bounded);
    let span = |end| StampSpan { weight_version: "v7".into(), weight_commit: 3, start: 0, end };
    let with = |kv, prompt| EngineCoreOutput { kv_spans: kv, prompt_spans: prompt, ..output("r1") };
    let length = |output: &EngineCoreOutput| {
        let payload = batch(vec![output.clone()]).encode();
        assert_eq!(decode_outputs(&[&payload]).unwrap().value, batch(vec![output.clone()]));
        payload[5]
    };
    assert_eq!(length(&with(None, None)), 20);
    assert_eq!(length(&with(Some(vec![span(4)]), None)), 21);
    assert_eq!(length(&with(None, Some(vec![span(4)]))), 22);
    assert_eq!(length(&with(Some(vec![]), Some(vec![]))), 22);
}
