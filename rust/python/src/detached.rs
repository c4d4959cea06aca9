//! The one place where this module lets other Python threads run.

use pyo3::marker::Ungil;
use pyo3::prelude::*;

/// Work on fewer bytes takes less time than handing the interpreter over and getting it back.
const WORTH_DETACHING_BYTES: usize = 64 * 1024;

/// Runs `work` on `bytes` of input, detached from the interpreter when they are many.
pub(crate) fn run_detached<T: Ungil + Send>(
    py: Python<'_>,
    bytes: usize,
    work: impl FnOnce() -> T + Ungil + Send,
) -> T {
    if bytes < WORTH_DETACHING_BYTES { work() } else { py.detach(work) }
}
