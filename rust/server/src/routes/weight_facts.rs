//! What is known of the weights in force, and their label.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rollspan_generate::{ApiError, check_label};
use serde_json::{Value, json};

use crate::answer::Failure;
use crate::app::App;
use crate::control::Control;
use crate::fan_out::{agreed, successes};

const NEW_VERSION: &str = "new_version";
const ACTION: &str = "action";
const ACTIONS: [&str; 3] = ["checksum", "compare", "reset"];
const BASELINE: &str = "baseline";

/// POST `/update_weight_version`: another label for the weights in force.
pub(super) async fn relabel(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let label = check_label(control.required(NEW_VERSION)?, NEW_VERSION)?;
    let outcomes = control.call("set_weight_version", &[label.as_str().into()]).await?;
    tracing::info!(label, "weights relabelled");
    Ok(control.answer_of_all(json!({"success": true, NEW_VERSION: label}), &[NEW_VERSION], &outcomes))
}

/// GET `/weight_info`
pub(super) async fn info(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let label = control.ask("get_weight_version").await?;
    Ok(control.answer(&json!({"weight_version": label}), &[]))
}

/// GET `/weight_history`: one record for each engine, also for one that is not there.
pub(super) async fn history(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let control = Control::read(app, request).await?;
    let outcomes = control.call("get_weight_history", &[]).await?;
    let record = |index: u64| {
        let of_engine = outcomes.iter().find(|outcome| outcome.engine.index() == index);
        let dead = || json!({"engine_index": index, "state": "dead", "weight_digest": null});
        of_engine.and_then(|outcome| outcome.result.as_ref().ok()).cloned().unwrap_or_else(dead)
    };
    let records: Vec<Value> = (0..control.app.engines.size() as u64).map(record).collect();
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
    let outcomes = control.call("check_weights", &arguments).await?;
    if action == "checksum" {
        return Ok(control.answer(&agreed(&outcomes)?, &[ACTION, BASELINE]));
    }
    let found = if action == "compare" { compared(&successes(&outcomes)?) } else { agreed(&outcomes)? };
    Ok(control.answer_of_all(found, &[ACTION, BASELINE], &outcomes))
}

/// What all engines together found.
fn compared(found: &[&Value]) -> Value {
    let matches = found.iter().all(|found| found["match"] == true);
    let names = found.iter().filter_map(|found| found["mismatches"].as_array()).flatten().filter_map(Value::as_str);
    let mismatches: BTreeSet<&str> = names.collect();
    json!({"match": matches, "mismatches": mismatches})
}

/// Whether all engines serve the same weights: each is ready, and all have one digest, which of several must be known.
fn consistent(records: &[Value]) -> bool {
    let digest = |record: &Value| record["weight_digest"].clone();
    let first = records.first().map(digest);
    let is_known = records.len() == 1 || first.as_ref().is_some_and(|digest| !digest.is_null());
    is_known && records.iter().all(|record| record["state"] == "ready" && Some(digest(record)) == first)
}
