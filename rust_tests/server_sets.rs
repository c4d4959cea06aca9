//! Several engines behind one frontend: who takes a request, updates of all or none, and engines that die and come back.

mod server_support;

use rollspan_engine_client::mock::{MockEngine, MockLink, finished, hello, step, tokens};
use rollspan_protocol::{EngineCoreOutputs, EngineHello, FinishReason, UtilityFailure};
use rollspan_server::{Event, Options, ServeError};
use serde_json::{Value, json};
use server_support::{Answer, Connection, GENERATE, Server, in_time};

const DIGEST: &str = "blake3:0000000000000000000000000000000000000000000000000000000000000000";
const OTHER: &str = "blake3:1111111111111111111111111111111111111111111111111111111111111111";

struct Set {
    server: Server,
    links: Vec<MockLink>,
    engines: Vec<MockEngine>,
}

fn hello_of(index: usize) -> EngineHello {
    EngineHello { engine_index: index as u64, ..hello() }
}

impl Set {
    async fn of(size: usize) -> Self {
        let engines: Vec<_> = (0..size).map(|_| MockEngine::bind()).collect();
        let mut options = Options::new("");
        options.engines = engines.iter().map(MockEngine::path).collect();
        let mut server = Server::start(options).await;
        let mut links = Vec::new();
        for (index, engine) in engines.iter().enumerate() {
            links.push(engine.accept(&hello_of(index)).await);
        }
        assert_eq!(server.events.recv().await, Some(Event::Ready));
        Self { server, links, engines }
    }

    async fn post(&self, path: &str, body: &Value) -> Connection {
        self.server.send("POST", path, body.to_string().as_bytes()).await
    }

    async fn get(&self, path: &str) -> Answer {
        in_time(self.server.ask("GET", path, &Value::Null)).await
    }

    /// Sends a generate request with these headers.
    async fn generate(&self, headers: &[&str]) -> Connection {
        let body = json!({"token_ids": [5], "sampling_params": {}}).to_string();
        let length = format!("Content-Length: {}", body.len());
        let mut connection = self.server.begin("POST", GENERATE, &[&[length.as_str()], headers].concat()).await;
        connection.write(body.as_bytes()).await;
        connection
    }

    /// A request with these headers, which this engine must get and answers.
    async fn served_by(&mut self, index: usize, headers: &[&str]) -> Answer {
        let asked = self.generate(headers).await;
        let id = in_time(self.links[index].request()).await.request_id;
        let output = vec![finished(&id, &[7], FinishReason::Stop)];
        let message = EngineCoreOutputs { engine_index: index as u64, ..step("v", 1, output) };
        self.links[index].send(&message).await;
        in_time(asked.answer()).await
    }

    /// Answers the next call of this engine, which must be of this method; gives its arguments.
    async fn answer(&mut self, index: usize, method: &str, outcome: Result<Value, UtilityFailure>) -> Value {
        let call = in_time(self.links[index].call()).await;
        assert_eq!(call.method, method, "engine {index}");
        self.links[index].answer(call.call_id, outcome).await;
        call.args.into()
    }

    /// The same for all engines, which must get the same arguments.
    async fn answer_all(&mut self, method: &str, arguments: Value, result: &Value) {
        for index in 0..self.links.len() {
            assert_eq!(self.answer(index, method, Ok(result.clone())).await, arguments, "{method} of engine {index}");
        }
    }

    /// A whole update of all engines.
    async fn update(&mut self, commits: &[u64]) -> Answer {
        let started = self.post("/start_weight_update", &json!({})).await;
        self.answer_all("start_weight_update", json!([]), &Value::Null).await;
        assert_eq!(in_time(started.answer()).await.status, 200);
        let updated = self.post("/update_weights", &json!({"update_info": {"path": "w"}})).await;
        self.answer_all("update_weights", json!([{"path": "w"}]), &Value::Null).await;
        assert_eq!(in_time(updated.answer()).await.status, 200);
        let finished = self.post("/finish_weight_update", &json!({"weight_version": "next"})).await;
        self.answer_all("prepare_weight_update", json!([{}]), &json!({"weight_digest": DIGEST})).await;
        for (index, commit) in commits.iter().enumerate() {
            self.answer(index, "get_weight_commit", Ok(json!(commit))).await;
        }
        let commit = 1 + commits.iter().max().copied().unwrap_or(0);
        let committed = json!({"weight_version": "next", "weight_commit": commit, "weight_digest": DIGEST});
        self.answer_all("finish_weight_update", json!(["next", {"commit": commit}]), &committed).await;
        in_time(finished.answer()).await
    }

