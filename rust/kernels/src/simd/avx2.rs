//! [`Simd`] with AVX2, FMA and F16C: two vectors of eight.

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _CMP_EQ_OQ, _CMP_LE_OQ, _CMP_LT_OQ, _MM_FROUND_TO_NEAREST_INT, _mm_add_ps, _mm_cvtss_f32,
    _mm_loadu_si128, _mm_max_ps, _mm_permute_ps, _mm_storeu_si128, _mm256_add_epi32, _mm256_add_ps, _mm256_and_ps,
    _mm256_and_si256, _mm256_andnot_ps, _mm256_blendv_epi8, _mm256_blendv_ps, _mm256_castps_si256,
    _mm256_castps256_ps128, _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cvtepi32_ps, _mm256_cvtepu16_epi32,
    _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_div_ps, _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_fnmadd_ps,
    _mm256_loadu_ps, _mm256_loadu_si256, _mm256_max_ps, _mm256_min_ps, _mm256_movemask_ps, _mm256_mul_ps,
    _mm256_or_si256, _mm256_packus_epi32, _mm256_permute4x64_epi64, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_slli_epi32, _mm256_sqrt_ps, _mm256_srli_epi32, _mm256_storeu_ps, _mm256_storeu_si256, _mm256_sub_epi32,
    _mm256_sub_ps, _mm256_xor_ps,
};

use super::{Bf16, F16, LANES, Simd};
use crate::isa::Isa;

/// A CPU with AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

impl Avx2 {
    /// The token, where the CPU has the features.
    pub fn detect() -> Option<Self> {
        Isa::Avx2.is_available().then_some(Self(()))
    }
}

/// Lanes 0 to 7 and 8 to 15; of a mask, all bits of a lane or none.
type Pair = [__m256; 2];

/// A window of 16 at `16 - n` has n lanes set.
static PREFIX: [i32; 32] = {
    let mut lanes = [0; 32];
    let mut i = 0;
    while i < 16 {
        lanes[i] = -1;
        i += 1;
    }
    lanes
};

const HALF_ROUNDING: i32 = _MM_FROUND_TO_NEAREST_INT;

// SAFETY of every block below: the token proves that the CPU has the features; pointers are the caller's promise.
macro_rules! each {
    ($operation:ident $(::<$parameter:ident>)? ($($argument:expr),+)) => {
        unsafe { [$operation$(::<$parameter>)?($($argument[0]),+), $operation$(::<$parameter>)?($($argument[1]),+)] }
    };
}

