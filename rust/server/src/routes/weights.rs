//! Weight updates.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rollspan_generate::{ApiError, Reason, check_label};
use serde_json::{Map, Value, json};

use crate::answer::{Failure, internal};
use crate::app::App;
use crate::control::Control;
use crate::fan_out::{call_each, info_of, successes};
use crate::uploads::Reading;

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
    let given = control.field(INIT_INFO).map(|given| infos(&control, INIT_INFO, given)).transpose()?;
    let infos = given.unwrap_or_else(|| vec![json!({})]);
    control
        .complete(async move |control: Control| {
            let engines = control.app.engines.there()?;
            let outcomes =
                call_each(&engines, "init_weight_transfer_engine", |engine| vec![info_of(engine, &infos)]).await;
            successes(&outcomes)?;
            tracing::info!("weight transfer initialized");
            Ok(control.answer_of_all(json!({"message": "Weight transfer initialized"}), &[INIT_INFO], &outcomes))
        })
        .await
}

/// POST `/shutdown_weight_transfer_engine`
pub(super) async fn shut_down_transfer(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let outcomes = control.call("shutdown_weight_transfer_engine", &[]).await?;
    tracing::info!("weight transfer shut down");
    Ok(control.answer_of_all(json!({"message": "Weight transfer shut down"}), &[], &outcomes))
}

/// POST `/start_weight_update`
pub(super) async fn start(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let mode = control.field(MODE);
    if let Some(mode) = mode.filter(|mode| !MODES.iter().any(|known| *mode == known)) {
        return Err(ApiError::wrong(MODE, "staged or in_place", mode).into());
    }
    let options = mode.map(|mode| json!({MODE: mode}));
    control
        .complete(async move |control: Control| {
            let outcomes = control.app.update.start(options.as_ref()).await?;
            tracing::info!("weight update started");
            Ok(control.answer_of_all(json!({"message": "Weight update started"}), &[MODE], &outcomes))
        })
        .await
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
        return control.complete(update_from_directory).await;
    }
    let infos = infos(&control, UPDATE_INFO, control.required(UPDATE_INFO)?)?;
    control.complete(move |control| update_from(control, infos)).await
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
    let options = [("digest", digest), (PARTIAL, partial)].into_iter();
    let options = options.filter_map(|(name, value)| Some((name.to_owned(), value?.clone()))).collect();
    control
        .complete(async move |control: Control| {
            let (committed, outcomes) = control.app.update.finish(label, options).await?;
            log_commit(&committed);
            let body = with_message("Weight update finished", committed);
            Ok(control.answer_of_all(body, &[WEIGHT_VERSION, WEIGHT_DIGEST, PARTIAL], &outcomes))
        })
        .await
}

/// POST `/abort_weight_update`: drops the open update, if there is one.
pub(super) async fn abort(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    control
        .complete(async |control: Control| {
            let outcomes = control.app.update.abort().await?;
            let aborted = successes(&outcomes)?.into_iter().any(|aborted| *aborted == true);
            tracing::info!(aborted, "weight update aborted");
            Ok(control.answer_of_all(json!({"status": "aborted", "aborted": aborted}), &[], &outcomes))
        })
        .await
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
    let update = &control.app.update;
    update.start(None).await?;
    update.update(&[json!({"backend": "disk", "path": directory})]).await?;
    let (committed, outcomes) = update.finish(label, Map::new()).await?;
    drop(alone);
    log_commit(&committed);
    let body = with_message("Weights updated", committed);
    Ok(control.answer_of_all(body, &[WEIGHT_DIR, WEIGHT_VERSION], &outcomes))
}

/// A piece of the open update. Files that clients have uploaded are deleted once they are in the engines.
async fn update_from(control: Control, infos: Vec<Value>) -> Result<Response, Failure> {
    let is_upload =
        |info: &&Value| !info["upload"].is_null() && (info["backend"].is_null() || info["backend"] == "http");
    let mut held = Vec::new();
    for info in infos.iter().filter(is_upload) {
        held.push(control.app.spool()?.reading(&info["upload"], "update_info.upload")?);
    }
    let outcomes = control.app.update.update(&infos).await?;
    let deleted = tokio::task::spawn_blocking(|| held.into_iter().for_each(Reading::delete)).await;
    deleted.map_err(|error| internal(format!("deleting an upload: {error}")))?;
    tracing::info!("weights updated");
    Ok(control.answer_of_all(json!({"message": "Weights updated"}), &[UPDATE_INFO], &outcomes))
}

/// One object for all engines, or one for each.
fn infos(control: &Control, name: &str, given: &Value) -> Result<Vec<Value>, ApiError> {
    let size = control.app.engines.size();
    let found = given.as_array().map_or_else(|| std::slice::from_ref(given), Vec::as_slice);
    if (found.len() == 1 || found.len() == size) && found.iter().all(Value::is_object) {
        return Ok(found.to_vec());
    }
    let objects = if size == 1 { "one object".to_owned() } else { format!("1 or {size} objects") };
    Err(ApiError::wrong(name, &format!("an object or a list of {objects}"), given))
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
