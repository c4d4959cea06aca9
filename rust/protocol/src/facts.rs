//! What an engine says about itself in its hello: its limits and its model.

use serde::Serialize;

use crate::fields::map_struct;

/// Limits of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[expect(missing_docs, reason = "the names are those of the engine's configuration")]
pub struct Limits {
    pub max_frame_bytes: u64,
    pub max_model_len: u64,
    pub max_num_seqs: u64,
    pub max_num_batched_tokens: u64,
    pub max_logprobs: u64,
    pub vocab_size: u64,
    pub block_size: u64,
    pub num_blocks: u64,
}

/// The model of an engine.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ModelFacts {
    /// Name or path it was started with.
    pub name: String,
    /// Class of the model, such as `LlamaForCausalLM`.
    pub architecture: String,
    /// `float32`, `bfloat16` or `float16`.
    pub dtype: String,
    /// Torch device.
    pub device: String,
    /// Number of parameters.
    pub num_parameters: u64,
    /// Tokens that end an output, the main one first.
    pub eos_token_ids: Vec<u32>,
}

map_struct! {
    Limits:
    required max_frame_bytes,
    required max_model_len,
    required max_num_seqs,
    required max_num_batched_tokens,
    required max_logprobs,
    required vocab_size,
    required block_size,
    required num_blocks,
}

map_struct! {
    ModelFacts:
    required name,
    required architecture,
    required dtype,
    required device,
    required num_parameters,
    required eos_token_ids,
}
