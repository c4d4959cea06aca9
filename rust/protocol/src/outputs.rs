//! `EngineCoreOutputs`: the envelope of everything an engine says after its hello.

use std::sync::Arc;

use serde::de::SeqAccess;
use serde_json::Value;

use crate::decoded::{Decoded, Result as DecodeResult, decode, read};
use crate::error::{DecodeError, DecodeErrorKind as Kind};
use crate::fields::Fields;
use crate::output::EngineCoreOutput;
use crate::source::Source;
use crate::stats::SchedulerStats;
use crate::untyped::Skipped;
use crate::wire::Wire;
use crate::writer::Writer;

/// Elements of an `EngineCoreOutputs` array: vLLM's 9, then ours.
pub const ENVELOPE_ELEMENTS: usize = 10;

/// Root of the path in errors.
const NAME: &str = "EngineCoreOutputs";

/// One message of an engine.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineCoreOutputs {
    /// Rank of the engine.
    pub engine_index: u64,
    /// Monotonic clock of the engine, seconds; 0 when the sender left it out. Only differences mean anything.
    pub timestamp: f64,
    /// Label of the weights that the step was launched with: every new token in the message was sampled by them.
    pub weight_version: Option<Arc<str>>,
    /// Commit number of the same weights (ours).
    pub weight_commit: Option<u64>,
    /// What the message says.
    pub body: Body,
}

/// The families of messages; one holds exactly one of them.
#[derive(Debug, Clone, PartialEq)]
pub enum Body {
    /// What a step did.
    Batch(Batch),
    /// Answer to a utility call.
    Utility(UtilityOutput),
    /// A data-parallel wave ended.
    WaveComplete(u64),
    /// A data-parallel wave begins.
    StartWave(u64),
}

/// What a step did; at least one of the three is there.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Batch {
    /// One for each request that has news.
    pub outputs: Vec<EngineCoreOutput>,
    /// State of the scheduler.
    pub scheduler_stats: Option<SchedulerStats>,
    /// Internal ids that ended.
    pub finished_requests: Option<Vec<String>>,
}

/// Answer to a utility call.
#[derive(Debug, Clone, PartialEq)]
pub struct UtilityOutput {
    /// Of the call.
    pub call_id: u64,
    /// What the method returned, or how it failed.
    pub outcome: Result<Value, UtilityFailure>,
}

/// How a utility call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UtilityFailure {
    /// For people.
    pub message: String,
    /// Stable code, a key of the table of errors (ours); `None` from foreign engines.
    pub reason: Option<String>,
}

impl EngineCoreOutputs {
    /// The payload of an OUTPUTS frame.
    pub fn encode(&self) -> Vec<u8> {
        let (nothing, mut utility, mut wave_complete, mut start_wave) = (Batch::default(), None, None, None);
        let mut batch = &nothing;
        match &self.body {
            Body::Batch(body) => batch = body,
            Body::Utility(body) => utility = Some(body),
            Body::WaveComplete(wave) => wave_complete = Some(wave),
            Body::StartWave(wave) => start_wave = Some(wave),
        }
        let mut writer = Writer::new();
        writer.array(ENVELOPE_ELEMENTS);
        writer.value(self.engine_index);
        writer.array(batch.outputs.len());
        for output in &batch.outputs {
            output.write(&mut writer);
        }
        writer.value(&batch.scheduler_stats);
        writer.value(self.timestamp);
        writer.optional(utility, |writer, utility| utility.write(writer));
        writer.value(&batch.finished_requests);
        writer.value(wave_complete);
        writer.value(start_wave);
        writer.value(self.weight_version.as_deref());
        writer.value(self.weight_commit);
        writer.into_bytes()
    }
}

/// Reads an OUTPUTS message: `frames[0]` is the envelope, the others are auxiliary buffers (none over framed links).
///
/// # Errors
/// The envelope is not exactly one well-formed message of one family.
pub fn decode_outputs(frames: &[&[u8]]) -> DecodeResult<Decoded<EngineCoreOutputs>> {
    let (envelope, buffers) = frames.split_first().ok_or(Kind::Truncated)?;
    let Decoded { value, skipped_fields } = decode::<Envelope>(NAME, envelope, buffers)?;
    let value = value.try_into().map_err(|kind| DecodeError::from(kind).at(NAME))?;
    Ok(Decoded { value, skipped_fields })
}

/// The elements of the array, each of them well-formed; whether they make a message is the next question.
#[derive(Default)]
struct Envelope {
    engine_index: u64,
    batch: Batch,
    timestamp: f64,
    utility: Option<UtilityOutput>,
    wave_complete: Option<u64>,
    start_wave: Option<u64>,
    weight_version: Option<Arc<str>>,
    weight_commit: Option<u64>,
}

