//! What the engine and its settings are, in vLLM's groups; `rollspan.frontend.server_info` is the twin.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rollspan_generate::ApiError;
use serde_json::{Map, Value, json};

use crate::answer::Failure;
use crate::app::App;
use crate::control::Control;
use crate::engine::Engine;
use crate::fan_out::Outcome;

const FORMAT: &str = "config_format";
const FORMATS: [&str; 2] = ["json", "text"];

/// GET `/server_info`
pub(super) async fn server_info(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    if let Some(other) = control.parameter(FORMAT).filter(|format| !FORMATS.contains(format)) {
        return Err(ApiError::wrong(FORMAT, &FORMATS.join(" or "), &other.into()).into());
    }
    let outcomes = control.call("server_info", &[]).await?;
    let size = control.app.engines.size();
    Ok(control.answer(&described(&*control.app.engines.first()?, &outcomes, size), &[]))
}

/// GET `/get_world_size`: how many engines there are, or without `include_dp` how many ranks one has.
pub(super) async fn world_size(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let all = control.flag("include_dp")?.unwrap_or(true);
    let size = if all { control.app.engines.size() } else { 1 };
    Ok(control.answer(&json!({"world_size": size}), &["include_dp"]))
}

/// `first` stands for all; `outcomes` are what the engines that are there say of themselves, `size` is that of the set.
fn described(first: &Engine, outcomes: &[Outcome], size: usize) -> Value {
    let hello = first.client.hello();
    let (limits, model) = (&hello.limits, &hello.model);
    let told = outcomes.iter().filter_map(|outcome| Some(about(&outcome.engine, outcome.result.as_ref().ok()?)));
    let told: Vec<Value> = told.collect();
    let backend = told.first().and_then(|about| about["config"]["weight_transfer_backend"].as_str()).unwrap_or("disk");
    let mut described = json!({
        "vllm_config": {
            "model_config": {
                "model": model.name,
                "served_model_name": first.served.model,
                "architecture": model.architecture,
                "dtype": model.dtype,
                "max_model_len": limits.max_model_len,
                "max_logprobs": limits.max_logprobs,
                "vocab_size": limits.vocab_size,
            },
            "cache_config": {"block_size": limits.block_size, "num_gpu_blocks": limits.num_blocks},
            "scheduler_config": {
                "max_num_seqs": limits.max_num_seqs,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
            },
            "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": size},
            "device_config": {"device": model.device},
            "weight_transfer_config": {"backend": backend},
        },
        "version": env!("CARGO_PKG_VERSION"),
        "frontend": "rust",
        "engine": told.first(),
    });
    if size > 1 {
        described["engines"] = told.into();
    }
    described
}

fn about(engine: &Engine, facts: &Value) -> Value {
    let hello = engine.client.hello();
    let mut about: Map<String, Value> = Map::from_iter([
        ("version".to_owned(), hello.rollspan_version.as_str().into()),
        ("engine_index".to_owned(), hello.engine_index.into()),
        ("pid".to_owned(), hello.pid.into()),
        ("num_parameters".to_owned(), hello.model.num_parameters.into()),
        ("eos_token_ids".to_owned(), hello.model.eos_token_ids.as_slice().into()),
    ]);
    if let Value::Object(facts) = facts {
        about.extend(facts.clone());
    }
    about.into()
}
