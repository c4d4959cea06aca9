//! Laws of the codec: what is encoded is read back; appended elements are skipped; any bytes get an answer.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use rollspan_protocol::{
    Admission, Batch, Body, ENVELOPE_ELEMENTS, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineError,
    FinishReason, LogprobsLists, Provenance, RoutedExperts, SamplingParams, StampSpan, StopReason, StructuredOutputs,
    decode_outputs,
};

fn logprobs(positions: usize) -> impl Strategy<Value = LogprobsLists> {
    (1_usize..4).prop_flat_map(move |width| {
        let cells = positions * width;
        // Not NaN, which equals nothing.
        let values = vec(prop_oneof![-1e30_f32..0.0, Just(f32::NEG_INFINITY)], cells);
        (vec(any::<u32>(), cells), values, vec(any::<u32>(), positions)).prop_map(
            move |(token_ids, logprobs, sampled_ranks)| LogprobsLists {
                width,
                token_ids,
                logprobs,
                sampled_ranks,
                cumulative: None,
            },
        )
    })
}

fn experts() -> impl Strategy<Value = RoutedExperts> {
    let shape = (0_usize..3, 1_usize..3, 1_usize..3);
    (prop::sample::select(vec![("|u1", 1), ("<i2", 2), ("<i4", 4)]), shape).prop_flat_map(|((dtype, item), shape)| {
        let (tokens, layers, top_k) = shape;
        vec(any::<u8>(), tokens * layers * top_k * item)
            .prop_map(move |data| RoutedExperts::new(dtype, [tokens, layers, top_k], data).unwrap())
    })
}

fn finish_reason() -> impl Strategy<Value = FinishReason> {
    use FinishReason::{Abort, Error, Length, Repetition, Stop};
    prop::sample::select(vec![Stop, Length, Abort, Error, Repetition])
}

fn output() -> impl Strategy<Value = EngineCoreOutput> {
    let stop = prop_oneof![any::<i64>().prop_map(StopReason::Token), ".{0,4}".prop_map(StopReason::Text)];
    let words = || option::of(".{0,4}");
    let error = (".{0,4}", ".{0,4}", any::<bool>(), words(), words())
        .prop_map(|(code, message, retryable, param, reason)| EngineError { code, message, retryable, param, reason });
    let admission = (".{0,4}", any::<u64>())
        .prop_map(|(label, weight_commit)| Admission { weight_version: label.into(), weight_commit });
    let tokens = vec(any::<u32>(), 1..4);
    let tokens = tokens.prop_flat_map(|tokens| {
        let rows = option::of(logprobs(tokens.len()));
        (Just(tokens), rows)
    });
    let ends = (option::of(finish_reason()), option::of(stop), option::of(error), option::of(admission));
    let asked = (option::of((0_usize..3).prop_flat_map(logprobs)), option::of(experts()), spans(), spans());
    (".{0,8}", tokens, asked, ends).prop_map(|(request_id, (new_token_ids, new_logprobs), asked, ends)| {
        EngineCoreOutput {
            request_id,
            new_token_ids,
            new_logprobs,
            new_prompt_logprobs: asked.0.map(Box::new),
            routed_experts: asked.1.map(Box::new),
            kv_spans: asked.2,
            prompt_spans: asked.3,
            finish_reason: ends.0,
            stop_reason: ends.1,
            error: ends.2,
            admission: ends.3,
            ..EngineCoreOutput::default()
        }
    })
}

fn spans() -> impl Strategy<Value = Option<Vec<StampSpan>>> {
    let span = (".{0,4}", any::<u64>(), any::<u32>(), any::<u32>()).prop_map(|(label, weight_commit, start, end)| {
        StampSpan { weight_version: label.into(), weight_commit, start, end }
    });
    option::of(vec(span, 0..3))
}

