//! Checks of single JSON values, and the header that names ignored fields.

use std::fmt::Write as _;

use serde_json::{Map, Value};

use crate::error::{ApiError, Reason};
use crate::shown::shown;

pub(crate) const BOOLEAN: &str = "true or false";
const REQUEST_ID_CHARACTERS: usize = 256;
const REQUEST_ID: &str = "a string of 1 to 256 characters without control characters";
const LABEL_BYTES: usize = 256;
const IGNORED_HEADER_BYTES: usize = 1024;

/// The value of a field; an explicit null is as good as none.
pub(crate) fn present<'a>(fields: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    fields.get(name).filter(|value| !value.is_null())
}

/// The field as an integer from `least` to `most`; floats and booleans are none.
pub(crate) fn integer(value: &Value, least: i64, most: i64) -> Option<i64> {
    value.as_i64().filter(|value| (least..=most).contains(value))
}

/// An optional boolean field of `fields`; `path` is its full name.
pub(crate) fn boolean(fields: &Map<String, Value>, name: &str, path: &str) -> Result<bool, ApiError> {
    match present(fields, name) {
        None => Ok(false),
        Some(Value::Bool(value)) => Ok(*value),
        Some(value) => Err(ApiError::wrong(path, BOOLEAN, value)),
    }
}

/// An optional string field of 1 to `most` characters.
pub(crate) fn string(
    fields: &Map<String, Value>,
    name: &str,
    allowed: &str,
    most: usize,
) -> Result<Option<String>, ApiError> {
    match present(fields, name) {
        None => Ok(None),
        Some(Value::String(text)) if (1..=most).contains(&text.chars().count()) => Ok(Some(text.clone())),
        Some(value) => Err(ApiError::wrong(name, allowed, value)),
    }
}

/// Checks a request id of the field or header `path`.
///
/// # Errors
/// It is not a string of 1 to 256 characters without control characters.
pub fn check_request_id(value: &Value, path: &str) -> Result<String, ApiError> {
    let fits = |text: &&String| {
        (1..=REQUEST_ID_CHARACTERS).contains(&text.chars().count()) && !text.chars().any(char::is_control)
    };
    match value {
        Value::String(text) if fits(&text) => Ok(text.clone()),
        other => Err(ApiError::wrong(path, REQUEST_ID, other)),
    }
}

/// Checks a weight version of the field `field`; integers become their decimal string.
///
/// # Errors
/// [`Reason::InvalidLabel`]: it is neither an integer nor a string of 1 to 256 bytes without control characters.
pub fn check_label(value: &Value, field: &str) -> Result<String, ApiError> {
    match value {
        Value::Number(number) if !number.is_f64() => return Ok(number.to_string()),
        Value::String(text) if (1..=LABEL_BYTES).contains(&text.len()) && !text.chars().any(char::is_control) => {
            return Ok(text.clone());
        }
        _ => {}
    }
    let allowed = "a string of 1 to 256 bytes without control characters or an integer";
    let message = format!("{field} must be {allowed}, got {}", shown(value));
    Err(ApiError::new(Reason::InvalidLabel, message).with_param(field))
}

/// Value of the header `X-Ignored-Fields`: as many of `names` as fit into 1024 bytes, percent-encoded where a header
/// or the list's commas need it; `None` when there is nothing to name.
pub fn ignored_fields_header(names: &[String]) -> Option<String> {
    let mut header = String::new();
    for name in names {
        let mut longer = header.clone();
        if !longer.is_empty() {
            longer.push(',');
        }
        for byte in name.bytes() {
            if byte.is_ascii_alphanumeric() || b"_.-".contains(&byte) {
                longer.push(byte.into());
            } else if write!(longer, "%{byte:02X}").is_err() {
                return None;
            }
        }
        if longer.len() > IGNORED_HEADER_BYTES {
            break;
        }
        header = longer;
    }
    Some(header).filter(|header| !header.is_empty())
}
