//! Ending open requests by the ids that their clients know.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rollspan_engine_client::EngineClient;
use rollspan_generate::ApiError;
use serde_json::{Value, json};

use crate::answer::Failure;
use crate::app::App;
use crate::control::Control;

const FIELD: &str = "request_ids";

/// POST `/abort_requests`: the given ids, or all.
pub(super) async fn given_or_all(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let ids = control.field(FIELD).map(strings).transpose()?;
    Ok(abort(&control, ids.as_deref())?)
}

/// POST `/inference/v1/abort_requests`: the given ids.
pub(super) async fn given(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let ids = strings(control.required(FIELD)?)?;
    Ok(abort(&control, Some(&ids))?)
}

fn abort(control: &Control, ids: Option<&[String]>) -> Result<Response, ApiError> {
    let engines = control.app.engines.there()?;
    let abort = |client: &EngineClient| ids.map_or_else(|| client.abort_all(), |ids| client.abort(ids));
    let aborted: usize = engines.iter().map(|engine| abort(&engine.client)).sum();
    tracing::info!(aborted, "aborted requests");
    Ok(control.answer(&json!({"status": "aborted", "aborted": aborted}), &[FIELD]))
}

fn strings(value: &Value) -> Result<Vec<String>, ApiError> {
    const ALLOWED: &str = "a list of strings";
    let items = value.as_array().ok_or_else(|| ApiError::wrong(FIELD, ALLOWED, value))?;
    let string = |(index, item): (usize, &Value)| {
        item.as_str().map(str::to_owned).ok_or_else(|| ApiError::wrong_element(FIELD, ALLOWED, item, index))
    };
    items.iter().enumerate().map(string).collect()
}
