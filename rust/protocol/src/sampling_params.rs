//! `SamplingParams` on the wire: a map of the keys that differ from their default.

use serde::de::MapAccess;

use crate::error::DecodeErrorKind as Kind;
use crate::fields::entries;
use crate::source::Source;
use crate::wire::{InF32Range, Scalar, Wire, in_range, scalars};
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

/// 0, 1 or 2.
struct OutputKind(u64);

scalars! {
    OutputKind, "an integer": Scalar::Integer(value) => match in_range(value, "a signed 64-bit integer")? {
        kind @ 0..=2_i64 => Self(kind.unsigned_abs()),
        value => return Err(Kind::UnknownValue { value, allowed: "an output kind (0, 1, 2)" }),
    };
}

impl Wire for SamplingParams {
    const EXPECTED: &'static str = "a map";

    fn map<'de, A: MapAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut params = Self::default();
        entries(access, source, |key, entry| {
            match key {
                "n" => params.n = entry.read()?,
                "temperature" => params.temperature = entry.read::<InF32Range>()?.0,
                "top_p" => params.top_p = entry.read::<InF32Range>()?.0,
                "top_k" => params.top_k = entry.read()?,
                "seed" => params.seed = entry.read()?,
                // vLLM writes nil for "no limit", which our frontends resolve; a peer that does not gets no output.
                "max_tokens" => params.max_tokens = entry.read()?,
                "min_tokens" => params.min_tokens = entry.read()?,
                "stop_token_ids" => params.stop_token_ids = entry.read::<Option<_>>()?.unwrap_or_default(),
                "ignore_eos" => params.ignore_eos = entry.read()?,
                "logprobs" => params.logprobs = entry.read()?,
                "output_kind" => params.output_kind = entry.read::<OutputKind>()?.0,
                "_eos_token_id" => params.eos_token_id = entry.read()?,
                "_all_stop_token_ids" => params.all_stop_token_ids = entry.read()?,
                _ => entry.skip()?,
            }
            Ok(())
        })?;
        Ok(params)
    }
}

impl SamplingParams {
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
                writer.value(key);
                write(writer);
            }
        };
        entry("n", &|writer| writer.value(self.n));
        entry("temperature", &|writer| writer.value(self.temperature));
        entry("top_p", &|writer| writer.value(self.top_p));
        entry("top_k", &|writer| writer.value(self.top_k));
        entry("seed", &|writer| writer.value(self.seed));
        entry("max_tokens", &|writer| writer.value(self.max_tokens));
        entry("min_tokens", &|writer| writer.value(self.min_tokens));
        entry("stop_token_ids", &|writer| writer.value(&self.stop_token_ids));
        entry("ignore_eos", &|writer| writer.value(self.ignore_eos));
        entry("logprobs", &|writer| writer.value(self.logprobs));
        entry("output_kind", &|writer| writer.value(self.output_kind));
        entry("_eos_token_id", &|writer| writer.value(self.eos_token_id));
        entry("_all_stop_token_ids", &|writer| writer.value(&self.all_stop_token_ids));
    }

    fn differs_in_temperature(&self) -> bool {
        (self.temperature - 1.0).abs() > 0.0
    }

    fn differs_in_top_p(&self) -> bool {
        (self.top_p - 1.0).abs() > 0.0
    }
}
