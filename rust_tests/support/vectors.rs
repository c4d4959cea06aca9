//! The shared vectors of `tests/conformance`, and decoded messages in the form in which they write their meaning.

use std::path::Path;

use rollspan_protocol::{
    Body, ClientHello, Dead, DecodeError, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineHello,
    LogprobsLists, PrefixCacheStats, Provenance, RoutedExperts, SamplingParams, StampSpan, StopReason, UtilityRequest,
    decode_abort, decode_outputs,
};
use serde_json::{Map, Value, json};

/// A file of vectors.
pub fn load(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/conformance").join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).expect("vectors are JSON")
}

/// The cases of one part of a file, each with its name.
pub fn cases(file: &Value, part: &str) -> Vec<(String, Value)> {
    let cases = file[part].as_array().expect("a list of cases");
    let name = |case: &Value| format!("{}: {}", text(&case["kind"]), text(&case["title"]));
    cases.iter().map(|case| (name(case), case.clone())).collect()
}

/// A string of the vectors.
pub fn text(value: &Value) -> &str {
    value.as_str().expect("a string")
}

/// Bytes written in hex.
pub fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.chars().map(|digit| u8::try_from(digit.to_digit(16).unwrap()).unwrap()).collect();
    digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// The frames of a case.
pub fn frames(case: &Value) -> Vec<Vec<u8>> {
    case["frames"].as_array().expect("frames").iter().map(|frame| bytes(text(frame))).collect()
}

/// Decodes a message of that kind into the form of the vectors, where fields with their default are left out.
pub fn view(kind: &str, frames: &[Vec<u8>]) -> Result<Value, DecodeError> {
    let payload = &frames[0];
    Ok(match kind {
        "outputs" => {
            let frames: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
            let decoded = decode_outputs(&frames)?;
            outputs_view(&decoded.value, decoded.skipped_fields)
        }
        "request" => request_view(&EngineCoreRequest::decode(payload)?.value),
        "abort" => json!({"request_ids": decode_abort(payload)?}),
        "utility_call" => {
            let call = UtilityRequest::decode(payload)?.value;
            json!({"client_index": call.client_index, "call_id": call.call_id, "method": call.method, "args": call.args})
        }
        "client_hello" => {
            let hello = ClientHello::decode(payload)?.value;
            json!({"version": hello.version, "name": hello.name, "max_frame_bytes": hello.max_frame_bytes})
        }
        "engine_hello" => engine_hello_view(&EngineHello::decode(payload)?.value),
        "dead" => {
            let dead = Dead::decode(payload)?.value;
            json!({"reason": dead.reason, "message": dead.message})
        }
        other => panic!("unknown kind {other}"),
    })
}

fn engine_hello_view(hello: &EngineHello) -> Value {
    let (limits, model) = (&hello.limits, &hello.model);
    let fields = json!({
        "version": hello.version,
        "rollspan_version": hello.rollspan_version,
        "engine_index": hello.engine_index,
        "pid": hello.pid,
        "limits": {
            "max_frame_bytes": limits.max_frame_bytes,
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_logprobs": limits.max_logprobs,
            "vocab_size": limits.vocab_size,
            "block_size": limits.block_size,
            "num_blocks": limits.num_blocks,
        },
        "model": {
            "name": model.name,
            "architecture": model.architecture,
            "dtype": model.dtype,
            "device": model.device,
            "num_parameters": model.num_parameters,
            "eos_token_ids": model.eos_token_ids,
        },
        "weight_version": hello.weight_version,
        "weight_commit": hello.weight_commit,
        "paused": hello.paused,
        "weight_state": hello.weight_state,
    });
    without(fields, &[("weight_state", json!("ready"))])
}

/// Leaves out what is null or equals its default.
pub fn without(fields: Value, defaults: &[(&str, Value)]) -> Value {
    let Value::Object(fields) = fields else { panic!("an object") };
    let kept = fields.into_iter().filter(|(name, value)| {
        let is_default = defaults.iter().any(|(default, plain)| default == name && plain == value);
        !value.is_null() && !is_default
    });
    kept.collect::<Map<_, _>>().into()
}

