//! [`Simd`] with AVX-512.

use std::arch::x86_64::{
    __m256i, __m512, __mmask16, _CMP_EQ_OQ, _CMP_LE_OQ, _CMP_LT_OQ, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT,
    _mm_cvtss_f32, _mm256_loadu_si256, _mm256_storeu_si256, _mm512_abs_ps, _mm512_add_epi32, _mm512_add_ps,
    _mm512_and_epi32, _mm512_castps_si512, _mm512_castps512_ps128, _mm512_castsi512_ps, _mm512_cmp_ps_mask,
    _mm512_cvtepi32_epi16, _mm512_cvtepi32_ps, _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_div_ps,
    _mm512_fmadd_ps, _mm512_fnmadd_ps, _mm512_loadu_ps, _mm512_mask_blend_epi32, _mm512_mask_blend_ps, _mm512_max_ps,
    _mm512_min_ps, _mm512_mul_ps, _mm512_or_epi32, _mm512_permute_ps, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_shuffle_f32x4, _mm512_slli_epi32, _mm512_sqrt_ps, _mm512_srli_epi32, _mm512_storeu_ps, _mm512_sub_epi32,
    _mm512_sub_ps, _mm512_xor_epi32,
};

use super::{Bf16, F16, LANES, Simd};
use crate::isa::Isa;

/// A CPU with AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy, Debug)]
pub struct Avx512(());

impl Avx512 {
    /// The token, where the CPU has the features.
    pub fn detect() -> Option<Self> {
        Isa::Avx512.is_available().then_some(Self(()))
    }
}

const HALF_ROUNDING: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

// SAFETY of every block below: the token proves that the CPU has the features; pointers are the caller's promise.
macro_rules! reduce {
    ($value:expr, $operation:ident) => {{
        let a = $value;
        unsafe {
            let a = $operation(a, _mm512_shuffle_f32x4::<0b11_10_11_10>(a, a));
            let a = $operation(a, _mm512_shuffle_f32x4::<0b01_01_01_01>(a, a));
            let a = $operation(a, _mm512_permute_ps::<0b11_10_11_10>(a));
            let a = $operation(a, _mm512_permute_ps::<0b01_01_01_01>(a));
            _mm_cvtss_f32(_mm512_castps512_ps128(a))
        }
    }};
}

impl Simd for Avx512 {
    type F = __m512;
    type M = __mmask16;
    const WIDE: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn from_array(self, lanes: [f32; LANES]) -> __m512 {
        unsafe { _mm512_loadu_ps(lanes.as_ptr()) }
    }
    #[inline(always)]
    fn to_array(self, a: __m512) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), a) };
        lanes
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: __m512) {
        unsafe { _mm512_storeu_ps(to, a) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const Bf16) -> __m512 {
        unsafe {
            let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast::<__m256i>()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut Bf16, a: __m512) {
        unsafe {
            let bits = _mm512_castps_si512(a);
            let odd = _mm512_and_epi32(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let rounded = _mm512_srli_epi32::<16>(rounded);
            let number = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, a);
            let result = _mm512_mask_blend_epi32(number, _mm512_set1_epi32(0x7fc0), rounded);
            _mm256_storeu_si256(to.cast::<__m256i>(), _mm512_cvtepi32_epi16(result));
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const F16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast::<__m256i>())) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut F16, a: __m512) {
        unsafe { _mm256_storeu_si256(to.cast::<__m256i>(), _mm512_cvtps_ph::<HALF_ROUNDING>(a)) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn neg_mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn sqrt(self, a: __m512) -> __m512 {
        unsafe { _mm512_sqrt_ps(a) }
    }
    #[inline(always)]
    fn neg(self, a: __m512) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_xor_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(i32::MIN))) }
    }
    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        unsafe { _mm512_abs_ps(a) }
    }
    #[inline(always)]
    fn less(self, a: __m512, b: __m512) -> __mmask16 {
        unsafe { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b) }
    }
    #[inline(always)]
    fn less_equal(self, a: __m512, b: __m512) -> __mmask16 {
        unsafe { _mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b) }
    }
    #[inline(always)]
    fn equal(self, a: __m512, b: __m512) -> __mmask16 {
        unsafe { _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b) }
    }
    #[inline(always)]
    fn first(self, n: usize) -> __mmask16 {
        if n >= LANES { u16::MAX } else { (1 << n) - 1 }
    }
    #[inline(always)]
    fn and(self, a: __mmask16, b: __mmask16) -> __mmask16 {
        a & b
    }
    #[inline(always)]
    fn not(self, a: __mmask16) -> __mmask16 {
        !a
    }
    #[inline(always)]
    fn bits(self, a: __mmask16) -> u16 {
        a
    }
    #[inline(always)]
    fn select(self, mask: __mmask16, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mask_blend_ps(mask, b, a) }
    }
    #[inline(always)]
    fn scale_exponent(self, x: __m512, biased: __m512) -> __m512 {
        unsafe {
            let shift = _mm512_slli_epi32::<23>(_mm512_castps_si512(biased));
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), shift))
        }
    }
    #[inline(always)]
    fn split_exponent(self, a: __m512) -> (__m512, __m512) {
        unsafe {
            let bits = _mm512_castps_si512(a);
            let exponent = _mm512_sub_epi32(_mm512_srli_epi32::<23>(bits), _mm512_set1_epi32(126));
            let fraction = _mm512_and_epi32(bits, _mm512_set1_epi32(0x007f_ffff));
            let fraction = _mm512_or_epi32(fraction, _mm512_set1_epi32(0x3f00_0000));
            (_mm512_cvtepi32_ps(exponent), _mm512_castsi512_ps(fraction))
        }
    }
    #[inline(always)]
    fn reduce_add(self, a: __m512) -> f32 {
        reduce!(a, _mm512_add_ps)
    }
    #[inline(always)]
    fn reduce_max(self, a: __m512) -> f32 {
        reduce!(a, _mm512_max_ps)
    }
}
