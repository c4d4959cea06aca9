//! `EngineCoreRequest` and the abort message: what a frontend asks of the engine.

use std::sync::Arc;

use crate::decoded::{Decoded, decode};
use crate::error::DecodeErrorKind as Kind;
use crate::fields::Fields;
use crate::raw::RawValue;
use crate::reader::{Reader, Result};
use crate::sampling_params::SamplingParams;
use crate::writer::Writer;

/// Elements of an `EngineCoreRequest` array.
pub const REQUEST_ELEMENTS: usize = 22;

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
    /// Elements that this version only passes on, by name, where they were not nil.
    pub other: Vec<(&'static str, RawValue)>,
}

impl EngineCoreRequest {
    /// The payload of an ADD frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        let other = |writer: &mut Writer, name: &str| {
            let found = self.other.iter().find(|(other, _)| *other == name);
            writer.optional(found, |writer, (_, value)| writer.raw(value));
        };
        writer.array(REQUEST_ELEMENTS);
        writer.text(&self.request_id);
        writer.optional(self.prompt_token_ids.as_deref(), Writer::token_ids);
        other(&mut writer, "mm_features");
        writer.optional(self.sampling_params.as_ref(), |writer, params| params.write(writer));
        other(&mut writer, "pooling_params");
        writer.f64(self.arrival_time);
        other(&mut writer, "lora_request");
        writer.optional(self.cache_salt.as_deref(), Writer::text);
        other(&mut writer, "data_parallel_rank");
        other(&mut writer, "prompt_embeds");
        other(&mut writer, "prompt_is_token_ids");
        writer.u64(self.client_index);
        writer.u64(self.current_wave);
        writer.i64(self.priority);
        other(&mut writer, "trace_headers");
        writer.boolean(self.resumable);
        writer.optional(self.external_req_id.as_deref(), Writer::text);
        other(&mut writer, "reasoning_ended");
        other(&mut writer, "reasoning_parser_kwargs");
        writer.boolean(self.abort_immediately);
        writer.optional(self.session_id.as_deref(), Writer::text);
        other(&mut writer, "kv_hints");
        writer.into_bytes()
    }

    /// Reads the payload of an ADD frame.
    ///
    /// # Errors
    /// The payload is not exactly one well-formed request.
    pub fn decode(payload: &[u8]) -> Result<Decoded<Self>> {
        decode("EngineCoreRequest", payload, &[], Self::read)
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let mut fields = Fields::open(reader)?;
        let request_id = fields.required(reader, "request_id", Reader::string)?;
        let mut request = Self { request_id, ..Self::default() };
        request.prompt_token_ids = fields.required(reader, "prompt_token_ids", |reader| {
            if reader.nil()? { Ok(None) } else { reader.list(Reader::u32).map(|ids| Some(ids.into())) }
        })?;
        request.keep(&mut fields, reader, "mm_features", true)?;
        request.sampling_params = fields.required(reader, "sampling_params", |reader| {
            if reader.nil()? { Ok(None) } else { SamplingParams::read(reader).map(Some) }
        })?;
        request.keep(&mut fields, reader, "pooling_params", true)?;
        request.arrival_time = fields.required(reader, "arrival_time", Reader::f64)?;
        request.keep(&mut fields, reader, "lora_request", true)?;
        request.cache_salt =
            fields.required(
                reader,
                "cache_salt",
                |reader| {
                    if reader.nil()? { Ok(None) } else { reader.string().map(Some) }
                },
            )?;
        request.keep(&mut fields, reader, "data_parallel_rank", true)?;
        request.keep(&mut fields, reader, "prompt_embeds", false)?;
        request.keep(&mut fields, reader, "prompt_is_token_ids", false)?;
        request.client_index = fields.defaulted(reader, "client_index", Reader::u64)?;
        request.current_wave = fields.defaulted(reader, "current_wave", Reader::u64)?;
        request.priority = fields.defaulted(reader, "priority", Reader::i64)?;
        request.keep(&mut fields, reader, "trace_headers", false)?;
        request.resumable = fields.defaulted(reader, "resumable", Reader::boolean)?;
        request.external_req_id = fields.optional(reader, "external_req_id", Reader::string)?;
        request.keep(&mut fields, reader, "reasoning_ended", false)?;
        request.keep(&mut fields, reader, "reasoning_parser_kwargs", false)?;
        request.abort_immediately = fields.defaulted(reader, "abort_immediately", Reader::boolean)?;
        request.session_id = fields.optional(reader, "session_id", Reader::string)?;
        request.keep(&mut fields, reader, "kv_hints", false)?;
        fields.close(reader)?;
        Ok(request)
    }

    /// Keeps an element that is only passed on, unless it is nil.
    fn keep(&mut self, fields: &mut Fields, reader: &mut Reader<'_>, name: &'static str, required: bool) -> Result<()> {
        let value = if required {
            fields.required(reader, name, |reader| if reader.nil()? { Ok(None) } else { reader.raw().map(Some) })?
        } else {
            fields.optional(reader, name, Reader::raw)?
        };
        self.other.extend(value.map(|value| (name, value)));
        Ok(())
    }
}

/// The payload of an ABORT frame: internal ids.
pub fn encode_abort<S: AsRef<str>>(request_ids: &[S]) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.texts(request_ids);
    writer.into_bytes()
}

/// Reads the payload of an ABORT frame.
///
/// # Errors
/// The payload is not exactly one array of strings.
pub fn decode_abort(payload: &[u8]) -> Result<Vec<String>> {
    decode("Abort", payload, &[], |reader| reader.list(Reader::string)).map(|decoded| decoded.value)
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
        let mut writer = Writer::default();
        writer.array(4);
        writer.u64(self.client_index);
        writer.u64(self.call_id);
        writer.text(&self.method);
        writer.array(self.args.len());
        self.args.iter().for_each(|argument| writer.json(argument));
        writer.into_bytes()
    }

    /// Reads the payload of a UTILITY frame.
    ///
    /// # Errors
    /// The payload is not exactly one well-formed call.
    pub fn decode(payload: &[u8]) -> Result<Decoded<Self>> {
        decode("UtilityRequest", payload, &[], |reader| {
            let mut fields = Fields::open(reader)?;
            let call = Self {
                client_index: fields.required(reader, "client_index", Reader::u64)?,
                call_id: fields.required(reader, "call_id", Reader::u64)?,
                method: fields.required(reader, "method", Reader::string)?,
                args: fields.required(reader, "args", |reader| reader.list(Reader::json))?,
            };
            fields.close(reader)?;
            if call.method.is_empty() { Err(Kind::Missing.into()) } else { Ok(call) }
        })
    }
}
