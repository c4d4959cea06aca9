//! Functions made of a [`Simd`]'s operations. The polynomials are those of Cephes (`expf`, `logf`, `tanhf`).

// The constants are those of the source, to its last digit.
#![allow(clippy::excessive_precision, clippy::unreadable_literal)]

use super::Simd;

/// Adding it to a float of magnitude below 2^22 rounds that to an integer, which then is in the low bits.
const ROUNDER: f32 = 12_582_912.0;
const LN_2_HIGH: f32 = 0.693359375;
const LN_2_LOW: f32 = -2.12194440e-4;

#[inline(always)]
fn polynomial<S: Simd, const N: usize>(simd: S, x: S::F, coefficients: [f32; N]) -> S::F {
    let mut value = simd.splat(coefficients[0]);
    let mut index = 1;
    while index < N {
        value = simd.mul_add(value, x, simd.splat(coefficients[index]));
        index += 1;
    }
    value
}

#[inline(always)]
pub(super) fn exp<S: Simd>(simd: S, a: S::F) -> S::F {
    let biased = simd.mul_add(a, simd.splat(std::f32::consts::LOG2_E), simd.splat(ROUNDER));
    let n = simd.sub(biased, simd.splat(ROUNDER));
    let r = simd.neg_mul_add(n, simd.splat(LN_2_HIGH), a);
    let r = simd.neg_mul_add(n, simd.splat(LN_2_LOW), r);
    let tail = polynomial(
        simd,
        r,
        [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1],
    );
    let near = simd.add(simd.mul_add(simd.mul(r, r), tail, r), simd.splat(1.0));
    let value = simd.scale_exponent(near, biased);
    let value = simd.select(simd.less(a, simd.splat(-87.33)), simd.zero(), value);
    let value = simd.select(simd.less(simd.splat(88.72), a), simd.splat(f32::INFINITY), value);
    simd.select(simd.equal(a, a), value, a)
}

#[inline(always)]
pub(super) fn ln<S: Simd>(simd: S, a: S::F) -> S::F {
    let one = simd.splat(1.0);
    let (e, m) = simd.split_exponent(a);
    let small = simd.less(m, simd.splat(std::f32::consts::FRAC_1_SQRT_2));
    let e = simd.select(small, simd.sub(e, one), e);
    let x = simd.sub(simd.select(small, simd.add(m, m), m), one);
    let z = simd.mul(x, x);
    let tail = polynomial(
        simd,
        x,
        [
            7.0376836292e-2,
            -1.1514610310e-1,
            1.1676998740e-1,
            -1.2420140846e-1,
            1.4249322787e-1,
            -1.6668057665e-1,
            2.0000714765e-1,
            -2.4999993993e-1,
            3.3333331174e-1,
        ],
    );
    let y = simd.mul(simd.mul(x, z), tail);
    let y = simd.mul_add(e, simd.splat(LN_2_LOW), y);
    let y = simd.neg_mul_add(z, simd.splat(0.5), y);
    let value = simd.mul_add(e, simd.splat(LN_2_HIGH), simd.add(x, y));
    let value = simd.select(simd.less(a, simd.splat(f32::MIN_POSITIVE)), simd.splat(f32::NEG_INFINITY), value);
    let value = simd.select(simd.less(a, simd.zero()), simd.splat(f32::NAN), value);
    let value = simd.select(simd.equal(a, simd.splat(f32::INFINITY)), a, value);
    simd.select(simd.equal(a, a), value, a)
}

#[inline(always)]
pub(super) fn tanh<S: Simd>(simd: S, a: S::F) -> S::F {
    let one = simd.splat(1.0);
    let magnitude = simd.abs(a);
    let z = simd.mul(a, a);
    let tail = polynomial(
        simd,
        z,
        [-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1],
    );
    let near = simd.mul_add(simd.mul(tail, z), a, a);
    let grown = exp(simd, simd.add(magnitude, magnitude));
    let far = simd.sub(one, simd.div(simd.splat(2.0), simd.add(grown, one)));
    let far = simd.select(simd.less(a, simd.zero()), simd.neg(far), far);
    simd.select(simd.less(magnitude, simd.splat(0.625)), near, far)
}
