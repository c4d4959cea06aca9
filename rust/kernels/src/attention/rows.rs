//! Attention of a few tokens of one sequence with one key head.

use std::cell::RefCell;

use crate::attention::arguments::{Checked, DataType, Span};
use crate::attention::tile::{KEYS, MOST_ROWS, SEGMENTS, Seen, State, Tile, most_rows};
use crate::isa::Kernel;
use crate::simd::{Bf16, Element, F16, LANES, Simd};

/// The tokens of `span` with the query heads that share key head `head`.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) call: &'a Checked<'a>,
    pub(super) span: Span,
    pub(super) head: usize,
}

/// A cache line: what scratch memory is made of.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _lanes: [f32; LANES],
}

thread_local! {
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let call = &self.call.call;
        let rows = self.tokens() * self.group();
        let lines = rows * (call.head_dim + call.value_dim + KEYS + LANES) / LANES + rows.div_ceil(LANES);
        let mut scratch = SCRATCH.take();
        if scratch.len() < lines {
            scratch.resize(lines, Line { _lanes: [0.0; LANES] });
        }
        let query = scratch.as_mut_ptr().cast::<f32>();
        // SAFETY: the scratch holds all of it, and the call is checked.
        unsafe {
            let scores = query.add(rows * call.head_dim);
            let sums = scores.add(rows * KEYS);
            let total = sums.add(rows * call.value_dim);
            let state = State { query, scores, sums, top: total.add(rows * LANES), total };
            match call.data_type {
                DataType::F32 => self.begin::<S, f32>(simd, query, state),
                DataType::Bf16 => self.begin::<S, Bf16>(simd, query, state),
                DataType::F16 => self.begin::<S, F16>(simd, query, state),
            }
            match call.cache_type {
                DataType::F32 => self.attend::<S, f32>(simd, state),
                DataType::Bf16 => self.attend::<S, Bf16>(simd, state),
                DataType::F16 => self.attend::<S, F16>(simd, state),
            }
            match call.data_type {
                DataType::F32 => self.finish::<S, f32>(simd, state),
                DataType::Bf16 => self.finish::<S, Bf16>(simd, state),
                DataType::F16 => self.finish::<S, F16>(simd, state),
            }
        }
        SCRATCH.set(scratch);
    }
}

