//! The object `sampling_params`: validation, and what depends on model and prompt filled in.

use std::collections::BTreeSet;

use rollspan_protocol::SamplingParams;
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::neutral;
use crate::request::Served;
use crate::value::{BOOLEAN, integer, present};
use crate::{sampling_lists, structures};

pub(crate) const PREFIX: &str = "sampling_params.";
const MAX_N: i64 = 1024;

/// Fields with an effect.
const FIELDS: [&str; 22] = [
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
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "prompt_logprobs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "skip_reading_prefix_cache",
    "routed_experts",
    "routed_experts_prompt_start",
];

/// Fields about text: checked for their type, without effect, as token ids come out.
const TEXT_FIELDS: [&str; 4] =
    ["detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"];

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

    fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.optional(name, BOOLEAN, Value::as_bool)
    }

    /// A number from `least` to `most`.
    fn number(&self, name: &str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        let allowed = format!("a number from {least} to {most}");
        self.optional(name, &allowed, |value| value.as_f64().filter(|value| (least..=most).contains(value)))
    }
}

/// Parameters of one request: the first failure in the order of the fields wins.
///
/// `prompt_tokens` may be too many; the caller refuses that afterwards, so the room is then left unbounded.
///
/// # Errors
/// Names the field at fault and what is allowed there.
pub(crate) fn parse(
    object: &Map<String, Value>,
    prompt_tokens: usize,
    served: &Served,
) -> Result<SamplingParams, ApiError> {
    let fields = Fields(object);
    let room = i64::try_from(served.limits.max_model_len.saturating_sub(prompt_tokens as u64)).unwrap_or(i64::MAX);
    let room = if room >= 1 { room } else { i64::MAX };
    let last = served.limits.vocab_size.saturating_sub(1);
    let plain = SamplingParams::default();
    // Fields of a literal are evaluated in the order in which they are written.
    let mut params = SamplingParams {
        n: fields
            .optional("n", &format!("an integer from 1 to {MAX_N}"), |value| integer(value, 1, MAX_N))?
            .map_or(plain.n, i64::unsigned_abs),
        temperature: fields.number("temperature", 0.0, 2.0)?.unwrap_or(plain.temperature),
        top_p: fields
            .optional("top_p", "a number above 0 and at most 1", |value| {
                value.as_f64().filter(|value| *value > 0.0 && *value <= 1.0)
            })?
            .unwrap_or(plain.top_p),
        top_k: fields
            .optional("top_k", "an integer of at least -1", |value| integer(value, -1, i64::MAX))?
            .unwrap_or(plain.top_k),
        seed: fields
            .optional("seed", &format!("an integer from -1 to {}", i64::MAX), |value| integer(value, -1, i64::MAX))?
            .filter(|seed| *seed >= 0),
        max_tokens: fields
            .optional("max_tokens", "an integer of at least 1", |value| integer(value, 1, i64::MAX))?
            .map_or(room, |asked| asked.min(room))
            .unsigned_abs(),
        ..plain
    };
    let most = i64::try_from(params.max_tokens).unwrap_or(i64::MAX);
    let min_tokens =
        fields.optional("min_tokens", "an integer from 0 to max_tokens", |value| integer(value, 0, most))?;
    params.min_tokens = min_tokens.map_or(0, i64::unsigned_abs);
    params.stop_token_ids = sampling_lists::stop_token_ids(object, last)?;
    params.ignore_eos = fields.flag("ignore_eos")?.unwrap_or(false);
    params.logprobs = logprobs(&fields, "logprobs", served)?;
    params.min_p = fields.number("min_p", 0.0, 1.0)?.unwrap_or(params.min_p);
    params.presence_penalty = fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or(params.presence_penalty);
    params.frequency_penalty = fields.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(params.frequency_penalty);
    params.repetition_penalty = fields.number("repetition_penalty", 0.01, 100.0)?.unwrap_or(params.repetition_penalty);
    params.prompt_logprobs = logprobs(&fields, "prompt_logprobs", served)?;
    params.logit_bias = sampling_lists::logit_bias(object, last)?;
    params.allowed_token_ids = sampling_lists::allowed_token_ids(object, last)?;
    params.bad_words = sampling_lists::bad_words(object)?;
    params.structured_outputs = structures::parse(object)?;
    params.skip_reading_prefix_cache = fields.flag("skip_reading_prefix_cache")?;
    params.routed_experts = fields.flag("routed_experts")?;
    let start = fields
        .optional("routed_experts_prompt_start", "an integer of at least 0", |value| integer(value, 0, i64::MAX))?;
    params.routed_experts_prompt_start = start.map_or(0, i64::unsigned_abs);
    for name in TEXT_FIELDS {
        fields.flag(name)?;
    }
    neutral::check(neutral::SAMPLING, object, PREFIX)?;
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

fn logprobs(fields: &Fields<'_>, name: &str, served: &Served) -> Result<Option<i64>, ApiError> {
    let most = i64::try_from(served.limits.max_logprobs).unwrap_or(i64::MAX);
    let whole_vocabulary = present(fields.0, name).is_some_and(|value| value.as_i64() == Some(-1));
    let condition =
        if whole_vocabulary { format!(" (-1 needs a vocabulary of at most {most})") } else { String::new() };
    let allowed = format!("an integer from -1 to {most}{condition}");
    fields.optional(name, &allowed, |value| {
        let count = integer(value, -1, most)?;
        (count >= 0 || served.limits.vocab_size <= served.limits.max_logprobs).then_some(count)
    })
}

/// Names of the object's keys that mean nothing here.
pub(crate) fn unknown(object: &Map<String, Value>) -> impl Iterator<Item = String> {
    let known = |name: &&String| {
        let name = name.as_str();
        FIELDS.contains(&name) || TEXT_FIELDS.contains(&name) || neutral::knows(neutral::SAMPLING, name)
    };
    let own = object.keys().filter(move |name| !known(name)).map(|name| format!("{PREFIX}{name}"));
    own.chain(structures::unknown(object))
}
