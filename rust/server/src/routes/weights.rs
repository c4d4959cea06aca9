//! Weight updates and the label of the weights in force.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rollspan_generate::{ApiError, Reason, check_label, shown};
use serde_json::{Value, json};

use crate::answer::Failure;
use crate::app::App;
use crate::control::Control;

const UPDATE_INFO: &str = "update_info";
const WEIGHT_DIR: &str = "weight_dir";
const WEIGHT_VERSION: &str = "weight_version";
const WEIGHT_COMMIT: &str = "weight_commit";
const NEW_VERSION: &str = "new_version";

/// POST `/start_weight_update`
pub(super) async fn start(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    control.call("start_weight_update", Vec::new()).await?;
    tracing::info!("weight update started");
    Ok(control.answer(&json!({"message": "Weight update started"}), &[]))
}

/// POST `/update_weights`
pub(super) async fn update(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    if let Some(directory) = control.field(WEIGHT_DIR) {
        let message = format!("{WEIGHT_DIR} is not supported yet: leave it out or send null, got {}", shown(directory));
        return Err(ApiError::new(Reason::UnsupportedField, message).with_param(WEIGHT_DIR).into());
    }
    let given = control.required(UPDATE_INFO)?;
    let info = match given {
        Value::Array(items) if items.len() == 1 => &items[0],
        other => other,
    };
    if !info.is_object() {
        return Err(ApiError::wrong(UPDATE_INFO, "an object or a list of one object", given).into());
    }
    control.call("update_weights", vec![info.clone()]).await.inspect_err(|error| note_failure(&control, error))?;
    tracing::info!("weights updated");
    Ok(control.answer(&json!({"message": "Weights updated"}), &[UPDATE_INFO]))
}

/// POST `/finish_weight_update`
pub(super) async fn finish(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let label = control.field(WEIGHT_VERSION).map(|label| check_label(label, WEIGHT_VERSION)).transpose()?;
    let finished = control.call("finish_weight_update", vec![label.into()]).await;
    let finished = finished.inspect_err(|error| note_failure(&control, error))?;
    control.engine.metrics.weight_update_ended("success");
    let (version, commit) = (&finished[WEIGHT_VERSION], &finished[WEIGHT_COMMIT]);
    tracing::info!(%version, %commit, "weight update finished");
    let message = "Weight update finished";
    let body = json!({"message": message, WEIGHT_VERSION: version, WEIGHT_COMMIT: commit});
    Ok(control.answer(&body, &[WEIGHT_VERSION]))
}

/// POST `/update_weight_version`: another label for the weights in force.
pub(super) async fn relabel(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let label = check_label(control.required(NEW_VERSION)?, NEW_VERSION)?;
    control.call("set_weight_version", vec![label.as_str().into()]).await?;
    tracing::info!(label, "weights relabelled");
    Ok(control.answer(&json!({"success": true, NEW_VERSION: label}), &[NEW_VERSION]))
}

/// GET `/weight_info`
pub(super) async fn info(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let label = control.call("get_weight_version", Vec::new()).await?;
    Ok(control.answer(&json!({WEIGHT_VERSION: label}), &[]))
}

/// Counts a failed update; a call that was refused before it could be part of one is none.
fn note_failure(control: &Control, error: &ApiError) {
    let refused = [
        Reason::UpdateActive,
        Reason::NoUpdateActive,
        Reason::InvalidRequest,
        Reason::InvalidLabel,
        Reason::EngineDead,
    ];
    if !refused.contains(&error.reason) {
        control.engine.metrics.weight_update_ended("failure");
    }
}
