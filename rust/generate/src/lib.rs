//! A generate request from its bytes to the bytes of its answer, as pure functions: no I/O, no clock, no randomness.
//!
//! The way of a request:
//! 1. [`GenerateRequest::parse`] validates the body against what the server serves ([`Served`]);
//! 2. [`GenerateRequest::engine_requests`] makes one engine request for each output sequence;
//! 3. one [`Choice`] for each of them takes the engine's outputs ([`Choice::push`]) with the label and commit number of
//!    their message;
//! 4. [`collected`] answers with all of them, or a [`ChunkWriter`] with one chunk after another.
//!
//! Every failure is an [`ApiError`], whose [`Reason`] decides status and type: [`Reason`] is the one table of errors.

mod choice;
mod chunk;
mod collected;
mod error;
mod kv_versions;
mod logprobs;
mod neutral;
mod npy;
mod prompt_logprobs;
mod provenance;
mod request;
mod sampling;
mod sampling_lists;
mod shown;
mod spans;
mod structures;
mod token_ids;
mod value;

pub use choice::{Choice, Delta};
pub use chunk::ChunkWriter;
pub use collected::{AnswerFacts, collected};
pub use error::{ApiError, Reason};
pub use kv_versions::{KvSpansError, KvVersionBuilder, KvVersionSpan, Told, WeightSpan};
pub use request::{GenerateRequest, Served, StreamOptions};
pub use shown::shown;
pub use spans::{CommitSpan, SpanBuilder, Spans, VersionSpan};
pub use value::{check_label, check_request_id, ignored_fields_header};
