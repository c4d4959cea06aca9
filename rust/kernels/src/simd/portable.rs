//! [`Simd`] in plain Rust: the definition of what the others do.

use super::{Bf16, Element, F16, LANES, Simd};

/// Any CPU.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

/// 16 floats, aligned to a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Floats([f32; LANES]);

macro_rules! lanes {
    ($index:ident => $value:expr) => {{
        let mut result = [0.0_f32; LANES];
        let mut $index = 0;
        while $index < LANES {
            result[$index] = $value;
            $index += 1;
        }
        Floats(result)
    }};
}

macro_rules! mask {
    ($index:ident => $value:expr) => {{
        let mut result = 0_u16;
        let mut $index = 0;
        while $index < LANES {
            result |= u16::from($value) << $index;
            $index += 1;
        }
        result
    }};
}

#[inline(always)]
unsafe fn read<T: Element>(from: *const T) -> Floats {
    // SAFETY: the caller says that 16 elements are there.
    lanes!(i => unsafe { from.add(i).read_unaligned() }.to_f32())
}

#[inline(always)]
unsafe fn write<T: Element>(to: *mut T, a: Floats) {
    for (i, value) in a.0.into_iter().enumerate() {
        // SAFETY: the caller says that 16 elements are there.
        unsafe { to.add(i).write_unaligned(T::from_f32(value)) }
    }
}

#[inline(always)]
fn greater(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[inline(always)]
fn smaller(a: f32, b: f32) -> f32 {
    if a < b { a } else { b }
}

macro_rules! reduce {
    ($lanes:expr, $operation:expr) => {{
        let mut lanes: [f32; LANES] = $lanes;
        let mut half = LANES / 2;
        while half > 0 {
            let mut i = 0;
            while i < half {
                lanes[i] = $operation(lanes[i], lanes[i + half]);
                i += 1;
            }
            half /= 2;
        }
        lanes[0]
    }};
}

impl Simd for Portable {
    type F = Floats;
    type M = u16;
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Floats {
        Floats([x; LANES])
    }
    #[inline(always)]
    fn from_array(self, lanes: [f32; LANES]) -> Floats {
        Floats(lanes)
    }
    #[inline(always)]
    fn to_array(self, a: Floats) -> [f32; LANES] {
        a.0
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Floats {
        // SAFETY: the caller's promise.
        unsafe { read(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: Floats) {
        // SAFETY: the caller's promise.
        unsafe { write(to, a) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const Bf16) -> Floats {
        // SAFETY: the caller's promise.
        unsafe { read(from) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut Bf16, a: Floats) {
        // SAFETY: the caller's promise.
        unsafe { write(to, a) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const F16) -> Floats {
        // SAFETY: the caller's promise.
        unsafe { read(from) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut F16, a: Floats) {
        // SAFETY: the caller's promise.
        unsafe { write(to, a) }
    }
    #[inline(always)]
    fn add(self, a: Floats, b: Floats) -> Floats {
        lanes!(i => a.0[i] + b.0[i])
    }
    #[inline(always)]
    fn sub(self, a: Floats, b: Floats) -> Floats {
        lanes!(i => a.0[i] - b.0[i])
    }
    #[inline(always)]
    fn mul(self, a: Floats, b: Floats) -> Floats {
        lanes!(i => a.0[i] * b.0[i])
    }
    #[inline(always)]
    fn div(self, a: Floats, b: Floats) -> Floats {
        lanes!(i => a.0[i] / b.0[i])
    }
    #[inline(always)]
    fn mul_add(self, a: Floats, b: Floats, c: Floats) -> Floats {
        lanes!(i => a.0[i].mul_add(b.0[i], c.0[i]))
    }
    #[inline(always)]
    fn neg_mul_add(self, a: Floats, b: Floats, c: Floats) -> Floats {
        lanes!(i => (-a.0[i]).mul_add(b.0[i], c.0[i]))
    }
    #[inline(always)]
    fn max(self, a: Floats, b: Floats) -> Floats {
        lanes!(i => greater(a.0[i], b.0[i]))
    }
    #[inline(always)]
    fn min(self, a: Floats, b: Floats) -> Floats {
        lanes!(i => smaller(a.0[i], b.0[i]))
    }
    #[inline(always)]
    fn sqrt(self, a: Floats) -> Floats {
        lanes!(i => a.0[i].sqrt())
    }
    #[inline(always)]
    fn neg(self, a: Floats) -> Floats {
        lanes!(i => -a.0[i])
    }
    #[inline(always)]
    fn abs(self, a: Floats) -> Floats {
        lanes!(i => a.0[i].abs())
    }
    #[inline(always)]
    fn less(self, a: Floats, b: Floats) -> u16 {
        mask!(i => a.0[i] < b.0[i])
    }
    #[inline(always)]
    fn less_equal(self, a: Floats, b: Floats) -> u16 {
        mask!(i => a.0[i] <= b.0[i])
    }
    #[inline(always)]
    #[expect(clippy::float_cmp, reason = "equality is what is asked for")]
    fn equal(self, a: Floats, b: Floats) -> u16 {
        mask!(i => a.0[i] == b.0[i])
    }
    #[inline(always)]
    fn first(self, n: usize) -> u16 {
        if n >= LANES { u16::MAX } else { (1 << n) - 1 }
    }
    #[inline(always)]
    fn and(self, a: u16, b: u16) -> u16 {
        a & b
    }
    #[inline(always)]
    fn not(self, a: u16) -> u16 {
        !a
    }
    #[inline(always)]
    fn bits(self, a: u16) -> u16 {
        a
    }
    #[inline(always)]
    fn select(self, mask: u16, a: Floats, b: Floats) -> Floats {
        lanes!(i => if mask >> i & 1 == 1 { a.0[i] } else { b.0[i] })
    }
    #[inline(always)]
    fn scale_exponent(self, x: Floats, biased: Floats) -> Floats {
        lanes!(i => f32::from_bits(x.0[i].to_bits().wrapping_add(biased.0[i].to_bits() << 23)))
    }
    #[inline(always)]
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_wrap, reason = "exponents are small")]
    fn split_exponent(self, a: Floats) -> (Floats, Floats) {
        let exponents = lanes!(i => ((a.0[i].to_bits() >> 23) as i32 - 126) as f32);
        (exponents, lanes!(i => f32::from_bits(a.0[i].to_bits() & 0x007f_ffff | 0x3f00_0000)))
    }
    #[inline(always)]
    fn reduce_add(self, a: Floats) -> f32 {
        reduce!(a.0, |x: f32, y: f32| x + y)
    }
    #[inline(always)]
    fn reduce_max(self, a: Floats) -> f32 {
        reduce!(a.0, greater)
    }
}
