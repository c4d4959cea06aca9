//! Control routes: calls that take long, failures, and what the server says of itself.

mod server_support;

use rollspan_engine_client::mock::{finished, step, tokens};
use rollspan_protocol::{FinishReason, UtilityFailure};
use serde_json::{Value, json};
use server_support::{Server, in_time, settle};

#[tokio::test]
async fn a_pause_takes_as_long_as_it_takes_while_others_go_on() {
    let (server, mut link, _engine) = Server::ready().await;
    let paused = server.send("POST", "/pause?mode=wait&clear_cache=false", b"").await;
    let call = link.call().await;
    assert_eq!((call.method.as_str(), call.args), ("pause_generation", vec![json!("wait"), json!(false)]));
    settle(&server, &mut link).await;
    link.answer(call.call_id, Ok(Value::Null)).await;
    assert_eq!(in_time(paused.answer()).await.json(), json!({"status": "paused"}));
}

#[tokio::test]
async fn a_caller_that_goes_away_leaves_nothing_wedged() {
    let (server, mut link, _engine) = Server::ready().await;
    let paused = server.send("POST", "/pause?mode=wait", b"").await;
    let call = link.call().await;
    drop(paused);
    let resumed = server.send("POST", "/resume", b"").await;
    let resume = link.call().await;
    assert_eq!(resume.method, "resume_scheduler");
    link.answer(resume.call_id, Ok(Value::Null)).await;
    assert_eq!(in_time(resumed.answer()).await.status, 200);
    link.answer(call.call_id, Ok(Value::Null)).await;
    settle(&server, &mut link).await;
}

#[tokio::test]
async fn a_failed_call_keeps_its_reason() {
    let (server, mut link, _engine) = Server::ready().await;
    for (reason, expected) in [
        (Some("update_active"), (409, "update_active".to_owned())),
        (Some("weights_invalid"), (400, "weights_invalid".to_owned())),
        (Some("never heard of"), (500, "internal_error".to_owned())),
        (None, (500, "internal_error".to_owned())),
    ] {
        let asked = server.send("POST", "/start_weight_update", b"").await;
        let call = link.call().await;
        let failure = UtilityFailure { message: "no".to_owned(), reason: reason.map(str::to_owned) };
        link.answer(call.call_id, Err(failure)).await;
        assert_eq!(in_time(asked.answer()).await.failure(), expected);
    }
}

#[tokio::test]
async fn unknown_routes_and_methods_are_answered_in_json() {
    let (server, _link, _engine) = Server::ready().await;
    let unknown = in_time(server.ask("GET", "/nowhere", &Value::Null)).await;
    assert_eq!(unknown.failure(), (404, "not_found".to_owned()));
    let wrong = in_time(server.ask("DELETE", "/pause", &Value::Null)).await;
    assert_eq!(wrong.failure(), (405, "method_not_allowed".to_owned()));
    assert_eq!(wrong.header("allow"), Some("POST"));
}

#[tokio::test]
async fn the_metrics_count_tokens_requests_and_updates() {
    let (server, mut link, _engine) = Server::ready().await;
    let asked = server.generate(&json!({"token_ids": [1, 2, 3], "sampling_params": {}})).await;
    let id = link.request().await.request_id;
    link.send(&step("v\"1\"", 1, vec![tokens(&id, &[4])])).await;
    link.send(&step("v\"2\"", 2, vec![finished(&id, &[5, 6], FinishReason::Length)])).await;
    in_time(asked.answer()).await;
    let text = String::from_utf8(in_time(server.ask("GET", "/metrics", &Value::Null)).await.body).unwrap_or_default();
    for line in [
        "rollspan:prompt_tokens_total{model_name=\"mock\"} 3",
        "rollspan:generation_tokens_total{model_name=\"mock\"} 3",
        "rollspan:request_success_total{finished_reason=\"length\",model_name=\"mock\"} 1",
        "rollspan:requests_spanning_update_total{model_name=\"mock\"} 1",
        "rollspan:time_to_first_token_seconds_count{model_name=\"mock\"} 1",
        "rollspan:inter_token_latency_seconds_count{model_name=\"mock\"} 1",
        "rollspan:weight_commit{model_name=\"mock\"} 2",
        "rollspan:weight_version_info{model_name=\"mock\",version=\"v\\\"2\\\"\"} 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
    }
}

#[tokio::test]
async fn a_finished_update_names_its_label_and_commit() {
    let (server, mut link, _engine) = Server::ready().await;
    let asked = server.send("POST", "/finish_weight_update", br#"{"weight_version": 7}"#).await;
    let call = link.call().await;
    assert_eq!((call.method.as_str(), call.args), ("finish_weight_update", vec![json!("7")]));
    link.answer(call.call_id, Ok(json!({"weight_version": "7", "weight_commit": 3}))).await;
    let answer = in_time(asked.answer()).await.json();
    let message = "Weight update finished";
    assert_eq!(answer, json!({"message": message, "weight_version": "7", "weight_commit": 3}));
}