macro_rules! reduce {
    ($value:expr, $wide:ident, $narrow:ident) => {{
        let a = $value;
        unsafe {
            let a = $wide(a[0], a[1]);
            let a = $narrow(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = $narrow(a, _mm_permute_ps::<0b11_10_11_10>(a));
            let a = $narrow(a, _mm_permute_ps::<0b01_01_01_01>(a));
            _mm_cvtss_f32(a)
        }
    }};
}

impl Simd for Avx2 {
    type F = Pair;
    type M = Pair;
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Pair {
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    fn from_array(self, lanes: [f32; LANES]) -> Pair {
        unsafe { self.load(lanes.as_ptr()) }
    }
    #[inline(always)]
    fn to_array(self, a: Pair) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        unsafe { self.store(lanes.as_mut_ptr(), a) };
        lanes
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Pair {
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: Pair) {
        unsafe {
            _mm256_storeu_ps(to, a[0]);
            _mm256_storeu_ps(to.add(8), a[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const Bf16) -> Pair {
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast::<__m128i>()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(8).cast::<__m128i>()));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high))]
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut Bf16, a: Pair) {
        let [low, high] = each!(round_bf16(a));
        unsafe {
            // Packing interleaves the halves of 128 bits.
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
            _mm256_storeu_si256(to.cast::<__m256i>(), packed);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const F16) -> Pair {
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(from.cast::<__m128i>())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast::<__m128i>())),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut F16, a: Pair) {
        unsafe {
            _mm_storeu_si128(to.cast::<__m128i>(), _mm256_cvtps_ph::<HALF_ROUNDING>(a[0]));
            _mm_storeu_si128(to.add(8).cast::<__m128i>(), _mm256_cvtps_ph::<HALF_ROUNDING>(a[1]));
        }
    }
    #[inline(always)]
    fn add(self, a: Pair, b: Pair) -> Pair {
        each!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Pair, b: Pair) -> Pair {
        each!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Pair, b: Pair) -> Pair {
        each!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: Pair, b: Pair) -> Pair {
        each!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn mul_add(self, a: Pair, b: Pair, c: Pair) -> Pair {
        each!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn neg_mul_add(self, a: Pair, b: Pair, c: Pair) -> Pair {
        each!(_mm256_fnmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: Pair, b: Pair) -> Pair {
        each!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: Pair, b: Pair) -> Pair {
        each!(_mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn sqrt(self, a: Pair) -> Pair {
        each!(_mm256_sqrt_ps(a))
    }
    #[inline(always)]
    fn neg(self, a: Pair) -> Pair {
        each!(_mm256_xor_ps(a, self.splat(-0.0)))
    }
    #[inline(always)]
    fn abs(self, a: Pair) -> Pair {
        each!(_mm256_andnot_ps(self.splat(-0.0), a))
    }
    #[inline(always)]
    fn less(self, a: Pair, b: Pair) -> Pair {
        each!(_mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
    }
    #[inline(always)]
    fn less_equal(self, a: Pair, b: Pair) -> Pair {
        each!(_mm256_cmp_ps::<_CMP_LE_OQ>(a, b))
    }
    #[inline(always)]
    fn equal(self, a: Pair, b: Pair) -> Pair {
        each!(_mm256_cmp_ps::<_CMP_EQ_OQ>(a, b))
    }
    #[inline(always)]
    fn first(self, n: usize) -> Pair {
        unsafe {
            let lanes = PREFIX.as_ptr().add(LANES - n.min(LANES));
            [
                _mm256_castsi256_ps(_mm256_loadu_si256(lanes.cast::<__m256i>())),
                _mm256_castsi256_ps(_mm256_loadu_si256(lanes.add(8).cast::<__m256i>())),
            ]
        }
    }
    #[inline(always)]
    fn and(self, a: Pair, b: Pair) -> Pair {
        each!(_mm256_and_ps(a, b))
    }
    #[inline(always)]
    fn not(self, a: Pair) -> Pair {
        each!(_mm256_andnot_ps(a, self.first(LANES)))
    }
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "two times 8 bits")]
    fn bits(self, a: Pair) -> u16 {
        let [low, high] = each!(_mm256_movemask_ps(a));
        (low | high << 8) as u16
    }
    #[inline(always)]
    fn select(self, mask: Pair, a: Pair, b: Pair) -> Pair {
        each!(_mm256_blendv_ps(b, a, mask))
    }
    #[inline(always)]
    fn scale_exponent(self, x: Pair, biased: Pair) -> Pair {
        each!(scale(x, biased))
    }
    #[inline(always)]
    fn split_exponent(self, a: Pair) -> (Pair, Pair) {
        (each!(exponent(a)), each!(fraction(a)))
    }
    #[inline(always)]
    fn reduce_add(self, a: Pair) -> f32 {
        reduce!(a, _mm256_add_ps, _mm_add_ps)
    }
    #[inline(always)]
    fn reduce_max(self, a: Pair) -> f32 {
        reduce!(a, _mm256_max_ps, _mm_max_ps)
    }
}

#[inline(always)]
unsafe fn round_bf16(a: __m256) -> __m256i {
    unsafe {
        let bits = _mm256_castps_si256(a);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let number = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_EQ_OQ>(a, a));
        _mm256_blendv_epi8(_mm256_set1_epi32(0x7fc0), _mm256_srli_epi32::<16>(rounded), number)
    }
}

#[inline(always)]
unsafe fn scale(x: __m256, biased: __m256) -> __m256 {
    unsafe {
        let shift = _mm256_slli_epi32::<23>(_mm256_castps_si256(biased));
        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), shift))
    }
}

#[inline(always)]
unsafe fn exponent(a: __m256) -> __m256 {
    unsafe {
        let bits = _mm256_srli_epi32::<23>(_mm256_castps_si256(a));
        _mm256_cvtepi32_ps(_mm256_sub_epi32(bits, _mm256_set1_epi32(126)))
    }
}

#[inline(always)]
unsafe fn fraction(a: __m256) -> __m256 {
    unsafe {
        let bits = _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x007f_ffff));
        _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x3f00_0000)))
    }
}