    /// Ends the process of an engine and starts another one in its place.
    async fn restart(&mut self, index: usize) {
        drop(self.links.remove(index));
        let fresh = in_time(self.engines[index].accept(&hello_of(index))).await;
        self.links.insert(index, fresh);
        let rank = format!("X-data-parallel-rank: {index}");
        let why = "it was restarted or has missed a commit, and waits for the next weight update";
        let message = format!("engine {index} takes no requests: {why}");
        in_time(async {
            loop {
                let refused = self.generate(&[&rank]).await.answer().await;
                assert_eq!(refused.failure(), (503, "engine_dead".to_owned()));
                if refused.json()["error"]["message"] == message.as_str() {
                    break;
                }
            }
        })
        .await;
    }
}

fn failure(reason: &str) -> Result<Value, UtilityFailure> {
    Err(UtilityFailure { message: format!("because of {reason}"), reason: Some(reason.to_owned()) })
}

#[tokio::test]
async fn requests_take_turns_and_those_of_a_session_stay_together() {
    let mut set = Set::of(2).await;
    for index in [0, 1, 0] {
        set.served_by(index, &[]).await;
    }
    // Of the vectors: this one goes to engine 1.
    for _ in 0..3 {
        set.served_by(1, &["X-Session-ID: session-1"]).await;
    }
}

#[tokio::test]
async fn a_busy_engine_gets_no_more_than_the_others() {
    let mut set = Set::of(2).await;
    let _first = set.generate(&[]).await;
    in_time(set.links[0].request()).await;
    for _ in 0..3 {
        set.served_by(1, &[]).await;
    }
}

#[tokio::test]
async fn a_client_may_name_the_engine() {
    let mut set = Set::of(2).await;
    for _ in 0..2 {
        assert_eq!(set.served_by(1, &["X-data-parallel-rank: 1"]).await.json()["engine_index"], 1);
    }
    for rank in ["2", "-1", "one", "00000000001"] {
        let refused = in_time(set.generate(&[&format!("X-data-parallel-rank: {rank}")]).await.answer()).await;
        let error = &refused.json()["error"];
        assert_eq!((refused.status, &error["param"]), (400, &json!("X-data-parallel-rank")), "{rank}");
    }
}

#[tokio::test]
async fn an_id_is_open_once_in_the_whole_set() {
    let mut set = Set::of(2).await;
    let _open = set.generate(&["X-Request-Id: a"]).await;
    in_time(set.links[0].request()).await;
    let refused = in_time(set.generate(&["X-Request-Id: a"]).await.answer()).await;
    assert_eq!(refused.failure(), (409, "duplicate_request_id".to_owned()));
}

#[tokio::test]
async fn an_update_commits_everywhere_under_one_number() {
    let mut set = Set::of(2).await;
    let answer = set.update(&[3, 5]).await.json();
    let committed = json!({"weight_version": "next", "weight_commit": 6, "weight_digest": DIGEST});
    assert_eq!((&answer["message"], &answer["weight_commit"]), (&json!("Weight update finished"), &json!(6)));
    let outcome = |index| json!({"engine_index": index, "result": committed});
    assert_eq!(answer["engines"], json!([outcome(0), outcome(1)]));
    let sized = set.get("/get_world_size").await.json();
    assert_eq!(sized, json!({"world_size": 2}));
}

#[tokio::test]
async fn each_engine_gets_its_own_of_a_list_of_infos() {
    let mut set = Set::of(2).await;
    let body = json!({"init_info": [{"rank_offset": 1}, {"rank_offset": 2}]});
    let asked = set.post("/init_weight_transfer_engine", &body).await;
    for index in [0, 1] {
        let arguments = set.answer(index, "init_weight_transfer_engine", Ok(Value::Null)).await;
        assert_eq!(arguments, json!([{"rank_offset": index + 1}]));
    }
    assert_eq!(in_time(asked.answer()).await.status, 200);
    let refused = set.post("/update_weights", &json!({"update_info": [{}, {}, {}]})).await;
    let message = in_time(refused.answer()).await.json()["error"]["message"].clone();
    assert_eq!(message, "update_info must be an object or a list of 1 or 2 objects, got [{},{},{}]");
}

