//! Control routes: calls that take long, failures, and what the server says of itself.

mod server_support;

use rollspan_engine_client::mock::{MockLink, finished, hello, stats, step, tokens};
use rollspan_protocol::{
    EngineHello, FinishReason, SchedulerStats, UtilityFailure, WeightUpdateSeconds, WeightUpdates,
};
use serde_json::{Value, json};
use server_support::{Server, in_time, settle};

const DIGEST: &str = "blake3:0000000000000000000000000000000000000000000000000000000000000000";

/// Answers the next call, which must be this one.
async fn serve_call(link: &mut MockLink, method: &str, arguments: Value, answer: Value) {
    let call = link.call().await;
    assert_eq!((call.method.as_str(), Value::Array(call.args)), (method, arguments));
    link.answer(call.call_id, Ok(answer)).await;
}

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
        "rollspan:prompt_tokens_total{engine=\"0\",model_name=\"mock\"} 3",
        "rollspan:generation_tokens_total{engine=\"0\",model_name=\"mock\"} 3",
        "rollspan:request_success_total{engine=\"0\",finished_reason=\"length\",model_name=\"mock\"} 1",
        "rollspan:requests_spanning_update_total{engine=\"0\",model_name=\"mock\"} 1",
        "rollspan:time_to_first_token_seconds_count{engine=\"0\",model_name=\"mock\"} 1",
        "rollspan:inter_token_latency_seconds_count{engine=\"0\",model_name=\"mock\"} 1",
        "rollspan:weight_commit{engine=\"0\",model_name=\"mock\"} 2",
        "rollspan:weight_version_info{engine=\"0\",model_name=\"mock\",version=\"v\\\"2\\\"\"} 1",
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
    let committed = json!({"weight_version": "7", "weight_commit": 3, "weight_digest": DIGEST});
    link.answer(call.call_id, Ok(committed.clone())).await;
    let mut answer = in_time(asked.answer()).await.json();
    assert_eq!(answer.as_object_mut().unwrap().remove("message"), Some(json!("Weight update finished")));
    assert_eq!(answer, committed);
}

#[tokio::test]
async fn options_reach_the_engine_only_when_they_were_given() {
    let (server, mut link, _engine) = Server::ready().await;
    for (path, body, method, arguments) in [
        ("/start_weight_update", json!(null), "start_weight_update", json!([])),
        ("/start_weight_update", json!({"mode": "in_place"}), "start_weight_update", json!([{"mode": "in_place"}])),
        (
            "/finish_weight_update",
            json!({"weight_digest": DIGEST, "partial": false}),
            "finish_weight_update",
            json!([null, {"digest": DIGEST, "partial": false}]),
        ),
        ("/init_weight_transfer_engine", json!(null), "init_weight_transfer_engine", json!([{}])),
        (
            "/init_weight_transfer_engine",
            json!({"init_info": [{"backend": "shm"}]}),
            "init_weight_transfer_engine",
            json!([{"backend": "shm"}]),
        ),
        ("/sleep?level=2&mode=keep", json!({"level": 1}), "sleep", json!([2, "keep"])),
        ("/sleep", json!(null), "sleep", json!([1, "abort"])),
    ] {
        let (asked, ()) = tokio::join!(
            in_time(server.ask("POST", path, &body)),
            serve_call(&mut link, method, arguments, json!({})),
        );
        assert_eq!(asked.status, 200, "{path} {body}");
    }
}

#[tokio::test]
async fn what_the_engine_would_not_understand_is_refused_before_it_is_called() {
    let (server, _link, _engine) = Server::ready().await;
    for (path, body, param) in [
        ("/start_weight_update", json!({"mode": "later"}), json!("mode")),
        ("/start_draft_weight_update", json!(null), json!(null)),
        ("/finish_weight_update", json!({"weight_digest": "blake3:AB"}), json!("weight_digest")),
        ("/finish_weight_update", json!({"partial": 1}), json!("partial")),
        ("/update_weights", json!({"update_info": 1}), json!("update_info")),
        ("/update_weights", json!({"update_info": [{}, {}]}), json!("update_info")),
        ("/update_weights", json!({"weight_dir": 1}), json!("weight_dir")),
        ("/update_weights", json!({"weight_dir": "w", "update_info": {}}), json!("weight_dir")),
        ("/weight_checker", json!({}), json!("action")),
        ("/weight_checker", json!({"action": "look"}), json!("action")),
        ("/weight_checker", json!({"action": "compare", "baseline": {"a": 1}}), json!("baseline")),
        ("/sleep?level=3", json!(null), json!("level")),
        ("/sleep", json!({"level": true}), json!("level")),
        ("/sleep?mode=deep", json!(null), json!("mode")),
        ("/wake_up?tags=weights&tags=all", json!(null), json!("tags")),
        ("/wake_up", json!({"tags": "weights"}), json!("tags")),
    ] {
        let answer = in_time(server.ask("POST", path, &body)).await;
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &param), "{path} {body}");
    }
}

#[tokio::test]
async fn waking_up_says_whether_a_part_still_sleeps() {
    let (server, mut link, _engine) = Server::ready().await;
    for (query, tags, sleeping, status) in [
        ("?tags=weights", json!(["weights"]), true, "sleeping"),
        ("?tags=weights&tags=kv_cache", json!(["weights", "kv_cache"]), false, "awake"),
        ("", json!(null), false, "awake"),
    ] {
        let asked = server.send("POST", &format!("/wake_up{query}"), b"").await;
        serve_call(&mut link, "wake_up", json!([tags]), Value::Null).await;
        serve_call(&mut link, "is_sleeping", json!([]), json!(sleeping)).await;
        assert_eq!(in_time(asked.answer()).await.json(), json!({"status": status, "tags": tags}));
    }
}