impl Rows<'_> {
    fn tokens(&self) -> usize {
        self.span.stop - self.span.start
    }

    fn group(&self) -> usize {
        self.call.call.heads / self.call.call.kv_heads
    }

    /// Positions that a token sees, `start..stop`.
    #[inline(always)]
    fn sees(&self, token: usize) -> (usize, usize) {
        let stop = self.span.position + token + 1;
        match self.call.call.sliding_window {
            0 => (0, stop),
            window => (stop.saturating_sub(window), stop),
        }
    }

    /// The scaled queries, and nothing seen yet but the sink.
    #[inline(always)]
    unsafe fn begin<S: Simd, T: Element>(&self, simd: S, query: *mut f32, state: State) {
        let (call, group) = (&self.call.call, self.group());
        let scale = simd.splat(call.scale);
        for row in 0..self.tokens() * group {
            let head = self.head * group + row % group;
            // SAFETY: the call is checked, and the state has the rows.
            unsafe {
                let from = (call.query.address as *const T)
                    .add((self.span.row + row / group) * call.query.row + head * call.query.head);
                for dim in (0..call.head_dim).step_by(LANES) {
                    simd.store(query.add(row * call.head_dim + dim), simd.mul(simd.read(from.add(dim)), scale));
                }
                for dim in (0..call.value_dim).step_by(LANES) {
                    simd.store(state.sums.add(row * call.value_dim + dim), simd.zero());
                }
                simd.store(state.total.add(row * LANES), simd.zero());
                *state.top.add(row) = f32::NEG_INFINITY;
                if call.sinks != 0 {
                    *state.top.add(row) = *(call.sinks as *const f32).add(head);
                    *state.total.add(row * LANES) = 1.0;
                }
            }
        }
    }

    /// Takes all tiles that a row sees.
    #[inline(always)]
    unsafe fn attend<S: Simd, T: Element>(&self, simd: S, state: State) {
        let (tokens, group) = (self.tokens(), self.group());
        let (begin, end) = (self.sees(0).0, self.sees(tokens - 1).1);
        // The first and last token that see anything of the tile.
        let (mut first, mut last) = (0, 0);
        let mut position = begin / KEYS * KEYS;
        while position < end {
            while self.sees(first).1 <= position {
                first += 1;
            }
            while last + 1 < tokens && self.sees(last + 1).0 < position + KEYS {
                last += 1;
            }
            let tile = self.tile::<T>(position, end);
            // What comes next: the next tile, or the next task's first one.
            if position + KEYS < end {
                self.tile::<T>(position + KEYS, end).prefetch(simd);
            } else if self.head + 1 < self.call.call.kv_heads {
                Self { head: self.head + 1, ..*self }.tile::<T>(begin / KEYS * KEYS, end).prefetch(simd);
            }
            let (mut row, stop) = (first * group, (last + 1) * group);
            while row < stop {
                // Parts of about the same size: a single row left over would be slow.
                let parts = (stop - row).div_ceil(most_rows::<S>());
                let rows = (stop - row).div_ceil(parts);
                let mut seen: [Seen; MOST_ROWS] = [(0, 0); MOST_ROWS];
                for r in 0..rows {
                    let (start, stop) = self.sees((row + r) / group);
                    seen[r] = (start.saturating_sub(position), KEYS.min(stop - position));
                }
                // SAFETY: the call is checked, and the state has the rows.
                unsafe { tile.add(simd, rows, state.at(row, &tile), &seen) };
                row += rows;
            }
            position += KEYS;
        }
    }

    /// The keys from `position` on, of `end` in all.
    #[inline(always)]
    fn tile<T: Element>(&self, position: usize, end: usize) -> Tile<T> {
        let call = &self.call.call;
        let table = &self.call.block_table[self.span.sequence * call.table_width..][..call.table_width];
        let mut tile = Tile {
            segments: (end - position).div_ceil(LANES).min(SEGMENTS),
            keys: [std::ptr::null(); SEGMENTS],
            key_stride: call.block_size,
            values: [std::ptr::null(); SEGMENTS],
            head_dim: call.head_dim,
            value_dim: call.value_dim,
            softcap: call.softcap,
        };
        for segment in 0..SEGMENTS {
            let at = position + segment * LANES;
            if segment >= tile.segments {
                tile.keys[segment] = tile.keys[segment - 1];
                tile.values[segment] = tile.values[segment - 1];
                continue;
            }
            #[expect(clippy::cast_sign_loss, reason = "checked")]
            let block = table[at / call.block_size] as usize;
            let (page, offset) = (block * call.kv_heads + self.head, at % call.block_size);
            // SAFETY: the call is checked.
            unsafe {
                tile.keys[segment] = (call.keys as *const T).add(page * call.head_dim * call.block_size + offset);
                tile.values[segment] =
                    (call.values as *const T).add((page * call.block_size + offset) * call.value_dim);
            }
        }
        tile
    }

    /// The sums over their totals.
    #[inline(always)]
    unsafe fn finish<S: Simd, T: Element>(&self, simd: S, state: State) {
        let (call, group) = (&self.call.call, self.group());
        for row in 0..self.tokens() * group {
            let head = self.head * group + row % group;
            // SAFETY: the call is checked, and the state has the rows.
            unsafe {
                let to =
                    (call.output as *mut T).add(((self.span.row + row / group) * call.heads + head) * call.value_dim);
                let total = simd.splat(simd.reduce_add(simd.load(state.total.add(row * LANES))));
                for dim in (0..call.value_dim).step_by(LANES) {
                    let sums = simd.load(state.sums.add(row * call.value_dim + dim));
                    simd.write(to.add(dim), simd.div(sums, total));
                }
            }
        }
    }
}
