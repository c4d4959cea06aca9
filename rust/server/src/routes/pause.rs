//! Pausing and resuming generation.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rollspan_generate::ApiError;
use serde_json::json;

use crate::answer::Failure;
use crate::app::App;
use crate::control::Control;

/// Name, the engine's mode, and whether it clears the cache when the caller does not say. The last two are spellings of `SGLang`.
const MODES: [(&str, &str, bool); 5] = [
    ("abort", "abort", true),
    ("wait", "wait", true),
    ("keep", "keep", true),
    ("retract", "keep", true),
    ("in_place", "keep", false),
];

const MODE: &str = "mode";
const CLEAR_CACHE: &str = "clear_cache";

/// POST /pause: answers when the state holds, which in wait mode may take long.
pub(super) async fn pause(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let (mode, clears) = mode(&control)?;
    let clear_cache = control.flag(CLEAR_CACHE)?.unwrap_or(clears);
    let outcomes = control.call("pause_generation", &[mode.into(), clear_cache.into()]).await?;
    tracing::info!(mode, clear_cache, "paused");
    Ok(control.answer_of_all(json!({"status": "paused"}), &[MODE, CLEAR_CACHE], &outcomes))
}

/// POST /resume
pub(super) async fn resume(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let outcomes = control.call("resume_scheduler", &[]).await?;
    tracing::info!("resumed");
    Ok(control.answer_of_all(json!({"status": "resumed"}), &[], &outcomes))
}

/// GET `/is_paused`
pub(super) async fn is_paused(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let paused = control.ask("is_scheduler_paused").await?;
    Ok(control.answer(&json!({"is_paused": paused}), &[]))
}

/// The query wins over the body.
fn mode(control: &Control) -> Result<(&'static str, bool), ApiError> {
    let Some(given) = control.given(MODE) else { return Ok(("abort", true)) };
    let known = MODES.iter().find(|(name, ..)| given == *name);
    known
        .map(|(_, mode, clears)| (*mode, *clears))
        .ok_or_else(|| ApiError::wrong(MODE, "abort, wait, keep, retract or in_place", &given))
}
