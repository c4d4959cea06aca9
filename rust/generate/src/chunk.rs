//! The chunks of a stream: new tokens of one sequence each, and on its last one everything about the whole of it.

use rollspan_protocol::FinishReason;
use serde::Serialize;

use crate::choice::Choice;
use crate::collected::{AnswerFacts, RootStamp, Stop, Usage, prompt_logprobs, prompt_spans};
use crate::kv_versions::{KvVersionSpan, Told, WeightSpan};
use crate::logprobs::Objects;
use crate::npy;
use crate::prompt_logprobs::PromptLogprobs;
use crate::request::GenerateRequest;
use crate::spans::{CommitSpan, VersionSpan};

#[derive(Serialize)]
struct Chunk<'a> {
    request_id: &'a str,
    choices: [ChunkChoice<'a>; 1],
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_weight_commits: Option<Told<&'a [WeightSpan]>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    #[serde(flatten)]
    last: Option<ChunkEnd<'a>>,
}

/// What only the last chunk of a sequence says about its request.
#[derive(Serialize)]
struct ChunkEnd<'a> {
    model: &'a str,
    created: u64,
    engine_index: u64,
    weight_version: Option<&'a str>,
    weight_commit: Option<u64>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    token_ids: &'a [u32],
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Objects<'a>>,
    #[serde(flatten)]
    last: Option<ChoiceEnd<'a>>,
    #[serde(flatten)]
    spans: Option<ChunkSpans>,
}

/// What only the last chunk of a sequence says about it.
#[derive(Serialize)]
struct ChoiceEnd<'a> {
    stop_reason: Option<Stop<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    routed_experts: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_versions: Option<Told<Vec<KvVersionSpan>>>,
}

#[derive(Serialize)]
struct ChunkSpans {
    weight_versions: Option<Vec<VersionSpan>>,
    weight_commits: Option<Vec<CommitSpan>>,
}

#[derive(Serialize)]
struct UsageChunk<'a> {
    request_id: &'a str,
    choices: [(); 0],
    usage: Usage,
}

/// Writes the chunks of one stream, in JSON without the framing of events.
#[derive(Debug)]
pub struct ChunkWriter {
    first: bool,
    completion_tokens: usize,
}

impl Default for ChunkWriter {
    fn default() -> Self {
        Self { first: true, completion_tokens: 0 }
    }
}

impl ChunkWriter {
    /// The next chunk of sequence `index`: everything that was not taken from it before. `None` when that is nothing, as
    /// there is no chunk without tokens but the last one of a sequence.
    ///
    /// # Errors
    /// JSON cannot hold the chunk, which means a bug here.
    pub fn chunk(
        &mut self,
        request: &GenerateRequest,
        facts: &AnswerFacts,
        choices: &mut [Choice],
        index: usize,
    ) -> Result<Option<Vec<u8>>, serde_json::Error> {
        let Some(delta) = choices.get_mut(index).and_then(Choice::take) else {
            return Ok(None);
        };
        self.completion_tokens += delta.token_ids.len();
        let first = std::mem::replace(&mut self.first, false);
        let choices = &*choices;
        let choice = &choices[index];
        let finished = choice.finished();
        let spans = if finished {
            Some(choice.spans().finish(choice.tokens()))
        } else if request.stream_options.include_weight_versions {
            Some(choice.spans().between(delta.start, delta.start + delta.token_ids.len()))
        } else {
            None
        };
        let begins = index == 0 && delta.start == 0;
        let continuous = request.stream_options.continuous_usage_stats;
        let chunk = Chunk {
            request_id: &facts.request_id,
            choices: [ChunkChoice {
                index,
                token_ids: &delta.token_ids,
                finish_reason: choice.finish_reason().map(FinishReason::as_str),
                logprobs: request
                    .sampling_params
                    .logprobs
                    .map(|_| Objects { lists: Some(&delta.logprobs), top: request.top_logprobs() }),
                last: finished.then(|| ChoiceEnd {
                    stop_reason: Stop::of(choice),
                    routed_experts: choice.routed_experts().map(npy::encoded),
                    kv_versions: choice.kv_versions(),
                }),
                spans: spans.map(|spans| ChunkSpans { weight_versions: spans.versions, weight_commits: spans.commits }),
            }],
            prompt_logprobs: prompt_logprobs(request, choices).filter(|_| begins),
            prompt_weight_commits: prompt_spans(choices).filter(|_| begins),
            prompt_token_ids: (first && request.return_token_ids).then_some(&*request.token_ids),
            usage: continuous.then(|| Usage::new(request, self.completion_tokens, choices)),
            last: finished.then(|| {
                let stamp = RootStamp::new(choices);
                ChunkEnd {
                    model: &facts.model,
                    created: facts.created,
                    engine_index: facts.engine_index,
                    weight_version: stamp.weight_version,
                    weight_commit: stamp.weight_commit,
                }
            }),
        };
        serde_json::to_vec(&chunk).map(Some)
    }

    /// The last chunk of a stream that asked for its usage; `None` for others.
    ///
    /// # Errors
    /// JSON cannot hold the chunk, which means a bug here.
    pub fn usage_chunk(
        &self,
        request: &GenerateRequest,
        facts: &AnswerFacts,
        choices: &[Choice],
    ) -> Result<Option<Vec<u8>>, serde_json::Error> {
        if !request.stream_options.include_usage {
            return Ok(None);
        }
        let usage = Usage::new(request, self.completion_tokens, choices);
        serde_json::to_vec(&UsageChunk { request_id: &facts.request_id, choices: [], usage }).map(Some)
    }
}
