//! Paged attention for Python; see `rollspan.kernels.attention_native`.

#![expect(unsafe_code, reason = "kernels read tensors by address; rollspan.kernels checks them and keeps them alive")]

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use rollspan_kernels::attention::{Attention, DataType, Strided};

use crate::detached::run_detached;

fn data_type(code: u8) -> PyResult<DataType> {
    match code {
        0 => Ok(DataType::F32),
        1 => Ok(DataType::Bf16),
        2 => Ok(DataType::F16),
        _ => {
            Err(PyValueError::new_err(format!("data type {code} given: 0 (float32), 1 (bfloat16), 2 (float16) wanted")))
        }
    }
}

/// Writes the step's keys and values to the cache, then attends.
///
/// `rows` is `(query, its row stride, head stride, key, .., value, .., output, data type, heads)`, `cache` is
/// `(keys, values, data type, num_blocks, kv_heads, block_size, head_dim, value_dim)` and `batch` is
/// `(query_start, seq_lens, block_table, slot_mapping, sequences, table_width, rows)`: addresses and strides in elements.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "tuples of integers and a few numbers are what is quick to pass")]
pub(crate) fn paged_attention(
    py: Python<'_>,
    rows: (usize, usize, usize, usize, usize, usize, usize, usize, usize, usize, u8, usize),
    cache: (usize, usize, u8, usize, usize, usize, usize, usize),
    batch: (usize, usize, usize, usize, usize, usize, usize),
    scale: f32,
    sliding_window: usize,
    softcap: f32,
    sinks: usize,
) -> PyResult<()> {
    let (query_start, seq_lens, block_table, slot_mapping, sequences, table_width, num_rows) = batch;
    let call = Attention {
        query: Strided { address: rows.0, row: rows.1, head: rows.2 },
        key: Strided { address: rows.3, row: rows.4, head: rows.5 },
        value: Strided { address: rows.6, row: rows.7, head: rows.8 },
        output: rows.9,
        data_type: data_type(rows.10)?,
        heads: rows.11,
        keys: cache.0,
        values: cache.1,
        cache_type: data_type(cache.2)?,
        num_blocks: cache.3,
        kv_heads: cache.4,
        block_size: cache.5,
        head_dim: cache.6,
        value_dim: cache.7,
        query_start,
        seq_lens,
        block_table,
        slot_mapping,
        sequences,
        table_width,
        rows: num_rows,
        scale,
        sliding_window,
        softcap,
        sinks,
    };
    // SAFETY: `rollspan.kernels.attention_native` takes the addresses from tensors of these shapes, and waits.
    let checked = unsafe { call.check() }.map_err(|error| PyValueError::new_err(error.to_string()))?;
    run_detached(py, checked.bytes(), || checked.run());
    Ok(())
}
