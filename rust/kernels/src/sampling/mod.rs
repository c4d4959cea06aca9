//! Sampling from rows of logits, fused with the log-probs that are asked for.
//!
//! The probability of a token, relative to the most probable one's, is counted in units of 2^-40 ([`mass`]). Integers
//! add up to the same sum in any order, so that a choice depends on its row, seed, position and parameters alone: not on
//! the batch, the threads or the instruction set. Nothing is ever sorted as a whole: the best tokens are found through
//! the maxima of groups of tokens ([`scan`]), the boundary of top-p through a [`histogram`].

mod histogram;
mod mass;
mod row;
mod sample;
mod scan;
mod truncate;

pub use row::{Kind, Outcome, Row};
pub use sample::{Job, sample_rows, score_rows};
