//! `POST /inference/v1/generate`: the body, validated, and the engine requests that it becomes.

use std::collections::BTreeSet;
use std::sync::Arc;

use rollspan_protocol::{EngineCoreRequest, EngineHello, Limits, Provenance, SamplingParams};
use serde_json::{Map, Value};

use crate::choice::Choice;
use crate::error::{ApiError, Reason};
use crate::shown::cut;
use crate::token_ids::{Body, TokenIds};
use crate::value::{boolean, check_request_id, integer, present, string};
use crate::{neutral, provenance, sampling};

const STREAM_OPTIONS: [&str; 3] = ["include_usage", "continuous_usage_stats", "include_weight_versions"];
/// So many unknown fields are named in an error.
const UNKNOWN_LISTED: usize = 20;
const CACHE_SALT_CHARACTERS: usize = 1024;

/// Fields of the body that have an effect.
const FIELDS: [&str; 9] = [
    "request_id",
    "model",
    "stream",
    "stream_options",
    "return_token_ids",
    "priority",
    "cache_salt",
    "sampling_params",
    "token_ids",
];

/// What requests are held against.
#[derive(Debug, Clone, PartialEq)]
pub struct Served {
    /// Name of the model towards clients.
    pub model: String,
    /// Limits of the engine.
    pub limits: Limits,
    /// Tokens that end an output, the main one first.
    pub eos_token_ids: Vec<u32>,
}

impl Served {
    /// What an engine serves, under `model` or under the name that it gave itself.
    pub fn new(hello: &EngineHello, model: Option<&str>) -> Self {
        Self {
            model: model.unwrap_or(&hello.model.name).to_owned(),
            limits: hello.limits,
            eos_token_ids: hello.model.eos_token_ids.clone(),
        }
    }
}

/// What a stream carries besides tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamOptions {
    /// A last chunk with the usage.
    pub include_usage: bool,
    /// The usage so far on every chunk; only with `include_usage`.
    pub continuous_usage_stats: bool,
    /// Spans on every chunk.
    pub include_weight_versions: bool,
}

/// A validated request.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateRequest {
    /// The prompt; at least one id, all of them in the vocabulary.
    pub token_ids: Arc<[u32]>,
    /// The client's id (header before body), if it gave one.
    pub request_id: Option<String>,
    /// Answer with server-sent events.
    pub stream: bool,
    /// What the stream carries.
    pub stream_options: StreamOptions,
    /// Give the prompt back.
    pub return_token_ids: bool,
    /// Lower runs first.
    pub priority: i64,
    /// Separates entries of the prefix cache.
    pub cache_salt: Option<String>,
    /// What is asked about the weights and the KV.
    pub provenance: Provenance,
    /// Resolved: `max_tokens` fits behind the prompt, EOS and stop ids are filled in; `n` as asked.
    pub sampling_params: SamplingParams,
    /// Dotted names of unknown fields, sorted.
    pub ignored_fields: Vec<String>,
}

impl GenerateRequest {
    /// Parses and validates a body; the first failure wins.
    ///
    /// `header_request_id` is the header `X-Request-Id`, which wins over the body's `request_id`; `strict` refuses unknown
    /// fields.
    ///
    /// # Errors
    /// Names the field at fault and what is allowed there.
    pub fn parse(
        body: &[u8],
        header_request_id: Option<&str>,
        served: &Served,
        strict: bool,
    ) -> Result<Self, ApiError> {
        let (prompt, fields) = match serde_json::from_slice(body) {
            Ok(Body::Object { token_ids, fields }) => (token_ids, fields),
            Ok(Body::Other) => {
                return Err(ApiError::new(Reason::InvalidRequest, "request body must be a JSON object"));
            }
            Err(error) => {
                let message = format!("request body is not valid JSON: {error}");
                return Err(ApiError::new(Reason::InvalidJson, message));
            }
        };
        let token_ids = check_token_ids(prompt, &served.limits)?;
        let request_id = request_id(&fields, header_request_id)?;
        let model = match present(&fields, "model") {
            None => None,
            Some(Value::String(name)) => Some(name.as_str()),
            Some(value) => return Err(ApiError::wrong("model", "a string", value)),
        };
        let stream = boolean(&fields, "stream", "stream")?;
        let stream_options = stream_options(&fields)?;
        neutral::check(neutral::OUTPUT_MODE, &fields, "")?;
        let return_token_ids = boolean(&fields, "return_token_ids", "return_token_ids")?;
        let priority = priority(&fields)?;
        let salt_allowed = format!("a string of 1 to {CACHE_SALT_CHARACTERS} characters");
        let cache_salt = string(&fields, "cache_salt", &salt_allowed, CACHE_SALT_CHARACTERS)?;
        let provenance = provenance::parse(&fields)?;
        neutral::check(neutral::BODY, &fields, "")?;
        let sampling = match fields.get("sampling_params") {
            None => return Err(ApiError::missing("sampling_params")),
            Some(Value::Object(object)) => object,
            Some(value) => return Err(ApiError::wrong("sampling_params", "an object", value)),
        };
        let sampling_params = sampling::parse(sampling, token_ids.len(), served)?;
        check_model(model, &served.model)?;
        check_prompt_length(&token_ids, &served.limits)?;
        let ignored_fields = unknown(&fields, sampling);
        if strict {
            refuse_unknown(&ignored_fields)?;
        }
        Ok(Self {
            token_ids: token_ids.into(),
            request_id,
            stream,
            stream_options,
            return_token_ids,
            priority,
            cache_salt,
            provenance,
            sampling_params,
            ignored_fields,
        })
    }

