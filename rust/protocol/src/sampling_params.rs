//! `SamplingParams` on the wire: a map of the keys that differ from their default.

use crate::error::DecodeErrorKind as Kind;
use crate::reader::{Reader, Result};
use crate::writer::Writer;

/// How the engine samples one sequence. Fields and defaults are vLLM's; floats are 64-bit on the wire.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Output sequences; frontends send 1 and make children of a larger request.
    pub n: u64,
    /// 0 is greedy.
    pub temperature: f64,
    /// Nucleus: 1 is off.
    pub top_p: f64,
    /// Most probable tokens kept; 0 and -1 are off.
    pub top_k: i64,
    /// `None` for a random one.
    pub seed: Option<i64>,
    /// Always resolved by the frontend.
    pub max_tokens: u64,
    /// EOS and stop ids are masked until that many tokens are out.
    pub min_tokens: u64,
    /// Tokens that end the output with a `stop_reason`.
    pub stop_token_ids: Vec<u32>,
    /// Go on after EOS.
    pub ignore_eos: bool,
    /// `None` for none, 0 for the sampled token's, k for the top k besides, -1 for the whole vocabulary.
    pub logprobs: Option<i64>,
    /// 0 cumulative, 1 delta, 2 final only: without meaning to the engine.
    pub output_kind: u64,
    /// The token that ends the output without a `stop_reason`; `None` when none does.
    pub eos_token_id: Option<u32>,
    /// Union of `stop_token_ids` and all EOS ids, ascending: what `min_tokens` masks.
    pub all_stop_token_ids: Vec<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            n: 1,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            seed: None,
            max_tokens: 16,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            output_kind: 0,
            eos_token_id: None,
            all_stop_token_ids: Vec::new(),
        }
    }
}

fn optional<'a, T>(reader: &mut Reader<'a>, read: impl FnOnce(&mut Reader<'a>) -> Result<T>) -> Result<Option<T>> {
    if reader.nil()? { Ok(None) } else { read(reader).map(Some) }
}

impl SamplingParams {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let mut params = Self::default();
        reader.entries(|reader, key| {
            match key {
                "n" => params.n = reader.u64()?,
                "temperature" => params.temperature = reader.f64_in_f32_range()?,
                "top_p" => params.top_p = reader.f64_in_f32_range()?,
                "top_k" => params.top_k = reader.i64()?,
                "seed" => params.seed = optional(reader, Reader::i64)?,
                // vLLM writes nil for "no limit", which our frontends resolve; a peer that does not gets no output.
                "max_tokens" => params.max_tokens = reader.u64()?,
                "min_tokens" => params.min_tokens = reader.u64()?,
                "stop_token_ids" => {
                    params.stop_token_ids = optional(reader, |reader| reader.list(Reader::u32))?.unwrap_or_default();
                }
                "ignore_eos" => params.ignore_eos = reader.boolean()?,
                "logprobs" => params.logprobs = optional(reader, Reader::i64)?,
                "output_kind" => {
                    params.output_kind = match reader.i64()? {
                        kind @ 0..=2 => kind.unsigned_abs(),
                        value => return Err(Kind::UnknownValue { value, allowed: "an output kind (0, 1, 2)" }.into()),
                    };
                }
                "_eos_token_id" => params.eos_token_id = optional(reader, Reader::u32)?,
                "_all_stop_token_ids" => params.all_stop_token_ids = reader.list(Reader::u32)?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        Ok(params)
    }

    pub(crate) fn write(&self, writer: &mut Writer) {
        let plain = Self::default();
        let present = [
            self.n != plain.n,
            self.differs_in_temperature(),
            self.differs_in_top_p(),
            self.top_k != plain.top_k,
            self.seed.is_some(),
            self.max_tokens != plain.max_tokens,
            self.min_tokens != plain.min_tokens,
            !self.stop_token_ids.is_empty(),
            self.ignore_eos,
            self.logprobs.is_some(),
            self.output_kind != plain.output_kind,
            self.eos_token_id.is_some(),
            !self.all_stop_token_ids.is_empty(),
        ];
        writer.map(present.iter().filter(|present| **present).count());
        let mut present = present.into_iter();
        let mut entry = |key: &str, write: &dyn Fn(&mut Writer)| {
            if present.next().unwrap_or(false) {
                writer.text(key);
                write(writer);
            }
        };
        entry("n", &|w| w.u64(self.n));
        entry("temperature", &|w| w.f64(self.temperature));
        entry("top_p", &|w| w.f64(self.top_p));
        entry("top_k", &|w| w.i64(self.top_k));
        entry("seed", &|w| w.optional(self.seed, Writer::i64));
        entry("max_tokens", &|w| w.u64(self.max_tokens));
        entry("min_tokens", &|w| w.u64(self.min_tokens));
        entry("stop_token_ids", &|w| w.token_ids(&self.stop_token_ids));
        entry("ignore_eos", &|w| w.boolean(self.ignore_eos));
        entry("logprobs", &|w| w.optional(self.logprobs, Writer::i64));
        entry("output_kind", &|w| w.u64(self.output_kind));
        entry("_eos_token_id", &|w| w.optional(self.eos_token_id.map(u64::from), Writer::u64));
        entry("_all_stop_token_ids", &|w| w.token_ids(&self.all_stop_token_ids));
    }

    fn differs_in_temperature(&self) -> bool {
        (self.temperature - 1.0).abs() > 0.0
    }

    fn differs_in_top_p(&self) -> bool {
        (self.top_p - 1.0).abs() > 0.0
    }
}
