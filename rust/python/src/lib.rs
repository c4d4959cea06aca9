//! `rollspan._native`: the decoder and the span builder of the Rust frontend, and the compute kernels, for Python.
//!
//! Everything here has a twin in pure Python, which is its definition; the package works without this module.

mod codec;
mod detached;
mod kernels;
mod kernels_attention;
mod kernels_fused;
mod kernels_sampling;
mod spans;

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::codec::decode_outputs;
    #[pymodule_export]
    use crate::kernels::{kernel_isa, kernel_threads, set_kernel_isa, set_kernel_threads};
    #[pymodule_export]
    use crate::kernels_attention::paged_attention;
    #[pymodule_export]
    use crate::kernels_fused::{gated, linear, linear_rows, rms_norm, rotary};
    #[pymodule_export]
    use crate::kernels_sampling::{sample_rows, score_rows};
    #[pymodule_export]
    use crate::spans::SpanBuilder;

    use pyo3::prelude::*;

    /// The version of the package that it was built for.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
