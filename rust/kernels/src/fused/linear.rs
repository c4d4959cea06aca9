//! Linear layers of few rows in bfloat16: weights are read once, as they are, which is all that takes time.

use crate::pool::pool;
use crate::simd::Bf16;

/// Most rows that are worth it: with more, a matrix unit is faster than reading.
pub const MOST_ROWS: usize = 8;

/// One weight matrix.
#[derive(Clone, Copy, Debug)]
pub struct Weight {
    /// Address of `[outputs, depth]` bfloat16, contiguous.
    pub address: usize,
    /// Rows of the matrix.
    pub outputs: usize,
    /// Address of `[outputs]` bfloat16; 0 for none.
    pub bias: usize,
}

/// `output = input * weights^T + bias` for bfloat16, the outputs of several weights side by side.
///
/// Products are summed in `f32` and the sum is rounded once.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// Number of rows, at most [`MOST_ROWS`].
    pub rows: usize,
    /// Columns of the input and of the weights.
    pub depth: usize,
    /// Address of the first row, and elements from one to the next.
    pub input: (usize, usize),
    /// The matrices.
    pub weights: &'a [Weight],
    /// Address of the result, contiguous.
    pub output: usize,
}

impl Linear<'_> {
    /// Whether this CPU can: it needs AVX-512 with products of bfloat16.
    pub fn is_available() -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512bf16")
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            false
        }
    }

    /// Elements of the weights.
    pub fn size(&self) -> usize {
        self.depth * self.weights.iter().map(|weight| weight.outputs).sum::<usize>()
    }

    /// Computes all of it, on the pool where the weights are big; false, and nothing done, where the CPU or the number of
    /// rows does not allow it.
    ///
    /// # Safety
    /// The tensors that the fields describe are valid; nobody else reads what is written or writes what is read.
    pub unsafe fn run(&self) -> bool {
        if !Self::is_available() || self.rows > MOST_ROWS {
            return false;
        }
        #[cfg(target_arch = "x86_64")]
        {
            let stride: usize = self.weights.iter().map(|weight| weight.outputs).sum();
            let mut first = 0;
            for &weight in self.weights {
                let tasks = (weight.outputs * self.depth / super::SHARE).clamp(1, pool().num_threads());
                pool().run(tasks, |task| {
                    let part = weight.outputs * task / tasks..weight.outputs * (task + 1) / tasks;
                    // SAFETY: the CPU has the features, and the caller's promise.
                    unsafe { avx512::columns(self, weight, part, first, stride) };
                });
                first += weight.outputs;
            }
        }
        true
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::{
        __m512, __m512bh, __mmask32, _MM_HINT_T0, _mm_prefetch, _mm512_dpbf16_ps, _mm512_loadu_si512,
        _mm512_maskz_loadu_epi16, _mm512_reduce_add_ps, _mm512_setzero_ps,
    };
    use std::ops::Range;

    use super::{Bf16, Linear, Weight};
    use crate::simd::Element;

    /// Elements of a vector.
    const LANES: usize = 32;

    /// The outputs `part` of one weight, whose first output goes to column `first` of rows of `stride`.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub(super) unsafe fn columns(linear: &Linear<'_>, weight: Weight, part: Range<usize>, first: usize, stride: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            match linear.rows {
                0 => {}
                1 => blocks::<1, 8>(linear, weight, part, first, stride),
                2 => blocks::<2, 8>(linear, weight, part, first, stride),
                3 | 4 => blocks::<4, 4>(linear, weight, part, first, stride),
                _ => blocks::<8, 2>(linear, weight, part, first, stride),
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn blocks<const ROWS: usize, const OUTPUTS: usize>(
        linear: &Linear<'_>,
        weight: Weight,
        part: Range<usize>,
        first: usize,
        stride: usize,
    ) {
        let input = linear.input.0 as *const Bf16;
        // Rows that are not there repeat the last one, and are not stored.
        let rows: [*const Bf16; ROWS] =
            std::array::from_fn(|row| input.wrapping_add(row.min(linear.rows - 1) * linear.input.1));
        let matrix = weight.address as *const Bf16;
        let mut output = part.start;
        while output < part.end {
            let last = part.end - 1;
            let columns: [*const Bf16; OUTPUTS] =
                std::array::from_fn(|i| matrix.wrapping_add((output + i).min(last) * linear.depth));
            // SAFETY: all pointers are to `depth` elements.
            let sums = unsafe { products(rows, columns, linear.depth) };
            for (row, sums) in sums.iter().enumerate().take(linear.rows) {
                for (i, &sum) in sums.iter().enumerate().take(part.end - output) {
                    let mut total = _mm512_reduce_add_ps(sum);
                    // SAFETY: the bias has an element for each output, the result a row for each of the input.
                    unsafe {
                        if weight.bias != 0 {
                            total += (*(weight.bias as *const Bf16).add(output + i)).to_f32();
                        }
                        let to = (linear.output as *mut Bf16).add(row * stride + first + output + i);
                        *to = Bf16::from_f32(total);
                    }
                }
            }
            output += OUTPUTS;
        }
    }

    /// The products of each row with each column, not yet summed over the lanes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn products<const ROWS: usize, const OUTPUTS: usize>(
        rows: [*const Bf16; ROWS],
        columns: [*const Bf16; OUTPUTS],
        depth: usize,
    ) -> [[__m512; OUTPUTS]; ROWS] {
        let mut sums = [[_mm512_setzero_ps(); OUTPUTS]; ROWS];
        let mut k = 0;
        // SAFETY: `depth` elements are readable at every pointer.
        unsafe {
            while k + LANES <= depth {
                let inputs: [__m512bh; ROWS] = std::array::from_fn(|row| load(rows[row].add(k)));
                for (i, column) in columns.iter().enumerate() {
                    // The rows of the next block: a row is too short for the CPU to foresee them. Past the end is no fault.
                    _mm_prefetch::<_MM_HINT_T0>(column.wrapping_add(OUTPUTS * depth + k).cast());
                    let weights = load(column.add(k));
                    for (row, sums) in sums.iter_mut().enumerate() {
                        sums[i] = _mm512_dpbf16_ps(sums[i], inputs[row], weights);
                    }
                }
                k += LANES;
            }
            if k < depth {
                let mask: __mmask32 = (1 << (depth - k)) - 1;
                for (i, column) in columns.iter().enumerate() {
                    let weights = load_first(column.add(k), mask);
                    for (row, sums) in sums.iter_mut().enumerate() {
                        sums[i] = _mm512_dpbf16_ps(sums[i], load_first(rows[row].add(k), mask), weights);
                    }
                }
            }
        }
        sums
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn load(from: *const Bf16) -> __m512bh {
        // SAFETY: the caller's promise; both types are 64 plain bytes.
        unsafe { std::mem::transmute(_mm512_loadu_si512(from.cast())) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn load_first(from: *const Bf16, mask: __mmask32) -> __m512bh {
        // SAFETY: the caller's promise for the elements of the mask; both types are 64 plain bytes.
        unsafe { std::mem::transmute(_mm512_maskz_loadu_epi16(mask, from.cast())) }
    }
}
