//! RMS norm, optionally of a sum that is kept as well.

use super::{RowKernel, whole};
use crate::simd::{Element, LANES, Simd};

/// What the normalised row is multiplied by, and where the result is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scaling {
    /// Nothing.
    None,
    /// `weight * round(x)`: Llama, Qwen, Mistral.
    Rounded,
    /// `round(weight * x)`, as `OLMo` does.
    Weight,
    /// `round((1 + weight) * x)`: Gemma.
    OnePlus,
}

/// `output = norm(input + addend) * weight`, row by row, with `sum = input + addend` kept.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
    /// Address of the first row, and elements from one to the next.
    pub input: (usize, usize),
    /// Added to the input and rounded; address 0 for nothing.
    pub addend: (usize, usize),
    /// Where the sum goes, contiguous; unused without an addend.
    pub sum: usize,
    /// Address of the weight, `columns` elements of the input's type.
    pub weight: usize,
    /// How the weight is applied.
    pub scaling: Scaling,
    /// Added to the mean of the squares.
    pub epsilon: f32,
    /// Where the result goes, contiguous.
    pub output: usize,
}

impl RowKernel for Norm {
    fn rows(&self) -> usize {
        self.rows
    }

    fn width(&self) -> usize {
        self.columns
    }

    #[inline(always)]
    unsafe fn row<T: Element, S: Simd>(&self, simd: S, row: usize) {
        let n = self.columns;
        // SAFETY: the caller's promise: all rows are valid.
        unsafe {
            let mut input = (self.input.0 as *const T).add(row * self.input.1);
            if self.addend.0 != 0 {
                let addend = (self.addend.0 as *const T).add(row * self.addend.1);
                let sum = (self.sum as *mut T).add(row * n);
                add(simd, input, addend, sum, n);
                input = sum;
            }
            let output = (self.output as *mut T).add(row * n);
            normalise(simd, input, output, n, self.weight as *const T, self.scaling, self.epsilon);
        }
    }
}

#[inline(always)]
unsafe fn add<T: Element, S: Simd>(simd: S, a: *const T, b: *const T, sum: *mut T, n: usize) {
    let mut i = 0;
    // SAFETY: the caller's promise: n elements each.
    unsafe {
        while i < whole(n) {
            simd.write(sum.add(i), simd.add(simd.read(a.add(i)), simd.read(b.add(i))));
            i += LANES;
        }
        if i < n {
            let rest = n - i;
            let total = simd.add(simd.read_first(a.add(i), rest), simd.read_first(b.add(i), rest));
            simd.write_first(sum.add(i), total, rest);
        }
    }
}

/// Normalises `n` elements; `input` and `output` may be the same.
///
/// # Safety
/// `n` elements are readable at `input` (and at `weight` unless the scaling is `None`) and writable at `output`.
#[inline(always)]
pub(super) unsafe fn normalise<T: Element, S: Simd>(
    simd: S,
    input: *const T,
    output: *mut T,
    n: usize,
    weight: *const T,
    scaling: Scaling,
    epsilon: f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let scale = inverse_rms(simd, input, n, epsilon);
        let mut i = 0;
        while i < whole(n) {
            let x = simd.mul(simd.read(input.add(i)), scale);
            let w = if scaling == Scaling::None { x } else { simd.read(weight.add(i)) };
            simd.write(output.add(i), apply::<T, S>(simd, x, w, scaling));
            i += LANES;
        }
        if i < n {
            let rest = n - i;
            let x = simd.mul(simd.read_first(input.add(i), rest), scale);
            let w = if scaling == Scaling::None { x } else { simd.read_first(weight.add(i), rest) };
            simd.write_first(output.add(i), apply::<T, S>(simd, x, w, scaling), rest);
        }
    }
}

#[inline(always)]
fn apply<T: Element, S: Simd>(simd: S, x: S::F, weight: S::F, scaling: Scaling) -> S::F {
    match scaling {
        Scaling::None => x,
        Scaling::Rounded => simd.mul(weight, round::<T, S>(simd, x)),
        Scaling::Weight => simd.mul(weight, x),
        Scaling::OnePlus => simd.mul(x, simd.add(simd.splat(1.0), weight)),
    }
}

/// To the element type and back.
#[inline(always)]
pub(super) fn round<T: Element, S: Simd>(simd: S, a: S::F) -> S::F {
    let mut lanes = [T::default(); LANES];
    // SAFETY: 16 elements are there.
    unsafe {
        simd.write(lanes.as_mut_ptr(), a);
        simd.read(lanes.as_ptr())
    }
}

#[inline(always)]
unsafe fn inverse_rms<T: Element, S: Simd>(simd: S, input: *const T, n: usize, epsilon: f32) -> S::F {
    let mut sums = [simd.zero(); 4];
    let mut i = 0;
    // SAFETY: the caller's promise: n elements.
    unsafe {
        while i + 4 * LANES <= n {
            let mut part = 0;
            while part < 4 {
                let x = simd.read(input.add(i + part * LANES));
                sums[part] = simd.mul_add(x, x, sums[part]);
                part += 1;
            }
            i += 4 * LANES;
        }
        while i < whole(n) {
            let x = simd.read(input.add(i));
            sums[0] = simd.mul_add(x, x, sums[0]);
            i += LANES;
        }
        if i < n {
            let x = simd.read_first(input.add(i), n - i);
            sums[1] = simd.mul_add(x, x, sums[1]);
        }
    }
    let total = simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3]));
    #[expect(clippy::cast_precision_loss, reason = "a row's length is far below 2^24")]
    let mean = simd.reduce_add(total) / n as f32;
    simd.splat(1.0 / (mean + epsilon).sqrt())
}
