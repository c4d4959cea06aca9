//! `EngineCoreOutput`: what one step did for one request.

use std::sync::Arc;

use crate::error::DecodeErrorKind as Kind;
use crate::fields::Fields;
use crate::logprobs::LogprobsLists;
use crate::raw::RawValue;
use crate::reader::{Reader, Result};
use crate::stats::PrefillStats;
use crate::writer::Writer;

/// Elements of an `EngineCoreOutput` array: vLLM's 19, then ours.
pub const OUTPUT_ELEMENTS: usize = 20;

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

    fn read(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(match reader.i64()? {
            0 => Self::Stop,
            1 => Self::Length,
            2 => Self::Abort,
            3 => Self::Error,
            4 => Self::Repetition,
            value => return Err(Kind::UnknownValue { value, allowed: "a finish reason (0 to 4)" }.into()),
        })
    }
}

/// What ended a request that stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopReason {
    /// A stop token.
    Token(i64),
    /// A stop string, or a word of the engine's.
    Text(String),
}

/// Failure of one request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EngineError {
    /// Stable code, such as `engine_paused`.
    pub code: String,
    /// For people.
    pub message: String,
    /// The same request may succeed later.
    pub retryable: bool,
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
    /// Set on the last output.
    pub finish_reason: Option<FinishReason>,
    /// What stopped it, for stop tokens.
    pub stop_reason: Option<StopReason>,
    /// With the first output behind a prefill.
    pub prefill_stats: Option<PrefillStats>,
    /// NaNs among the logits of this step.
    pub num_nans_in_logits: u64,
    /// With `finish_reason` error.
    pub error: Option<EngineError>,
    /// With the first and the last output of a request (ours).
    pub admission: Option<Admission>,
    /// Elements that this version only passes on, by name, where they were not nil.
    pub other: Vec<(&'static str, RawValue)>,
}

impl EngineCoreOutput {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let mut fields = Fields::open(reader)?;
        let mut output = Self {
            request_id: fields.required(reader, "request_id", Reader::string)?,
            new_token_ids: fields.required(reader, "new_token_ids", |reader| reader.list(Reader::u32))?,
            new_logprobs: fields.optional(reader, "new_logprobs", LogprobsLists::read)?,
            ..Self::default()
        };
        output.keep(&mut fields, reader, "new_prompt_logprobs_tensors", Reader::raw)?;
        output.keep(&mut fields, reader, "pooling_output", Reader::raw)?;
        output.finish_reason = fields.optional(reader, "finish_reason", FinishReason::read)?;
        output.stop_reason = fields.optional(reader, "stop_reason", StopReason::read)?;
        output.keep(&mut fields, reader, "events", Reader::raw_array)?;
        output.keep(&mut fields, reader, "kv_transfer_params", Reader::raw_map)?;
        output.keep(&mut fields, reader, "ec_transfer_params", Reader::raw_map)?;
        output.keep(&mut fields, reader, "trace_headers", Reader::raw_map)?;
        output.prefill_stats = fields.optional(reader, "prefill_stats", PrefillStats::read)?;
        output.keep(&mut fields, reader, "routed_experts", Reader::raw)?;
        output.num_nans_in_logits = fields.defaulted(reader, "num_nans_in_logits", Reader::u64)?;
        output.keep(&mut fields, reader, "mm_cache_miss_hashes", Reader::raw)?;
        output.keep(&mut fields, reader, "new_sampling_mask", Reader::raw)?;
        output.keep(&mut fields, reader, "spec_decode_metrics", Reader::raw)?;
        output.keep(&mut fields, reader, "prompt_token_id_logprobs", Reader::raw)?;
        output.error = fields.optional(reader, "error", EngineError::read)?;
        output.admission = fields.optional(reader, "admission", Admission::read)?;
        fields.close(reader)?;
        output.check()
    }

    fn check(self) -> Result<Self> {
        let rows = self.new_logprobs.as_ref().map_or(self.new_token_ids.len(), LogprobsLists::positions);
        if rows != self.new_token_ids.len() {
            let found = format!("{rows} rows for {} new tokens", self.new_token_ids.len());
            return Err(crate::error::DecodeError::from(Kind::InvalidArray(found)).at("new_logprobs"));
        }
        Ok(self)
    }

    /// Keeps an element that is only passed on, unless it is nil.
    fn keep<'a>(
        &mut self,
        fields: &mut Fields,
        reader: &mut Reader<'a>,
        name: &'static str,
        read: impl FnOnce(&mut Reader<'a>) -> Result<RawValue>,
    ) -> Result<()> {
        let value = fields.optional(reader, name, read)?;
        self.other.extend(value.map(|value| (name, value)));
        Ok(())
    }

    pub(crate) fn write(&self, writer: &mut Writer) {
        let other = |writer: &mut Writer, name: &str| {
            let found = self.other.iter().find(|(other, _)| *other == name);
            writer.optional(found, |writer, (_, value)| writer.raw(value));
        };
        writer.array(OUTPUT_ELEMENTS);
        writer.text(&self.request_id);
        writer.token_ids(&self.new_token_ids);
        writer.optional(self.new_logprobs.as_ref(), |writer, logprobs| logprobs.write(writer));
        other(writer, "new_prompt_logprobs_tensors");
        other(writer, "pooling_output");
        writer.optional(self.finish_reason, |writer, reason| writer.u64(reason as u64));
        writer.optional(self.stop_reason.as_ref(), |writer, reason| match reason {
            StopReason::Token(token) => writer.i64(*token),
            StopReason::Text(text) => writer.text(text),
        });
        other(writer, "events");
        other(writer, "kv_transfer_params");
        other(writer, "ec_transfer_params");
        other(writer, "trace_headers");
        writer.optional(self.prefill_stats, |writer, stats| stats.write(writer));
        other(writer, "routed_experts");
        writer.u64(self.num_nans_in_logits);
        other(writer, "mm_cache_miss_hashes");
        other(writer, "new_sampling_mask");
        other(writer, "spec_decode_metrics");
        other(writer, "prompt_token_id_logprobs");
        writer.optional(self.error.as_ref(), |writer, error| {
            writer.map(3);
            writer.text("code");
            writer.text(&error.code);
            writer.text("message");
            writer.text(&error.message);
            writer.text("retryable");
            writer.boolean(error.retryable);
        });
        writer.optional(self.admission.as_ref(), |writer, admission| {
            writer.array(2);
            writer.text(&admission.weight_version);
            writer.u64(admission.weight_commit);
        });
    }
}

impl StopReason {
    fn read(reader: &mut Reader<'_>) -> Result<Self> {
        if reader.at_text()? { reader.string().map(Self::Text) } else { reader.i64().map(Self::Token) }
    }
}

impl EngineError {
    fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let (mut code, mut message, mut retryable) = (None, None, None);
        reader.entries(|reader, key| {
            match key {
                "code" => code = Some(reader.string()?),
                "message" => message = Some(reader.string()?),
                "retryable" => retryable = Some(reader.boolean()?),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        let missing = |name: &str| crate::error::DecodeError::from(Kind::Missing).at(name);
        Ok(Self {
            code: code.ok_or_else(|| missing("code"))?,
            message: message.ok_or_else(|| missing("message"))?,
            retryable: retryable.unwrap_or(false),
        })
    }
}

impl Admission {
    fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let mut fields = Fields::open(reader)?;
        let weight_version = fields.required(reader, "weight_version", |reader| reader.text().map(Arc::from))?;
        let weight_commit = fields.required(reader, "weight_commit", Reader::u64)?;
        fields.close(reader)?;
        Ok(Self { weight_version, weight_commit })
    }
}