#[tokio::test]
async fn a_directory_is_a_whole_update_even_for_a_client_that_goes_away() {
    let (server, mut link, _engine) = Server::ready().await;
    let body = br#"{"weight_dir": "/w/step_1"}"#;
    let gone = server.send("POST", "/update_weights", body).await;
    serve_call(&mut link, "start_weight_update", json!([]), Value::Null).await;
    let again = server.send("POST", "/update_weights", body).await;
    let update = link.call().await;
    drop(gone);
    settle(&server, &mut link).await;
    link.answer(update.call_id, Ok(Value::Null)).await;
    let committed = |commit| json!({"weight_version": "default", "weight_commit": commit, "weight_digest": DIGEST});
    serve_call(&mut link, "finish_weight_update", json!([null]), committed(1)).await;
    serve_call(&mut link, "start_weight_update", json!([]), Value::Null).await;
    let info = json!([{"backend": "disk", "path": "/w/step_1"}]);
    serve_call(&mut link, "update_weights", info, Value::Null).await;
    serve_call(&mut link, "finish_weight_update", json!([null]), committed(2)).await;
    let answer = in_time(again.answer()).await.json();
    assert_eq!((&answer["message"], &answer["weight_commit"]), (&json!("Weights updated"), &json!(2)));
}

#[tokio::test]
async fn the_history_is_consistent_only_when_the_engine_is_ready() {
    let (server, mut link, _engine) = Server::ready().await;
    for (state, consistent) in [("ready", true), ("updating", false)] {
        let asked = server.send("GET", "/weight_history", b"").await;
        let record = json!({"engine_index": 0, "state": state, "weight_digest": DIGEST});
        serve_call(&mut link, "get_weight_history", json!([]), record.clone()).await;
        assert_eq!(in_time(asked.answer()).await.json(), json!({"engines": [record], "consistent": consistent}));
    }
}

#[tokio::test]
async fn health_follows_the_state_of_the_weights() {
    let undeclared = EngineHello { weight_state: "undeclared".to_owned(), ..hello() };
    let (server, mut link, _engine) = Server::with_engine(|_| {}, &undeclared).await;
    let health = async || in_time(server.ask("GET", "/health", &Value::Null)).await;
    assert_eq!(health().await.failure(), (503, "weights_undeclared".to_owned()));
    for (state, failure) in [
        ("inconsistent", Some((503, "weights_inconsistent"))),
        ("updating", None),
        ("sleeping", Some((409, "engine_sleeping"))),
        ("ready", None),
    ] {
        let told = SchedulerStats { weight_state: Some(state.into()), ..SchedulerStats::default() };
        link.send(&stats("default", 0, told)).await;
        settle(&server, &mut link).await;
        let answer = health().await;
        match failure {
            Some((status, reason)) => assert_eq!(answer.failure(), (status, reason.to_owned())),
            None => assert_eq!(answer.json(), json!({"status": "ok"})),
        }
    }
}

#[tokio::test]
async fn the_metrics_tell_of_updates_and_of_the_age_of_tokens() {
    let (server, mut link, _engine) = Server::ready().await;
    let asked = server.generate(&json!({"token_ids": [1], "sampling_params": {"n": 2}})).await;
    let (first, second) = (link.request().await.request_id, link.request().await.request_id);
    link.send(&step("a", 1, vec![tokens(&first, &[4, 5]), tokens(&second, &[4])])).await;
    link.send(&step("b", 2, vec![tokens(&first, &[6]), finished(&second, &[6], FinishReason::Stop)])).await;
    let told = SchedulerStats {
        weight_updates: Some(WeightUpdates { success: 5, failure: 1 }),
        weight_update_seconds: Some(WeightUpdateSeconds { receive: 2.0, stall: Some(0.002), ..Default::default() }),
        ..SchedulerStats::default()
    };
    link.send(&stats("e", 5, told.clone())).await;
    link.send(&stats("e", 5, told)).await;
    link.send(&step("e", 5, vec![finished(&first, &[7, 8, 9], FinishReason::Length)])).await;
    in_time(asked.answer()).await;
    let text = String::from_utf8(in_time(server.ask("GET", "/metrics", &Value::Null)).await.body).unwrap_or_default();
    for line in [
        "rollspan:generation_tokens_by_lag_total{engine=\"0\",lag=\"0\",model_name=\"mock\"} 4",
        "rollspan:generation_tokens_by_lag_total{engine=\"0\",lag=\"1\",model_name=\"mock\"} 1",
        "rollspan:generation_tokens_by_lag_total{engine=\"0\",lag=\"2\",model_name=\"mock\"} 0",
        "rollspan:generation_tokens_by_lag_total{engine=\"0\",lag=\"3+\",model_name=\"mock\"} 3",
        "rollspan:requests_spanning_update_total{engine=\"0\",model_name=\"mock\"} 2",
        "rollspan:weight_updates_total{engine=\"0\",model_name=\"mock\",result=\"success\"} 5",
        "rollspan:weight_updates_total{engine=\"0\",model_name=\"mock\",result=\"failure\"} 1",
        "rollspan:weight_update_duration_seconds_sum{engine=\"0\",model_name=\"mock\",phase=\"receive\"} 2",
        "rollspan:weight_update_duration_seconds_count{engine=\"0\",model_name=\"mock\",phase=\"commit\"} 1",
        "rollspan:weight_update_stall_seconds_bucket{engine=\"0\",model_name=\"mock\",le=\"0.005\"} 1",
        "rollspan:weight_update_stall_seconds_bucket{engine=\"0\",model_name=\"mock\",le=\"0.001\"} 0",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
    }
}
