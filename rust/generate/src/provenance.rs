//! What a request asks about the weights and the KV behind its output.

use rollspan_protocol::Provenance;
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::value::{boolean, integer, present};

/// Fields of the body, in the order in which they are checked.
const FIELDS: [&str; 5] =
    ["min_weight_commit", "weight_wait_s", "max_weight_lag", "return_kv_versions", "allow_stale_prefix"];

/// Whether the body has a field of that name.
pub(crate) fn knows(name: &str) -> bool {
    FIELDS.contains(&name)
}

/// Reads the fields: the first failure in their order wins.
///
/// # Errors
/// Names the field at fault and what is allowed there.
pub(crate) fn parse(fields: &Map<String, Value>) -> Result<Provenance, ApiError> {
    let [min_weight_commit, weight_wait_s, max_weight_lag, return_kv_versions, allow_stale_prefix] = FIELDS;
    // Fields of a literal are evaluated in the order in which they are written.
    Ok(Provenance {
        min_weight_commit: count(fields, min_weight_commit)?.unwrap_or(0),
        weight_wait_s: seconds(fields, weight_wait_s)?,
        max_weight_lag: count(fields, max_weight_lag)?,
        return_kv_versions: boolean(fields, return_kv_versions, return_kv_versions)?,
        allow_stale_prefix: boolean(fields, allow_stale_prefix, allow_stale_prefix)?,
    })
}

fn count(fields: &Map<String, Value>, name: &str) -> Result<Option<u64>, ApiError> {
    let Some(value) = present(fields, name) else { return Ok(None) };
    let count = integer(value, 0, i64::MAX).map(i64::unsigned_abs);
    count.map(Some).ok_or_else(|| ApiError::wrong(name, "an integer of at least 0", value))
}

fn seconds(fields: &Map<String, Value>, name: &str) -> Result<f64, ApiError> {
    let Some(value) = present(fields, name) else { return Ok(0.0) };
    let seconds = value.as_f64().filter(|seconds| *seconds >= 0.0);
    seconds.ok_or_else(|| ApiError::wrong(name, "a number of at least 0", value))
}
