//! `SamplingParams` on the wire: a map of the keys that differ from their default.

use serde::de::MapAccess;
use serde::{Serialize, Serializer};

use crate::error::DecodeErrorKind as Kind;
use crate::fields::entries;
use crate::source::Source;
use crate::structured_outputs::StructuredOutputs;
use crate::wire::{InF32Range, Scalar, Wire, in_range, scalars, seed};
use crate::writer::{Entries, Writer};

/// How the engine samples one sequence. Fields and defaults are vLLM's; floats are 64-bit on the wire.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Output sequences; frontends send 1 and make children of a larger request.
    pub n: u64,
    /// 0 is greedy.
    pub temperature: f64,
    /// Nucleus: 1 is off.
    pub top_p: f64,
    /// Most probable tokens kept; 0 and -1 are off.
    pub top_k: i64,
    /// `None` for a random one.
    pub seed: Option<i64>,
    /// Always resolved by the frontend.
    pub max_tokens: u64,
    /// EOS and stop ids are masked until that many tokens are out.
    pub min_tokens: u64,
    /// Tokens that end the output with a `stop_reason`.
    pub stop_token_ids: Vec<u32>,
    /// Go on after EOS.
    pub ignore_eos: bool,
    /// `None` for none, 0 for the sampled token's, k for the top k besides, -1 for the whole vocabulary.
    pub logprobs: Option<i64>,
    /// Tokens less probable than this share of the most probable one's are dropped; 0 is off.
    pub min_p: f64,
    /// Taken from the logits of tokens in the output.
    pub presence_penalty: f64,
    /// The same, once for each time.
    pub frequency_penalty: f64,
    /// Logits of tokens in prompt and output are divided by it; 1 is off.
    pub repetition_penalty: f64,
    /// As `logprobs`, for the prompt.
    pub prompt_logprobs: Option<i64>,
    /// What is added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f64)>,
    /// The only tokens that may be sampled; `None` for all.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Words that the output never holds, for the engine to tokenize.
    pub bad_words: Vec<String>,
    /// The same, tokenized by a foreign frontend.
    pub bad_words_token_ids: Vec<Vec<u32>>,
    /// What the output must look like.
    pub structured_outputs: Option<StructuredOutputs>,
    /// Compute the whole prompt; `None` leaves it to the engine.
    pub skip_reading_prefix_cache: Option<bool>,
    /// Return the experts that tokens were routed to; `None` leaves it to the engine.
    pub routed_experts: Option<bool>,
    /// First token of the prompt for which.
    pub routed_experts_prompt_start: u64,
    /// 0 cumulative, 1 delta, 2 final only: without meaning to the engine.
    pub output_kind: u64,
    /// The token that ends the output without a `stop_reason`; `None` when none does.
    pub eos_token_id: Option<u32>,
    /// Union of `stop_token_ids` and all EOS ids, ascending: what `min_tokens` masks.
    pub all_stop_token_ids: Vec<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            n: 1,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            seed: None,
            max_tokens: 16,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            prompt_logprobs: None,
            logit_bias: Vec::new(),
            allowed_token_ids: None,
            bad_words: Vec::new(),
            bad_words_token_ids: Vec::new(),
            structured_outputs: None,
            skip_reading_prefix_cache: None,
            routed_experts: None,
            routed_experts_prompt_start: 0,
            output_kind: 0,
            eos_token_id: None,
            all_stop_token_ids: Vec::new(),
        }
    }
}

/// 0, 1 or 2.
struct OutputKind(u64);

scalars! {
    OutputKind, "an integer": Scalar::Integer(value) => match in_range(value, "a signed 64-bit integer")? {
        kind @ 0..=2_i64 => Self(kind.unsigned_abs()),
        value => return Err(Kind::UnknownValue { value, allowed: "an output kind (0, 1, 2)" }),
    };
}

/// A map of token ids to numbers, as a list.
struct LogitBias(Vec<(u32, f64)>);

impl Wire for LogitBias {
    const EXPECTED: &'static str = "a map";

    fn map<'de, A: MapAccess<'de>>(mut access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut list = Vec::new();
        while let Some((token, bias)) = access.next_entry_seed(seed::<u32>(source), seed::<InF32Range>(source))? {
            list.push((token, bias.0));
        }
        Ok(Self(list))
    }
}

/// The same, to be written.
struct Biases<'a>(&'a [(u32, f64)]);

impl Serialize for Biases<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().copied())
    }
}

impl Wire for SamplingParams {
    const EXPECTED: &'static str = "a map";

