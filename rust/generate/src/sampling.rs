//! The object `sampling_params`: validation, and what depends on model and prompt filled in.

use std::collections::BTreeSet;

use rollspan_protocol::SamplingParams;
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::neutral;
use crate::request::Served;
use crate::value::{BOOLEAN, integer, present};

const PREFIX: &str = "sampling_params.";
const MAX_N: i64 = 1024;
const MAX_STOP_TOKEN_IDS: usize = 1024;

/// Fields with an effect; the order in which [`parse`] checks them.
const FIELDS: [&str; 10] = [
    "n",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
];

/// Fields about text: checked for their type, without effect, as token ids come out.
const TEXT_FIELDS: [&str; 5] = [
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "skip_reading_prefix_cache",
];

const ROUTED_EXPERTS_START: &str = "routed_experts_prompt_start";

/// The object under check.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    /// The value that `read` makes of a field; `None` when the field is absent or null.
    fn optional<T>(
        &self,
        name: &str,
        allowed: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = present(self.0, name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| ApiError::wrong(&format!("{PREFIX}{name}"), allowed, value))
    }
}

/// Parameters of one request: the first failure in the order of the fields wins.
///
/// `prompt_tokens` may be too many; the caller refuses that afterwards, so the room is then left unbounded.
pub(crate) fn parse(
    object: &Map<String, Value>,
    prompt_tokens: usize,
    served: &Served,
) -> Result<SamplingParams, ApiError> {
    let fields = Fields(object);
    let room = i64::try_from(served.limits.max_model_len.saturating_sub(prompt_tokens as u64)).unwrap_or(i64::MAX);
    let room = if room >= 1 { room } else { i64::MAX };
    let n = fields.optional("n", &format!("an integer from 1 to {MAX_N}"), |value| integer(value, 1, MAX_N))?;
    let temperature = fields.optional("temperature", "a number from 0 to 2", |value| {
        value.as_f64().filter(|value| (0.0..=2.0).contains(value))
    })?;
    let top_p = fields.optional("top_p", "a number above 0 and at most 1", |value| {
        value.as_f64().filter(|value| *value > 0.0 && *value <= 1.0)
    })?;
    let top_k = fields.optional("top_k", "an integer of at least -1", |value| integer(value, -1, i64::MAX))?;
    let seed_allowed = format!("an integer from -1 to {}", i64::MAX);
    let seed = fields.optional("seed", &seed_allowed, |value| integer(value, -1, i64::MAX))?;
    let max_tokens = fields.optional("max_tokens", "an integer of at least 1", |value| integer(value, 1, i64::MAX))?;
    let max_tokens = max_tokens.map_or(room, |asked| asked.min(room));
    let min_tokens =
        fields.optional("min_tokens", "an integer from 0 to max_tokens", |value| integer(value, 0, max_tokens))?;
    let stop_token_ids = stop_token_ids(object, served)?;
    let ignore_eos = fields.optional("ignore_eos", BOOLEAN, Value::as_bool)?.unwrap_or(false);
    let logprobs = logprobs(&fields, served)?;
    for name in TEXT_FIELDS {
        fields.optional(name, BOOLEAN, Value::as_bool)?;
    }
    fields.optional(ROUTED_EXPERTS_START, "an integer of at least 0", |value| integer(value, 0, i64::MAX))?;
    neutral::check(neutral::SAMPLING, object, PREFIX)?;
    let mut params = SamplingParams {
        n: n.unwrap_or(1).unsigned_abs(),
        temperature: temperature.unwrap_or(1.0),
        top_p: top_p.unwrap_or(1.0),
        top_k: top_k.unwrap_or(0),
        seed: seed.filter(|seed| *seed >= 0),
        max_tokens: max_tokens.unsigned_abs(),
        min_tokens: min_tokens.unwrap_or(0).unsigned_abs(),
        stop_token_ids,
        ignore_eos,
        logprobs,
        ..SamplingParams::default()
    };
    resolve_stops(&mut params, &served.eos_token_ids);
    Ok(params)
}

/// The main EOS id ends the output by itself, the others join the stop ids; all of them are masked by `min_tokens`.
fn resolve_stops(params: &mut SamplingParams, eos_token_ids: &[u32]) {
    if !params.ignore_eos {
        params.eos_token_id = eos_token_ids.first().copied();
        for id in eos_token_ids.iter().skip(1) {
            if !params.stop_token_ids.contains(id) {
                params.stop_token_ids.push(*id);
            }
        }
    }
    let all: BTreeSet<u32> = params.stop_token_ids.iter().chain(eos_token_ids).copied().collect();
    params.all_stop_token_ids = all.into_iter().collect();
}

fn stop_token_ids(object: &Map<String, Value>, served: &Served) -> Result<Vec<u32>, ApiError> {
    const NAME: &str = "stop_token_ids";
    let Some(value) = present(object, NAME) else { return Ok(Vec::new()) };
    let path = format!("{PREFIX}{NAME}");
    let last = served.limits.vocab_size.saturating_sub(1);
    let allowed = format!("a list of at most {MAX_STOP_TOKEN_IDS} integers from 0 to {last}");
    let Some(values) = value.as_array().filter(|values| values.len() <= MAX_STOP_TOKEN_IDS) else {
        return Err(ApiError::wrong(&path, &allowed, value));
    };
    let token = |value: &Value| value.as_u64().filter(|id| *id <= last).and_then(|id| u32::try_from(id).ok());
    let tokens = values
        .iter()
        .enumerate()
        .map(|(index, value)| token(value).ok_or_else(|| ApiError::wrong_element(&path, &allowed, value, index)));
    tokens.collect()
}

fn logprobs(fields: &Fields<'_>, served: &Served) -> Result<Option<i64>, ApiError> {
    let most = i64::try_from(served.limits.max_logprobs).unwrap_or(i64::MAX);
    let whole_vocabulary = present(fields.0, "logprobs").is_some_and(|value| value.as_i64() == Some(-1));
    let condition =
        if whole_vocabulary { format!(" (-1 needs a vocabulary of at most {most})") } else { String::new() };
    let allowed = format!("an integer from -1 to {most}{condition}");
    fields.optional("logprobs", &allowed, |value| {
        let count = integer(value, -1, most)?;
        (count >= 0 || served.limits.vocab_size <= served.limits.max_logprobs).then_some(count)
    })
}

/// Names of the object's keys that mean nothing here.
pub(crate) fn unknown(object: &Map<String, Value>) -> impl Iterator<Item = String> {
    let known = |name: &&String| {
        let name = name.as_str();
        FIELDS.contains(&name)
            || TEXT_FIELDS.contains(&name)
            || name == ROUTED_EXPERTS_START
            || neutral::knows(neutral::SAMPLING, name)
    };
    object.keys().filter(move |name| !known(name)).map(|name| format!("{PREFIX}{name}"))
}
