//! The kernels' threads and instruction set.
//!
//! Kernels take addresses, strides and shapes as integers: `rollspan.kernels` reads them off tensors that it has checked
//! and keeps alive during the call. They run detached from the interpreter when there is enough to do.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use rollspan_kernels::isa::Isa;
use rollspan_kernels::pool::pool;

/// The instruction set in use.
#[pyfunction]
pub(crate) fn kernel_isa() -> &'static str {
    Isa::active().name()
}

/// Uses another instruction set.
#[pyfunction]
pub(crate) fn set_kernel_isa(name: &str) -> PyResult<()> {
    if Isa::from_name(name).is_some_and(Isa::activate) {
        return Ok(());
    }
    let available: Vec<_> = Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(Isa::name).collect();
    Err(PyValueError::new_err(format!("instruction set {name:?} asked for, but this CPU has {}", available.join(", "))))
}

/// Threads that a kernel call may use.
#[pyfunction]
pub(crate) fn kernel_threads() -> usize {
    pool().num_threads()
}

/// Changes it; waits for a running kernel.
#[pyfunction]
pub(crate) fn set_kernel_threads(py: Python<'_>, threads: usize) {
    py.detach(|| pool().set_num_threads(threads));
}
