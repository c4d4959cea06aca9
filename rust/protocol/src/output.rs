//! `EngineCoreOutput`: what one step did for one request.

use std::sync::Arc;

use serde::Serialize;
use serde::de::SeqAccess;

use crate::error::DecodeErrorKind as Kind;
use crate::fields::{Fields, map_struct};
use crate::logprobs::{LogprobsLists, Tensors};
use crate::provenance::StampSpan;
use crate::raw::RawValue;
use crate::routed_experts::RoutedExperts;
use crate::source::Source;
use crate::stats::PrefillStats;
use crate::untyped::{AnyMap, Skipped};
use crate::wire::{Scalar, Wire, in_range, scalars};
use crate::writer::Writer;

/// Elements of an `EngineCoreOutput` array: vLLM's 19, then ours.
pub const OUTPUT_ELEMENTS: usize = 22;

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FinishReason {
    /// EOS or a stop token.
    Stop = 0,
    /// `max_tokens` or the model's length.
    Length = 1,
    /// Aborted from outside.
    Abort = 2,
    /// Failed; see [`EngineCoreOutput::error`].
    Error = 3,
    /// Repetition detection.
    Repetition = 4,
}

impl FinishReason {
    /// The word for it in answers and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
            Self::Repetition => "repetition",
        }
    }
}

scalars! {
    FinishReason, "an integer": Scalar::Integer(value) => match in_range(value, "a signed 64-bit integer")? {
        0 => Self::Stop,
        1 => Self::Length,
        2 => Self::Abort,
        3 => Self::Error,
        4 => Self::Repetition,
        value => return Err(Kind::UnknownValue { value, allowed: "a finish reason (0 to 4)" }),
    };
    StopReason, "an integer":
        Scalar::Integer(value) => Self::Token(in_range(value, "a signed 64-bit integer")?),
        Scalar::Text(text) => Self::Text(text.to_owned());
}

/// What ended a request that stopped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    /// A stop token.
    Token(i64),
    /// A stop string, or a word of the engine's.
    Text(String),
}

/// Failure of one request.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct EngineError {
    /// Stable code, such as `engine_paused`.
    pub code: String,
    /// For people.
    pub message: String,
    /// The same request may succeed later.
    pub retryable: bool,
    /// Dotted path of the field at fault (ours).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub param: Option<String>,
    /// Key of the table of errors, where it says more than the code (ours).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Weights in force when a request entered the scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    /// Label.
    pub weight_version: Arc<str>,
    /// Commit number.
    pub weight_commit: u64,
}

/// What one step did for one request; after an output with a `finish_reason` nothing more comes for that id.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct EngineCoreOutput {
    /// Internal id.
    pub request_id: String,
    /// Tokens since the last output, often one.
    pub new_token_ids: Vec<u32>,
    /// One row per new token, when asked for.
    pub new_logprobs: Option<LogprobsLists>,
    /// Of the prompt's tokens after the first, when asked for, all at once with the first new tokens; column 0 of a row is
    /// the prompt's own token.
    pub new_prompt_logprobs: Option<Box<LogprobsLists>>,
    /// Set on the last output.
    pub finish_reason: Option<FinishReason>,
    /// What stopped it, for stop tokens.
    pub stop_reason: Option<StopReason>,
    /// With the first output behind a prefill.
    pub prefill_stats: Option<PrefillStats>,
    /// On the last output, when asked for: of prompt and output, all but the last token.
    pub routed_experts: Option<Box<RoutedExperts>>,
    /// NaNs among the logits of this step.
    pub num_nans_in_logits: u64,
    /// With `finish_reason` error.
    pub error: Option<EngineError>,
    /// With the first and the last output of a request (ours).
    pub admission: Option<Admission>,
    /// Which weights computed the KV at positions 0 to that of the first new token; with the first token, and whenever it
    /// has changed otherwise than by growing under the message's stamp (ours).
    pub kv_spans: Option<Vec<StampSpan>>,
    /// Which weights scored the prompt's tokens after the first; with their log-probs (ours).
    pub prompt_spans: Option<Vec<StampSpan>>,
    /// Elements that this version only passes on, by name, where they were not nil.
    pub other: Vec<(&'static str, RawValue)>,
}

