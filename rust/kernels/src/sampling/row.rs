//! What goes in and comes out for one row, laid out as in `rollspan/kernels/sampling_torch.py`.

use super::scan::CHUNK;
use crate::simd::{Element, LANES, Simd};

/// Evaluates an expression with the row as a [`Typed`] of its element type.
macro_rules! by_kind {
    ($logits:expr, $row:ident => $value:expr) => {{
        let logits = $logits;
        match logits.kind() {
            $crate::sampling::row::Kind::F32 => {
                let $row = logits.typed::<f32>();
                $value
            }
            $crate::sampling::row::Kind::Bf16 => {
                let $row = logits.typed::<$crate::simd::Bf16>();
                $value
            }
            $crate::sampling::row::Kind::F16 => {
                let $row = logits.typed::<$crate::simd::F16>();
                $value
            }
        }
    }};
}
pub(super) use by_kind;

/// Element type of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// IEEE single precision.
    F32 = 0,
    /// bfloat16.
    Bf16 = 1,
    /// IEEE half precision.
    F16 = 2,
}

/// One row to sample.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Row {
    /// Address of the logits that are sampled from.
    pub scores: u64,
    /// Address of the logits whose log-probs are reported.
    pub reported: u64,
    /// The request's seed.
    pub seed: u64,
    /// Tokens that the request has sampled.
    pub position: i64,
    /// 0 is greedy and ignores truncation.
    pub temperature: f32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// At most 0 is off.
    pub top_k: i32,
    /// Best tokens to report; -1 for no log-prob at all.
    pub num_top: i32,
    /// Element type of `scores`, a [`Kind`].
    pub scores_kind: u8,
    /// Element type of `reported`, a [`Kind`].
    pub reported_kind: u8,
    /// Unused.
    pub padding: u16,
}

/// What was sampled.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Outcome {
    /// The token; meaningless unless valid.
    pub token: i64,
    /// One more than the number of tokens with a larger logit; set with a log-prob.
    pub rank: i32,
    /// 1, or 0 where no token can be chosen.
    pub valid: u8,
    /// Unused.
    pub padding: [u8; 3],
}

impl Row {
    /// Where in the cumulative distribution the choice falls, in units of 2^-53: `SplitMix64` over seed and position.
    pub fn draw(&self) -> u64 {
        const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
        let state = mix(self.seed.wrapping_add(GOLDEN));
        let step = self.position.cast_unsigned().wrapping_add(1).wrapping_mul(GOLDEN);
        mix(state.wrapping_add(step)) >> 11
    }
}

fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A row of logits in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Logits {
    address: usize,
    kind: Kind,
    len: usize,
}

impl Logits {
    /// # Safety
    /// `len` elements of the type `kind` are readable at `address`, and stay so.
    pub(super) unsafe fn new(address: u64, kind: u8, len: usize) -> Self {
        let kind = match kind {
            0 => Kind::F32,
            1 => Kind::Bf16,
            _ => Kind::F16,
        };
        #[expect(clippy::cast_possible_truncation, reason = "addresses fit a usize")]
        Self { address: address as usize, kind, len }
    }

    pub(super) fn len(self) -> usize {
        self.len
    }

    pub(super) fn kind(self) -> Kind {
        self.kind
    }

    /// The elements, which are `T`s: see [`by_kind`].
    pub(super) fn typed<T: Element>(self) -> Typed<T> {
        Typed { start: self.address as *const T, len: self.len }
    }

    /// The logit of a token.
    pub(super) fn at(self, token: usize) -> f32 {
        by_kind!(self, row => row.at(token))
    }
}

/// A row of a known element type; made by [`Logits::typed`] only, so all of it is readable.
#[derive(Clone, Copy)]
pub(super) struct Typed<T> {
    start: *const T,
    pub(super) len: usize,
}

impl<T: Element> Typed<T> {
    #[inline(always)]
    pub(super) fn at(self, token: usize) -> f32 {
        assert!(token < self.len, "a token beyond the row's end");
        // SAFETY: inside the row.
        unsafe { *self.start.add(token) }.to_f32()
    }

    /// Whether all tokens of the chunk are in the row.
    #[inline(always)]
    pub(super) fn is_full(self, chunk: usize) -> bool {
        (chunk + 1) * CHUNK <= self.len
    }

    /// 16 logits from token `first` on, in a chunk that [`Typed::is_full`] (`FULL`); else -inf beyond the end.
    #[inline(always)]
    pub(super) fn load<S: Simd, const FULL: bool>(self, simd: S, first: usize) -> S::F {
        if FULL || first + LANES <= self.len {
            debug_assert!(first + LANES <= self.len);
            // SAFETY: inside the row.
            return unsafe { simd.read(self.start.add(first)) };
        }
        let outside = simd.splat(f32::NEG_INFINITY);
        if first >= self.len {
            return outside;
        }
        let rest = self.len - first;
        // SAFETY: inside the row.
        let values = unsafe { simd.read_first(self.start.add(first), rest) };
        simd.select(simd.first(rest), values, outside)
    }
}
