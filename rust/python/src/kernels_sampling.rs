//! The sampler of the kernels crate; `rollspan.kernels.sampling_native` is its only caller.

#![allow(unsafe_code, reason = "hands addresses to the kernels")]

use pyo3::prelude::*;
use rollspan_kernels::sampling::{self, Job};

/// Addresses of rows, outcomes, token ids and log-probs; then count, vocabulary and columns.
type Description = (usize, usize, usize, usize, usize, usize, usize);

fn job(description: Description) -> Job {
    let (rows, outcomes, ids, logprobs, count, vocabulary, columns) = description;
    Job {
        rows: rows as *const _,
        outcomes: outcomes as *mut _,
        ids: ids as *mut _,
        logprobs: logprobs as *mut _,
        count,
        vocabulary,
        columns,
    }
}

/// Samples a token for each row.
#[pyfunction]
pub(crate) fn sample_rows(py: Python<'_>, description: Description, raw_logprobs: bool) {
    let job = job(description);
    // SAFETY: the caller made the arrays as `Job` describes them and keeps them, and the logits, alive and to itself.
    py.detach(|| unsafe { sampling::sample_rows(&job, raw_logprobs) });
}

/// Reports log-probs of given tokens.
#[pyfunction]
pub(crate) fn score_rows(py: Python<'_>, description: Description) {
    let job = job(description);
    // SAFETY: as above.
    py.detach(|| unsafe { sampling::score_rows(&job) });
}
