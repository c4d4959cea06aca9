//! What attention is called with, and how it is shared out.

use std::cmp::Reverse;
use std::fmt;

use crate::attention::rows::Rows;
use crate::attention::write::Write;
use crate::isa::Isa;
use crate::pool::pool;
use crate::simd::LANES;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataType {
    /// `f32`.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
}

impl DataType {
    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// A tensor `[rows, heads, dim]` with a contiguous last dimension; strides in elements.
#[derive(Clone, Copy, Debug)]
pub struct Strided {
    /// Address of the first element.
    pub address: usize,
    /// From one row to the next.
    pub row: usize,
    /// From one head to the next.
    pub head: usize,
}

/// One call of attention. Addresses are those of contiguous tensors unless said otherwise.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// `[rows, heads, head_dim]`.
    pub query: Strided,
    /// `[rows, kv_heads, head_dim]`.
    pub key: Strided,
    /// `[rows, kv_heads, value_dim]`.
    pub value: Strided,
    /// Type of query, key, value and output.
    pub data_type: DataType,
    /// `[rows, heads, value_dim]`.
    pub output: usize,
    /// `[num_blocks, kv_heads, head_dim, block_size]`.
    pub keys: usize,
    /// `[num_blocks, kv_heads, block_size, value_dim]`.
    pub values: usize,
    /// Type of the cache.
    pub cache_type: DataType,
    /// Query heads, a multiple of the key heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// A multiple of 16.
    pub head_dim: usize,
    /// A multiple of 16.
    pub value_dim: usize,
    /// Pages of the cache.
    pub num_blocks: usize,
    /// Tokens in a page, a multiple of 16.
    pub block_size: usize,
    /// Rows that are written to the cache.
    pub rows: usize,
    /// Sequences.
    pub sequences: usize,
    /// `i32 [sequences + 1]`.
    pub query_start: usize,
    /// `i32 [sequences]`.
    pub seq_lens: usize,
    /// `i32 [sequences, table_width]`.
    pub block_table: usize,
    /// Entries for each sequence.
    pub table_width: usize,
    /// `i64 [rows]`.
    pub slot_mapping: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// 0 for none.
    pub sliding_window: usize,
    /// 0 for none.
    pub softcap: f32,
    /// `f32 [heads]`, or 0 for none.
    pub sinks: usize,
}

/// What is wrong with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalid(&'static str);

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Invalid {}

/// A call whose batch stays within its tensors.
#[derive(Debug)]
pub struct Checked<'a> {
    pub(super) call: Attention,
    pub(super) query_start: &'a [i32],
    pub(super) seq_lens: &'a [i32],
    pub(super) block_table: &'a [i32],
    pub(super) slot_mapping: &'a [i64],
}

/// Query rows that are computed together, as tokens of one sequence.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub(super) sequence: usize,
    /// Token of the sequence's tokens in this step.
    pub(super) start: usize,
    pub(super) stop: usize,
    /// Position of token `start`.
    pub(super) position: usize,
    /// Row of token `start`.
    pub(super) row: usize,
}

/// Query rows (tokens times heads of a group) that share a pass over the keys.
const SHARED_ROWS: usize = 48;
/// Rows whose keys and values are written together.
const WRITTEN_ROWS: usize = 64;

fn index(value: i32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

impl Attention {
    /// Checks that everything the batch names lies within the tensors.
    ///
    /// # Errors
    /// It does not.
    ///
    /// # Safety
    /// All addresses are those of live tensors of the stated shapes, strides and types, and stay so as long as the result
    /// is used. Nothing else writes to them, and nothing else reads the cache or the output, while it runs.
    pub unsafe fn check<'a>(self) -> Result<Checked<'a>, Invalid> {
        // SAFETY: the caller's promise.
        let (query_start, seq_lens, block_table, slot_mapping) = unsafe {
            (
                slice(self.query_start as *const i32, self.sequences + 1),
                slice(self.seq_lens as *const i32, self.sequences),
                slice(self.block_table as *const i32, self.sequences * self.table_width),
                slice(self.slot_mapping as *const i64, self.rows),
            )
        };
        let dims = [self.head_dim, self.value_dim, self.block_size];
        if dims.into_iter().any(|dim| dim == 0 || dim % LANES != 0) {
            return Err(Invalid("head_dim, value_dim and block_size must be multiples of 16"));
        }
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Invalid("the query heads must be a multiple of the key heads"));
        }
        let slots = self.num_blocks * self.block_size;
        if slot_mapping.iter().any(|&slot| usize::try_from(slot).is_ok_and(|slot| slot >= slots) || slot < 0) {
            return Err(Invalid("slot_mapping names a slot outside the cache"));
        }
        if query_start[0] != 0 || query_start.windows(2).any(|pair| pair[1] < pair[0]) {
            return Err(Invalid("query_start must begin with 0 and not go down"));
        }
        if index(query_start[self.sequences]) > self.rows {
            return Err(Invalid("query_start names rows that there are not"));
        }
        for (sequence, pair) in query_start.windows(2).enumerate() {
            let (length, rows) = (index(seq_lens[sequence]), index(pair[1] - pair[0]));
            if length < rows || length.div_ceil(self.block_size) > self.table_width {
                return Err(Invalid("seq_lens must cover the sequence's rows and lie within its block_table"));
            }
            let table = &block_table[sequence * self.table_width..][..length.div_ceil(self.block_size)];
            if table.iter().any(|&block| index(block) >= self.num_blocks) {
                return Err(Invalid("block_table names a block outside the cache"));
            }
        }
        Ok(Checked { call: self, query_start, seq_lens, block_table, slot_mapping })
    }
}

impl Checked<'_> {
    /// Bytes of keys and values that will be read, about.
    pub fn bytes(&self) -> usize {
        let keys: usize = self.seq_lens.iter().map(|&length| index(length)).sum();
        keys * self.call.kv_heads * (self.call.head_dim + self.call.value_dim) * self.call.cache_type.size()
    }

    /// Writes the step's keys and values, then attends.
    pub fn run(&self) {
        let isa = Isa::active();
        pool().run(self.call.rows.div_ceil(WRITTEN_ROWS), |task| {
            let start = task * WRITTEN_ROWS;
            isa.run(Write { call: self, start, stop: self.call.rows.min(start + WRITTEN_ROWS) });
        });
        let spans = self.spans();
        pool().run(spans.len() * self.call.kv_heads, |task| {
            let (span, head) = (spans[task / self.call.kv_heads], task % self.call.kv_heads);
            isa.run(Rows { call: self, span, head });
        });
    }

    /// The longest first, so that threads end together.
    fn spans(&self) -> Vec<Span> {
        let tokens = (SHARED_ROWS / (self.call.heads / self.call.kv_heads)).max(1);
        let mut spans = Vec::with_capacity(self.seq_lens.len());
        for (sequence, pair) in self.query_start.windows(2).enumerate() {
            let (first, rows) = (index(pair[0]), index(pair[1] - pair[0]));
            let before = index(self.seq_lens[sequence]) - rows;
            for start in (0..rows).step_by(tokens) {
                let stop = rows.min(start + tokens);
                spans.push(Span { sequence, start, stop, position: before + start, row: first + start });
            }
        }
        if pool().num_threads() > 1 {
            spans.sort_by_key(|span| Reverse(span.position));
        }
        spans
    }
}

/// The slice that begins at `address`; an empty tensor has no address.
///
/// # Safety
///
/// As for [`std::slice::from_raw_parts`], unless `length` is 0.
unsafe fn slice<'a, T>(address: *const T, length: usize) -> &'a [T] {
    if length == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(address, length) }
}
