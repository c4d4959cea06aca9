//! A tile of keys for a few rows: scores, softmax, weighted values.

use crate::attention::micro::{score, weigh};
use crate::simd::{Element, LANES, Simd};

/// Keys of a tile. Part of the definition of the results.
pub(super) const KEYS: usize = 64;
/// Vectors of keys in a tile.
pub(super) const SEGMENTS: usize = KEYS / LANES;

/// One tile of cached keys and values of a head.
#[derive(Clone, Copy)]
pub(super) struct Tile<T> {
    /// Those that hold keys of the sequence.
    pub(super) segments: usize,
    /// Each at 16 keys of the first dimension; past the last segment, the last again.
    pub(super) keys: [*const T; SEGMENTS],
    /// From one dimension to the next.
    pub(super) key_stride: usize,
    /// Each at 16 rows of values.
    pub(super) values: [*const T; SEGMENTS],
    pub(super) head_dim: usize,
    pub(super) value_dim: usize,
    pub(super) softcap: f32,
}

/// What rows have come to so far; as many of each as there are rows.
#[derive(Clone, Copy)]
pub(super) struct State {
    /// `[head_dim]` each, times the scale.
    pub(super) query: *const f32,
    /// `[KEYS]` each.
    pub(super) scores: *mut f32,
    /// `[value_dim]` each.
    pub(super) sums: *mut f32,
    /// One each.
    pub(super) top: *mut f32,
    /// 16 lanes each.
    pub(super) total: *mut f32,
}

/// Keys of the tile that a row sees: `start..stop`.
pub(super) type Seen = (usize, usize);

/// The most rows that [`Tile::add`] ever takes at once.
pub(super) const MOST_ROWS: usize = 6;

/// The most rows that [`Tile::add`] takes at once with these registers.
#[inline(always)]
pub(super) const fn most_rows<S: Simd>() -> usize {
    if S::WIDE { MOST_ROWS } else { 2 }
}

/// Bytes of a cache line.
const LINE: usize = 64;

