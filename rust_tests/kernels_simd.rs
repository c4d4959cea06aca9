//! Vectors: each operation gives the same bits on every instruction set, and the functions are as exact as they say.

#![allow(unsafe_code, reason = "vectors are read from and written to arrays")]
#![allow(clippy::inline_always, reason = "only what is inlined is compiled with the CPU's features")]
#![allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "numbers of any kind will do")]
#![allow(clippy::float_cmp, reason = "bits are what is compared")]

use rollspan_kernels::isa::{Isa, Kernel};
use rollspan_kernels::simd::{Bf16, Element, F16, LANES, Simd};

type Lanes = [f32; LANES];

/// All operations on three vectors, as bits.
struct Everything(Lanes, Lanes, Lanes);

impl Kernel for Everything {
    type Output = Vec<(&'static str, Vec<u32>)>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Self::Output {
        let (a, b, c) = (simd.from_array(self.0), simd.from_array(self.1), simd.from_array(self.2));
        let vectors = [
            ("splat", simd.splat(self.0[3])),
            ("add", simd.add(a, b)),
            ("sub", simd.sub(a, b)),
            ("mul", simd.mul(a, b)),
            ("div", simd.div(a, b)),
            ("mul_add", simd.mul_add(a, b, c)),
            ("neg_mul_add", simd.neg_mul_add(a, b, c)),
            ("max", simd.max(a, b)),
            ("min", simd.min(a, b)),
            ("sqrt", simd.sqrt(a)),
            ("neg", simd.neg(a)),
            ("abs", simd.abs(a)),
            ("select", simd.select(simd.less(a, b), a, c)),
            ("exponent", simd.split_exponent(simd.abs(a)).0),
            ("mantissa", simd.split_exponent(simd.abs(a)).1),
            ("exp", simd.exp(a)),
            ("ln", simd.ln(a)),
            ("tanh", simd.tanh(a)),
        ];
        let masks = [
            simd.less(a, b),
            simd.less_equal(a, b),
            simd.equal(a, c),
            simd.not(simd.less(a, b)),
            simd.and(simd.less(a, b), simd.less(b, c)),
            simd.first(0),
            simd.first(5),
            simd.first(16),
            simd.first(99),
        ];
        let mut results: Self::Output = Vec::new();
        for (name, vector) in vectors {
            results.push((name, simd.to_array(vector).map(canonical).to_vec()));
        }
        results.push(("masks", masks.map(|mask| u32::from(simd.bits(mask))).to_vec()));
        results.push(("reductions", vec![canonical(simd.reduce_add(a)), canonical(simd.reduce_max(a))]));
        let (mut bf16, mut f16, mut part) = ([Bf16(0); LANES], [F16(0); LANES], [7.0_f32; LANES]);
        // SAFETY: arrays of 16.
        unsafe {
            simd.write(bf16.as_mut_ptr(), a);
            simd.write(f16.as_mut_ptr(), a);
            simd.write_first(part.as_mut_ptr(), a, 5);
            results.push(("read bf16", simd.to_array(simd.read(bf16.as_ptr())).map(canonical).to_vec()));
            results.push(("read f16", simd.to_array(simd.read(f16.as_ptr())).map(canonical).to_vec()));
            results
                .push(("read first", simd.to_array(simd.read_first(self.0.as_ptr(), 11)).map(f32::to_bits).to_vec()));
        }
        results.push(("bf16", bf16.map(|value| u32::from(value.0)).to_vec()));
        results.push(("f16", f16.map(|value| u32::from(value.0)).to_vec()));
        results.push(("write first", part.map(f32::to_bits).to_vec()));
        results
    }
}

/// The sign and payload of a NaN that an operation makes are the CPU's own.
fn canonical(value: f32) -> u32 {
    if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }
}

const SPECIAL: [f32; 12] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    f32::MIN_POSITIVE,
    1e-40,
    f32::MAX,
    65519.9,
    65520.0,
];

/// Numbers of every kind, from a fixed generator.
fn samples(seed: u64) -> Lanes {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    [(); LANES].map(|()| match next() % 8 {
        0 => f32::from_bits(next()),
        1 => SPECIAL[next() as usize % SPECIAL.len()],
        2 => (next() as f32 / 2_f32.powi(31) - 1.0) * 1e-4,
        _ => (next() as f32 / 2_f32.powi(31) - 1.0) * 40.0,
    })
}

fn others() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| *isa != Isa::Portable && isa.is_available())
}