    /// The output sequences, empty yet.
    pub fn choices(&self) -> Vec<Choice> {
        let wants_logprobs = self.sampling_params.logprobs.is_some();
        let mut choices: Vec<Choice> =
            (0..self.sampling_params.n).zip(0..).map(|(_, index)| Choice::new(index, wants_logprobs)).collect();
        if let (Some(first), Some(_)) = (choices.first_mut(), self.sampling_params.prompt_logprobs) {
            first.expect_prompt_logprobs(self.token_ids.len().saturating_sub(1));
        }
        if self.provenance.return_kv_versions {
            for choice in &mut choices {
                choice.expect_kv_versions(self.token_ids.len());
            }
        }
        choices
    }

    /// Candidates that the log-probs of a token of the prompt name besides it; `None` for all that the engine sends.
    pub fn top_prompt_logprobs(&self) -> Option<usize> {
        self.sampling_params.prompt_logprobs.map_or(Some(0), |count| usize::try_from(count).ok())
    }

    /// Candidates that the log-probs of a position name besides the sampled token; `None` for all that the engine sends.
    pub fn top_logprobs(&self) -> Option<usize> {
        self.sampling_params.logprobs.map_or(Some(0), |count| usize::try_from(count).ok())
    }

    /// One engine request for each output sequence.
    ///
    /// The internal id is `<external id>-<8 hex digits of suffix>`, with `<index>_` in front for n > 1; the random part keeps a
    /// late output of an ended request apart from a new request of the same name. `arrival_time` is in seconds since 1970.
    pub fn engine_requests(
        &self,
        external_id: &str,
        suffix: u32,
        arrival_time: f64,
        session_id: Option<&str>,
    ) -> Vec<EngineCoreRequest> {
        let internal_id = format!("{external_id}-{suffix:08x}");
        let n = self.sampling_params.n;
        let request = |index: u64| EngineCoreRequest {
            request_id: if n == 1 { internal_id.clone() } else { format!("{index}_{internal_id}") },
            prompt_token_ids: Some(Arc::clone(&self.token_ids)),
            sampling_params: Some(SamplingParams {
                n: 1,
                seed: self.sampling_params.seed.map(|seed| child_seed(seed, index)),
                // The prompt is the same for all: one of them says it.
                prompt_logprobs: self.sampling_params.prompt_logprobs.filter(|_| index == 0),
                ..self.sampling_params.clone()
            }),
            arrival_time,
            cache_salt: self.cache_salt.clone(),
            priority: self.priority,
            external_req_id: Some(external_id.to_owned()),
            session_id: session_id.map(str::to_owned),
            provenance: self.provenance,
            ..EngineCoreRequest::default()
        };
        (0..n).map(request).collect()
    }
}

/// `(seed + index) mod 2^63`.
fn child_seed(seed: i64, index: u64) -> i64 {
    let sum = seed.unsigned_abs().wrapping_add(index) & i64::MAX.unsigned_abs();
    sum.cast_signed()
}

