//! What is known of the weights in force, and their label.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rollspan_generate::{ApiError, check_label};
use serde_json::{Value, json};

use crate::answer::Failure;
use crate::app::App;
use crate::control::Control;

const NEW_VERSION: &str = "new_version";
const ACTION: &str = "action";
const ACTIONS: [&str; 3] = ["checksum", "compare", "reset"];
const BASELINE: &str = "baseline";

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
    Ok(control.answer(&json!({"weight_version": label}), &[]))
}

/// GET `/weight_history`: one record for each engine.
pub(super) async fn history(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let records = [control.call("get_weight_history", Vec::new()).await?];
    Ok(control.answer(&json!({"engines": records, "consistent": consistent(&records)}), &[]))
}

/// POST `/weight_checker`: digests of single tensors, compared or not, or all weights zero.
pub(super) async fn check(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let action = control.required(ACTION)?;
    if !ACTIONS.iter().any(|known| action == known) {
        return Err(ApiError::wrong(ACTION, "checksum, compare or reset", action).into());
    }
    let mut arguments = vec![action.clone()];
    if action == "compare" {
        let baseline = control.required(BASELINE)?;
        if !baseline.as_object().is_some_and(|digests| digests.values().all(Value::is_string)) {
            return Err(ApiError::wrong(BASELINE, "an object of digests by name", baseline).into());
        }
        arguments.push(baseline.clone());
    }
    let found = control.call("check_weights", arguments).await?;
    Ok(control.answer(&found, &[ACTION, BASELINE]))
}

/// Whether all engines serve the same weights: each is ready, and all have one digest.
fn consistent(records: &[Value]) -> bool {
    let digest = |record: &Value| record["weight_digest"].clone();
    let first = records.first().map(digest);
    records.iter().all(|record| record["state"] == "ready" && Some(digest(record)) == first)
}
