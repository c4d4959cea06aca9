//! Sleeping: the engine gives its memory back, and takes it again.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rollspan_generate::ApiError;
use serde_json::{Value, json};

use crate::answer::Failure;
use crate::app::App;
use crate::control::Control;

const LEVEL: &str = "level";
const MODE: &str = "mode";
const MODES: [&str; 3] = ["abort", "wait", "keep"];
const TAGS: &str = "tags";
const TAG_NAMES: [&str; 2] = ["weights", "kv_cache"];

/// POST /sleep: first what a pause of this mode does to requests, then the memory is free.
pub(super) async fn sleep(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let level = level(&control)?;
    let mode = match control.given(MODE) {
        None => MODES[0],
        Some(given) => MODES
            .into_iter()
            .find(|mode| given == *mode)
            .ok_or_else(|| ApiError::wrong(MODE, "abort, wait or keep", &given))?,
    };
    let outcomes = control.call("sleep", &[level.into(), mode.into()]).await?;
    tracing::info!(level, mode, "sleeping");
    Ok(control.answer_of_all(json!({"status": "sleeping", "level": level}), &[LEVEL, MODE], &outcomes))
}

/// POST `/wake_up`: the given parts, or all; what is awake stays so.
pub(super) async fn wake_up(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let tags = tags(&control)?;
    let outcomes = control.call("wake_up", std::slice::from_ref(&tags)).await?;
    let sleeping = control.ask("is_sleeping").await?;
    tracing::info!(%tags, "woken up");
    let status = if sleeping == Value::Bool(true) { "sleeping" } else { "awake" };
    Ok(control.answer_of_all(json!({"status": status, "tags": tags}), &[TAGS], &outcomes))
}

/// GET `/is_sleeping`
pub(super) async fn is_sleeping(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let sleeping = control.ask("is_sleeping").await?;
    Ok(control.answer(&json!({"is_sleeping": sleeping}), &[]))
}

/// The query wins over the body.
fn level(control: &Control) -> Result<u64, ApiError> {
    let level = match (control.parameter(LEVEL), control.field(LEVEL)) {
        (Some("1"), _) | (None, None) => Some(1),
        (Some("2"), _) => Some(2),
        (Some(_), _) => None,
        (None, Some(given)) => given.as_u64().filter(|level| (1..=2).contains(level)),
    };
    level.ok_or_else(|| ApiError::wrong(LEVEL, "1 or 2", &control.given(LEVEL).unwrap_or_default()))
}

/// The list of tags; null for all.
fn tags(control: &Control) -> Result<Value, ApiError> {
    const ALLOWED: &str = "a list of weights and kv_cache";
    let given = match control.parameters(TAGS) {
        words if words.is_empty() => control.field(TAGS).cloned().unwrap_or_default(),
        words => Value::Array(words),
    };
    match &given {
        Value::Null => return Ok(Value::Null),
        Value::Array(tags) if tags.is_empty() => return Ok(Value::Null),
        Value::Array(tags) => {
            if let Some(index) = tags.iter().position(|tag| !TAG_NAMES.iter().any(|name| tag == name)) {
                return Err(ApiError::wrong_element(TAGS, ALLOWED, &tags[index], index));
            }
        }
        other => return Err(ApiError::wrong(TAGS, ALLOWED, other)),
    }
    Ok(given)
}
