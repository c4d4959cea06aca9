//! Known fields that are not implemented: accepted with a value that changes nothing, refused with any other.

use serde_json::{Map, Value};

use crate::error::{ApiError, Reason};
use crate::value::present;

/// A value that changes nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Neutral {
    Null,
    False,
    Number(u8),
    Text(&'static str),
    EmptyList,
    EmptyObject,
}

/// A field and the values that change nothing, the one that messages show first.
type Field = (&'static str, &'static [Neutral]);

/// Fields of the body, in the order in which they are checked.
pub(crate) const BODY: &[Field] = &[
    ("response_format", &[Neutral::Text("objects")]),
    ("kv_transfer_params", &[Neutral::Null]),
    ("ec_transfer_params", &[Neutral::Null]),
    ("features", &[Neutral::Null]),
    ("content_parts", &[Neutral::Null]),
    ("token_offsets", &[Neutral::Null]),
    ("parse_context", &[Neutral::Null]),
    ("reasoning_ended", &[Neutral::Null]),
    ("reasoning_parser_kwargs", &[Neutral::Null]),
];

/// Checked earlier than the others, as it says what kind of answer is wanted.
pub(crate) const OUTPUT_MODE: &[Field] = &[("output_mode", &[Neutral::Text("tokens")])];

/// Fields of `sampling_params`, in the order in which they are checked.
pub(crate) const SAMPLING: &[Field] = &[
    ("stop", &[Neutral::Null, Neutral::Text(""), Neutral::EmptyList]),
    ("extra_args", &[Neutral::Null, Neutral::EmptyObject]),
    ("watermarking", &[Neutral::Null, Neutral::False]),
    ("flat_logprobs", &[Neutral::False]),
    ("stream_interval", &[Neutral::Null, Neutral::Number(1)]),
    ("thinking_token_budget", &[Neutral::Null]),
    ("repetition_detection", &[Neutral::Null]),
    ("logprob_token_ids", &[Neutral::Null]),
    ("prompt_logprob_token_ids", &[Neutral::Null]),
    ("prompt_logprob_start", &[Neutral::Null]),
    ("trace_decode_token_ids", &[Neutral::Null]),
];

impl Neutral {
    fn matches(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Null, Value::Null) | (Self::False, Value::Bool(false)) => true,
            (Self::Number(neutral), Value::Number(value)) => {
                value.as_f64().is_some_and(|value| (value - f64::from(neutral)).abs() <= 0.0)
            }
            (Self::Text(neutral), Value::String(value)) => value == neutral,
            (Self::EmptyList, Value::Array(values)) => values.is_empty(),
            (Self::EmptyObject, Value::Object(entries)) => entries.is_empty(),
            _ => false,
        }
    }

    fn json(self) -> Value {
        match self {
            Self::Null => Value::Null,
            Self::False => Value::Bool(false),
            Self::Number(value) => value.into(),
            Self::Text(value) => value.into(),
            Self::EmptyList => Value::Array(Vec::new()),
            Self::EmptyObject => Value::Object(Map::new()),
        }
    }
}

/// Refuses each field of the table that is set to anything but a neutral value; null is always neutral.
pub(crate) fn check(table: &[Field], fields: &Map<String, Value>, prefix: &str) -> Result<(), ApiError> {
    for (name, neutral) in table {
        let Some(value) = present(fields, name) else { continue };
        if neutral.iter().any(|neutral| neutral.matches(value)) {
            continue;
        }
        let path = format!("{prefix}{name}");
        let first = neutral.first().map_or(Value::Null, |neutral| neutral.json());
        let message = format!(
            "{path} is not supported yet: leave it out or send {}, got {}",
            crate::shown(&first),
            crate::shown(value)
        );
        return Err(ApiError::new(Reason::UnsupportedField, message).with_param(path));
    }
    Ok(())
}

/// Whether the table has a field of that name.
pub(crate) fn knows(table: &[Field], name: &str) -> bool {
    table.iter().any(|(field, _)| *field == name)
}