fn message() -> impl Strategy<Value = EngineCoreOutputs> {
    let head = (any::<u64>(), 0.0..1e9_f64, option::of(".{0,4}"), option::of(any::<u64>()));
    (head, vec(output(), 1..4)).prop_map(|((engine_index, timestamp, label, weight_commit), outputs)| {
        EngineCoreOutputs {
            engine_index,
            timestamp,
            weight_version: label.map(Into::into),
            weight_commit,
            body: Body::Batch(Batch { outputs, ..Batch::default() }),
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_outputs_message_is_read_back(message in message()) {
        let decoded = decode_outputs(&[&message.encode()]).unwrap();
        prop_assert_eq!(decoded.value, message);
        prop_assert_eq!(decoded.skipped_fields, 0);
    }

    #[test]
    fn elements_of_later_versions_are_skipped_and_counted(message in message(), later in 0_u8..5) {
        let mut payload = message.encode();
        let known = 0x90 | u8::try_from(ENVELOPE_ELEMENTS).unwrap();
        prop_assert_eq!(payload[0], known);
        payload[0] += later;
        payload.extend(std::iter::repeat_n(b"\x91\xa1x", later.into()).flatten());
        let decoded = decode_outputs(&[&payload]).unwrap();
        prop_assert_eq!(decoded.value, message);
        prop_assert_eq!(decoded.skipped_fields, u64::from(later));
    }

    #[test]
    fn a_request_is_read_back(
        request_id in ".{0,8}",
        prompt in vec(any::<u32>(), 0..8),
        numbers in (0.0..2.0_f64, 0.0..1.0_f64, any::<i64>(), option::of(any::<i64>()), any::<u64>()),
        stops in vec(any::<u32>(), 0..3),
        penalties in (-2.0..2.0_f64, -2.0..2.0_f64, 0.01..100.0_f64, 0.0..1.0_f64),
        bias in vec((any::<u32>(), -100.0..100.0_f64), 0..3),
        words in (vec(".{0,4}", 0..3), vec(vec(any::<u32>(), 1..3), 0..3), option::of(vec(any::<u32>(), 0..3))),
        regex in option::of(".{0,4}"),
        experts in (option::of(any::<bool>()), any::<u64>(), option::of(any::<bool>()), option::of(any::<i64>())),
        salt in option::of(".{0,4}"),
        bounds in (any::<u64>(), 0.0..1e300_f64, option::of(any::<u64>()), any::<bool>(), any::<bool>()),
    ) {
        let params = SamplingParams {
            temperature: numbers.0,
            top_p: numbers.1,
            top_k: numbers.2,
            seed: numbers.3,
            max_tokens: numbers.4,
            stop_token_ids: stops,
            presence_penalty: penalties.0,
            frequency_penalty: penalties.1,
            repetition_penalty: penalties.2,
            min_p: penalties.3,
            logit_bias: bias,
            bad_words: words.0,
            bad_words_token_ids: words.1,
            allowed_token_ids: words.2,
            structured_outputs: regex.map(|regex| StructuredOutputs { regex: Some(regex), ..Default::default() }),
            routed_experts: experts.0,
            routed_experts_prompt_start: experts.1,
            skip_reading_prefix_cache: experts.2,
            prompt_logprobs: experts.3,
            ..SamplingParams::default()
        };
        let request = EngineCoreRequest {
            request_id,
            prompt_token_ids: Some(prompt.into()),
            sampling_params: Some(params),
            cache_salt: salt,
            priority: numbers.2,
            provenance: Provenance {
                min_weight_commit: bounds.0,
                weight_wait_s: bounds.1,
                max_weight_lag: bounds.2,
                return_kv_versions: bounds.3,
                allow_stale_prefix: bounds.4,
            },
            ..EngineCoreRequest::default()
        };
        prop_assert_eq!(EngineCoreRequest::decode(&request.encode()).unwrap().value, request);
    }

    #[test]
    fn any_bytes_get_an_answer(bytes in vec(any::<u8>(), 0..200)) {
        let _outcomes = (decode_outputs(&[&bytes]), EngineCoreRequest::decode(&bytes));
    }
}