#[tokio::test]
async fn a_failure_before_the_last_step_drops_the_update_everywhere() {
    let mut set = Set::of(2).await;
    let asked = set.post("/update_weights", &json!({"update_info": {"path": "w"}})).await;
    let slow = in_time(set.links[0].call()).await;
    set.answer(1, "update_weights", failure("weights_invalid")).await;
    // The other one still receives when it is told to stop.
    set.answer(0, "abort_weight_update", Ok(json!(true))).await;
    set.answer(1, "abort_weight_update", Ok(json!(false))).await;
    let aborted = UtilityFailure { message: "aborted".to_owned(), reason: Some("update_aborted".to_owned()) };
    set.links[0].answer(slow.call_id, Err(aborted)).await;
    let answer = in_time(asked.answer()).await;
    assert_eq!(answer.failure(), (400, "weights_invalid".to_owned()));
    let body = answer.json();
    assert_eq!(body["error"]["message"], "engine 1: because of weights_invalid");
    assert_eq!(body["engines"][0]["error"]["reason"], "update_aborted");
    assert_eq!(body["engines"][1]["error"]["reason"], "weights_invalid");
}

#[tokio::test]
async fn different_failures_are_a_partial_failure() {
    let mut set = Set::of(2).await;
    let asked = set.post("/pause", &json!({})).await;
    set.answer(0, "pause_generation", Ok(Value::Null)).await;
    set.answer(1, "pause_generation", failure("pause_superseded")).await;
    let answer = in_time(asked.answer()).await;
    assert_eq!(answer.failure(), (502, "partial_failure".to_owned()));
    let expected = json!([{"engine_index": 0, "result": null}, answer.json()["engines"][1]]);
    assert_eq!(answer.json()["engines"], expected);
    let asked = set.post("/pause", &json!({})).await;
    for index in [0, 1] {
        set.answer(index, "pause_generation", failure("engine_sleeping")).await;
    }
    assert_eq!(in_time(asked.answer()).await.failure(), (409, "engine_sleeping".to_owned()));
}

#[tokio::test]
async fn a_failure_in_the_last_step_says_which_engines_committed() {
    let mut set = Set::of(2).await;
    let asked = set.post("/finish_weight_update", &json!({})).await;
    set.answer_all("prepare_weight_update", json!([{}]), &json!({"weight_digest": DIGEST})).await;
    set.answer_all("get_weight_commit", json!([]), &json!(0)).await;
    let committed = json!({"weight_version": "default", "weight_commit": 1, "weight_digest": DIGEST});
    set.answer(0, "finish_weight_update", Ok(committed.clone())).await;
    set.answer(1, "finish_weight_update", failure("engine_error")).await;
    let answer = in_time(asked.answer()).await;
    assert_eq!(answer.failure(), (502, "partial_failure".to_owned()));
    assert_eq!(answer.json()["engines"][0], json!({"engine_index": 0, "result": committed}));
}

#[tokio::test]
async fn engines_that_would_have_different_weights_commit_nothing() {
    let mut set = Set::of(2).await;
    let asked = set.post("/finish_weight_update", &json!({})).await;
    set.answer(0, "prepare_weight_update", Ok(json!({"weight_digest": DIGEST}))).await;
    set.answer(1, "prepare_weight_update", Ok(json!({"weight_digest": OTHER}))).await;
    set.answer_all("abort_weight_update", json!([]), &json!(true)).await;
    let answer = in_time(asked.answer()).await;
    assert_eq!(answer.failure(), (409, "digest_mismatch".to_owned()));
}

#[tokio::test]
async fn a_finish_that_is_asked_again_is_answered_again() {
    let mut set = Set::of(2).await;
    let asked = set.post("/finish_weight_update", &json!({"weight_version": "a"})).await;
    for index in [0, 1] {
        set.answer(index, "prepare_weight_update", failure("no_update_active")).await;
    }
    set.answer_all("abort_weight_update", json!([]), &json!(false)).await;
    let committed = json!({"weight_version": "a", "weight_commit": 4, "weight_digest": DIGEST});
    set.answer_all("finish_weight_update", json!(["a"]), &committed).await;
    assert_eq!(in_time(asked.answer()).await.json()["weight_commit"], 4);
}

