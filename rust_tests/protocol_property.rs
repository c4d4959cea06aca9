//! Laws of the codec: what is encoded is read back; appended elements are skipped; any bytes get an answer.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use rollspan_protocol::{
    Admission, Batch, Body, ENVELOPE_ELEMENTS, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineError,
    FinishReason, LogprobsLists, SamplingParams, StopReason, decode_outputs,
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

fn finish_reason() -> impl Strategy<Value = FinishReason> {
    use FinishReason::{Abort, Error, Length, Repetition, Stop};
    prop::sample::select(vec![Stop, Length, Abort, Error, Repetition])
}

fn output() -> impl Strategy<Value = EngineCoreOutput> {
    let stop = prop_oneof![any::<i64>().prop_map(StopReason::Token), ".{0,4}".prop_map(StopReason::Text)];
    let error = (".{0,4}", ".{0,4}", any::<bool>()).prop_map(|(code, message, retryable)| EngineError {
        code,
        message,
        retryable,
    });
    let admission = (".{0,4}", any::<u64>())
        .prop_map(|(label, weight_commit)| Admission { weight_version: label.into(), weight_commit });
    let tokens = vec(any::<u32>(), 1..4);
    let tokens = tokens.prop_flat_map(|tokens| {
        let rows = option::of(logprobs(tokens.len()));
        (Just(tokens), rows)
    });
    let ends = (option::of(finish_reason()), option::of(stop), option::of(error), option::of(admission));
    (".{0,8}", tokens, ends).prop_map(|(request_id, (new_token_ids, new_logprobs), ends)| EngineCoreOutput {
        request_id,
        new_token_ids,
        new_logprobs,
        finish_reason: ends.0,
        stop_reason: ends.1,
        error: ends.2,
        admission: ends.3,
        ..EngineCoreOutput::default()
    })
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
        salt in option::of(".{0,4}"),
    ) {
        let params = SamplingParams {
            temperature: numbers.0,
            top_p: numbers.1,
            top_k: numbers.2,
            seed: numbers.3,
            max_tokens: numbers.4,
            stop_token_ids: stops,
            ..SamplingParams::default()
        };
        let request = EngineCoreRequest {
            request_id,
            prompt_token_ids: Some(prompt.into()),
            sampling_params: Some(params),
            cache_salt: salt,
            priority: numbers.2,
            ..EngineCoreRequest::default()
        };
        prop_assert_eq!(EngineCoreRequest::decode(&request.encode()).unwrap().value, request);
    }

    #[test]
    fn any_bytes_get_an_answer(bytes in vec(any::<u8>(), 0..200)) {
        let _outcomes = (decode_outputs(&[&bytes]), EngineCoreRequest::decode(&bytes));
    }
}