/// View of an OUTPUTS message.
pub fn outputs_view(message: &EngineCoreOutputs, skipped_fields: u64) -> Value {
    let mut fields = json!({
        "engine_index": message.engine_index,
        "timestamp": message.timestamp,
        "weight_version": message.weight_version.as_deref(),
        "weight_commit": message.weight_commit,
        "skipped_fields": skipped_fields,
    });
    match &message.body {
        Body::Batch(batch) => {
            fields["outputs"] = batch.outputs.iter().map(output_view).collect();
            fields["finished_requests"] = json!(batch.finished_requests);
            fields["scheduler_stats"] = batch.scheduler_stats.as_ref().map_or(Value::Null, |stats| {
                let cache = stats.prefix_cache_stats.filter(|cache| *cache != PrefixCacheStats::default());
                let view = json!({
                    "num_running_reqs": stats.num_running_reqs,
                    "num_waiting_reqs": stats.num_waiting_reqs,
                    "kv_cache_usage": stats.kv_cache_usage,
                    "prefix_cache_stats": cache.map(|cache| json!({
                        "requests": cache.requests,
                        "queries": cache.queries,
                        "hits": cache.hits,
                        "preempted_requests": cache.preempted_requests,
                    })),
                });
                without(view, &[])
            });
        }
        Body::Utility(utility) => {
            let mut reply = json!({"call_id": utility.call_id});
            match &utility.outcome {
                Ok(result) => reply["result"] = result.clone(),
                Err(failure) => {
                    reply["failure"] = json!(failure.message);
                    reply["reason"] = json!(failure.reason);
                }
            }
            fields["utility_output"] = without(reply, &[]);
        }
        Body::WaveComplete(wave) => fields["wave_complete"] = json!(wave),
        Body::StartWave(wave) => fields["start_wave"] = json!(wave),
    }
    let zero = json!(0);
    let defaults =
        [("engine_index", zero.clone()), ("timestamp", json!(0.0)), ("skipped_fields", zero), ("outputs", json!([]))];
    without(fields, &defaults)
}

fn output_view(output: &EngineCoreOutput) -> Value {
    let fields = json!({
        "request_id": output.request_id,
        "new_token_ids": output.new_token_ids,
        "new_logprobs": output.new_logprobs.as_ref().map(logprobs_view),
        "new_prompt_logprobs": output.new_prompt_logprobs.as_deref().map(logprobs_view),
        "routed_experts": output.routed_experts.as_deref().map(experts_view),
        "finish_reason": output.finish_reason.map(|reason| reason as u8),
        "stop_reason": output.stop_reason.as_ref().map(|reason| match reason {
            StopReason::Token(token) => json!(token),
            StopReason::Text(text) => json!(text),
        }),
        "prefill_stats": output.prefill_stats.map(|stats| json!({
            "num_prompt_tokens": stats.num_prompt_tokens,
            "num_computed_tokens": stats.num_computed_tokens,
            "num_cached_tokens": stats.num_cached_tokens,
        })),
        "error": output.error.as_ref().map(|error| without(json!(error), &[])),
        "admission": output.admission.as_ref().map(|stamp| json!([&*stamp.weight_version, stamp.weight_commit])),
        "kv_spans": output.kv_spans.as_deref().map(spans_view),
        "prompt_spans": output.prompt_spans.as_deref().map(spans_view),
    });
    without(fields, &[("new_token_ids", json!([]))])
}

fn spans_view(spans: &[StampSpan]) -> Value {
    spans.iter().map(|span| json!([&*span.weight_version, span.weight_commit, span.start, span.end])).collect()
}

