//! Probabilities as whole numbers: a token's mass is e^((logit - largest logit) / temperature) in units of 2^-40.

use super::row::{Typed, by_kind};
use super::scan::{CHUNK, Surveyed};
use crate::isa::{Isa, Kernel};
use crate::simd::{Element, LANES, Simd};

/// Below this exponent a mass rounds to 0.
pub(super) const LEAST_EXPONENT: f32 = -28.5;
/// Doubles from here to 8192 are multiples of 2^-40: adding it rounds to one.
const ROUNDER: f64 = 4096.0;

/// The mass of the most probable token: 2^40.
const UNIT: f64 = 1_099_511_627_776.0;

/// Which tokens may be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Keep {
    /// Least logit.
    pub logit: f32,
    /// Least exponent: of (logit - largest logit) / temperature.
    pub exponent: f32,
    /// Of the tokens with the least logit only those up to this one.
    pub last: usize,
}

impl Keep {
    /// Every token.
    pub(super) const ALL: Self = Self { logit: f32::NEG_INFINITY, exponent: f32::NEG_INFINITY, last: usize::MAX };

    /// Whether a token of this logit and exponent is among them.
    pub(super) fn allows(&self, logit: f32, exponent: f32, token: usize) -> bool {
        #[expect(clippy::float_cmp, reason = "equal logits are meant")]
        let tied = logit == self.logit;
        exponent >= self.exponent && logit >= self.logit && (!tied || token <= self.last)
    }
}

/// What is sampled from.
#[derive(Clone, Copy)]
pub(super) struct Distribution<'a> {
    pub row: Surveyed<'a>,
    pub temperature: f32,
    /// 1 / temperature.
    pub scale: f32,
    pub keep: Keep,
}

impl<'a> Distribution<'a> {
    pub(super) fn new(row: Surveyed<'a>, temperature: f32) -> Self {
        Self { row, temperature, scale: 1.0 / temperature, keep: Keep::ALL }
    }

    pub(super) fn exponent(&self, logit: f32) -> f32 {
        (logit - self.row.highest) * self.scale
    }

    /// Natural logarithm of a token's probability, `total` being the mass of all.
    pub(super) fn logprob(&self, logit: f32, total: u64) -> f32 {
        let exponent = (f64::from(logit) - f64::from(self.row.highest)) / f64::from(self.temperature);
        #[expect(clippy::cast_precision_loss, reason = "a logarithm needs no more")]
        let mass = total as f64 / UNIT;
        #[expect(clippy::cast_possible_truncation, reason = "what is reported is single precision")]
        let logprob = (exponent - mass.ln()) as f32;
        logprob
    }
}

/// The mass of a weight in [0, 1].
#[inline(always)]
pub(super) fn mass(weight: f32) -> u64 {
    (f64::from(weight) + ROUNDER).to_bits() - ROUNDER.to_bits()
}

/// The mass of all weights.
#[inline(always)]
fn sum(weights: &[f32; CHUNK]) -> u64 {
    let mut total = 0_u64;
    for &weight in weights {
        total = total.wrapping_add((f64::from(weight) + ROUNDER).to_bits());
    }
    total.wrapping_sub(ROUNDER.to_bits().wrapping_mul(CHUNK as u64))
}

/// Exponents of one vector of logits.
#[inline(always)]
pub(super) fn exponents<S: Simd>(simd: S, from: &Distribution<'_>, logits: S::F) -> S::F {
    simd.mul(simd.sub(logits, simd.splat(from.row.highest)), simd.splat(from.scale))
}

/// Weights of one vector of logits; with `SELECT`, 0 for those that the distribution does not keep.
#[inline(always)]
fn weigh<S: Simd, const SELECT: bool>(simd: S, from: &Distribution<'_>, logits: S::F, strict: bool) -> S::F {
    let exponents = exponents(simd, from, logits);
    let weights = simd.exp(exponents);
    if !SELECT {
        return weights;
    }
    let least = simd.splat(from.keep.logit);
    let reached = if strict { simd.less(least, logits) } else { simd.less_equal(least, logits) };
    let kept = simd.and(reached, simd.less_equal(simd.splat(from.keep.exponent), exponents));
    simd.select(kept, weights, simd.zero())
}

#[inline(always)]
fn weigh_parts<S: Simd, T: Element, const FULL: bool, const SELECT: bool>(
    simd: S,
    row: Typed<T>,
    from: &Distribution<'_>,
    first: usize,
    strict: bool,
    weights: &mut [f32; CHUNK],
) {
    for part in 0..LANES {
        let logits = row.load::<S, FULL>(simd, first + part * LANES);
        let weight = weigh::<S, SELECT>(simd, from, logits, strict);
        // SAFETY: the parts of a chunk.
        unsafe { simd.store(weights.as_mut_ptr().add(part * LANES), weight) };
    }
}

