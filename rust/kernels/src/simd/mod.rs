//! Vectors of 16 floats, the same on every instruction set: same operations, same order, same bits.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod element;
mod functions;
mod portable;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
pub use element::{Bf16, Element, F16};
pub use portable::Portable;

/// Lanes of a vector.
pub const LANES: usize = 16;

/// An instruction set: a token that proves that the CPU has it, with the operations on vectors of 16 `f32`.
///
/// Everything is rounded to nearest even, with no contraction beyond the explicit [`Simd::mul_add`]. Comparisons with NaN
/// are false. Methods that take pointers need the named elements to be valid for reads or writes; no alignment is
/// needed, but 64 bytes are faster.
pub trait Simd: Copy + Send + Sync + 'static {
    /// 16 floats.
    type F: Copy;
    /// 16 truths.
    type M: Copy;

    /// Whether there are 32 vector registers of the full width: how big tiles should be.
    const WIDE: bool;

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::F;
    /// Lane `i` of the result is `lanes[i]`.
    fn from_array(self, lanes: [f32; LANES]) -> Self::F;
    /// The lanes.
    fn to_array(self, a: Self::F) -> [f32; LANES];

    /// Reads 16 floats.
    ///
    /// # Safety
    /// 16 elements at `from` are readable.
    unsafe fn load(self, from: *const f32) -> Self::F;
    /// Writes 16 floats.
    ///
    /// # Safety
    /// 16 elements at `to` are writable.
    unsafe fn store(self, to: *mut f32, a: Self::F);
    /// Reads 16 bfloat16.
    ///
    /// # Safety
    /// 16 elements at `from` are readable.
    unsafe fn load_bf16(self, from: *const Bf16) -> Self::F;
    /// Writes 16 bfloat16; a NaN becomes 0x7fc0, as in torch.
    ///
    /// # Safety
    /// 16 elements at `to` are writable.
    unsafe fn store_bf16(self, to: *mut Bf16, a: Self::F);
    /// Reads 16 IEEE half floats.
    ///
    /// # Safety
    /// 16 elements at `from` are readable.
    unsafe fn load_f16(self, from: *const F16) -> Self::F;
    /// Writes 16 IEEE half floats.
    ///
    /// # Safety
    /// 16 elements at `to` are writable.
    unsafe fn store_f16(self, to: *mut F16, a: Self::F);

    /// `a + b`.
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`.
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `c - a * b`, rounded once.
    fn neg_mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a` where it is greater than `b`, else `b` (so `b` where either is NaN).
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a` where it is less than `b`, else `b` (so `b` where either is NaN).
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// Square root.
    fn sqrt(self, a: Self::F) -> Self::F;
    /// `-a`.
    fn neg(self, a: Self::F) -> Self::F;
    /// `a` without its sign.
    fn abs(self, a: Self::F) -> Self::F;

    /// `a < b`.
    fn less(self, a: Self::F, b: Self::F) -> Self::M;
    /// `a <= b`.
    fn less_equal(self, a: Self::F, b: Self::F) -> Self::M;
    /// `a == b`.
    fn equal(self, a: Self::F, b: Self::F) -> Self::M;
    /// Lanes `0..n` (all from 16 on).
    fn first(self, n: usize) -> Self::M;
    /// Both.
    fn and(self, a: Self::M, b: Self::M) -> Self::M;
    /// Not.
    fn not(self, a: Self::M) -> Self::M;
    /// Bit `i` says lane `i`.
    fn bits(self, a: Self::M) -> u16;
    /// `a` where `mask`, else `b`.
    fn select(self, mask: Self::M, a: Self::F, b: Self::F) -> Self::F;

    /// `x * 2^n`, where `biased` is the float `n + 1.5 * 2^23`; for x and the result normal.
    fn scale_exponent(self, x: Self::F, biased: Self::F) -> Self::F;
    /// `(e, m)` with `a == m * 2^e` and m in [0.5, 1); for `a` positive and normal.
    fn split_exponent(self, a: Self::F) -> (Self::F, Self::F);

    /// Sum of the lanes: `i` with `i + 8`, then `i + 4`, `i + 2`, `i + 1`.
    fn reduce_add(self, a: Self::F) -> f32;
    /// Greatest lane, in the order of [`Simd::reduce_add`].
    fn reduce_max(self, a: Self::F) -> f32;

    /// Zero in every lane.
    #[inline(always)]
    fn zero(self) -> Self::F {
        self.splat(0.0)
    }

    /// e^a; less than 1.1 units in the last place from it. 0 below -87.3, infinite above 88.7. exp(0) is 1.
    #[inline(always)]
    fn exp(self, a: Self::F) -> Self::F {
        functions::exp(self, a)
    }

    /// Natural logarithm; less than 1.1 units in the last place from it. Subnormals count as 0, whose logarithm is -inf.
    #[inline(always)]
    fn ln(self, a: Self::F) -> Self::F {
        functions::ln(self, a)
    }

    /// Hyperbolic tangent, to about 2 units in the last place.
    #[inline(always)]
    fn tanh(self, a: Self::F) -> Self::F {
        functions::tanh(self, a)
    }

    /// Asks for the cache line at `address`, which need not be readable.
    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint about any address.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast::<i8>());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = address;
    }

    /// The 16 elements at `from`, as floats.
    ///
    /// # Safety
    /// 16 elements at `from` are readable.
    #[inline(always)]
    unsafe fn read<T: Element>(self, from: *const T) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { T::load(self, from) }
    }

    /// Rounds to 16 elements at `to`.
    ///
    /// # Safety
    /// 16 elements at `to` are writable.
    #[inline(always)]
    unsafe fn write<T: Element>(self, to: *mut T, a: Self::F) {
        // SAFETY: the caller's promise.
        unsafe { T::store(self, to, a) }
    }

    /// The first `n` (at most 16) elements at `from`; the other lanes are 0.
    ///
    /// # Safety
    /// `n` elements at `from` are readable.
    #[inline(always)]
    unsafe fn read_first<T: Element>(self, from: *const T, n: usize) -> Self::F {
        let mut lanes = [T::default(); LANES];
        // SAFETY: the caller's promise, and no more than the array holds.
        unsafe {
            std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), n.min(LANES));
            self.read(lanes.as_ptr())
        }
    }

    /// Rounds the first `n` (at most 16) lanes to `to`.
    ///
    /// # Safety
    /// `n` elements at `to` are writable.
    #[inline(always)]
    unsafe fn write_first<T: Element>(self, to: *mut T, a: Self::F, n: usize) {
        let mut lanes = [T::default(); LANES];
        // SAFETY: the caller's promise, and no more than the array holds.
        unsafe {
            self.write(lanes.as_mut_ptr(), a);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, n.min(LANES));
        }
    }
}