#[tokio::test]
async fn the_death_of_an_engine_fails_only_its_own_requests() {
    let mut set = Set::of(2).await;
    let lost = set.generate(&["X-data-parallel-rank: 0"]).await;
    in_time(set.links[0].request()).await;
    let kept = set.generate(&["X-data-parallel-rank: 1"]).await;
    let id = in_time(set.links[1].request()).await.request_id;
    set.links[1].send(&step("v", 1, vec![tokens(&id, &[6])])).await;
    set.restart(0).await;
    assert_eq!(in_time(lost.answer()).await.failure(), (503, "engine_dead".to_owned()));
    set.links[1].send(&step("v", 1, vec![finished(&id, &[7], FinishReason::Stop)])).await;
    assert_eq!(in_time(kept.answer()).await.json()["choices"][0]["token_ids"], json!([6, 7]));
    assert_eq!(set.get("/health").await.status, 200);
}

#[tokio::test]
async fn an_engine_that_came_back_takes_requests_after_the_next_commit_of_all() {
    let mut set = Set::of(2).await;
    set.restart(0).await;
    for _ in 0..3 {
        set.served_by(1, &[]).await;
    }
    assert_eq!(set.update(&[0, 4]).await.status, 200);
    assert_eq!(set.served_by(0, &["X-data-parallel-rank: 0"]).await.status, 200);
}

#[tokio::test]
async fn an_engine_that_came_back_with_other_weights_is_left_out() {
    let mut set = Set::of(2).await;
    set.restart(1).await;
    let asked = set.post("/finish_weight_update", &json!({})).await;
    set.answer(0, "prepare_weight_update", Ok(json!({"weight_digest": DIGEST}))).await;
    set.answer(1, "prepare_weight_update", Ok(json!({"weight_digest": OTHER}))).await;
    set.answer(1, "abort_weight_update", Ok(json!(true))).await;
    set.answer(0, "get_weight_commit", Ok(json!(7))).await;
    let committed = json!({"weight_version": "default", "weight_commit": 8, "weight_digest": DIGEST});
    set.answer(0, "finish_weight_update", Ok(committed)).await;
    assert_eq!(in_time(asked.answer()).await.json()["weight_commit"], 8);
    for _ in 0..2 {
        set.served_by(0, &[]).await;
    }
}

#[tokio::test]
async fn the_history_has_a_record_for_an_engine_that_is_dead() {
    let mut set = Set::of(2).await;
    drop(set.links.remove(1));
    let record = json!({"engine_index": 0, "state": "ready", "weight_digest": DIGEST});
    in_time(async {
        loop {
            let asked = set.server.send("GET", "/weight_history", b"").await;
            set.answer(0, "get_weight_history", Ok(record.clone())).await;
            let answer = asked.answer().await.json();
            if answer["engines"][1] == json!({"engine_index": 1, "state": "dead", "weight_digest": null}) {
                assert_eq!((&answer["engines"][0], &answer["consistent"]), (&record, &json!(false)));
                break;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn the_metrics_tell_engines_apart() {
    let mut set = Set::of(2).await;
    for (index, count) in [(0, 1), (1, 2)] {
        let asked = set.generate(&[&format!("X-data-parallel-rank: {index}")]).await;
        let id = in_time(set.links[index].request()).await.request_id;
        set.links[index].send(&step("v", 1, vec![finished(&id, &vec![7; count], FinishReason::Stop)])).await;
        in_time(asked.answer()).await;
    }
    let text = String::from_utf8(set.get("/metrics").await.body).unwrap_or_default();
    for line in [
        "rollspan:generation_tokens_total{engine=\"0\",model_name=\"mock\"} 1",
        "rollspan:generation_tokens_total{engine=\"1\",model_name=\"mock\"} 2",
        "rollspan:weight_version_info{engine=\"1\",model_name=\"mock\",version=\"v\"} 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
    }
}

#[tokio::test]
async fn an_engine_behind_the_wrong_socket_ends_the_server() {
    let engine = MockEngine::bind();
    let server = Server::start(Options::new(engine.path())).await;
    let _link = engine.accept(&hello_of(3)).await;
    let ended = in_time(server.serving).await.unwrap_or_else(|error| panic!("{error}"));
    let Err(error @ ServeError::Index(_)) = ended else { panic!("an error about the index was due") };
    assert!(error.to_string().contains("number 3, not 0"), "{error}");
}
