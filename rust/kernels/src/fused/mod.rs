//! Fused operations of the forward pass: RMS norm, rotary embedding, gated activation; and linear layers of few rows.
//!
//! Every result is rounded to the element type where the unfused operations of `transformers` round it.

mod gated;
mod linear;
mod norm;
mod rotary;

pub use gated::{Activation, Gated};
pub use linear::{Linear, MOST_ROWS, Weight};
pub use norm::{Norm, Scaling};
pub use rotary::{Heads, Rotary};

use crate::isa::{Isa, Kernel};
use crate::pool::pool;
use crate::simd::{Bf16, F16, LANES, Simd};

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// `f32`.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
}

/// An operation on rows that do not depend on each other.
trait RowKernel: Copy + Send + Sync {
    /// Number of rows.
    fn rows(&self) -> usize;
    /// Elements that a row reads, about.
    fn width(&self) -> usize;
    /// Computes one row, whose elements are `T`.
    ///
    /// # Safety
    /// The tensors that the kernel's fields describe are valid, for elements `T`, and nobody else writes them.
    unsafe fn row<T: crate::simd::Element, S: Simd>(&self, simd: S, row: usize);
}

struct Rows<'a, K> {
    kernel: &'a K,
    element: Type,
    start: usize,
    end: usize,
}

impl<K: RowKernel> Kernel for Rows<'_, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for row in self.start..self.end {
            // SAFETY: the promise to `run`.
            unsafe {
                match self.element {
                    Type::F32 => self.kernel.row::<f32, S>(simd, row),
                    Type::Bf16 => self.kernel.row::<Bf16, S>(simd, row),
                    Type::F16 => self.kernel.row::<F16, S>(simd, row),
                }
            }
        }
    }
}

/// Elements below which a second thread costs more than it brings.
const SHARE: usize = 1 << 15;

/// Computes all rows of `kernel`, on the pool where there are many elements.
///
/// # Safety
/// The tensors that the kernel's fields describe are valid, for elements of type `element`, and nobody else reads what
/// it writes or writes what it reads.
unsafe fn run<K: RowKernel>(kernel: &K, element: Type) {
    let rows = kernel.rows();
    let tasks = (rows * kernel.width() / SHARE).clamp(1, pool().num_threads().min(rows.max(1)));
    let isa = Isa::active();
    pool().run(tasks, |task| {
        isa.run(Rows { kernel, element, start: rows * task / tasks, end: rows * (task + 1) / tasks });
    });
}

// Not generic, so that the code of every kernel is compiled with this crate's optimisation.
macro_rules! entry_points {
    ($($kernel:ty),+) => {$(
        impl $kernel {
            /// Computes all rows, on the pool where there are many elements.
            ///
            /// # Safety
            /// The tensors that the fields describe are valid, for elements of type `element`; nobody else reads what
            /// is written or writes what is read.
            pub unsafe fn run(&self, element: Type) {
                // SAFETY: the caller's promise.
                unsafe { run(self, element) };
            }

            /// Elements that are read, about.
            pub fn size(&self) -> usize {
                self.rows() * self.width()
            }
        }
    )+};
}
entry_points!(Gated, Norm, Rotary);

/// Length of the part of `n` elements that whole vectors cover.
#[inline(always)]
fn whole(n: usize) -> usize {
    n / LANES * LANES
}
