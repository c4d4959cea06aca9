//! One output sequence: what the engine said so far, and what its reader has not seen.

use rollspan_protocol::{Admission, EngineCoreOutput, FinishReason, LogprobsLists, RoutedExperts, StopReason};

use crate::error::{ApiError, Reason};
use crate::kv_versions::{KvVersionBuilder, KvVersionSpan, Told, WeightSpan};
use crate::spans::SpanBuilder;

/// One output sequence. The engine's outputs are pushed; a reader takes everything since its last visit, so that a slow
/// reader gets fewer and larger deltas and memory is bounded by the length of the output.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    index: usize,
    wants_logprobs: bool,
    token_ids: Vec<u32>,
    logprobs: LogprobsLists,
    prompt_logprobs: Prompt,
    prompt_spans: Option<Vec<WeightSpan>>,
    kv_versions: Option<KvVersionBuilder>,
    routed_experts: Option<Box<RoutedExperts>>,
    spans: SpanBuilder,
    admission: Option<Admission>,
    cached_tokens: u64,
    finish_reason: Option<FinishReason>,
    stop_reason: Option<StopReason>,
    taken: usize,
    finish_taken: bool,
}

/// Log-probs of the prompt.
#[derive(Debug, Clone, Default)]
enum Prompt {
    #[default]
    NotWanted,
    /// Of so many tokens; the engine has not sent them yet.
    Expected(usize),
    Here(Box<LogprobsLists>),
}

/// What a reader takes of a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Delta {
    /// Position of the first token in the output.
    pub start: usize,
    /// Tokens since the last delta.
    pub token_ids: Vec<u32>,
    /// Their log-probs.
    pub logprobs: LogprobsLists,
}

impl Choice {
    /// Sequence number `index` of its request.
    pub fn new(index: usize, wants_logprobs: bool) -> Self {
        Self { index, wants_logprobs, ..Self::default() }
    }

    /// Asks for log-probs of the prompt's tokens after the first, `rows` of them.
    pub fn expect_prompt_logprobs(&mut self, rows: usize) {
        self.prompt_logprobs = if rows == 0 { Prompt::Here(Box::default()) } else { Prompt::Expected(rows) };
        self.prompt_spans = (rows == 0).then(Vec::new);
    }

    /// Asks for the KV versions behind a prompt of that length.
    pub fn expect_kv_versions(&mut self, prompt_length: usize) {
        self.kv_versions = Some(KvVersionBuilder::new(prompt_length));
    }

    /// Takes what one step produced; `version` and `commit` are those of the message that it came in.
    ///
    /// # Errors
    /// The engine failed on the sequence, or log-probs or KV spans do not fit the tokens. The sequence has then ended, with
    /// the tokens that it had.
    pub fn push(
        &mut self,
        output: EngineCoreOutput,
        version: Option<&str>,
        commit: Option<u64>,
    ) -> Result<(), ApiError> {
        if self.finished() {
            return Ok(());
        }
        if output.admission.is_some() {
            self.admission = output.admission;
        }
        if let Some(stats) = output.prefill_stats {
            self.cached_tokens = stats.num_cached_tokens;
        }
        if output.finish_reason == Some(FinishReason::Error) {
            self.finish_reason = output.finish_reason;
            return Err(output.error.as_ref().map_or_else(
                || ApiError::new(Reason::EngineError, "the engine ended the request with an error"),
                ApiError::from,
            ));
        }
        let count = output.new_token_ids.len();
        if let Prompt::Expected(rows) = self.prompt_logprobs {
            let found = output.new_prompt_logprobs.as_ref().map(|lists| lists.positions());
            match output.new_prompt_logprobs {
                Some(lists) if lists.positions() == rows => {
                    self.prompt_logprobs = Prompt::Here(lists);
                    let spans = output.prompt_spans;
                    self.prompt_spans = spans.map(|spans| spans.into_iter().map(WeightSpan::from).collect());
                }
                None if count == 0 => {}
                _ => return Err(self.without_logprobs(rows, "tokens of the prompt", found.unwrap_or(0))),
            }
        }
        if self.wants_logprobs && count > 0 {
            let rows = output.new_logprobs.as_ref().map_or(0, LogprobsLists::positions);
            let width = output.new_logprobs.as_ref().map_or(0, |lists| lists.width);
            let fits = self.logprobs.positions() == 0 || self.logprobs.width == width;
            if rows != count || !fits {
                return Err(self.without_logprobs(count, "tokens", rows));
            }
        }
        if let Some(builder) = &mut self.kv_versions
            && let Err(error) = builder.push(version, commit, count, output.kv_spans)
        {
            return Err(self.undecodable(format!("the engine sent {error}")));
        }
        if let Some(lists) = output.new_logprobs.filter(|_| self.wants_logprobs && count > 0) {
            self.logprobs.extend(&lists);
        }
        self.token_ids.extend(output.new_token_ids);
        self.spans.push(version, commit, count);
        if output.finish_reason.is_some() {
            self.finish_reason = output.finish_reason;
            self.stop_reason = output.stop_reason;
            self.routed_experts = output.routed_experts;
        }
        Ok(())
    }

