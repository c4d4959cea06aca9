//! The answer to a request that did not ask for a stream.

use rollspan_protocol::{FinishReason, StopReason};

use crate::choice::Choice;
use crate::kv_versions::{KvVersionSpan, Told, WeightSpan};
use crate::logprobs::Objects;
use crate::npy;
use crate::prompt_logprobs::PromptLogprobs;
use crate::request::GenerateRequest;
use crate::spans::{CommitSpan, VersionSpan};

/// What an answer says about its request besides the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnswerFacts {
    /// External id.
    pub request_id: String,
    /// Name of the model.
    pub model: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Rank of the engine.
    pub engine_index: u64,
}

#[derive(serde::Serialize)]
pub(crate) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptTokensDetails,
    completion_tokens_details: (),
}

#[derive(serde::Serialize)]
struct PromptTokensDetails {
    cached_tokens: u64,
}

impl Usage {
    pub fn new(request: &GenerateRequest, completion_tokens: usize, choices: &[Choice]) -> Self {
        let prompt_tokens = request.token_ids.len();
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails {
                // The others of several sequences find what the first one has computed.
                cached_tokens: choices.first().map_or(0, Choice::cached_tokens),
            },
            completion_tokens_details: (),
        }
    }
}

/// The admission stamp of a request: each half is there when all sequences that have one agree on it.
pub(crate) struct RootStamp<'a> {
    pub weight_version: Option<&'a str>,
    pub weight_commit: Option<u64>,
}

impl<'a> RootStamp<'a> {
    pub fn new(choices: &'a [Choice]) -> Self {
        let versions = choices.iter().filter_map(Choice::admission).map(|stamp| &*stamp.weight_version);
        let commits = choices.iter().filter_map(Choice::admission).map(|stamp| stamp.weight_commit);
        Self { weight_version: agreed(versions), weight_commit: agreed(commits) }
    }
}

fn agreed<T: PartialEq>(mut values: impl Iterator<Item = T>) -> Option<T> {
    let first = values.next()?;
    values.all(|value| value == first).then_some(first)
}

/// What stopped a sequence, as JSON has it.
#[derive(serde::Serialize)]
#[serde(untagged)]
pub(crate) enum Stop<'a> {
    Token(i64),
    Text(&'a str),
}

impl<'a> Stop<'a> {
    pub fn of(choice: &'a Choice) -> Option<Self> {
        choice.stop_reason().map(|reason| match reason {
            StopReason::Token(token) => Self::Token(*token),
            StopReason::Text(text) => Self::Text(text),
        })
    }
}

#[derive(serde::Serialize)]
struct Answer<'a> {
    request_id: &'a str,
    model: &'a str,
    created: u64,
    output_mode: &'static str,
    usage: Usage,
    engine_index: u64,
    weight_version: Option<&'a str>,
    weight_commit: Option<u64>,
    prompt_token_ids: Option<&'a [u32]>,
    prompt_logprobs: Option<PromptLogprobs<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_weight_commits: Option<Told<&'a [WeightSpan]>>,
    kv_transfer_params: (),
    ec_transfer_params: (),
    choices: Vec<AnswerChoice<'a>>,
}

#[derive(serde::Serialize)]
struct AnswerChoice<'a> {
    index: usize,
    token_ids: &'a [u32],
    finish_reason: Option<&'static str>,
    stop_reason: Option<Stop<'a>>,
    logprobs: Option<Objects<'a>>,
    routed_experts: Option<String>,
    weight_versions: Option<Vec<VersionSpan>>,
    weight_commits: Option<Vec<CommitSpan>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_versions: Option<Told<Vec<KvVersionSpan>>>,
}

impl<'a> AnswerChoice<'a> {
    fn new(choice: &'a Choice, top: Option<usize>) -> Self {
        let spans = choice.spans().finish(choice.tokens());
        Self {
            index: choice.index(),
            token_ids: choice.token_ids(),
            finish_reason: choice.finish_reason().map(FinishReason::as_str),
            stop_reason: Stop::of(choice),
            logprobs: choice.logprobs().map(|lists| Objects { lists: Some(lists), top }),
            routed_experts: choice.routed_experts().map(npy::encoded),
            weight_versions: spans.versions,
            weight_commits: spans.commits,
            kv_versions: choice.kv_versions(),
        }
    }
}

/// Log-probs of the prompt, which come with the first sequence.
pub(crate) fn prompt_logprobs<'a>(request: &GenerateRequest, choices: &'a [Choice]) -> Option<PromptLogprobs<'a>> {
    let lists = choices.first().and_then(Choice::prompt_logprobs)?;
    Some(PromptLogprobs { lists, top: request.top_prompt_logprobs() })
}

/// Which weights scored the prompt, beside its log-probs.
pub(crate) fn prompt_spans(choices: &[Choice]) -> Option<Told<&[WeightSpan]>> {
    let first = choices.first().filter(|choice| choice.prompt_logprobs().is_some())?;
    Some(Told(first.prompt_spans()))
}

/// The JSON body of a collected answer: all sequences of the request, ended, with nothing taken from them.
///
/// # Errors
/// JSON cannot hold the answer, which means a bug here.
pub fn collected(
    request: &GenerateRequest,
    facts: &AnswerFacts,
    choices: &[Choice],
) -> Result<Vec<u8>, serde_json::Error> {
    let top = request.top_logprobs();
    let stamp = RootStamp::new(choices);
    let completion_tokens = choices.iter().map(Choice::tokens).sum();
    serde_json::to_vec(&Answer {
        request_id: &facts.request_id,
        model: &facts.model,
        created: facts.created,
        output_mode: "tokens",
        usage: Usage::new(request, completion_tokens, choices),
        engine_index: facts.engine_index,
        weight_version: stamp.weight_version,
        weight_commit: stamp.weight_commit,
        prompt_token_ids: request.return_token_ids.then_some(&*request.token_ids),
        prompt_logprobs: prompt_logprobs(request, choices),
        prompt_weight_commits: prompt_spans(choices),
        kv_transfer_params: (),
        ec_transfer_params: (),
        choices: choices.iter().map(|choice| AnswerChoice::new(choice, top)).collect(),
    })
}