fn check_token_ids(prompt: Option<TokenIds>, limits: &Limits) -> Result<Vec<u32>, ApiError> {
    const PATH: &str = "token_ids";
    let last = limits.vocab_size.saturating_sub(1);
    let allowed = format!("a non-empty list of integers from 0 to {last}");
    let in_vocabulary = |ids: &[u32]| match ids.iter().position(|id| u64::from(*id) > last) {
        Some(index) => Err(ApiError::wrong_element(PATH, &allowed, &ids[index].into(), index)),
        None => Ok(()),
    };
    match prompt {
        None => Err(ApiError::missing(PATH)),
        Some(TokenIds::Other(value)) => Err(ApiError::wrong(PATH, &allowed, &value)),
        Some(TokenIds::Element { before, value }) => {
            in_vocabulary(&before)?;
            Err(ApiError::wrong_element(PATH, &allowed, &value, before.len()))
        }
        Some(TokenIds::Ids(ids)) if ids.is_empty() => Err(ApiError::wrong(PATH, &allowed, &Value::Array(Vec::new()))),
        Some(TokenIds::Ids(ids)) => in_vocabulary(&ids).map(|()| ids),
    }
}

fn request_id(fields: &Map<String, Value>, header: Option<&str>) -> Result<Option<String>, ApiError> {
    if let Some(header) = header {
        return check_request_id(&header.into(), "X-Request-Id").map(Some);
    }
    present(fields, "request_id").map(|value| check_request_id(value, "request_id")).transpose()
}

fn stream_options(fields: &Map<String, Value>) -> Result<StreamOptions, ApiError> {
    let object = match present(fields, "stream_options") {
        None => return Ok(StreamOptions::default()),
        Some(Value::Object(object)) => object,
        Some(value) => return Err(ApiError::wrong("stream_options", "an object", value)),
    };
    let flag = |name: &str| boolean(object, name, &format!("stream_options.{name}"));
    let [include_usage, continuous_usage_stats, include_weight_versions] = STREAM_OPTIONS;
    let include_usage = flag(include_usage)?;
    let continuous_usage_stats = flag(continuous_usage_stats)? && include_usage;
    Ok(StreamOptions { include_usage, continuous_usage_stats, include_weight_versions: flag(include_weight_versions)? })
}

fn priority(fields: &Map<String, Value>) -> Result<i64, ApiError> {
    let (least, most) = (i64::from(i32::MIN), i64::from(i32::MAX));
    let Some(value) = present(fields, "priority") else { return Ok(0) };
    let allowed = || format!("an integer from {least} to {most}");
    integer(value, least, most).ok_or_else(|| ApiError::wrong("priority", &allowed(), value))
}

fn check_model(asked: Option<&str>, served: &str) -> Result<(), ApiError> {
    match asked {
        Some(name) if name != served => {
            let message = format!("model \"{}\" does not exist; this server serves \"{served}\"", cut(name));
            Err(ApiError::new(Reason::ModelNotFound, message).with_param("model"))
        }
        _ => Ok(()),
    }
}

fn check_prompt_length(token_ids: &[u32], limits: &Limits) -> Result<(), ApiError> {
    let (most, found) = (limits.max_model_len.saturating_sub(1), token_ids.len());
    if found as u64 <= most {
        return Ok(());
    }
    let message = format!(
        "token_ids must hold at most {most} tokens (max_model_len {} leaves room for one output token), got {found}",
        limits.max_model_len
    );
    Err(ApiError::new(Reason::PromptTooLong, message).with_param("token_ids"))
}

/// Dotted names of the keys, at all levels, that mean nothing here.
fn unknown(fields: &Map<String, Value>, sampling: &Map<String, Value>) -> Vec<String> {
    let known = |name: &str| {
        let neutral = neutral::knows(neutral::BODY, name) || neutral::knows(neutral::OUTPUT_MODE, name);
        FIELDS.contains(&name) || provenance::knows(name) || neutral
    };
    let mut names: BTreeSet<String> = fields.keys().filter(|name| !known(name)).cloned().collect();
    if let Some(Value::Object(options)) = fields.get("stream_options") {
        let unknown = options.keys().filter(|name| !STREAM_OPTIONS.contains(&name.as_str()));
        names.extend(unknown.map(|name| format!("stream_options.{name}")));
    }
    names.extend(sampling::unknown(sampling));
    names.into_iter().collect()
}

fn refuse_unknown(names: &[String]) -> Result<(), ApiError> {
    match names.first() {
        None => Ok(()),
        Some(first) => {
            let listed: Vec<String> = names.iter().take(UNKNOWN_LISTED).map(|name| cut(name)).collect();
            let more = match names.len() - listed.len() {
                0 => String::new(),
                left => format!(" and {left} more"),
            };
            let message = format!("unknown fields: {}{more}", listed.join(", "));
            Err(ApiError::new(Reason::UnknownField, message).with_param(cut(first)))
        }
    }
}
