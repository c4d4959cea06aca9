//! `EngineCoreOutputs`: the envelope of everything an engine says after its hello.

use std::sync::Arc;

use serde_json::Value;

use crate::decoded::{Decoded, decode};
use crate::error::DecodeErrorKind as Kind;
use crate::fields::Fields;
use crate::output::EngineCoreOutput;
use crate::reader::{Reader, Result};
use crate::stats::SchedulerStats;
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
    pub outcome: std::result::Result<Value, UtilityFailure>,
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
        let mut writer = Writer::default();
        writer.array(ENVELOPE_ELEMENTS);
        writer.u64(self.engine_index);
        let batch = if let Body::Batch(batch) = &self.body { Some(batch) } else { None };
        let outputs = batch.map_or(&[][..], |batch| &batch.outputs);
        writer.array(outputs.len());
        for output in outputs {
            output.write(&mut writer);
        }
        let stats = batch.and_then(|batch| batch.scheduler_stats.as_ref());
        writer.optional(stats, |writer, stats| stats.write(writer));
        writer.f64(self.timestamp);
        let utility = if let Body::Utility(utility) = &self.body { Some(utility) } else { None };
        writer.optional(utility, |writer, utility| utility.write(writer));
        let finished = batch.and_then(|batch| batch.finished_requests.as_deref());
        writer.optional(finished, Writer::texts);
        let wave = |wave: &Body| if let Body::WaveComplete(wave) = wave { Some(*wave) } else { None };
        writer.optional(wave(&self.body), Writer::u64);
        let wave = |wave: &Body| if let Body::StartWave(wave) = wave { Some(*wave) } else { None };
        writer.optional(wave(&self.body), Writer::u64);
        writer.optional(self.weight_version.as_deref(), Writer::text);
        writer.optional(self.weight_commit, Writer::u64);
        writer.into_bytes()
    }
}

/// Reads an OUTPUTS message: `frames[0]` is the envelope, the others are auxiliary buffers (none over framed links).
///
/// # Errors
/// The envelope is not exactly one well-formed message of one family.
pub fn decode_outputs(frames: &[&[u8]]) -> Result<Decoded<EngineCoreOutputs>> {
    let (envelope, buffers) = frames.split_first().ok_or(Kind::Truncated)?;
    let Decoded { value: fields, skipped_fields } = decode(NAME, envelope, buffers, Envelope::read)?;
    let value = fields.message().map_err(|error| error.at(NAME))?;
    Ok(Decoded { value, skipped_fields })
}

/// The elements of the array, each of them well-formed; whether they make a message is the next question.
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

impl Envelope {
    fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let mut fields = Fields::open(reader)?;
        let engine_index = fields.defaulted(reader, "engine_index", Reader::u64)?;
        let outputs = fields.defaulted(reader, "outputs", |reader| reader.list(EngineCoreOutput::read))?;
        let scheduler_stats = fields.optional(reader, "scheduler_stats", SchedulerStats::read)?;
        let timestamp = fields.defaulted(reader, "timestamp", Reader::f64)?;
        let utility = fields.optional(reader, "utility_output", UtilityOutput::read)?;
        let finished_requests = fields.optional(reader, "finished_requests", |reader| reader.list(Reader::string))?;
        let envelope = Self {
            engine_index,
            batch: Batch { outputs, scheduler_stats, finished_requests },
            timestamp,
            utility,
            wave_complete: fields.optional(reader, "wave_complete", Reader::u64)?,
            start_wave: fields.optional(reader, "start_wave", Reader::u64)?,
            weight_version: fields.optional(reader, "weight_version", |reader| reader.text().map(Arc::from))?,
            weight_commit: fields.optional(reader, "weight_commit", Reader::u64)?,
        };
        fields.close(reader)?;
        Ok(envelope)
    }

    fn message(self) -> Result<EngineCoreOutputs> {
        let batch = &self.batch;
        let is_batch =
            !batch.outputs.is_empty() || batch.scheduler_stats.is_some() || batch.finished_requests.is_some();
        let families = [is_batch, self.utility.is_some(), self.wave_complete.is_some(), self.start_wave.is_some()];
        let families: u8 = families.map(u8::from).iter().sum();
        let body = match (self.utility, self.wave_complete, self.start_wave) {
            _ if families != 1 => return Err(Kind::Family(families).into()),
            (Some(utility), ..) => Body::Utility(utility),
            (_, Some(wave), _) => Body::WaveComplete(wave),
            (.., Some(wave)) => Body::StartWave(wave),
            (None, None, None) => Body::Batch(self.batch),
        };
        Ok(EngineCoreOutputs {
            engine_index: self.engine_index,
            timestamp: self.timestamp,
            weight_version: self.weight_version,
            weight_commit: self.weight_commit,
            body,
        })
    }
}

/// Best effort on a message that [`decode_outputs`] refused: internal ids of the outputs that it certainly names.
pub fn recover_request_ids(frames: &[&[u8]]) -> Vec<String> {
    let mut ids = Vec::new();
    let Some(envelope) = frames.first() else { return ids };
    let mut reader = Reader::new(envelope, &[]);
    // What was recovered before the first unreadable byte counts, so the error itself is of no interest here.
    let _stopped_at = recover(&mut reader, &mut ids);
    ids
}

fn recover(reader: &mut Reader<'_>, ids: &mut Vec<String>) -> Result<()> {
    reader.array()?;
    reader.skip()?;
    for _ in 0..reader.array()? {
        let elements = reader.array()?;
        if elements == 0 {
            continue;
        }
        ids.push(reader.string()?);
        (1..elements).try_for_each(|_| reader.skip())?;
        reader.leave();
    }
    Ok(())
}

impl UtilityOutput {
    fn write(&self, writer: &mut Writer) {
        writer.array(4);
        writer.u64(self.call_id);
        match &self.outcome {
            Ok(value) => {
                writer.nil();
                writer.array(2);
                writer.nil();
                writer.json(value);
                writer.nil();
            }
            Err(failure) => {
                writer.text(&failure.message);
                writer.nil();
                writer.optional(failure.reason.as_deref(), Writer::text);
            }
        }
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let mut fields = Fields::open(reader)?;
        let call_id = fields.required(reader, "call_id", Reader::u64)?;
        let failure = fields.optional(reader, "failure", Reader::string)?;
        let result = fields.optional(reader, "result", |reader| {
            let mut fields = Fields::open(reader)?;
            let type_info = fields.optional(reader, "type_info", Reader::raw)?;
            if type_info.is_some() {
                return Err(Kind::TypeInformation.into());
            }
            let value = fields.required(reader, "value", Reader::json)?;
            fields.close(reader)?;
            Ok(value)
        })?;
        let reason = fields.optional(reader, "reason", Reader::string)?;
        fields.close(reader)?;
        let outcome = match failure {
            Some(message) => Err(UtilityFailure { message, reason }),
            None => Ok(result.unwrap_or_default()),
        };
        Ok(Self { call_id, outcome })
    }
}
