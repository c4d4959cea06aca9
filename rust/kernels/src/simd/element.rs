//! Elements of tensors: `f32`, bfloat16 and IEEE half, each converted exactly to `f32` and rounded to nearest even back.

use super::Simd;

/// A bfloat16: the upper half of an `f32`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// An IEEE half float.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

/// An element of a tensor that kernels read and write, computing in `f32`.
pub trait Element: Copy + Default + Send + Sync + 'static {
    /// The exact value.
    fn to_f32(self) -> f32;
    /// Rounded to nearest even.
    fn from_f32(value: f32) -> Self;
    /// 16 of them; see [`Simd::read`].
    ///
    /// # Safety
    /// 16 elements at `from` are readable.
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F;
    /// 16 of them; see [`Simd::write`].
    ///
    /// # Safety
    /// 16 elements at `to` are writable.
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, a: S::F);
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { simd.load(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, a: S::F) {
        // SAFETY: the caller's promise.
        unsafe { simd.store(to, a) }
    }
}

impl Element for Bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        Self(if value.is_nan() { 0x7fc0 } else { rounded as u16 })
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { simd.load_bf16(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, a: S::F) {
        // SAFETY: the caller's promise.
        unsafe { simd.store_bf16(to, a) }
    }
}

impl Element for F16 {
    /// As the conversion instructions of CPUs: a signalling NaN becomes quiet.
    #[inline(always)]
    fn to_f32(self) -> f32 {
        let (sign, magnitude) = (u32::from(self.0 >> 15) << 31, u32::from(self.0 & 0x7fff));
        let bits = match magnitude {
            // Subnormal: the fraction counts units of 2^-24, which f32 holds exactly.
            0..=0x03ff => {
                #[expect(clippy::cast_precision_loss, reason = "at most 10 bits")]
                let value = magnitude as f32 * (1.0 / 16_777_216.0);
                value.to_bits()
            }
            0x0400..=0x7bff => (magnitude << 13) + ((127 - 15) << 23),
            0x7c00 => 0x7f80_0000,
            _ => 0x7fc0_0000 | (magnitude & 0x03ff) << 13,
        };
        f32::from_bits(sign | bits)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let (sign, magnitude) = ((value.to_bits() >> 16) & 0x8000, value.to_bits() & 0x7fff_ffff);
        let bits = match magnitude {
            // Below 2^-14: adding 0.5 rounds to units of 2^-24 (2^-24 is the last bit of floats in [0.5, 1)).
            0..=0x387f_ffff => (f32::from_bits(magnitude) + 0.5).to_bits() - 0x3f00_0000,
            // Below 65520: round the 13 bits away; a carry runs into the exponent, up to infinity.
            0x3880_0000..=0x477f_efff => (magnitude - ((127 - 15) << 23) + 0x0fff + ((magnitude >> 13) & 1)) >> 13,
            0x477f_f000..=0x7f80_0000 => 0x7c00,
            _ => 0x7e00 | (magnitude >> 13) & 0x03ff,
        };
        #[expect(clippy::cast_possible_truncation, reason = "each case gives 15 bits")]
        Self((sign | bits) as u16)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { simd.load_f16(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, a: S::F) {
        // SAFETY: the caller's promise.
        unsafe { simd.store_f16(to, a) }
    }
}
