//! Paged attention with a fused write of the step's keys and values.
//!
//! Keys lie in pages `[block][kv_head][head_dim][block_size]`, values in pages `[block][kv_head][block_size][value_dim]`.
//! Everything is computed in `f32`. For one row (a token and a query head), whatever is computed beside it:
//! - its keys are taken in tiles of [`tile::KEYS`] that start at multiples of that, in ascending order; tiles that it does
//!   not see are left out;
//! - a score is `fma` over the dimensions in ascending order, of the query times the scale; then the soft cap;
//! - the softmax is online: the maximum of a tile, sums of weights in 16 lanes, values added by `fma` in ascending order
//!   of keys, only those that it sees.
//!
//! So its bits depend on nothing else, and NaN in stale slots never reaches it.

mod arguments;
mod micro;
mod rows;
mod tile;
mod write;

pub use arguments::{Attention, Checked, DataType, Invalid, Strided};
