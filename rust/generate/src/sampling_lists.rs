//! Fields of `sampling_params` that are lists or objects: token ids, biases and bad words.

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::sampling::PREFIX;
use crate::value::present;

const MAX_STOP_TOKEN_IDS: usize = 1024;
const MAX_BAD_WORDS: usize = 1024;
const MAX_BAD_WORD_CHARACTERS: usize = 256;
const MOST_BIAS: f64 = 100.0;

/// The value as a token id of at most `last`.
fn token(value: &Value, last: u64) -> Option<u32> {
    value.as_u64().filter(|id| *id <= last).and_then(|id| u32::try_from(id).ok())
}

fn tokens(path: &str, values: &[Value], last: u64, allowed: &str) -> Result<Vec<u32>, ApiError> {
    let checked = values
        .iter()
        .enumerate()
        .map(|(index, value)| token(value, last).ok_or_else(|| ApiError::wrong_element(path, allowed, value, index)));
    checked.collect()
}

/// Tokens that end the output.
pub(crate) fn stop_token_ids(object: &Map<String, Value>, last: u64) -> Result<Vec<u32>, ApiError> {
    let Some(value) = present(object, "stop_token_ids") else { return Ok(Vec::new()) };
    let path = format!("{PREFIX}stop_token_ids");
    let allowed = format!("a list of at most {MAX_STOP_TOKEN_IDS} integers from 0 to {last}");
    match value.as_array() {
        Some(values) if values.len() <= MAX_STOP_TOKEN_IDS => tokens(&path, values, last, &allowed),
        _ => Err(ApiError::wrong(&path, &allowed, value)),
    }
}

/// The only tokens that may be sampled; `None` for all.
pub(crate) fn allowed_token_ids(object: &Map<String, Value>, last: u64) -> Result<Option<Vec<u32>>, ApiError> {
    let Some(value) = present(object, "allowed_token_ids") else { return Ok(None) };
    let path = format!("{PREFIX}allowed_token_ids");
    let allowed = format!("a non-empty list of integers from 0 to {last}");
    match value.as_array() {
        Some(values) if !values.is_empty() => tokens(&path, values, last, &allowed).map(Some),
        _ => Err(ApiError::wrong(&path, &allowed, value)),
    }
}

/// What is added to logits, by token.
pub(crate) fn logit_bias(object: &Map<String, Value>, last: u64) -> Result<Vec<(u32, f64)>, ApiError> {
    let Some(value) = present(object, "logit_bias") else { return Ok(Vec::new()) };
    let path = format!("{PREFIX}logit_bias");
    let allowed = format!("an object of token ids from 0 to {last} with numbers from -100 to 100");
    let Some(entries) = value.as_object() else { return Err(ApiError::wrong(&path, &allowed, value)) };
    let entry = |(key, value): (&String, &Value)| {
        let number = value.as_f64().filter(|number| number.abs() <= MOST_BIAS);
        token_key(key, last).zip(number).ok_or_else(|| {
            let shown = Map::from_iter([(key.clone(), value.clone())]);
            ApiError::wrong(&path, &allowed, &shown.into())
        })
    };
    entries.iter().map(entry).collect()
}

/// Decimal digits without leading zeros.
fn token_key(key: &str, last: u64) -> Option<u32> {
    let canonical = key.bytes().all(|byte| byte.is_ascii_digit()) && (key == "0" || !key.starts_with('0'));
    key.parse().ok().filter(|id| canonical && u64::from(*id) <= last)
}

/// Words that the output never holds.
pub(crate) fn bad_words(object: &Map<String, Value>) -> Result<Vec<String>, ApiError> {
    let Some(value) = present(object, "bad_words") else { return Ok(Vec::new()) };
    let path = format!("{PREFIX}bad_words");
    let allowed = format!("a list of at most {MAX_BAD_WORDS} strings of 1 to {MAX_BAD_WORD_CHARACTERS} characters");
    let Some(words) = value.as_array().filter(|words| words.len() <= MAX_BAD_WORDS) else {
        return Err(ApiError::wrong(&path, &allowed, value));
    };
    let fits = |word: &&str| (1..=MAX_BAD_WORD_CHARACTERS).contains(&word.chars().count());
    let checked = words.iter().enumerate().map(|(index, word)| {
        let text = word.as_str().filter(fits).map(str::to_owned);
        text.ok_or_else(|| ApiError::wrong_element(&path, &allowed, word, index))
    });
    checked.collect()
}
