//! Weight updates.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rollspan_generate::{ApiError, Reason, check_label};
use serde_json::{Map, Value, json};

use crate::answer::{Failure, internal};
use crate::app::App;
use crate::control::Control;

const INIT_INFO: &str = "init_info";
const UPDATE_INFO: &str = "update_info";
const MODE: &str = "mode";
const MODES: [&str; 2] = ["staged", "in_place"];
const WEIGHT_DIR: &str = "weight_dir";
const WEIGHT_VERSION: &str = "weight_version";
const WEIGHT_DIGEST: &str = "weight_digest";
const PARTIAL: &str = "partial";

/// POST `/init_weight_transfer_engine`
pub(super) async fn init_transfer(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let info = control.field(INIT_INFO).map_or_else(|| Ok(json!({})), |given| info(INIT_INFO, given))?;
    control.call("init_weight_transfer_engine", vec![info]).await?;
    tracing::info!("weight transfer initialized");
    Ok(control.answer(&json!({"message": "Weight transfer initialized"}), &[INIT_INFO]))
}

/// POST `/shutdown_weight_transfer_engine`
pub(super) async fn shut_down_transfer(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    control.call("shutdown_weight_transfer_engine", Vec::new()).await?;
    tracing::info!("weight transfer shut down");
    Ok(control.answer(&json!({"message": "Weight transfer shut down"}), &[]))
}

/// POST `/start_weight_update`
pub(super) async fn start(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let mode = control.field(MODE);
    if let Some(mode) = mode.filter(|mode| !MODES.iter().any(|known| *mode == known)) {
        return Err(ApiError::wrong(MODE, "staged or in_place", mode).into());
    }
    control.call("start_weight_update", options([(MODE, mode)])).await?;
    tracing::info!("weight update started");
    Ok(control.answer(&json!({"message": "Weight update started"}), &[MODE]))
}

/// POST `/start_draft_weight_update`
pub(super) async fn start_draft(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    Control::read(app, request).await?;
    Err(ApiError::new(Reason::UnsupportedField, "there is no draft model to update").into())
}

/// POST `/update_weights`: a piece of the open update, or with `weight_dir` a whole one.
pub(super) async fn update(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    if control.field(WEIGHT_DIR).is_some() {
        return to_its_end(update_from_directory(control)).await;
    }
    let info = info(UPDATE_INFO, control.required(UPDATE_INFO)?)?;
    let is_upload = !info["upload"].is_null() && (info["backend"].is_null() || info["backend"] == "http");
    if is_upload {
        return to_its_end(update_from_upload(control, info)).await;
    }
    control.call("update_weights", vec![info]).await?;
    tracing::info!("weights updated");
    Ok(control.answer(&json!({"message": "Weights updated"}), &[UPDATE_INFO]))
}

/// POST `/finish_weight_update`: weights, label, commit number and digest change together.
pub(super) async fn finish(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let label = label(&control)?;
    let (digest, partial) = (control.field(WEIGHT_DIGEST), control.field(PARTIAL));
    if let Some(digest) = digest.filter(|digest| !is_digest(digest)) {
        return Err(ApiError::wrong(WEIGHT_DIGEST, "blake3: and 64 lower-case hex digits", digest).into());
    }
    if let Some(partial) = partial.filter(|partial| !partial.is_boolean()) {
        return Err(ApiError::wrong(PARTIAL, "true or false", partial).into());
    }
    let mut arguments = vec![label];
    arguments.extend(options([("digest", digest), (PARTIAL, partial)]));
    let committed = control.call("finish_weight_update", arguments).await?;
    log_commit(&committed);
    let body = with_message("Weight update finished", committed);
    Ok(control.answer(&body, &[WEIGHT_VERSION, WEIGHT_DIGEST, PARTIAL]))
}