/// Weights of a chunk; false, and nothing written, where all are 0.
#[inline(always)]
pub(super) fn weigh_chunk<S: Simd, T: Element>(
    simd: S,
    row: Typed<T>,
    from: &Distribution<'_>,
    chunk: usize,
    weights: &mut [f32; CHUNK],
) -> bool {
    // SAFETY: a group has 16 elements.
    let largest = unsafe { simd.load(from.row.maxima[chunk * LANES..][..LANES].as_ptr()) };
    let alive = simd.less_equal(simd.splat(LEAST_EXPONENT), exponents(simd, from, largest));
    if simd.bits(simd.and(alive, simd.less_equal(simd.splat(from.keep.logit), largest))) == 0 {
        return false;
    }
    let first = chunk * CHUNK;
    let strict = first > from.keep.last;
    if from.keep == Keep::ALL {
        if row.is_full(chunk) {
            weigh_parts::<S, T, true, false>(simd, row, from, first, strict, weights);
        } else {
            weigh_parts::<S, T, false, false>(simd, row, from, first, strict, weights);
        }
        return true;
    }
    weigh_parts::<S, T, false, true>(simd, row, from, first, strict, weights);
    if !strict && from.keep.last < (first + CHUNK - 1).min(row.len - 1) {
        for token in from.keep.last + 1..(first + CHUNK).min(row.len) {
            #[expect(clippy::float_cmp, reason = "equal logits are meant")]
            if row.at(token) == from.keep.logit {
                weights[token - first] = 0.0;
            }
        }
    }
    true
}

struct Masses<'a> {
    from: Distribution<'a>,
    into: &'a mut Vec<u64>,
}

impl Masses<'_> {
    #[inline(always)]
    fn pass<S: Simd, T: Element>(self, simd: S, row: Typed<T>) -> u64 {
        let mut weights = [0.0; CHUNK];
        let mut total = 0;
        self.into.clear();
        for chunk in 0..self.from.row.chunks() {
            let mass = if weigh_chunk(simd, row, &self.from, chunk, &mut weights) { sum(&weights) } else { 0 };
            self.into.push(mass);
            total += mass;
        }
        total
    }
}

impl Kernel for Masses<'_> {
    type Output = u64;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> u64 {
        by_kind!(self.from.row.logits, row => self.pass(simd, row))
    }
}

/// The mass of each chunk, and of all.
pub(super) fn masses(isa: Isa, from: Distribution<'_>, into: &mut Vec<u64>) -> u64 {
    isa.run(Masses { from, into })
}

struct Find<'a> {
    from: Distribution<'a>,
    chunk: usize,
    target: u64,
}

impl Find<'_> {
    #[inline(always)]
    fn pass<S: Simd, T: Element>(self, simd: S, row: Typed<T>) -> usize {
        let mut weights = [0.0; CHUNK];
        weigh_chunk(simd, row, &self.from, self.chunk, &mut weights);
        let mut before = 0;
        let found = weights.iter().position(|&weight| {
            before += mass(weight);
            before > self.target
        });
        self.chunk * CHUNK + found.unwrap_or(0)
    }
}

impl Kernel for Find<'_> {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> usize {
        by_kind!(self.from.row.logits, row => self.pass(simd, row))
    }
}

/// The token at which the mass, added up in order of id, first exceeds `target`, which is less than that of all.
pub(super) fn find(isa: Isa, from: Distribution<'_>, masses: &[u64], target: u64) -> usize {
    let mut before = 0;
    for (chunk, &mass) in masses.iter().enumerate() {
        if before + mass > target {
            return isa.run(Find { from, chunk, target: target - before });
        }
        before += mass;
    }
    0
}

struct Weigh<'a> {
    from: Distribution<'a>,
    logits: &'a [f32],
    into: &'a mut Vec<f32>,
}

impl Kernel for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        self.into.resize(self.logits.len().next_multiple_of(LANES), 0.0);
        for (logits, into) in self.logits.chunks(LANES).zip(self.into.chunks_exact_mut(LANES)) {
            // SAFETY: as many as the slices hold.
            unsafe {
                let logits = simd.read_first(logits.as_ptr(), logits.len());
                simd.store(into.as_mut_ptr(), weigh::<S, true>(simd, &self.from, logits, false));
            }
        }
    }
}

/// The weight of each logit, and more.
pub(super) fn weights(isa: Isa, from: Distribution<'_>, logits: &[f32], into: &mut Vec<f32>) {
    isa.run(Weigh { from, logits, into });
}
