//! The two matrix products, on as many rows and columns as the registers hold. Shapes never change a row's operations.

use crate::attention::tile::{KEYS, SEGMENTS};
use crate::simd::{Element, LANES, Simd};

/// Scores of `R` rows with `C` segments of 16 keys.
///
/// # Safety
/// `query` has `R` rows of `dim`; `keys` point to `dim` vectors, `stride` apart; `scores` has `R` rows of [`KEYS`] from it.
#[inline(always)]
pub(super) unsafe fn score<S: Simd, T: Element, const R: usize, const C: usize>(
    simd: S,
    query: *const f32,
    dim: usize,
    keys: [*const T; C],
    stride: usize,
    scores: *mut f32,
) {
    let mut sums = [[simd.zero(); C]; R];
    for d in 0..dim {
        let mut vectors = [simd.zero(); C];
        for c in 0..C {
            // SAFETY: the caller's promise, here and below.
            vectors[c] = unsafe { simd.read(keys[c].add(d * stride)) };
        }
        for r in 0..R {
            let factor = simd.splat(unsafe { *query.add(r * dim + d) });
            for c in 0..C {
                sums[r][c] = simd.mul_add(factor, vectors[c], sums[r][c]);
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            unsafe { simd.store(scores.add(r * KEYS + c * LANES), sums[r][c]) };
        }
    }
}

/// Adds the values of keys `start` to `stop - 1`, times their weights, to `C` vectors of `R` rows of sums.
///
/// # Safety
/// `weights` has `R` rows of [`KEYS`]; each of `values` points to the column in 16 rows, `dim` apart, at least those
/// named; `sums` has `R` rows of `dim` from it.
#[inline(always)]
pub(super) unsafe fn weigh<S: Simd, T: Element, const R: usize, const C: usize>(
    simd: S,
    weights: *const f32,
    values: &[*const T; SEGMENTS],
    column: usize,
    dim: usize,
    (start, stop): (usize, usize),
    sums: *mut f32,
) {
    let mut totals = [[simd.zero(); C]; R];
    for r in 0..R {
        for c in 0..C {
            // SAFETY: the caller's promise, here and below.
            totals[r][c] = unsafe { simd.load(sums.add(r * dim + column + c * LANES)) };
        }
    }
    let mut key = start;
    while key < stop {
        let segment = unsafe { values[key / LANES].add(column) };
        let end = stop.min((key / LANES + 1) * LANES);
        while key < end {
            let row = unsafe { segment.add(key % LANES * dim) };
            let mut vectors = [simd.zero(); C];
            for c in 0..C {
                vectors[c] = unsafe { simd.read(row.add(c * LANES)) };
            }
            for r in 0..R {
                let weight = simd.splat(unsafe { *weights.add(r * KEYS + key) });
                for c in 0..C {
                    totals[r][c] = simd.mul_add(weight, vectors[c], totals[r][c]);
                }
            }
            key += 1;
        }
    }
    for r in 0..R {
        for c in 0..C {
            unsafe { simd.store(sums.add(r * dim + column + c * LANES), totals[r][c]) };
        }
    }
}
