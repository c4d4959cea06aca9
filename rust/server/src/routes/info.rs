//! What the engine and its settings are, in vLLM's groups; `rollspan.frontend.server_info` is the twin.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rollspan_generate::ApiError;
use serde_json::{Map, Value, json};

use crate::answer::Failure;
use crate::app::{App, Engine};
use crate::control::Control;

const FORMAT: &str = "config_format";
const FORMATS: [&str; 2] = ["json", "text"];

/// GET `/server_info`
pub(super) async fn server_info(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    if let Some(other) = control.parameter(FORMAT).filter(|format| !FORMATS.contains(format)) {
        return Err(ApiError::wrong(FORMAT, &FORMATS.join(" or "), &other.into()).into());
    }
    let facts = control.call("server_info", Vec::new()).await?;
    Ok(control.answer(&described(&control.engine, facts), &[]))
}

/// GET `/get_world_size`: how many engines there are.
pub(super) async fn world_size(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    Ok(control.answer(&json!({"world_size": 1}), &[]))
}

fn described(engine: &Engine, facts: Value) -> Value {
    let hello = engine.client.hello();
    let (limits, model) = (&hello.limits, &hello.model);
    let mut about: Map<String, Value> = Map::from_iter([
        ("version".to_owned(), hello.rollspan_version.as_str().into()),
        ("engine_index".to_owned(), hello.engine_index.into()),
        ("pid".to_owned(), hello.pid.into()),
        ("num_parameters".to_owned(), model.num_parameters.into()),
        ("eos_token_ids".to_owned(), model.eos_token_ids.as_slice().into()),
    ]);
    if let Value::Object(facts) = facts {
        about.extend(facts);
    }
    json!({
        "vllm_config": {
            "model_config": {
                "model": model.name,
                "served_model_name": engine.served.model,
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
            "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
            "device_config": {"device": model.device},
            "weight_transfer_config": {"backend": "disk"},
        },
        "version": env!("CARGO_PKG_VERSION"),
        "frontend": "rust",
        "engine": about,
    })
}