impl<T: Element> Tile<T> {
    /// Asks for all of it. Pages lie anywhere in memory, so the CPU cannot foresee them; bandwidth is what decoding costs.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd>(&self, simd: S) {
        let step = (LINE / (self.key_stride * size_of::<T>())).max(1);
        for segment in 0..self.segments {
            for dim in (0..self.head_dim).step_by(step) {
                simd.prefetch(self.keys[segment].wrapping_add(dim * self.key_stride));
            }
            for element in (0..LANES * self.value_dim).step_by(LINE / size_of::<T>()) {
                simd.prefetch(self.values[segment].wrapping_add(element));
            }
        }
    }

    /// Takes the tile into `rows` rows, of which row r sees keys `seen[r]`; at least one each.
    ///
    /// # Safety
    /// The tile's pointers are those of readable pages, values at least up to the last key seen; `state` has the rows.
    #[inline(always)]
    pub(super) unsafe fn add<S: Simd>(&self, simd: S, rows: usize, state: State, seen: &[Seen]) {
        let (mut common, mut last) = ((0, KEYS), 0);
        for &(start, stop) in &seen[..rows] {
            common = (common.0.max(start), common.1.min(stop));
            last = last.max(stop);
        }
        // Each row takes its keys in ascending order: those before the common ones, the common ones, those after.
        common.1 = common.1.max(common.0);
        let mut pieces = [(0, 0, (0, 0)); 2 * MOST_ROWS + 1];
        pieces[MOST_ROWS] = (0, rows, common);
        // SAFETY: the caller's promise, here and below.
        unsafe {
            self.score(simd, rows, state, last);
            for (r, &(start, stop)) in seen[..rows].iter().enumerate() {
                self.soften(simd, state.at(r, self), (start, stop));
                pieces[r] = (r, 1, (start, stop.min(common.0)));
                pieces[MOST_ROWS + 1 + r] = (r, 1, (start.max(common.1), stop));
            }
            for (row, rows, seen) in pieces {
                if seen.0 < seen.1 {
                    self.weigh(simd, rows, state.at(row, self), seen);
                }
            }
        }
    }

    /// Scores of keys up to `last`, at least.
    #[inline(always)]
    unsafe fn score<S: Simd>(&self, simd: S, rows: usize, state: State, last: usize) {
        macro_rules! with {
            ($rows:literal, $columns:literal) => {{
                let mut segment = 0;
                while segment * LANES < last {
                    let mut keys = [self.keys[segment]; $columns];
                    keys.copy_from_slice(&self.keys[segment..segment + $columns]);
                    let scores = state.scores.add(segment * LANES);
                    score::<S, T, $rows, $columns>(simd, state.query, self.head_dim, keys, self.key_stride, scores);
                    segment += $columns;
                }
            }};
        }
        // SAFETY: the caller's promise.
        unsafe {
            match (S::WIDE, rows) {
                (true, 1) => with!(1, 4),
                (true, 2) => with!(2, 4),
                (true, 3) => with!(3, 4),
                (true, 4) => with!(4, 4),
                (true, 5) => with!(5, 4),
                (true, _) => with!(6, 4),
                (false, 1) => with!(1, 2),
                (false, _) => with!(2, 2),
            }
        }
    }

    /// Turns a row's scores into weights, and makes its maximum and totals those with this tile.
    #[inline(always)]
    unsafe fn soften<S: Simd>(&self, simd: S, row: State, (start, stop): Seen) {
        // SAFETY: the caller's promise.
        unsafe {
            let hidden = simd.splat(f32::NEG_INFINITY);
            let mut highest = hidden;
            let mut key = 0;
            while key < stop {
                let mut scores = simd.load(row.scores.add(key));
                if self.softcap > 0.0 {
                    let cap = simd.splat(self.softcap);
                    scores = simd.mul(cap, simd.tanh(simd.div(scores, cap)));
                }
                if key < start || key + LANES > stop {
                    scores = simd.select(simd.first(stop - key), scores, hidden);
                    scores = simd.select(simd.first(start.saturating_sub(key)), hidden, scores);
                }
                simd.store(row.scores.add(key), scores);
                highest = simd.max(highest, scores);
                key += LANES;
            }
            let (highest, top) = (simd.reduce_max(highest), *row.top);
            let mut total = simd.load(row.total);
            if highest > top {
                let kept = simd.exp(simd.splat(top - highest));
                total = simd.mul(total, kept);
                let mut column = 0;
                while column < self.value_dim {
                    let sums = row.sums.add(column);
                    simd.store(sums, simd.mul(simd.load(sums), kept));
                    column += LANES;
                }
                *row.top = highest;
            }
            // A row that has seen only scores of -inf must not get -inf - -inf.
            let shift = simd.splat(if *row.top == f32::NEG_INFINITY { 0.0 } else { *row.top });
            key = 0;
            while key < stop {
                let weights = simd.exp(simd.sub(simd.load(row.scores.add(key)), shift));
                simd.store(row.scores.add(key), weights);
                total = simd.add(total, weights);
                key += LANES;
            }
            simd.store(row.total, total);
        }
    }

    /// Adds the values of keys `seen`, weighted, to the sums of `rows` rows.
    #[inline(always)]
    unsafe fn weigh<S: Simd>(&self, simd: S, rows: usize, state: State, seen: Seen) {
        macro_rules! columns {
            ($rows:literal, $columns:literal, $column:ident) => {
                while $column + $columns * LANES <= self.value_dim {
                    weigh::<S, T, $rows, $columns>(
                        simd,
                        state.scores,
                        &self.values,
                        $column,
                        self.value_dim,
                        seen,
                        state.sums,
                    );
                    $column += $columns * LANES;
                }
            };
        }
        macro_rules! with {
            ($rows:literal) => {{
                let mut column = 0;
                if S::WIDE {
                    columns!($rows, 4, column);
                }
                columns!($rows, 2, column);
                columns!($rows, 1, column);
            }};
        }
        // SAFETY: the caller's promise.
        unsafe {
            match (S::WIDE, rows) {
                (_, 1) => with!(1),
                (_, 2) | (false, _) => with!(2),
                (true, 3) => with!(3),
                (true, 4) => with!(4),
                (true, 5) => with!(5),
                (true, _) => with!(6),
            }
        }
    }
}

impl State {
    /// That of the rows from `row` on.
    ///
    /// # Safety
    /// There is such a row.
    #[inline(always)]
    pub(super) unsafe fn at<T>(self, row: usize, tile: &Tile<T>) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            Self {
                query: self.query.add(row * tile.head_dim),
                scores: self.scores.add(row * KEYS),
                sums: self.sums.add(row * tile.value_dim),
                top: self.top.add(row),
                total: self.total.add(row * LANES),
            }
        }
    }
}