#[test]
fn every_operation_gives_the_same_bits_on_every_instruction_set() {
    for seed in 0..4000 {
        let (a, b, c) = (samples(3 * seed), samples(3 * seed + 1), samples(3 * seed + 2));
        let expected = Isa::Portable.run(Everything(a, b, c));
        for isa in others() {
            for (expected, got) in expected.iter().zip(isa.run(Everything(a, b, c))) {
                assert_eq!(*expected, got, "{} of {a:?}, {b:?}, {c:?}", isa.name());
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Function {
    Exp,
    Ln,
    Tanh,
}

struct Apply(Function, Lanes);

impl Kernel for Apply {
    type Output = Lanes;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Lanes {
        let a = simd.from_array(self.1);
        simd.to_array(match self.0 {
            Function::Exp => simd.exp(a),
            Function::Ln => simd.ln(a),
            Function::Tanh => simd.tanh(a),
        })
    }
}

/// The greatest distance from `exact` over floats from `low` to `high`, in units in the last place of the result.
fn worst(function: Function, exact: fn(f64) -> f64, low: f32, high: f32) -> f64 {
    let mut worst = 0.0_f64;
    let points = 1_000_000_u32;
    for start in (0..points).step_by(LANES) {
        let inputs: Lanes = std::array::from_fn(|i| low + (high - low) * ((start + i as u32) as f32 / points as f32));
        for (input, got) in inputs.into_iter().zip(Isa::best().run(Apply(function, inputs))) {
            let expected = exact(f64::from(input));
            let nearest = (expected as f32).abs().max(f32::MIN_POSITIVE);
            let unit = f64::from(f32::from_bits(nearest.to_bits() + 1)) - f64::from(nearest);
            worst = worst.max((f64::from(got) - expected).abs() / unit);
        }
    }
    worst
}

#[test]
fn exp_ln_and_tanh_are_exact_to_the_last_places() {
    let exp = [(-87.0, -1.0), (-1.0, 1.0), (1.0, 88.7)].map(|(low, high)| worst(Function::Exp, f64::exp, low, high));
    let ln =
        [(1e-37, 1e-3), (1e-3, 0.9), (0.9, 1.1), (1.1, 1e6)].map(|(low, high)| worst(Function::Ln, f64::ln, low, high));
    let tanh = [(-12.0, -0.7), (-0.7, 0.7), (0.7, 12.0)].map(|(low, high)| worst(Function::Tanh, f64::tanh, low, high));
    assert!(exp.iter().all(|&units| units < 1.1), "{exp:?}");
    assert!(ln.iter().all(|&units| units < 1.1), "{ln:?}");
    assert!(tanh.iter().all(|&units| units < 2.0), "{tanh:?}");
}

#[test]
fn the_ends_of_exp_and_ln() {
    let apply = |function, x: f32| Isa::best().run(Apply(function, [x; LANES]))[0];
    for (x, expected) in [(0.0, 1.0), (-0.0, 1.0), (f32::NEG_INFINITY, 0.0), (-200.0, 0.0), (-1e30, 0.0)] {
        assert_eq!(apply(Function::Exp, x), expected, "exp({x})");
    }
    for x in [89.0, 1e30, f32::INFINITY] {
        assert_eq!(apply(Function::Exp, x), f32::INFINITY, "exp({x})");
    }
    assert_eq!(apply(Function::Ln, 1.0), 0.0);
    assert_eq!(apply(Function::Ln, 0.0), f32::NEG_INFINITY);
    assert_eq!(apply(Function::Ln, f32::INFINITY), f32::INFINITY);
    assert!(apply(Function::Ln, -1.0).is_nan());
    for function in [Function::Exp, Function::Ln, Function::Tanh] {
        assert!(apply(function, f32::NAN).is_nan());
    }
}

struct Half(F16);

impl Kernel for Half {
    type Output = (u32, u16);

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> (u32, u16) {
        let (from, mut to) = ([self.0; LANES], [F16(0); LANES]);
        // SAFETY: arrays of 16.
        unsafe {
            let value = simd.read(from.as_ptr());
            simd.write(to.as_mut_ptr(), value);
            (simd.to_array(value)[0].to_bits(), to[0].0)
        }
    }
}

#[test]
fn every_half_float_converts_as_the_hardware_does_it() {
    for bits in 0..=u16::MAX {
        let half = F16(bits);
        let value = half.to_f32();
        if !value.is_nan() {
            assert_eq!(F16::from_f32(value), half);
        }
        for isa in others() {
            let (read, written) = isa.run(Half(half));
            assert_eq!((read, written), (value.to_bits(), F16::from_f32(value).0), "{bits:#06x}");
        }
        // The neighbourhood of the middle between two halves, where rounding decides.
        for offset in [-1_i32, 0, 1] {
            let between = f32::from_bits((value.to_bits() + 0x1000).wrapping_add_signed(offset));
            if !between.is_nan() {
                let expected = Isa::best().run(Everything([between; LANES], [0.0; LANES], [0.0; LANES]));
                let f16 = expected.iter().find(|(name, _)| *name == "f16").map(|(_, lanes)| lanes[0]);
                assert_eq!(f16, Some(u32::from(F16::from_f32(between).0)), "{between:e}");
            }
        }
    }
}
