//! The engine link: what frontends and engines say to each other. `PROTOCOL.md` beside this crate is its contract.
//!
//! Pure data: no I/O, no clock, no async. A message is read by [`decode_outputs`] or a type's `decode`, which are
//! tolerant of shorter and longer arrays and strict about everything else, and written by the type's `encode`.
//! [`encode_frame`], [`FrameHeader::parse`] and [`split_frame`] put payloads into frames and take them out.

mod array;
mod decoded;
mod error;
mod facts;
mod fields;
mod framing;
mod hello;
mod logprobs;
mod output;
mod outputs;
mod provenance;
mod raw;
mod request;
mod routed_experts;
mod sampling_params;
mod source;
mod stats;
mod structured_outputs;
mod untyped;
mod wire;
mod writer;

pub use decoded::{Decoded, MAX_DEPTH};
pub use error::{DecodeError, DecodeErrorKind, FrameError};
pub use facts::{Limits, ModelFacts};
pub use framing::{FrameHeader, FrameKind, HEADER_BYTES, MAX_FRAME_BYTES, encode_frame, split_frame};
pub use hello::{ClientHello, Dead, EngineHello, MAGIC, VERSION};
pub use logprobs::{LogprobsLists, LogprobsRow};
pub use output::{Admission, EngineCoreOutput, EngineError, FinishReason, OUTPUT_ELEMENTS, StopReason};
pub use outputs::{
    Batch, Body, ENVELOPE_ELEMENTS, EngineCoreOutputs, UtilityFailure, UtilityOutput, decode_outputs,
    recover_request_ids,
};
pub use provenance::{Provenance, StampSpan};
pub use raw::RawValue;
pub use request::{EngineCoreRequest, REQUEST_ELEMENTS, UtilityRequest, decode_abort, encode_abort};
pub use routed_experts::RoutedExperts;
pub use sampling_params::SamplingParams;
pub use stats::{PrefillStats, PrefixCacheStats, SchedulerStats, WeightUpdateSeconds, WeightUpdates};
pub use structured_outputs::StructuredOutputs;
