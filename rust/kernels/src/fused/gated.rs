//! The product of an activated gate with another row.

use super::norm::round;
use super::{RowKernel, whole};
use crate::simd::{Element, LANES, Simd};

/// The activation of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + exp(-x))`.
    Silu,
    /// The approximation of GELU by the hyperbolic tangent.
    GeluTanh,
}

/// `output = round(activation(gate)) * up`, row by row.
#[derive(Clone, Copy, Debug)]
pub struct Gated {
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
    /// Address of the first row, and elements from one to the next.
    pub gate: (usize, usize),
    /// As the gate.
    pub up: (usize, usize),
    /// What is done to the gate.
    pub activation: Activation,
    /// Where the result goes, contiguous.
    pub output: usize,
}

impl RowKernel for Gated {
    fn rows(&self) -> usize {
        self.rows
    }

    fn width(&self) -> usize {
        self.columns
    }

    #[inline(always)]
    unsafe fn row<T: Element, S: Simd>(&self, simd: S, row: usize) {
        let n = self.columns;
        let mut i = 0;
        // SAFETY: the caller's promise: all rows are valid.
        unsafe {
            let gate = (self.gate.0 as *const T).add(row * self.gate.1);
            let up = (self.up.0 as *const T).add(row * self.up.1);
            let output = (self.output as *mut T).add(row * n);
            while i < whole(n) {
                let active = round::<T, S>(simd, activate(simd, simd.read(gate.add(i)), self.activation));
                simd.write(output.add(i), simd.mul(active, simd.read(up.add(i))));
                i += LANES;
            }
            if i < n {
                let rest = n - i;
                let active = activate(simd, simd.read_first(gate.add(i), rest), self.activation);
                let product = simd.mul(round::<T, S>(simd, active), simd.read_first(up.add(i), rest));
                simd.write_first(output.add(i), product, rest);
            }
        }
    }
}

#[inline(always)]
fn activate<S: Simd>(simd: S, x: S::F, activation: Activation) -> S::F {
    let one = simd.splat(1.0);
    match activation {
        Activation::Silu => simd.div(x, simd.add(one, simd.exp(simd.neg(x)))),
        Activation::GeluTanh => {
            const SLOPE: f32 = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2;
            let cubed = simd.mul(simd.mul(x, x), x);
            let inner = simd.mul(simd.splat(SLOPE), simd.mul_add(simd.splat(0.044_715), cubed, x));
            simd.mul(simd.mul(simd.splat(0.5), x), simd.add(one, simd.tanh(inner)))
        }
    }
}
