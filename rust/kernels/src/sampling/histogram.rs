//! The mass of a row by exponent: where top-p ends in a row whose best few tokens do not reach its share.

use super::mass::{Distribution, LEAST_EXPONENT, exponents, mass, weigh_chunk};
use super::row::{Typed, by_kind};
use super::scan::{CHUNK, Candidate};
use crate::isa::{Isa, Kernel};
use crate::simd::{Element, LANES, Simd};

/// Bins of a [`histogram`].
pub(super) const BINS: usize = 1024;

/// Adding it to a float from 0 to 2^22 rounds that to a whole number, which then is in the low bits.
const WHOLE: f32 = 8_388_608.0;

/// The bin of each exponent, plus [`WHOLE`].
#[inline(always)]
fn bins<S: Simd>(simd: S, exponents: S::F) -> S::F {
    #[expect(clippy::cast_precision_loss, reason = "1024 and 1023 are exact")]
    let (scale, last) = (simd.splat(BINS as f32 / LEAST_EXPONENT), simd.splat((BINS - 1) as f32));
    simd.add(simd.min(simd.mul(exponents, scale), last), simd.splat(WHOLE))
}

struct Histogram<'a> {
    from: Distribution<'a>,
    into: &'a mut [u64; BINS],
}

impl Histogram<'_> {
    #[inline(always)]
    fn pass<S: Simd, T: Element>(self, simd: S, row: Typed<T>) {
        let mut weights = [0.0; CHUNK];
        let mut places = [0.0_f32; CHUNK];
        let mut masses = [0; CHUNK];
        for chunk in 0..self.from.row.chunks() {
            if !weigh_chunk(simd, row, &self.from, chunk, &mut weights) {
                continue;
            }
            for part in 0..LANES {
                let logits = row.load::<S, false>(simd, chunk * CHUNK + part * LANES);
                let bins = bins(simd, exponents(simd, &self.from, logits));
                // SAFETY: the parts of a chunk.
                unsafe { simd.store(places.as_mut_ptr().add(part * LANES), bins) };
            }
            for (into, &weight) in masses.iter_mut().zip(&weights) {
                *into = mass(weight);
            }
            for (&mass, &place) in masses.iter().zip(&places) {
                self.into[place.to_bits() as usize % BINS] += mass;
            }
        }
    }
}

impl Kernel for Histogram<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        by_kind!(self.from.row.logits, row => self.pass(simd, row));
    }
}

/// The mass by exponent: better tokens lie in lower bins, equal ones in the same.
pub(super) fn histogram(isa: Isa, from: Distribution<'_>) -> [u64; BINS] {
    let mut into = [0; BINS];
    isa.run(Histogram { from, into: &mut into });
    into
}

struct Members<'a> {
    from: Distribution<'a>,
    bin: usize,
    into: &'a mut Vec<Candidate>,
}

impl Members<'_> {
    #[inline(always)]
    fn pass<S: Simd, T: Element>(self, simd: S, row: Typed<T>) {
        #[expect(clippy::cast_precision_loss, reason = "a small whole number")]
        let bin = simd.splat(self.bin as f32 + WHOLE);
        for first in (0..row.len).step_by(LANES) {
            let logits = row.load::<S, false>(simd, first);
            let mut found = simd.bits(simd.equal(bins(simd, exponents(simd, &self.from, logits)), bin));
            while found != 0 {
                let token = first + found.trailing_zeros() as usize;
                found &= found - 1;
                if token >= row.len {
                    break;
                }
                let logit = row.at(token);
                if self.from.keep.allows(logit, self.from.exponent(logit), token) {
                    #[expect(clippy::cast_possible_truncation, reason = "token ids fit 32 bits")]
                    self.into.push(Candidate { logit, token: token as u32 });
                }
            }
        }
    }
}

impl Kernel for Members<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        by_kind!(self.from.row.logits, row => self.pass(simd, row));
    }
}

/// The tokens of a bin that the distribution keeps.
pub(super) fn members(isa: Isa, from: Distribution<'_>, bin: usize, into: &mut Vec<Candidate>) {
    into.clear();
    isa.run(Members { from, bin, into });
}
