//! The fused kernels for Python: addresses and sizes in; see `rollspan.kernels.fused`.
//!
//! They take microseconds, so they keep the interpreter unless there is a lot to do.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use rollspan_kernels::fused::{Activation, Gated, Heads, Linear, MOST_ROWS, Norm, Rotary, Scaling, Type, Weight};

/// Elements from which a call lets other Python threads run.
const DETACH: usize = 1 << 16;

/// Calls `run(element)` of a kernel, detached from the interpreter where there is a lot to do.
macro_rules! run {
    ($py:expr, $kernel:expr, $element:expr) => {{
        let (kernel, element) = ($kernel, element($element)?);
        #[expect(unsafe_code, reason = "the addresses are those of tensors that the caller holds")]
        // SAFETY: the caller of the extension vouches for addresses, strides and sizes.
        let compute = || unsafe { kernel.run(element) };
        if kernel.size() >= DETACH {
            $py.detach(compute)
        } else {
            compute()
        }
        Ok(())
    }};
}

fn element(code: u8) -> PyResult<Type> {
    match code {
        0 => Ok(Type::F32),
        1 => Ok(Type::Bf16),
        2 => Ok(Type::F16),
        _ => Err(PyValueError::new_err("an element type is 0, 1 or 2")),
    }
}

fn scaling(code: u8) -> PyResult<Scaling> {
    match code {
        0 => Ok(Scaling::None),
        1 => Ok(Scaling::Rounded),
        2 => Ok(Scaling::Weight),
        3 => Ok(Scaling::OnePlus),
        _ => Err(PyValueError::new_err("a scaling is 0, 1, 2 or 3")),
    }
}

/// RMS norm of rows; with an addend (address not 0), of their sum, which is kept.
#[pyfunction]
#[pyo3(signature = (element_type, rows, columns, input, input_stride, addend, addend_stride, sum, weight, scaling_type, epsilon, output, /))]
#[expect(clippy::too_many_arguments, reason = "an object would cost a call more than the kernel")]
pub(crate) fn rms_norm(
    py: Python<'_>,
    element_type: u8,
    rows: usize,
    columns: usize,
    input: usize,
    input_stride: usize,
    addend: usize,
    addend_stride: usize,
    sum: usize,
    weight: usize,
    scaling_type: u8,
    epsilon: f32,
    output: usize,
) -> PyResult<()> {
    let kernel = Norm {
        rows,
        columns,
        input: (input, input_stride),
        addend: (addend, addend_stride),
        sum,
        weight,
        scaling: scaling(scaling_type)?,
        epsilon,
        output,
    };
    run!(py, kernel, element_type)
}

/// Rotary embedding of queries and keys: for each the heads, input, its row stride, output, its row stride, the address
/// of the norm's weight (0 for none).
#[pyfunction]
#[pyo3(signature = (element_type, rows, head_dim, cos, cos_stride, sin, sin_stride, scaling_type, epsilon, query, key, /))]
#[expect(clippy::too_many_arguments, reason = "an object would cost a call more than the kernel")]
pub(crate) fn rotary(
    py: Python<'_>,
    element_type: u8,
    rows: usize,
    head_dim: usize,
    cos: usize,
    cos_stride: usize,
    sin: usize,
    sin_stride: usize,
    scaling_type: u8,
    epsilon: f32,
    query: (usize, usize, usize, usize, usize, usize),
    key: (usize, usize, usize, usize, usize, usize),
) -> PyResult<()> {
    let scaling = scaling(scaling_type)?;
    let tensors = [query, key].map(|(heads, input, input_stride, output, output_stride, weight)| Heads {
        heads,
        input: (input, input_stride),
        output: (output, output_stride),
        weight,
        scaling,
    });
    let kernel = Rotary { rows, head_dim, tensors, cos: (cos, cos_stride), sin: (sin, sin_stride), epsilon };
    run!(py, kernel, element_type)
}

/// An activated gate (0: `SiLU`, 1: GELU by tanh) times another tensor.
#[pyfunction]
#[pyo3(signature = (element_type, activation, rows, columns, gate, gate_stride, up, up_stride, output, /))]
#[expect(clippy::too_many_arguments, reason = "an object would cost a call more than the kernel")]
pub(crate) fn gated(
    py: Python<'_>,
    element_type: u8,
    activation: u8,
    rows: usize,
    columns: usize,
    gate: usize,
    gate_stride: usize,
    up: usize,
    up_stride: usize,
    output: usize,
) -> PyResult<()> {
    let activation = match activation {
        0 => Activation::Silu,
        1 => Activation::GeluTanh,
        _ => return Err(PyValueError::new_err("an activation is 0 or 1")),
    };
    let kernel = Gated { rows, columns, gate: (gate, gate_stride), up: (up, up_stride), activation, output };
    run!(py, kernel, element_type)
}

/// Most rows that [`linear`] takes; 0 where this CPU lacks what it needs.
#[pyfunction]
pub(crate) fn linear_rows() -> usize {
    if Linear::is_available() { MOST_ROWS } else { 0 }
}

/// A linear layer of few rows in bfloat16; of each weight the address, the outputs and the address of the bias.
#[pyfunction]
#[pyo3(signature = (rows, depth, input, input_stride, weights, output, /))]
pub(crate) fn linear(
    py: Python<'_>,
    rows: usize,
    depth: usize,
    input: usize,
    input_stride: usize,
    weights: Vec<(usize, usize, usize)>,
    output: usize,
) -> PyResult<()> {
    let weights: Vec<_> =
        weights.into_iter().map(|(address, outputs, bias)| Weight { address, outputs, bias }).collect();
    let kernel = Linear { rows, depth, input: (input, input_stride), weights: &weights, output };
    #[expect(unsafe_code, reason = "the addresses are those of tensors that the caller holds")]
    // SAFETY: the caller of the extension vouches for addresses, strides and sizes.
    let compute = || unsafe { kernel.run() };
    let done = if kernel.size() >= DETACH { py.detach(compute) } else { compute() };
    if done { Ok(()) } else { Err(PyValueError::new_err("too many rows, or a CPU without bfloat16 products")) }
}
