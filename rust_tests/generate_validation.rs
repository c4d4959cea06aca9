//! The shared vectors of request validation, run by Rust; `tests/unit/test_conformance_generate.py` runs the same file.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "support/vectors.rs"]
#[expect(dead_code, reason = "no messages here")]
mod vectors;

use rollspan_generate::{ApiError, GenerateRequest, Reason, Served, check_label, ignored_fields_header};
use rollspan_protocol::Limits;
use serde_json::{Value, json};
use vectors::{bytes, load, provenance_view, sampling_view, text, without};

fn served(vector: &Value) -> Served {
    let limit = |name: &str| vector["limits"][name].as_u64().unwrap();
    Served {
        model: text(&vector["model"]).to_owned(),
        limits: Limits {
            max_frame_bytes: limit("max_frame_bytes"),
            max_model_len: limit("max_model_len"),
            max_num_seqs: limit("max_num_seqs"),
            max_num_batched_tokens: limit("max_num_batched_tokens"),
            max_logprobs: limit("max_logprobs"),
            vocab_size: limit("vocab_size"),
            block_size: limit("block_size"),
            num_blocks: limit("num_blocks"),
        },
        eos_token_ids: serde_json::from_value(vector["eos_token_ids"].clone()).unwrap(),
    }
}

fn parse(file: &Value, case: &Value) -> Result<GenerateRequest, ApiError> {
    let body = case.get("body").map_or_else(|| bytes(text(&case["body_hex"])), |body| text(body).as_bytes().to_vec());
    let name = case.get("served").map_or("plain", text);
    let header = case.get("header").map(text);
    let strict = case.get("strict").is_some_and(|strict| strict == &json!(true));
    GenerateRequest::parse(&body, header, &served(&file["served"][name]), strict)
}

fn view(request: &GenerateRequest) -> Value {
    let fields = json!({
        "token_ids": &*request.token_ids,
        "request_id": request.request_id,
        "stream": request.stream,
        "include_usage": request.stream_options.include_usage,
        "continuous_usage_stats": request.stream_options.continuous_usage_stats,
        "include_weight_versions": request.stream_options.include_weight_versions,
        "return_token_ids": request.return_token_ids,
        "priority": request.priority,
        "cache_salt": request.cache_salt,
        "provenance": provenance_view(&request.provenance),
        "sampling": sampling_view(&request.sampling_params),
        "ignored_fields": request.ignored_fields,
    });
    let flags = ["stream", "include_usage", "continuous_usage_stats", "include_weight_versions", "return_token_ids"];
    let mut defaults = vec![("priority", json!(0)), ("provenance", json!({})), ("ignored_fields", json!([]))];
    defaults.extend(flags.map(|flag| (flag, json!(false))));
    without(fields, &defaults)
}

#[test]
fn a_body_becomes_the_request_or_the_error_of_its_vector() {
    let file = load("generate_validation.json");
    let cases = file["cases"].as_array().unwrap();
    let mut failures = Vec::new();
    for case in cases {
        let outcome = match parse(&file, case) {
            Ok(request) => json!({"request": view(&request)}),
            Err(error) => {
                let words = !case["error"]["message"].is_null() || error.reason.as_str() != "invalid_json";
                let message = if words { json!(error.message) } else { Value::Null };
                json!({"error": {"reason": error.reason.as_str(), "param": error.param, "message": message}})
            }
        };
        let kind = if outcome.get("request").is_some() { "request" } else { "error" };
        if outcome[kind] != case[kind] {
            failures.push(format!("{}: {} instead of {}", case["title"], outcome[kind], case[kind]));
        }
    }
    assert!(cases.len() >= 80);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn a_parser_error_is_in_the_message_of_invalid_json() {
    let file = load("generate_validation.json");
    let error = parse(&file, &json!({"body": "{\"token_ids\": [1"})).unwrap_err();
    assert!(error.message.starts_with("request body is not valid JSON: EOF while parsing"), "{}", error.message);
    assert_eq!(error.status(), 400);
    let body = error.body();
    assert_eq!(body["error"]["type"], "BadRequestError");
    assert_eq!(body["error"]["reason"], "invalid_json");
    assert_eq!(body["error"]["code"], 400);
    assert_eq!(body["error"]["param"], Value::Null);
}

#[test]
fn a_request_for_several_outputs_becomes_one_engine_request_each() {
    let file = load("generate_validation.json");
    let seed = i64::MAX - 1;
    let body =
        format!(r#"{{"token_ids":[1,2],"sampling_params":{{"n":3,"seed":{seed}}},"priority":4,"cache_salt":"s"}}"#);
    let request = parse(&file, &json!({"body": body})).unwrap();
    let children = request.engine_requests("e1", 0x0a0b, 1.5, Some("session"));
    let ids: Vec<&str> = children.iter().map(|child| child.request_id.as_str()).collect();
    assert_eq!(ids, ["0_e1-00000a0b", "1_e1-00000a0b", "2_e1-00000a0b"]);
    let params = |index: usize| children[index].sampling_params.as_ref().unwrap();
    assert_eq!([0, 1, 2].map(|index| params(index).seed), [Some(seed), Some(i64::MAX), Some(0)]);
    for (index, child) in children.iter().enumerate() {
        assert_eq!(params(index).n, 1);
        assert_eq!(child.external_req_id.as_deref(), Some("e1"));
        assert_eq!((child.priority, child.cache_salt.as_deref()), (4, Some("s")));
        assert_eq!(child.session_id.as_deref(), Some("session"));
        assert_eq!(child.prompt_token_ids.as_deref(), Some(&[1, 2][..]));
    }
    let single = parse(&file, &json!({"body": r#"{"token_ids":[1],"sampling_params":{}}"#})).unwrap();
    assert_eq!(single.engine_requests("e1", 1, 1.5, None)[0].request_id, "e1-00000001");
}

#[test]
fn the_header_of_ignored_fields_is_encoded_and_bounded() {
    let header = |names: &[&str]| ignored_fields_header(&names.iter().map(ToString::to_string).collect::<Vec<_>>());
    assert_eq!(header(&[]), None);
    assert_eq!(header(&["a", "b.c_-"]).as_deref(), Some("a,b.c_-"));
    assert_eq!(header(&["a,b\r\n~ü"]).as_deref(), Some("a%2Cb%0D%0A%7E%C3%BC"));
    let long = "x".repeat(600);
    assert_eq!(header(&[&long, &long, "y"]), Some(long.clone()));
    assert_eq!(header(&[&"x".repeat(1025)]), None);
}

#[test]
fn a_value_becomes_the_label_or_the_refusal_of_its_vector() {
    for case in load("labels.json")["cases"].as_array().unwrap() {
        let label = check_label(&case["value"], "new_version");
        if let Some(expected) = case.get("label") {
            assert_eq!(label.as_deref(), Ok(text(expected)));
            continue;
        }
        let error = label.unwrap_err();
        assert_eq!(error.message, text(&case["message"]));
        assert_eq!((error.reason, error.param.as_deref()), (Reason::InvalidLabel, Some("new_version")));
    }
}

#[test]
fn the_table_of_errors_is_that_of_the_vectors() {
    let table: Vec<Value> = Reason::ALL
        .iter()
        .map(|reason| json!({"reason": reason.as_str(), "status": reason.status(), "type": reason.kind()}))
        .collect();
    assert_eq!(json!(table), load("errors.json")["errors"]);
}
