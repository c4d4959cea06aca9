//! Passes over a row of logits: its maximum, its largest logits, how many are larger than one.
//!
//! The row is cut into chunks of 256 tokens. Of each chunk the maxima of 16 groups are kept (group g: the tokens whose
//! number in the chunk is g modulo 16), by which later passes skip nearly all of the row.

use std::cmp::Ordering;

use super::row::{Logits, Typed, by_kind};
use crate::isa::{Isa, Kernel};
use crate::simd::{Element, LANES, Simd};

/// Tokens of a chunk.
pub(super) const CHUNK: usize = LANES * LANES;

/// A token with its logit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub logit: f32,
    pub token: u32,
}

impl Candidate {
    /// The better one first: larger logit, then lower id. Logits are no NaN.
    pub(super) fn order(a: &Self, b: &Self) -> Ordering {
        b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.token.cmp(&b.token))
    }
}

/// A row whose largest logit is known.
#[derive(Clone, Copy)]
pub(super) struct Surveyed<'a> {
    pub logits: Logits,
    pub highest: f32,
    /// Maxima of groups, 16 for each chunk; -inf for groups without tokens.
    pub maxima: &'a [f32],
}

impl Surveyed<'_> {
    pub(super) fn chunks(&self) -> usize {
        self.maxima.len() / LANES
    }
}

/// The maxima of a chunk's groups, and which of them hold no NaN.
#[inline(always)]
fn survey_chunk<S: Simd, T: Element, const FULL: bool>(simd: S, row: Typed<T>, chunk: usize) -> (S::F, S::M) {
    let mut largest = simd.splat(f32::NEG_INFINITY);
    let mut numbers = simd.first(LANES);
    for part in 0..LANES {
        let values = row.load::<S, FULL>(simd, chunk * CHUNK + part * LANES);
        numbers = simd.and(numbers, simd.equal(values, values));
        largest = simd.max(values, largest);
    }
    (largest, numbers)
}

struct Survey<'a> {
    logits: Logits,
    maxima: &'a mut Vec<f32>,
}

impl Survey<'_> {
    #[inline(always)]
    fn pass<S: Simd, T: Element>(maxima: &mut Vec<f32>, simd: S, row: Typed<T>) -> Option<f32> {
        let chunks = row.len.div_ceil(CHUNK);
        maxima.resize(chunks * LANES, 0.0);
        let mut numbers = simd.first(LANES);
        let mut highest = simd.splat(f32::NEG_INFINITY);
        for (chunk, groups) in maxima.chunks_exact_mut(LANES).enumerate() {
            let (largest, clean) = if row.is_full(chunk) {
                survey_chunk::<S, T, true>(simd, row, chunk)
            } else {
                survey_chunk::<S, T, false>(simd, row, chunk)
            };
            numbers = simd.and(numbers, clean);
            // SAFETY: a group has 16 elements.
            unsafe { simd.store(groups.as_mut_ptr(), largest) };
            highest = simd.max(largest, highest);
        }
        let highest = simd.reduce_max(highest);
        (simd.bits(numbers) == u16::MAX && highest.is_finite()).then_some(highest)
    }
}

impl Kernel for Survey<'_> {
    type Output = Option<f32>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Option<f32> {
        by_kind!(self.logits, row => Self::pass(self.maxima, simd, row))
    }
}

/// Finds the largest logit; None where there is a NaN, or where it is not finite.
pub(super) fn survey(isa: Isa, logits: Logits, maxima: &mut Vec<f32>) -> Option<Surveyed<'_>> {
    let highest = isa.run(Survey { logits, maxima: &mut *maxima })?;
    Some(Surveyed { logits, highest, maxima })
}

/// The first token with the largest logit.
pub(super) fn first_best(row: Surveyed<'_>) -> usize {
    #[expect(clippy::float_cmp, reason = "it is one of them")]
    let is_best = |logit: &f32| *logit == row.highest;
    let chunk = row.maxima.chunks_exact(LANES).position(|groups| groups.iter().any(is_best)).unwrap_or(0);
    let end = row.logits.len().min((chunk + 1) * CHUNK);
    (chunk * CHUNK..end).find(|&token| is_best(&row.logits.at(token))).unwrap_or(0)
}

struct Collect<'a> {
    row: Surveyed<'a>,
    least: f32,
    into: &'a mut Vec<Candidate>,
}

impl Collect<'_> {
    #[inline(always)]
    fn pass<S: Simd, T: Element>(self, simd: S, row: Typed<T>) {
        let least = simd.splat(self.least);
        for (chunk, groups) in self.row.maxima.chunks_exact(LANES).enumerate() {
            // SAFETY: a group has 16 elements.
            let largest = unsafe { simd.load(groups.as_ptr()) };
            if simd.bits(simd.less_equal(least, largest)) == 0 {
                continue;
            }
            for part in 0..LANES {
                let first = chunk * CHUNK + part * LANES;
                let values = row.load::<S, false>(simd, first);
                let mut found = simd.bits(simd.less_equal(least, values));
                while found != 0 {
                    let token = first + found.trailing_zeros() as usize;
                    found &= found - 1;
                    // Beyond the end all is -inf, which is less than any bound.
                    #[expect(clippy::cast_possible_truncation, reason = "token ids fit 32 bits")]
                    self.into.push(Candidate { logit: row.at(token), token: token as u32 });
                }
            }
        }
    }
}

