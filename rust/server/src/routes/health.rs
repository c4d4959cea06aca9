//! What the server says of itself.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::json;

use crate::answer::{Failure, value};
use crate::app::App;

/// GET /health: whether a request could be generated now.
pub(super) async fn health(State(app): State<Arc<App>>) -> Result<Response, Failure> {
    app.check_live()?;
    app.engines.check_fit()?;
    Ok(value(&json!({"status": "ok"})))
}

/// GET /version
pub(super) async fn version() -> Response {
    value(&json!({"version": env!("CARGO_PKG_VERSION"), "frontend": "rust"}))
}
