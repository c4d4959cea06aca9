//! What requests ask about the weights behind their output, and what outputs answer.

use std::sync::Arc;

use serde::de::{MapAccess, SeqAccess};

use crate::error::DecodeErrorKind as Kind;
use crate::fields::{Fields, entries};
use crate::source::Source;
use crate::wire::{Scalar, Wire, in_range, scalars};
use crate::writer::{Entries, Writer};

/// What a request asks about the weights and the KV that its output comes from (ours).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Provenance {
    /// Refuse to run under an older commit.
    pub min_weight_commit: u64,
    /// Seconds that the request may wait for an open update to bring that commit.
    pub weight_wait_s: f64,
    /// End the output with `abort` and stop reason `stale_weights` once the commit in force is more than so many ahead of
    /// that of its first token.
    pub max_weight_lag: Option<u64>,
    /// Tell which weights computed the keys and values that tokens attended to.
    pub return_kv_versions: bool,
    /// The prompt may use KV that earlier commits have cached.
    pub allow_stale_prefix: bool,
}

/// A time to wait.
struct Seconds(f64);

fn at_least_zero(seconds: f64) -> Result<Seconds, Kind> {
    let fits = seconds.is_finite() && seconds >= 0.0;
    if fits { Ok(Seconds(seconds)) } else { Err(Kind::OutOfRange("a number of at least 0")) }
}

scalars! {
    Seconds, "a float":
        Scalar::Float(seconds) => at_least_zero(seconds)?,
        Scalar::Integer(seconds) => Self(in_range::<u32>(seconds, "an unsigned 32-bit integer")?.into());
}

impl Wire for Provenance {
    const EXPECTED: &'static str = "a map";

    fn map<'de, A: MapAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut provenance = Self::default();
        entries(access, source, |key, entry| {
            match key {
                "min_weight_commit" => provenance.min_weight_commit = entry.read()?,
                "weight_wait_s" => provenance.weight_wait_s = entry.read::<Seconds>()?.0,
                "max_weight_lag" => provenance.max_weight_lag = entry.read()?,
                "return_kv_versions" => provenance.return_kv_versions = entry.read()?,
                "allow_stale_prefix" => provenance.allow_stale_prefix = entry.read()?,
                _ => entry.skip()?,
            }
            Ok(())
        })?;
        Ok(provenance)
    }
}

impl Provenance {
    pub(crate) fn write(self, writer: &mut Writer) {
        let mut entries = Entries::new();
        entries.number("min_weight_commit", self.min_weight_commit, 0);
        entries.float("weight_wait_s", self.weight_wait_s, 0.0);
        entries.some("max_weight_lag", self.max_weight_lag);
        entries.number("return_kv_versions", self.return_kv_versions, false);
        entries.number("allow_stale_prefix", self.allow_stale_prefix, false);
        entries.finish(writer);
    }
}

/// Positions `start` to `end - 1` belong to the weights of that label and commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StampSpan {
    /// Label.
    pub weight_version: Arc<str>,
    /// Commit number.
    pub weight_commit: u64,
    /// First position.
    pub start: u32,
    /// Behind the last position.
    pub end: u32,
}

impl StampSpan {
    pub(crate) fn write_list(spans: &[Self], writer: &mut Writer) {
        writer.array(spans.len());
        for span in spans {
            writer.value((&*span.weight_version, span.weight_commit, span.start, span.end));
        }
    }
}

impl Wire for StampSpan {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut fields = Fields::new(access, source);
        let span = Self {
            weight_version: fields.required("weight_version")?,
            weight_commit: fields.required("weight_commit")?,
            start: fields.required("start")?,
            end: fields.required("end")?,
        };
        fields.close()?;
        Ok(span)
    }
}
