//! What an engine says about itself in its hello: its limits and its model.

use crate::error::{DecodeError, DecodeErrorKind as Kind};
use crate::reader::{Reader, Result};
use crate::writer::Writer;

/// Limits of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
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
#[derive(Debug, Clone, PartialEq, Eq, Default)]
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

/// Takes a key that has no default out of its slot.
pub(crate) fn required<T>(slot: Option<T>, name: &str) -> Result<T> {
    slot.ok_or_else(|| DecodeError::from(Kind::Missing).at(name))
}

impl Limits {
    const NAMES: [&str; 8] = [
        "max_frame_bytes",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_logprobs",
        "vocab_size",
        "block_size",
        "num_blocks",
    ];

    fn values(&mut self) -> [&mut u64; 8] {
        [
            &mut self.max_frame_bytes,
            &mut self.max_model_len,
            &mut self.max_num_seqs,
            &mut self.max_num_batched_tokens,
            &mut self.max_logprobs,
            &mut self.vocab_size,
            &mut self.block_size,
            &mut self.num_blocks,
        ]
    }

    pub(crate) fn write(mut self, writer: &mut Writer) {
        writer.map(Self::NAMES.len());
        for (name, value) in Self::NAMES.into_iter().zip(self.values()) {
            writer.text(name);
            writer.u64(*value);
        }
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let mut found: [Option<u64>; 8] = [None; 8];
        reader.entries(|reader, key| {
            match Self::NAMES.iter().position(|name| *name == key) {
                Some(index) => found[index] = Some(reader.u64()?),
                None => reader.skip()?,
            }
            Ok(())
        })?;
        let mut limits = Self::default();
        for ((name, value), found) in Self::NAMES.into_iter().zip(limits.values()).zip(found) {
            *value = required(found, name)?;
        }
        Ok(limits)
    }
}

impl ModelFacts {
    pub(crate) fn write(&self, writer: &mut Writer) {
        writer.map(6);
        for (name, value) in [
            ("name", &self.name),
            ("architecture", &self.architecture),
            ("dtype", &self.dtype),
            ("device", &self.device),
        ] {
            writer.text(name);
            writer.text(value);
        }
        writer.text("num_parameters");
        writer.u64(self.num_parameters);
        writer.text("eos_token_ids");
        writer.token_ids(&self.eos_token_ids);
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let (mut name, mut architecture, mut dtype, mut device) = (None, None, None, None);
        let (mut parameters, mut eos) = (None, None);
        reader.entries(|reader, key| {
            match key {
                "name" => name = Some(reader.string()?),
                "architecture" => architecture = Some(reader.string()?),
                "dtype" => dtype = Some(reader.string()?),
                "device" => device = Some(reader.string()?),
                "num_parameters" => parameters = Some(reader.u64()?),
                "eos_token_ids" => eos = Some(reader.list(Reader::u32)?),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        Ok(Self {
            name: required(name, "name")?,
            architecture: required(architecture, "architecture")?,
            dtype: required(dtype, "dtype")?,
            device: required(device, "device")?,
            num_parameters: required(parameters, "num_parameters")?,
            eos_token_ids: required(eos, "eos_token_ids")?,
        })
    }
}