impl Kernel for Collect<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        by_kind!(self.row.logits, row => self.pass(simd, row));
    }
}

/// All tokens with a logit of at least `least`, which is finite, in order of id.
pub(super) fn collect(isa: Isa, row: Surveyed<'_>, least: f32, into: &mut Vec<Candidate>) {
    into.clear();
    isa.run(Collect { row, least, into });
}

/// How many of a chunk's logits are greater than `than`, by group.
#[inline(always)]
fn count_chunk<S: Simd, T: Element, const FULL: bool>(simd: S, row: Typed<T>, chunk: usize, than: S::F) -> S::F {
    let mut count = simd.zero();
    for part in 0..LANES {
        let values = row.load::<S, FULL>(simd, chunk * CHUNK + part * LANES);
        count = simd.select(simd.less(than, values), simd.add(count, simd.splat(1.0)), count);
    }
    count
}

struct Greater<'a> {
    row: Surveyed<'a>,
    than: f32,
}

impl Greater<'_> {
    #[inline(always)]
    fn pass<S: Simd, T: Element>(self, simd: S, row: Typed<T>) -> u32 {
        let than = simd.splat(self.than);
        // Counts stay below 2^24 in each lane, so they are exact.
        let mut count = simd.zero();
        for (chunk, groups) in self.row.maxima.chunks_exact(LANES).enumerate() {
            // SAFETY: a group has 16 elements.
            let largest = unsafe { simd.load(groups.as_ptr()) };
            if simd.bits(simd.less(than, largest)) == 0 {
                continue;
            }
            let found = if row.is_full(chunk) {
                count_chunk::<S, T, true>(simd, row, chunk, than)
            } else {
                count_chunk::<S, T, false>(simd, row, chunk, than)
            };
            count = simd.add(count, found);
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole numbers, see above")]
        simd.to_array(count).iter().map(|&lane| lane as u32).sum()
    }
}

impl Kernel for Greater<'_> {
    type Output = u32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> u32 {
        by_kind!(self.row.logits, row => self.pass(simd, row))
    }
}

/// How many tokens have a logit greater than `than`.
pub(super) fn greater(isa: Isa, row: Surveyed<'_>, than: f32) -> u32 {
    isa.run(Greater { row, than })
}

struct Merge<'a> {
    maxima: &'a [f32],
    into: &'a mut Vec<f32>,
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let merged = self.maxima.len().div_ceil(CHUNK);
        self.into.resize(merged * LANES, 0.0);
        for (groups, into) in self.maxima.chunks(CHUNK).zip(self.into.chunks_exact_mut(LANES)) {
            let mut largest = simd.splat(f32::NEG_INFINITY);
            for group in groups.chunks_exact(LANES) {
                // SAFETY: a group has 16 elements.
                largest = simd.max(unsafe { simd.load(group.as_ptr()) }, largest);
            }
            // SAFETY: as above.
            unsafe { simd.store(into.as_mut_ptr(), largest) };
        }
    }
}

/// A logit that at least `count` tokens reach, and not many more; None where the groups are too few to say.
fn bound(isa: Isa, row: Surveyed<'_>, count: usize, values: &mut Vec<f32>) -> Option<f32> {
    if count > row.maxima.len() {
        return None;
    }
    if count <= row.chunks().div_ceil(LANES) * LANES {
        isa.run(Merge { maxima: row.maxima, into: values });
    } else {
        values.clear();
        values.extend_from_slice(row.maxima);
    }
    let (_, least, _) = values.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
    Some(*least)
}

/// A set of best tokens that holds the `count` best ones (all, where there are fewer with a finite logit), by id; and the
/// logit from which on it is complete.
pub(super) fn candidates(
    isa: Isa,
    row: Surveyed<'_>,
    count: usize,
    values: &mut Vec<f32>,
    into: &mut Vec<Candidate>,
) -> f32 {
    let least = bound(isa, row, count, values).unwrap_or(f32::MIN).max(f32::MIN);
    collect(isa, row, least, into);
    least
}

/// The `count`-th largest logit; -inf where there are fewer with a finite one.
pub(super) fn nth(
    isa: Isa,
    row: Surveyed<'_>,
    count: usize,
    values: &mut Vec<f32>,
    scratch: &mut Vec<Candidate>,
) -> f32 {
    candidates(isa, row, count, values, scratch);
    if scratch.len() < count {
        return f32::NEG_INFINITY;
    }
    let (_, found, _) = scratch.select_nth_unstable_by(count - 1, Candidate::order);
    found.logit
}

/// The `count` best tokens, in order.
pub(super) fn best(isa: Isa, row: Surveyed<'_>, count: usize, values: &mut Vec<f32>, into: &mut Vec<Candidate>) {
    let count = count.min(row.logits.len());
    if count == 0 {
        return into.clear();
    }
    candidates(isa, row, count, values, into);
    if into.len() < count {
        let impossible = (0..row.logits.len()).filter(|&token| row.logits.at(token) == f32::NEG_INFINITY);
        let missing = count - into.len();
        #[expect(clippy::cast_possible_truncation, reason = "token ids fit 32 bits")]
        into.extend(impossible.take(missing).map(|token| Candidate { logit: f32::NEG_INFINITY, token: token as u32 }));
    }
    if into.len() > count {
        into.select_nth_unstable_by(count - 1, Candidate::order);
        into.truncate(count);
    }
    into.sort_unstable_by(Candidate::order);
}