/// POST `/abort_weight_update`: drops the open update, if there is one.
pub(super) async fn abort(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let aborted = control.call("abort_weight_update", Vec::new()).await?;
    tracing::info!(%aborted, "weight update aborted");
    Ok(control.answer(&json!({"status": "aborted", "aborted": aborted}), &[]))
}

/// Runs a change of several steps to its end, also when its client goes away in the middle: the client would find it half
/// done when it comes back.
async fn to_its_end(
    change: impl Future<Output = Result<Response, Failure>> + Send + 'static,
) -> Result<Response, Failure> {
    tokio::spawn(change).await.unwrap_or_else(|error| Err(internal(format!("updating weights: {error}")).into()))
}

/// A whole update. A client that sends it again, because it got no answer, has it done again after the first.
async fn update_from_directory(control: Control) -> Result<Response, Failure> {
    if control.field(UPDATE_INFO).is_some() {
        let message = "weight_dir and update_info exclude each other: send one of them";
        return Err(ApiError::new(Reason::InvalidRequest, message).with_param(WEIGHT_DIR).into());
    }
    let given = control.required(WEIGHT_DIR)?;
    let Some(directory) = given.as_str() else {
        return Err(ApiError::wrong(WEIGHT_DIR, "the path of a directory of safetensors", given).into());
    };
    let label = label(&control)?;
    let alone = control.app.directory_update.lock().await;
    control.call("start_weight_update", Vec::new()).await?;
    control.call("update_weights", vec![json!({"backend": "disk", "path": directory})]).await?;
    let committed = control.call("finish_weight_update", vec![label]).await?;
    drop(alone);
    log_commit(&committed);
    Ok(control.answer(&with_message("Weights updated", committed), &[WEIGHT_DIR, WEIGHT_VERSION]))
}

/// An update from files that clients have uploaded; once they are in the engine they are deleted.
async fn update_from_upload(control: Control, info: Value) -> Result<Response, Failure> {
    let reading = control.app.spool()?.reading(&info["upload"], "update_info.upload")?;
    control.call("update_weights", vec![info]).await?;
    let deleted = tokio::task::spawn_blocking(|| reading.delete()).await;
    deleted.map_err(|error| internal(format!("deleting an upload: {error}")))?;
    tracing::info!("weights updated");
    Ok(control.answer(&json!({"message": "Weights updated"}), &[UPDATE_INFO]))
}

/// The object of a field, which may be alone in a list.
fn info(name: &str, given: &Value) -> Result<Value, ApiError> {
    let found = match given {
        Value::Array(items) if items.len() == 1 => &items[0],
        other => other,
    };
    if found.is_object() {
        return Ok(found.clone());
    }
    Err(ApiError::wrong(name, "an object or a list of one object", given))
}

fn label(control: &Control) -> Result<Value, ApiError> {
    let label = control.field(WEIGHT_VERSION).map(|label| check_label(label, WEIGHT_VERSION)).transpose()?;
    Ok(label.into())
}

fn is_digest(value: &Value) -> bool {
    let digits = value.as_str().and_then(|text| text.strip_prefix("blake3:"));
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    digits.is_some_and(|digits| digits.len() == 64 && digits.bytes().all(is_digit))
}

/// The options of a call that were given, as its last argument; none when there are none.
fn options<const N: usize>(given: [(&str, Option<&Value>); N]) -> Vec<Value> {
    let given = given.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.clone())));
    let given: Map<String, Value> = given.collect();
    if given.is_empty() { Vec::new() } else { vec![given.into()] }
}

fn with_message(message: &str, committed: Value) -> Value {
    let mut body = Map::from_iter([("message".to_owned(), message.into())]);
    if let Value::Object(committed) = committed {
        body.extend(committed);
    }
    body.into()
}

fn log_commit(committed: &Value) {
    let (version, commit, digest) =
        (&committed[WEIGHT_VERSION], &committed["weight_commit"], &committed[WEIGHT_DIGEST]);
    tracing::info!(%version, %commit, %digest, "weight update finished");
}
