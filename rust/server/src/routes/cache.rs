//! The prefix cache.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::json;

use crate::answer::Failure;
use crate::app::App;
use crate::control::Control;
use crate::fan_out::successes;

const RUNNING: &str = "reset_running_requests";
/// Of a cache outside the engine, which there is none.
const EXTERNAL: &str = "reset_external";

/// POST `/reset_prefix_cache`
pub(super) async fn reset(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let running = control.flag(RUNNING)?.unwrap_or(false);
    control.flag(EXTERNAL)?;
    let outcomes = control.call("reset_prefix_cache", &[running.into()]).await?;
    let success = successes(&outcomes)?.into_iter().all(|success| *success == true);
    tracing::info!(running, "prefix cache reset");
    Ok(control.answer_of_all(json!({"success": success}), &[RUNNING, EXTERNAL], &outcomes))
}
