//! `EngineCoreRequest` and the abort message: what a frontend asks of the engine.

use std::sync::Arc;

use serde::de::SeqAccess;

use crate::decoded::{Decoded, Result as DecodeResult, decode};
use crate::error::DecodeErrorKind as Kind;
use crate::fields::Fields;
use crate::provenance::Provenance;
use crate::raw::RawValue;
use crate::sampling_params::SamplingParams;
use crate::source::Source;
use crate::untyped::{Kept, Skipped};
use crate::wire::Wire;
use crate::writer::Writer;

/// Elements of an `EngineCoreRequest` array: vLLM's 22, then ours.
pub const REQUEST_ELEMENTS: usize = 23;

/// One sequence to generate. Elements for modalities and features that rollspan has not are written as nil and read as
/// raw values.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct EngineCoreRequest {
    /// Internal id, unique among the open requests of the engine.
    pub request_id: String,
    /// Shared among the children of one request; `None` only from foreign frontends.
    pub prompt_token_ids: Option<Arc<[u32]>>,
    /// `None` only from foreign frontends.
    pub sampling_params: Option<SamplingParams>,
    /// Wall clock, seconds since 1970.
    pub arrival_time: f64,
    /// Mixed into the prefix cache's keys.
    pub cache_salt: Option<String>,
    /// Which frontend asks.
    pub client_index: u64,
    /// Data-parallel wave.
    pub current_wave: u64,
    /// Lower runs first.
    pub priority: i64,
    /// The id that the client knows.
    pub external_req_id: Option<String>,
    /// A streaming-input session stays open behind this chunk.
    pub resumable: bool,
    /// Admit and abort at once.
    pub abort_immediately: bool,
    /// Session of the client.
    pub session_id: Option<String>,
    /// What is asked about the weights and the KV (ours).
    pub provenance: Provenance,
    /// Elements that this version only passes on, by name, where they were not nil.
    pub other: Vec<(&'static str, RawValue)>,
}

impl EngineCoreRequest {
    /// The payload of an ADD frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        // Who asks nothing of us speaks as vLLM's frontends do.
        let ours = self.provenance != Provenance::default();
        writer.array(REQUEST_ELEMENTS - usize::from(!ours));
        writer.value(&self.request_id);
        writer.value(self.prompt_token_ids.as_deref());
        writer.kept(&self.other, "mm_features");
        writer.optional(self.sampling_params.as_ref(), |writer, params| params.write(writer));
        writer.kept(&self.other, "pooling_params");
        writer.value(self.arrival_time);
        writer.kept(&self.other, "lora_request");
        writer.value(&self.cache_salt);
        writer.kept(&self.other, "data_parallel_rank");
        writer.kept(&self.other, "prompt_embeds");
        writer.kept(&self.other, "prompt_is_token_ids");
        writer.value(self.client_index);
        writer.value(self.current_wave);
        writer.value(self.priority);
        writer.kept(&self.other, "trace_headers");
        writer.value(self.resumable);
        writer.value(&self.external_req_id);
        writer.kept(&self.other, "reasoning_ended");
        writer.kept(&self.other, "reasoning_parser_kwargs");
        writer.value(self.abort_immediately);
        writer.value(&self.session_id);
        writer.kept(&self.other, "kv_hints");
        if ours {
            self.provenance.write(&mut writer);
        }
        writer.into_bytes()
    }

    /// Reads the payload of an ADD frame.
    ///
    /// # Errors
    /// The payload is not exactly one well-formed request.
    pub fn decode(payload: &[u8]) -> DecodeResult<Decoded<Self>> {
        decode("EngineCoreRequest", payload, &[])
    }
}

impl Wire for EngineCoreRequest {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut fields = Fields::new(access, source);
        let mut request = Self { request_id: fields.required("request_id")?, ..Self::default() };
        request.prompt_token_ids = fields.required::<Option<Vec<u32>>>("prompt_token_ids")?.map(Arc::from);
        fields.kept::<Skipped>("mm_features", &mut request.other)?;
        request.sampling_params = fields.required("sampling_params")?;
        fields.kept::<Skipped>("pooling_params", &mut request.other)?;
        request.arrival_time = fields.required("arrival_time")?;
        fields.kept::<Skipped>("lora_request", &mut request.other)?;
        request.cache_salt = fields.required("cache_salt")?;
        let rank: Option<Kept<Skipped>> = fields.required("data_parallel_rank")?;
        request.other.extend(rank.map(|rank| ("data_parallel_rank", rank.raw)));
        fields.kept::<Skipped>("prompt_embeds", &mut request.other)?;
        fields.kept::<Skipped>("prompt_is_token_ids", &mut request.other)?;
        fields.defaulted("client_index", &mut request.client_index)?;
        fields.defaulted("current_wave", &mut request.current_wave)?;
        fields.defaulted("priority", &mut request.priority)?;
        fields.kept::<Skipped>("trace_headers", &mut request.other)?;
        fields.defaulted("resumable", &mut request.resumable)?;
        fields.defaulted("external_req_id", &mut request.external_req_id)?;
        fields.kept::<Skipped>("reasoning_ended", &mut request.other)?;
        fields.kept::<Skipped>("reasoning_parser_kwargs", &mut request.other)?;
        fields.defaulted("abort_immediately", &mut request.abort_immediately)?;
        fields.defaulted("session_id", &mut request.session_id)?;
        fields.kept::<Skipped>("kv_hints", &mut request.other)?;
        let mut provenance: Option<Provenance> = None;
        fields.defaulted("provenance", &mut provenance)?;
        request.provenance = provenance.unwrap_or_default();
        fields.close()?;
        Ok(request)
    }
}

/// The payload of an ABORT frame: internal ids.
pub fn encode_abort<S: AsRef<str>>(request_ids: &[S]) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.array(request_ids.len());
    for id in request_ids {
        writer.value(id.as_ref());
    }
    writer.into_bytes()
}

/// Reads the payload of an ABORT frame.
///
/// # Errors
/// The payload is not exactly one array of strings.
pub fn decode_abort(payload: &[u8]) -> DecodeResult<Vec<String>> {
    decode("Abort", payload, &[]).map(|decoded| decoded.value)
}

/// A call of one of the engine's methods; see PROTOCOL.md for the methods.
#[derive(Debug, Clone, PartialEq)]
pub struct UtilityRequest {
    /// Which frontend calls.
    pub client_index: u64,
    /// Comes back with the answer.
    pub call_id: u64,
    /// Name of the method.
    pub method: String,
    /// Positional arguments.
    pub args: Vec<serde_json::Value>,
}

impl UtilityRequest {
    /// The payload of a UTILITY frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        writer.value((self.client_index, self.call_id, &self.method, &self.args));
        writer.into_bytes()
    }

    /// Reads the payload of a UTILITY frame.
    ///
    /// # Errors
    /// The payload is not exactly one well-formed call.
    pub fn decode(payload: &[u8]) -> DecodeResult<Decoded<Self>> {
        decode("UtilityRequest", payload, &[])
    }
}

impl Wire for UtilityRequest {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut fields = Fields::new(access, source);
        let call = Self {
            client_index: fields.required("client_index")?,
            call_id: fields.required("call_id")?,
            method: fields.required("method")?,
            args: fields.required("args")?,
        };
        fields.close()?;
        if call.method.is_empty() { Err(source.refuse(Kind::Missing)) } else { Ok(call) }
    }
}
