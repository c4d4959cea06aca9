//! Rotary position embedding of queries and keys, optionally after a norm of each head.

use super::norm::{Scaling, normalise, round};
use super::{RowKernel, whole};
use crate::simd::{Element, LANES, Simd};

/// The heads of all rows of a tensor; the heads of a row lie side by side.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Heads of a row; 0 for no tensor.
    pub heads: usize,
    /// Address of the first row, and elements from one to the next.
    pub input: (usize, usize),
    /// Where the result goes; may be the input.
    pub output: (usize, usize),
    /// Address of the norm's weight, one head long; 0 for no norm.
    pub weight: usize,
    /// How the weight is applied.
    pub scaling: Scaling,
}

/// `output = x * cos + rotate_half(x) * sin` with `x` the normalised head.
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    /// Number of rows.
    pub rows: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Queries and keys.
    pub tensors: [Heads; 2],
    /// Address of the cosines of the first row, and elements from one row to the next; the element type is the heads'.
    pub cos: (usize, usize),
    /// As the cosines.
    pub sin: (usize, usize),
    /// Of the norm.
    pub epsilon: f32,
}

impl RowKernel for Rotary {
    fn rows(&self) -> usize {
        self.rows
    }

    fn width(&self) -> usize {
        self.head_dim * (self.tensors[0].heads + self.tensors[1].heads)
    }

    #[inline(always)]
    unsafe fn row<T: Element, S: Simd>(&self, simd: S, row: usize) {
        // SAFETY: the caller's promise: all rows are valid.
        unsafe {
            let cos = (self.cos.0 as *const T).add(row * self.cos.1);
            let sin = (self.sin.0 as *const T).add(row * self.sin.1);
            for tensor in &self.tensors {
                for head in 0..tensor.heads {
                    let offset = head * self.head_dim;
                    let mut input = (tensor.input.0 as *const T).add(row * tensor.input.1 + offset);
                    let output = (tensor.output.0 as *mut T).add(row * tensor.output.1 + offset);
                    if tensor.weight != 0 {
                        let weight = tensor.weight as *const T;
                        normalise(simd, input, output, self.head_dim, weight, tensor.scaling, self.epsilon);
                        input = output;
                    }
                    rotate(simd, input, output, self.head_dim, cos, sin);
                }
            }
        }
    }
}

/// One head; `input` and `output` may be the same.
#[inline(always)]
unsafe fn rotate<T: Element, S: Simd>(
    simd: S,
    input: *const T,
    output: *mut T,
    head_dim: usize,
    cos: *const T,
    sin: *const T,
) {
    let half = head_dim / 2;
    let mut i = 0;
    // SAFETY: the caller's promise: `head_dim` elements each.
    unsafe {
        while i < whole(half) {
            let (low, high) = (simd.read(input.add(i)), simd.read(input.add(half + i)));
            let first = sum::<T, S>(simd, low, simd.read(cos.add(i)), simd.neg(high), simd.read(sin.add(i)));
            let (far_cos, far_sin) = (simd.read(cos.add(half + i)), simd.read(sin.add(half + i)));
            let second = sum::<T, S>(simd, high, far_cos, low, far_sin);
            simd.write(output.add(i), first);
            simd.write(output.add(half + i), second);
            i += LANES;
        }
        if i < half {
            let n = half - i;
            let (low, high) = (simd.read_first(input.add(i), n), simd.read_first(input.add(half + i), n));
            let (near_cos, near_sin) = (simd.read_first(cos.add(i), n), simd.read_first(sin.add(i), n));
            let (far_cos, far_sin) = (simd.read_first(cos.add(half + i), n), simd.read_first(sin.add(half + i), n));
            let first = sum::<T, S>(simd, low, near_cos, simd.neg(high), near_sin);
            let second = sum::<T, S>(simd, high, far_cos, low, far_sin);
            simd.write_first(output.add(i), first, n);
            simd.write_first(output.add(half + i), second, n);
        }
    }
}

/// `round(a * b) + round(c * d)`.
#[inline(always)]
fn sum<T: Element, S: Simd>(simd: S, a: S::F, b: S::F, c: S::F, d: S::F) -> S::F {
    simd.add(round::<T, S>(simd, simd.mul(a, b)), round::<T, S>(simd, simd.mul(c, d)))
}