impl Wire for Envelope {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut fields = Fields::new(access, source);
        let mut envelope = Self::default();
        fields.defaulted("engine_index", &mut envelope.engine_index)?;
        fields.defaulted("outputs", &mut envelope.batch.outputs)?;
        fields.defaulted("scheduler_stats", &mut envelope.batch.scheduler_stats)?;
        fields.defaulted("timestamp", &mut envelope.timestamp)?;
        fields.defaulted("utility_output", &mut envelope.utility)?;
        fields.defaulted("finished_requests", &mut envelope.batch.finished_requests)?;
        fields.defaulted("wave_complete", &mut envelope.wave_complete)?;
        fields.defaulted("start_wave", &mut envelope.start_wave)?;
        fields.defaulted("weight_version", &mut envelope.weight_version)?;
        fields.defaulted("weight_commit", &mut envelope.weight_commit)?;
        fields.close()?;
        Ok(envelope)
    }
}

impl TryFrom<Envelope> for EngineCoreOutputs {
    type Error = Kind;

    fn try_from(envelope: Envelope) -> Result<Self, Kind> {
        let batch = &envelope.batch;
        let is_batch =
            !batch.outputs.is_empty() || batch.scheduler_stats.is_some() || batch.finished_requests.is_some();
        let families =
            [is_batch, envelope.utility.is_some(), envelope.wave_complete.is_some(), envelope.start_wave.is_some()];
        let families: u8 = families.map(u8::from).iter().sum();
        let body = match (envelope.utility, envelope.wave_complete, envelope.start_wave) {
            _ if families != 1 => return Err(Kind::Family(families)),
            (Some(utility), ..) => Body::Utility(utility),
            (_, Some(wave), _) => Body::WaveComplete(wave),
            (.., Some(wave)) => Body::StartWave(wave),
            (None, None, None) => Body::Batch(envelope.batch),
        };
        Ok(EngineCoreOutputs {
            engine_index: envelope.engine_index,
            timestamp: envelope.timestamp,
            weight_version: envelope.weight_version,
            weight_commit: envelope.weight_commit,
            body,
        })
    }
}

/// Best effort on a message that [`decode_outputs`] refused: internal ids of the outputs that it certainly names.
pub fn recover_request_ids(frames: &[&[u8]]) -> Vec<String> {
    let Some(envelope) = frames.first() else { return Vec::new() };
    let source = Source::new(envelope, &[]);
    // What was recovered before the first unreadable byte counts, so the error itself is of no interest here.
    let _stopped_at = read::<NamedOutputs>(&source);
    source.recovered()
}

/// An envelope of which only the ids of the outputs are read.
struct NamedOutputs;

impl Wire for NamedOutputs {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut fields = Fields::new(access, source);
        fields.required::<Skipped>("engine_index")?;
        fields.required::<Vec<NamedOutput>>("outputs")?;
        fields.close().map(|()| Self)
    }
}

struct NamedOutput;

impl Wire for NamedOutput {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut fields = Fields::new(access, source);
        let mut request_id = None;
        fields.defaulted("request_id", &mut request_id)?;
        source.recover(request_id);
        fields.close().map(|()| Self)
    }
}

impl UtilityOutput {
    fn write(&self, writer: &mut Writer) {
        writer.array(4);
        writer.value(self.call_id);
        match &self.outcome {
            Ok(result) => {
                writer.nil();
                writer.value(((), result));
                writer.nil();
            }
            Err(failure) => {
                writer.value(&failure.message);
                writer.nil();
                writer.value(&failure.reason);
            }
        }
    }
}

impl Wire for UtilityOutput {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut fields = Fields::new(access, source);
        let call_id = fields.required("call_id")?;
        let (mut failure, mut result, mut reason) = (None, None, None);
        fields.defaulted("failure", &mut failure)?;
        fields.defaulted("result", &mut result)?;
        fields.defaulted("reason", &mut reason)?;
        fields.close()?;
        let outcome = match failure {
            Some(message) => Err(UtilityFailure { message, reason }),
            None => Ok(result.map(|UtilityResult(value)| value).unwrap_or_default()),
        };
        Ok(Self { call_id, outcome })
    }
}

/// What a method returned, behind its type information, which only pickled data needs.
struct UtilityResult(Value);

impl Wire for UtilityResult {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut fields = Fields::new(access, source);
        if fields.required::<Option<Skipped>>("type_info")?.is_some() {
            return Err(source.refuse(Kind::TypeInformation));
        }
        let value = fields.required("value")?;
        fields.close()?;
        Ok(Self(value))
    }
}