    fn without_logprobs(&mut self, count: usize, what: &str, rows: usize) -> ApiError {
        self.undecodable(format!("the engine sent {count} {what} with {rows} log-probs"))
    }

    /// Ends the sequence, as what the engine said of it does not fit.
    fn undecodable(&mut self, message: String) -> ApiError {
        self.finish_reason = Some(FinishReason::Error);
        ApiError::new(Reason::DecodeError, message)
    }

    /// Ends the sequence from outside with what it has; later outputs of the engine are ignored.
    pub fn abort(&mut self) {
        if !self.finished() {
            self.finish_reason = Some(FinishReason::Abort);
        }
    }

    /// Whether the sequence has ended.
    pub fn finished(&self) -> bool {
        self.finish_reason.is_some()
    }

    /// Whether there is something that the reader has not taken: tokens, or the end.
    pub fn unread(&self) -> bool {
        !self.token_ids.is_empty() || (self.finished() && !self.finish_taken)
    }

    /// Moves everything since the last call to the reader; `None` when there is nothing.
    pub fn take(&mut self) -> Option<Delta> {
        if !self.unread() {
            return None;
        }
        let start = self.taken;
        let token_ids = std::mem::take(&mut self.token_ids);
        self.taken += token_ids.len();
        self.finish_taken = self.finished();
        Some(Delta { start, token_ids, logprobs: std::mem::take(&mut self.logprobs) })
    }

    /// Which sequence of its request.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Tokens that the reader has not taken: all of them when it takes none before the end.
    pub fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    /// Log-probs of [`Choice::token_ids`], when asked for.
    pub fn logprobs(&self) -> Option<&LogprobsLists> {
        self.wants_logprobs.then_some(&self.logprobs)
    }

    /// Log-probs of the prompt's tokens after the first, when asked for and here.
    pub fn prompt_logprobs(&self) -> Option<&LogprobsLists> {
        match &self.prompt_logprobs {
            Prompt::Here(lists) => Some(lists),
            _ => None,
        }
    }

    /// Which weights scored the prompt's tokens after the first, by index; with their log-probs, where the engine says it.
    pub fn prompt_spans(&self) -> Option<&[WeightSpan]> {
        self.prompt_spans.as_deref()
    }

    /// Which weights computed the KV of the whole output, when asked for.
    pub fn kv_versions(&self) -> Option<Told<Vec<KvVersionSpan>>> {
        self.kv_versions.as_ref().map(|builder| Told(builder.finish(self.tokens())))
    }

    /// Which experts the tokens were routed to, when asked for; at the end.
    pub fn routed_experts(&self) -> Option<&RoutedExperts> {
        self.routed_experts.as_deref()
    }

    /// Which weights sampled which token of the whole output.
    pub fn spans(&self) -> &SpanBuilder {
        &self.spans
    }

    /// Number of tokens of the whole output.
    pub fn tokens(&self) -> usize {
        self.spans.tokens()
    }

    /// Weights in force when the sequence entered the scheduler.
    pub fn admission(&self) -> Option<&Admission> {
        self.admission.as_ref()
    }

    /// Tokens of the prompt that came from the prefix cache.
    pub fn cached_tokens(&self) -> u64 {
        self.cached_tokens
    }

    /// Why the sequence ended.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish_reason
    }

    /// What stopped it.
    pub fn stop_reason(&self) -> Option<&StopReason> {
        self.stop_reason.as_ref()
    }
}
