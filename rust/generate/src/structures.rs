//! `sampling_params.structured_outputs`: what an output must look like. What a schema or grammar says is the engine's to
//! judge.

use rollspan_protocol::StructuredOutputs;
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::sampling::PREFIX;
use crate::value::{BOOLEAN, present};

const NAME: &str = "structured_outputs";

/// The ways to say it, of which a request names one.
const KINDS: [&str; 6] = ["json", "json_object", "regex", "choice", "grammar", "structural_tag"];
const OPTIONS: [&str; 3] = ["disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"];
const TEXT: &str = "a non-empty string";

fn text(value: &Value) -> Option<String> {
    value.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}

/// A schema as its text.
fn schema(value: &Value) -> Option<String> {
    if value.is_object() { Some(value.to_string()) } else { text(value) }
}

fn texts(value: &Value) -> Option<Vec<String>> {
    value.as_array().filter(|values| !values.is_empty())?.iter().map(text).collect()
}

/// Reads the field, which must name exactly one kind.
pub(crate) fn parse(sampling: &Map<String, Value>) -> Result<Option<StructuredOutputs>, ApiError> {
    let Some(value) = present(sampling, NAME) else { return Ok(None) };
    let path = format!("{PREFIX}{NAME}");
    let named = |object: &&Map<String, Value>| KINDS.iter().filter(|kind| present(object, kind).is_some()).count() == 1;
    let Some(object) = value.as_object().filter(named) else {
        let allowed = format!("an object with exactly one of {}", KINDS.join(", "));
        return Err(ApiError::wrong(&path, &allowed, value));
    };
    let fields = Fields { object, path };
    Ok(Some(StructuredOutputs {
        json: fields.read("json", "a JSON schema as an object or a non-empty string", schema)?,
        json_object: fields.read("json_object", "true", |value| value.as_bool().filter(|wanted| *wanted))?,
        regex: fields.read("regex", TEXT, text)?,
        choice: fields.read("choice", "a non-empty list of non-empty strings", texts)?,
        grammar: fields.read("grammar", TEXT, text)?,
        structural_tag: fields.read("structural_tag", TEXT, text)?,
        disable_any_whitespace: fields.read("disable_any_whitespace", BOOLEAN, Value::as_bool)?,
        disable_additional_properties: fields.read("disable_additional_properties", BOOLEAN, Value::as_bool)?,
        whitespace_pattern: fields.read("whitespace_pattern", TEXT, text)?,
    }))
}

struct Fields<'a> {
    object: &'a Map<String, Value>,
    path: String,
}

impl Fields<'_> {
    fn read<T>(
        &self,
        name: &str,
        allowed: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = present(self.object, name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| ApiError::wrong(&format!("{}.{name}", self.path), allowed, value))
    }
}

/// Names of the object's keys that mean nothing here.
pub(crate) fn unknown(sampling: &Map<String, Value>) -> impl Iterator<Item = String> {
    let keys = sampling.get(NAME).and_then(Value::as_object).into_iter().flat_map(Map::keys);
    let known = |name: &&String| KINDS.contains(&name.as_str()) || OPTIONS.contains(&name.as_str());
    keys.filter(move |name| !known(name)).map(|name| format!("{PREFIX}{NAME}.{name}"))
}
