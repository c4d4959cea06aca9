//! The prefix cache.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::json;

use crate::answer::Failure;
use crate::app::App;
use crate::control::Control;

const RUNNING: &str = "reset_running_requests";
/// Of a cache outside the engine, which there is none.
const EXTERNAL: &str = "reset_external";

/// POST `/reset_prefix_cache`
pub(super) async fn reset(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let running = control.flag(RUNNING)?.unwrap_or(false);
    control.flag(EXTERNAL)?;
    let success = control.call("reset_prefix_cache", vec![running.into()]).await?;
    tracing::info!(running, "prefix cache reset");
    Ok(control.answer(&json!({"success": success}), &[RUNNING, EXTERNAL]))
}
