//! The models that the server serves: one.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::json;

use crate::answer::{Failure, value};
use crate::app::App;

/// GET /v1/models
pub(super) async fn list(State(app): State<Arc<App>>) -> Result<Response, Failure> {
    let engine = app.engines.first()?;
    let card = json!({
        "id": engine.served.model,
        "object": "model",
        "created": app.started,
        "owned_by": "rollspan",
        "root": engine.client.hello().model.name,
        "parent": null,
        "max_model_len": engine.served.limits.max_model_len,
    });
    Ok(value(&json!({"object": "list", "data": [card]})))
}