fn logprobs_view(lists: &LogprobsLists) -> Value {
    let rows = || lists.rows();
    json!({
        "token_ids": rows().map(|row| row.token_ids.to_vec()).collect::<Vec<_>>(),
        "logprobs": rows().map(|row| row.logprobs.to_vec()).collect::<Vec<_>>(),
        "sampled_ranks": rows().map(|row| row.sampled_rank).collect::<Vec<_>>(),
    })
}

fn experts_view(experts: &RoutedExperts) -> Value {
    let data = experts.data();
    let ids: Vec<i64> = match experts.dtype() {
        "|u1" => data.iter().map(|id| i64::from(*id)).collect(),
        "<i2" => data.as_chunks().0.iter().map(|id| i64::from(i16::from_le_bytes(*id))).collect(),
        _ => data.as_chunks().0.iter().map(|id| i64::from(i32::from_le_bytes(*id))).collect(),
    };
    json!([experts.dtype(), experts.shape(), ids])
}

fn request_view(request: &EngineCoreRequest) -> Value {
    let fields = json!({
        "request_id": request.request_id,
        "prompt_token_ids": request.prompt_token_ids.as_deref(),
        "sampling_params": request.sampling_params.as_ref().map(sampling_view),
        "arrival_time": request.arrival_time,
        "cache_salt": request.cache_salt,
        "client_index": request.client_index,
        "priority": request.priority,
        "external_req_id": request.external_req_id,
        "session_id": request.session_id,
        "provenance": provenance_view(&request.provenance),
    });
    let nothing = json!({});
    let defaults = [("client_index", json!(0)), ("priority", json!(0)), ("sampling_params", nothing.clone())];
    without(fields, &[&defaults[..], &[("provenance", nothing)]].concat())
}

/// View of what a request asks about weights.
pub fn provenance_view(provenance: &Provenance) -> Value {
    let fields = json!({
        "min_weight_commit": provenance.min_weight_commit,
        "weight_wait_s": provenance.weight_wait_s,
        "max_weight_lag": provenance.max_weight_lag,
        "return_kv_versions": provenance.return_kv_versions,
        "allow_stale_prefix": provenance.allow_stale_prefix,
    });
    let (zero, no) = (json!(0), json!(false));
    let flags = [("return_kv_versions", no.clone()), ("allow_stale_prefix", no)];
    without(fields, &[&flags[..], &[("min_weight_commit", zero), ("weight_wait_s", json!(0.0))]].concat())
}

fn bias_view(bias: &[(u32, f64)]) -> Option<Map<String, Value>> {
    let view: Map<_, _> = bias.iter().map(|(token, bias)| (token.to_string(), json!(bias))).collect();
    Some(view).filter(|view| !view.is_empty())
}

/// View of sampling parameters.
pub fn sampling_view(params: &SamplingParams) -> Value {
    let of = |params: &SamplingParams| {
        json!({
            "n": params.n,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "seed": params.seed,
            "max_tokens": params.max_tokens,
            "min_tokens": params.min_tokens,
            "stop_token_ids": params.stop_token_ids,
            "ignore_eos": params.ignore_eos,
            "logprobs": params.logprobs,
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
            "prompt_logprobs": params.prompt_logprobs,
            "logit_bias": bias_view(&params.logit_bias),
            "allowed_token_ids": params.allowed_token_ids,
            "bad_words": params.bad_words,
            "bad_words_token_ids": params.bad_words_token_ids,
            "structured_outputs": params.structured_outputs,
            "skip_reading_prefix_cache": params.skip_reading_prefix_cache,
            "routed_experts": params.routed_experts,
            "routed_experts_prompt_start": params.routed_experts_prompt_start,
            "output_kind": params.output_kind,
            "eos_token_id": params.eos_token_id,
            "all_stop_token_ids": params.all_stop_token_ids,
        })
    };
    let plain = of(&SamplingParams::default());
    let defaults: Vec<(&str, Value)> =
        plain.as_object().unwrap().iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    without(of(params), &defaults)
}
