//! What the server says of itself.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use rollspan_generate::{ApiError, Reason};
use serde_json::json;

use crate::answer::{Failure, value};
use crate::app::App;

/// GET /health: whether a request could be generated now.
pub(super) async fn health(State(app): State<Arc<App>>) -> Result<Response, Failure> {
    check_weight_state(&app.live_engine()?.client.status().weight_state)?;
    Ok(value(&json!({"status": "ok"})))
}

/// Refuses states of the weights in which an engine cannot generate.
fn check_weight_state(state: &str) -> Result<(), ApiError> {
    let (reason, message) = match state {
        "inconsistent" => (
            Reason::WeightsInconsistent,
            "the weights are half changed: an update in place was cut off; a complete update mends them",
        ),
        "undeclared" => (
            Reason::WeightsUndeclared,
            "nobody has named the weights yet: finish an update with a weight_version, or POST /update_weight_version",
        ),
        "sleeping" => (Reason::EngineSleeping, "the engine sleeps: POST /wake_up"),
        _ => return Ok(()),
    };
    Err(ApiError::new(reason, message))
}

/// GET /version
pub(super) async fn version() -> Response {
    value(&json!({"version": env!("CARGO_PKG_VERSION"), "frontend": "rust"}))
}