impl Wire for EngineCoreOutput {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut fields = Fields::new(access, source);
        let mut output = Self { request_id: fields.required("request_id")?, ..Self::default() };
        output.new_token_ids = fields.required("new_token_ids")?;
        fields.defaulted("new_logprobs", &mut output.new_logprobs)?;
        let mut prompt_logprobs: Option<Tensors> = None;
        fields.defaulted("new_prompt_logprobs_tensors", &mut prompt_logprobs)?;
        output.new_prompt_logprobs = prompt_logprobs.map(|tensors| Box::new(tensors.0));
        fields.kept::<Skipped>("pooling_output", &mut output.other)?;
        fields.defaulted("finish_reason", &mut output.finish_reason)?;
        fields.defaulted("stop_reason", &mut output.stop_reason)?;
        fields.kept::<Vec<Skipped>>("events", &mut output.other)?;
        fields.kept::<AnyMap>("kv_transfer_params", &mut output.other)?;
        fields.kept::<AnyMap>("ec_transfer_params", &mut output.other)?;
        fields.kept::<AnyMap>("trace_headers", &mut output.other)?;
        fields.defaulted("prefill_stats", &mut output.prefill_stats)?;
        let mut routed_experts: Option<RoutedExperts> = None;
        fields.defaulted("routed_experts", &mut routed_experts)?;
        output.routed_experts = routed_experts.map(Box::new);
        fields.defaulted("num_nans_in_logits", &mut output.num_nans_in_logits)?;
        fields.kept::<Skipped>("mm_cache_miss_hashes", &mut output.other)?;
        fields.kept::<Skipped>("new_sampling_mask", &mut output.other)?;
        fields.kept::<Skipped>("spec_decode_metrics", &mut output.other)?;
        fields.kept::<Skipped>("prompt_token_id_logprobs", &mut output.other)?;
        fields.defaulted("error", &mut output.error)?;
        fields.defaulted("admission", &mut output.admission)?;
        fields.defaulted("kv_spans", &mut output.kv_spans)?;
        fields.defaulted("prompt_spans", &mut output.prompt_spans)?;
        fields.close()?;
        let tokens = output.new_token_ids.len();
        let rows = output.new_logprobs.as_ref().map_or(tokens, LogprobsLists::positions);
        if rows != tokens {
            let found = format!("{rows} rows for {tokens} new tokens");
            return Err(source.refuse_at("new_logprobs", Kind::InvalidArray(found)));
        }
        Ok(output)
    }
}

impl EngineCoreOutput {
    pub(crate) fn write(&self, writer: &mut Writer) {
        // Nearly all outputs have none.
        let spans = if self.prompt_spans.is_some() { 2 } else { usize::from(self.kv_spans.is_some()) };
        writer.array(OUTPUT_ELEMENTS - 2 + spans);
        writer.value(&self.request_id);
        writer.value(&self.new_token_ids);
        writer.optional(self.new_logprobs.as_ref(), |writer, logprobs| logprobs.write(writer));
        writer.optional(self.new_prompt_logprobs.as_deref(), |writer, logprobs| logprobs.write_tensors(writer));
        writer.kept(&self.other, "pooling_output");
        writer.value(self.finish_reason.map(|reason| reason as u8));
        writer.value(&self.stop_reason);
        writer.kept(&self.other, "events");
        writer.kept(&self.other, "kv_transfer_params");
        writer.kept(&self.other, "ec_transfer_params");
        writer.kept(&self.other, "trace_headers");
        writer.value(self.prefill_stats);
        writer.optional(self.routed_experts.as_deref(), |writer, experts| experts.write(writer));
        writer.value(self.num_nans_in_logits);
        writer.kept(&self.other, "mm_cache_miss_hashes");
        writer.kept(&self.other, "new_sampling_mask");
        writer.kept(&self.other, "spec_decode_metrics");
        writer.kept(&self.other, "prompt_token_id_logprobs");
        writer.value(&self.error);
        writer.value(self.admission.as_ref().map(|admission| (&*admission.weight_version, admission.weight_commit)));
        for spans in [&self.kv_spans, &self.prompt_spans].into_iter().take(spans) {
            writer.optional(spans.as_deref(), |writer, spans| StampSpan::write_list(spans, writer));
        }
    }
}

map_struct! {
    EngineError:
    required code,
    required message,
    defaulted retryable,
    defaulted param,
    defaulted reason,
}

impl Wire for Admission {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut fields = Fields::new(access, source);
        let weight_version = fields.required("weight_version")?;
        let weight_commit = fields.required("weight_commit")?;
        fields.close()?;
        Ok(Self { weight_version, weight_commit })
    }
}