    fn map<'de, A: MapAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut params = Self::default();
        entries(access, source, |key, entry| {
            match key {
                "n" => params.n = entry.read()?,
                "temperature" => params.temperature = entry.read::<InF32Range>()?.0,
                "top_p" => params.top_p = entry.read::<InF32Range>()?.0,
                "top_k" => params.top_k = entry.read()?,
                "seed" => params.seed = entry.read()?,
                // vLLM writes nil for "no limit", which our frontends resolve; a peer that does not gets no output.
                "max_tokens" => params.max_tokens = entry.read()?,
                "min_tokens" => params.min_tokens = entry.read()?,
                "stop_token_ids" => params.stop_token_ids = entry.read::<Option<_>>()?.unwrap_or_default(),
                "ignore_eos" => params.ignore_eos = entry.read()?,
                "logprobs" => params.logprobs = entry.read()?,
                "min_p" => params.min_p = entry.read::<InF32Range>()?.0,
                "presence_penalty" => params.presence_penalty = entry.read::<InF32Range>()?.0,
                "frequency_penalty" => params.frequency_penalty = entry.read::<InF32Range>()?.0,
                "repetition_penalty" => params.repetition_penalty = entry.read::<InF32Range>()?.0,
                "prompt_logprobs" => params.prompt_logprobs = entry.read()?,
                "logit_bias" => {
                    params.logit_bias = entry.read::<Option<LogitBias>>()?.map(|bias| bias.0).unwrap_or_default();
                }
                "allowed_token_ids" => params.allowed_token_ids = entry.read()?,
                "bad_words" => params.bad_words = entry.read::<Option<_>>()?.unwrap_or_default(),
                "_bad_words_token_ids" => params.bad_words_token_ids = entry.read::<Option<_>>()?.unwrap_or_default(),
                "structured_outputs" => params.structured_outputs = entry.read()?,
                "skip_reading_prefix_cache" => params.skip_reading_prefix_cache = entry.read()?,
                "routed_experts" => params.routed_experts = entry.read()?,
                "routed_experts_prompt_start" => params.routed_experts_prompt_start = entry.read()?,
                "output_kind" => params.output_kind = entry.read::<OutputKind>()?.0,
                "_eos_token_id" => params.eos_token_id = entry.read()?,
                "_all_stop_token_ids" => params.all_stop_token_ids = entry.read()?,
                _ => entry.skip()?,
            }
            Ok(())
        })?;
        Ok(params)
    }
}

impl SamplingParams {
    pub(crate) fn write(&self, writer: &mut Writer) {
        let plain = Self::default();
        let mut entries = Entries::new();
        entries.number("n", self.n, plain.n);
        entries.float("temperature", self.temperature, plain.temperature);
        entries.float("top_p", self.top_p, plain.top_p);
        entries.number("top_k", self.top_k, plain.top_k);
        entries.some("seed", self.seed);
        entries.number("max_tokens", self.max_tokens, plain.max_tokens);
        entries.number("min_tokens", self.min_tokens, plain.min_tokens);
        entries.list("stop_token_ids", &self.stop_token_ids);
        entries.number("ignore_eos", self.ignore_eos, plain.ignore_eos);
        entries.some("logprobs", self.logprobs);
        entries.float("min_p", self.min_p, plain.min_p);
        entries.float("presence_penalty", self.presence_penalty, plain.presence_penalty);
        entries.float("frequency_penalty", self.frequency_penalty, plain.frequency_penalty);
        entries.float("repetition_penalty", self.repetition_penalty, plain.repetition_penalty);
        entries.some("prompt_logprobs", self.prompt_logprobs);
        if !self.logit_bias.is_empty() {
            entries.entry("logit_bias", Biases(&self.logit_bias));
        }
        entries.some("allowed_token_ids", self.allowed_token_ids.as_ref());
        entries.list("bad_words", &self.bad_words);
        entries.some("structured_outputs", self.structured_outputs.as_ref());
        entries.some("skip_reading_prefix_cache", self.skip_reading_prefix_cache);
        entries.some("routed_experts", self.routed_experts);
        let start = self.routed_experts_prompt_start;
        entries.number("routed_experts_prompt_start", start, plain.routed_experts_prompt_start);
        entries.number("output_kind", self.output_kind, plain.output_kind);
        entries.some("_eos_token_id", self.eos_token_id);
        entries.list("_all_stop_token_ids", &self.all_stop_token_ids);
        entries.list("_bad_words_token_ids", &self.bad_words_token_ids);
        entries.finish(writer);
    }
}
